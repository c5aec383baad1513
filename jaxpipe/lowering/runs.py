"""Runs of True in an array of flags."""

from __future__ import annotations

import numpy as np

from ..table.encoded import BoolArray


def longest_true(flags: BoolArray) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    return max(runs_of_true(flags), key=lambda run: run[1], default=(0, 0))


def runs_of_true(flags: BoolArray) -> list[tuple[int, int]]:
    """Start and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))
