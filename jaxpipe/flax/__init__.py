"""flax models in a pipeline: stages and canonical parameters from modules as they are, nnx or
linen, and back.
"""

try:
    import flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "jaxpipe.flax needs flax, which is not installed: pip install 'jaxpipe[flax]'"
    ) from error

from .linen_blocks import LinenModel, from_linen, submodule, submodules
from .nnx_blocks import NnxModel, from_nnx
from .units import End
from .whole import WholeLinenModel, from_flax_model

__all__ = [
    "End",
    "LinenModel",
    "NnxModel",
    "WholeLinenModel",
    "from_flax_model",
    "from_linen",
    "from_nnx",
    "submodule",
    "submodules",
]

IMPORTS = ("arrays", "errors", "jaxprs", "layouts", "model")
