"""Small pure transformations of jaxprs: inline calls, slice, cut in two."""

from .cut import Cut, cut, drop_dead
from .eval_in_slots import Slot, Total, run_in_slots
from .flatten import flatten
from .scan_residuals import sink
from .slices import known_from, needed_for
from .value_numbering import equal_outputs, keep_first

__all__ = [
    "Cut",
    "Slot",
    "Total",
    "cut",
    "drop_dead",
    "equal_outputs",
    "flatten",
    "keep_first",
    "known_from",
    "needed_for",
    "run_in_slots",
    "sink",
]
