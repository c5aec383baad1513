"""Table -> table, valid in and valid out: transfers or recomputation added, backwards split or
merged, forwards alone.
"""

from .add_transfers import remove_transfers
from .recompute import remove_recompute
from .spread import remove_spread

__all__ = ["remove_recompute", "remove_spread", "remove_transfers"]

IMPORTS = ("engine", "errors", "table")
