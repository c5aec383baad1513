"""Table -> table, valid in and valid out: transfers or recomputation added, backwards split or
merged, forwards alone.
"""

from .rewrites import remove_recompute, remove_spread, remove_transfers

__all__ = ["remove_recompute", "remove_spread", "remove_transfers"]

IMPORTS = ("engine", "errors", "table")
