"""Slots for values that live from one moment to another: the fewest that are enough."""

from __future__ import annotations

import heapq

import numpy as np

from ..table.encoded import IntArray


def scan(begin: IntArray, end: IntArray, strays: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """The lowest free slot for each life, and for each stray moment one that is free then, or -1
    where none is.
    """
    free = list(range(size))
    spare: list[int] = []
    slots = [0] * len(begin)
    starts = np.concatenate([begin, strays])
    stops = np.concatenate([end, strays])
    # What begins in a moment is placed before that moment's strays.
    order = np.lexsort((stops, np.arange(len(starts)) >= len(begin), starts))
    ending = np.argsort(end, kind="stable")
    # How many lives are over when each one begins: a slot is free from the moment after its life's
    # last.
    over = np.searchsorted(end[ending], starts[order], side="left").tolist()
    leaving, gone, values = ending.tolist(), 0, len(begin)
    take, put_back = heapq.heappop, heapq.heappush
    for i, ended in zip(order.tolist(), over, strict=True):
        while gone < ended:
            put_back(free, slots[leaving[gone]])
            gone += 1
        if i < values:
            slots[i] = take(free)
        else:
            spare.append(free[0] if free else -1)
    return np.array(slots, np.int64), np.array(spare, np.int64)


def peak(begin: IntArray, end: IntArray) -> int:
    """The most lives that hold one moment."""
    moments = np.concatenate([2 * begin, 2 * end + 1])
    steps = np.concatenate([np.ones_like(begin), -np.ones_like(end)])
    return int(np.cumsum(steps[np.argsort(moments, kind="stable")]).max(initial=0))
