"""flax models in a pipeline: stages and canonical parameters from modules as they are, nnx or
linen, and back.
"""

try:
    import flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "jaxpipe.flax needs flax, which is not installed: pip install 'jaxpipe[flax]'"
    ) from error

from .common import End
from .linen import LinenStages, from_linen, submodule, submodules
from .linen_layers import LinenLayers
from .nnx import NnxStages, from_nnx
from .nnx_layers import NnxLayers

__all__ = [
    "End",
    "LinenLayers",
    "LinenStages",
    "NnxLayers",
    "NnxStages",
    "from_linen",
    "from_nnx",
    "submodule",
    "submodules",
]

IMPORTS = ("arrays", "errors", "layouts", "model")
