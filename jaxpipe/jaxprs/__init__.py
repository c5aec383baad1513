"""Small pure transformations of jaxprs: inline calls, slice, cut in two."""

from .cut import Cut, cut, drop_dead
from .flatten import flatten
from .merge import equal_outputs, keep_first
from .sink import sink
from .slices import known_from, needed_for
from .threaded import Slot, run_threaded

__all__ = ["Cut", "Slot", "cut", "drop_dead", "equal_outputs", "flatten", "keep_first", "known_from", "needed_for", "run_threaded", "sink"]
