"""The reference models of torch_ref, written a second time in JAX: same formulas, same parameter
names.
"""

from .base import Twin, to_flat, to_tree
from .build import names, twin

__all__ = ["Twin", "names", "to_flat", "to_tree", "twin"]
