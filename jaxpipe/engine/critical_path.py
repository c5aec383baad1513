"""The critical path: from the action that ends last back, at each step to the action that released
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..table.encoded import Encoded
from ..table.run_order import Transfers
from .costs import StageCosts
from .loop import Loop


def critical_chain(
    table: Encoded, transfers: Transfers, ends: Sequence[float], costs: StageCosts
) -> list[int]:
    """Numbers of the actions on a longest chain, in order of time (of an overlapped pair, its
    forward half).

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
