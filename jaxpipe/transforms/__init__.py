"""Table -> table, valid in and valid out: transfers, gathers or recomputation added, backwards
split or merged, forwards alone.
"""

from .add_gathers import Reduce
from .rewrites import remove_gathers, remove_recompute, remove_spread, remove_transfers

__all__ = ["Reduce", "remove_gathers", "remove_recompute", "remove_spread", "remove_transfers"]

IMPORTS = ("engine", "errors", "table")
