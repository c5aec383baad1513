"""The largest sizes of a table and of its numbers: far beyond any job, and small enough that a
typing error does not take all memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

MAX_DEVICES = 4096  # rows of a table
MAX_STAGES = 65_536
# of stage and microbatch, in a table that is built: three million actions, half a gigabyte
MAX_PAIRS = 2**20
MAX_DIGITS = 10  # of a stage's or microbatch's number, as text
MAX_COUNT = 10**MAX_DIGITS  # of anything that is counted
MAX_TEXT = 2**25  # characters of a table as text: more than MAX_PAIRS take
MAX_FAULTS = 1000  # cells that cannot be read; reading stops there
MAX_COST = 1e100  # whatever the unit is: sums and squares of such costs are finite numbers


def is_whole(value: object) -> TypeGuard[Any]:
    """True for Python's and numpy's whole numbers (True and False are none)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_flat(value: object) -> TypeGuard[Any]:
    """True for a list, a tuple or an array of one dimension."""
    if hasattr(value, "ndim"):
        return bool(value.ndim == 1)
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_number(value: object) -> TypeGuard[Any]:
    """True for Python's and numpy's real numbers (True and False are none)."""
    return isinstance(value, Real) and not isinstance(value, bool)
