"""Checkpoints in the model's canonical layout: any schedule, number of devices or plain program
resumes what another one saved.
"""

from .files import Checkpoints, DamagedCheckpointError
from .portable import PortableState as PortableState

__all__ = ["Checkpoints", "DamagedCheckpointError"]

IMPORTS = ("arrays", "errors", "model", "pipeline", "storage")
