"""Small pure transformations of jaxprs: inline calls, slice, cut in two."""

from .collectives import Reductions, collectives
from .cut import Cut, cut, drop_dead, equal_outputs, keep_first, known_from, needed_for
from .entry import Entry, Part
from .equations import results_of
from .eval_in_slots import run_in_slots
from .flatten import flatten, stores_on_host
from .min_cut import weight as cut_weight
from .scan_residuals import into_scans, keep_fewer_residuals
from .sizes import is_light
from .slots import InSlots, Piece, Slot, Target, Total, TotalPiece

__all__ = [
    "Cut",
    "Entry",
    "InSlots",
    "Part",
    "Piece",
    "Reductions",
    "Slot",
    "Target",
    "Total",
    "TotalPiece",
    "collectives",
    "cut",
    "cut_weight",
    "drop_dead",
    "equal_outputs",
    "flatten",
    "into_scans",
    "is_light",
    "keep_fewer_residuals",
    "keep_first",
    "known_from",
    "needed_for",
    "results_of",
    "run_in_slots",
    "stores_on_host",
]

IMPORTS = ()
