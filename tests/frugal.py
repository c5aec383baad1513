"""How little a refusal may take: seconds of one thread, and bytes."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

SECONDS, BYTES = 1.0, 100e6
TRIES = 3  # a busy machine, or a collection of garbage, may slow one down


def quick(call: Callable[[], object], *, spent: float = float("inf")) -> bool:
    """Whether a call takes less than a second; `spent` is what it has taken already, once."""
    for _ in range(TRIES):
        if spent < SECONDS:
            return True
        start = time.thread_time()
        call()
        spent = time.thread_time() - start
    return spent < SECONDS


def small(call: Callable[[], object]) -> bool:
    """Whether a call holds less than 100 MB at any time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
