"""How little a refusal may take: lines of jaxpipe, as many on every machine, and bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from tests.steps import TooManyStepsError, steps

# Lines of a second or so, without the count; the most that a refusal in these tests takes is a
# third of that.
LINES, BYTES = 5_000_000, 100e6
SECONDS = 1.0


def quick(call: Callable[[], object], *, spent: float = float("inf")) -> bool:
    """Whether a call runs few lines; not counted where it is known to have `spent` few seconds."""
    if spent < SECONDS:
        return True
    try:
        steps(call, most=LINES)
    except TooManyStepsError:
        return False
    return True


def small(call: Callable[[], object]) -> bool:
    """Whether a call holds less than 100 MB at any time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
