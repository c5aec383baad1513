"""A whole training state in the model's canonical layout, whatever schedule holds it: what
checkpoints are written from and read into.
"""

from .state import PortableState as PortableState

IMPORTS = ("arrays", "errors", "model", "pipeline")
