"""The critical path of a simulated table, and the period of its steady state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..table.encoded import Encoded
from ..table.run_order import Transfers
from .costs import StageCosts
from .loop import Loop

_LONGEST_TURN = 32  # microbatches after which a steady state repeats
_EQUAL = 1e-9  # of the last start: sums of the same times in another order


def critical_chain(
    table: Encoded, transfers: Transfers, ends: Sequence[float], costs: StageCosts
) -> list[int]:
    """Numbers of the actions on a longest chain, in order of time (of an overlapped pair, its
    forward half): from the action that ends last back, at each step to the one that released it.

    Where its device and its input release an action at the same time, the chain stays on the
    device.
    """
    if table.num_actions == 0:
        return []
    loop = Loop.of(table, costs, transfers)
    loop.ends = list(ends)
    # A posted RECV holds nothing up: its device may have gone on.
    posted = set(table.receives.tolist()) if transfers is Transfers.ASYNC else set()
    first_half = {second: first for first, second in loop.second_half.items()}
    last = max(np.flatnonzero(table.is_compute).tolist(), key=lambda i: ends[i])
    chain = [first_half.get(last, last)]
    while True:
        number = chain[-1]
        # What released it: the time, whether it is on the same device, and its number.
        found: list[tuple[float, bool, int]] = []
        for member in loop.groups.get(number, (number,)):
            before = member - 1
            while before in posted:
                before -= 1
            if before >= table.first[loop.device[member]]:
                found.append((ends[before], member == number, before))
        for half in {number, loop.second_half.get(number, number)}:
            if loop.need[half] >= 0:
                found.append((loop.ready(half), False, loop.need[half]))
        if not found:
            return chain[::-1]
        released = max(found)[2]
        chain.append(first_half.get(released, released))


def steady_period(table: Encoded, starts: Sequence[float], busy: Sequence[float]) -> float | None:
    """The time of a microbatch where the table repeats: all stages and kinds start the same time
    later, K microbatches on.

    Of the least K for which two turns of K microbatches or more, and at least half of all
    microbatches, are alike, the longest repeat counts.  None where nothing repeats so long. What
    repeats faster than the busiest device works (`busy` is the time of all microbatches) is a group
    of microbatches in one chunk.
    """
    times = _starts(table, starts)
    if times is None:
        return None
    near = _EQUAL * max(1.0, float(times.max()))
    microbatches = times.shape[1]
    for turn in range(1, min(_LONGEST_TURN, microbatches // 2) + 1):
        later = times[:, turn:] - times[:, :-turn]
        same = np.ptp(later, axis=0) <= near
        best, length = _longest(later[0], same, near)
        if (
            length >= max(2, turn, microbatches / 2 - turn)
            and best / turn >= max(busy) / microbatches - near
        ):
            return best / turn
    return None


def _starts(table: Encoded, starts: Sequence[float]) -> NDArray[np.float64] | None:
    """Per stage and kind, the starts in order; None where a stage and kind do not have one for each
    microbatch.
    """
    chosen = np.flatnonzero(table.is_compute & table.in_range)
    if not len(chosen):
        return None
    group = table.kind[chosen] * table.num_stages + table.stage[chosen]
    when = np.array(starts, np.float64)[chosen]
    order = np.lexsort((when, group))
    _, counts = np.unique(group, return_counts=True)
    if (counts != table.num_microbatches).any():
        return None
    found: NDArray[np.float64] = when[order].reshape(-1, table.num_microbatches)
    return found


def _longest(later: NDArray[np.float64], same: NDArray[np.bool_], near: float) -> tuple[float, int]:
    """The value and length of the longest run of one value where `same` holds."""
    best, length, run = 0.0, 0, 0
    for place, (value, holds) in enumerate(zip(later.tolist(), same.tolist(), strict=True)):
        goes_on = run and abs(value - later[place - 1]) <= near
        run = (run + 1 if goes_on else 1) if holds else 0
        if run > length:
            best, length = value, run
    return best, length
