"""Pause the garbage collector while a table is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No garbage collection inside: half a million new tuples would start dozens of collections,
    which find nothing and take as long.

    >>> with paused_collector():
    ...     rows = [(0, 1, 2)] * 3
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
