"""The actions of a table as tasks of the event loop.

Simulation, list scheduling and the insertion of R and of shares differ in one point: which action
comes next.
"""

from __future__ import annotations

import numpy as np

from ..table.clock import EventLoop
from ..table.encoded import Encoded, IntArray, Transfers
from ..table.gathered import runs_of
from ..table.kinds import BESIDE, KINDS, LINKED, RECEIVES, TRANSFERS, Sharded
from ..table.order import waiting
from .costs import StageCosts


def loop_of(table: Encoded, costs: StageCosts, transfers: Transfers = Transfers.ASYNC) -> EventLoop:
    """The loop whose tasks are the actions of a table, by number.

    The forward half of an overlapped pair takes no time; the pair's time is its other half's.  A
    collective action takes as long on every device as on the slowest.  U and X begin when the
    actions before them in their row are done, and run one after the other on a link of their
    device: that of device d is device P + d of the loop.
    """
    need, together = waiting(table, transfers)
    duration = action_durations(table, costs)
    for i, members in together.items():
        if i == members[0]:
            longest = max(duration[k] for k in members)
            for k in members:
                duration[k] = longest
    if transfers is Transfers.RENDEZVOUS:
        for i in np.flatnonzero(table.of_kinds(TRANSFERS)).tolist():
            duration[i] = costs.transfer[int(table.stage[together[i][0]])]
    sender = need if table.has_transfers else table.producer
    latency = np.array(costs.transfer)[table.stage[sender]]
    linked = np.flatnonzero(table.of_kinds(LINKED))
    device = table.device.copy()
    device[linked] += table.num_devices
    free = [0] * table.num_devices
    loop = EventLoop((device, need, latency, duration), free, groups=together)
    if len(linked):
        loop.free *= 2
        before = before_in_row(table).tolist()
        for i in linked.tolist():
            loop.need[i], loop.latency[i] = before[i], 0
        gather = runs_of(table, Sharded.PARAMETERS).begin
        waits = np.flatnonzero((gather >= 0) & ~table.of_kinds(BESIDE))
        loop.also = dict(zip(waits.tolist(), gather[waits].tolist(), strict=True))
    loop.second_half = {i: i + 1 for i in table.pairs.tolist()}
    # Alone, a device has all that it needs.
    hop = costs.transfer if table.num_devices > 1 else (0,) * table.num_stages
    for number, collective in table.collectives.items():
        if collective.source >= 0:
            loop.need[number] = int(table.last_half[collective.source])
            loop.latency[number] = hop[collective.stage]
        if (user := collective.user) >= 0:
            loop.need[user] = collective.members[loop.device[user]]
            loop.latency[user] = hop[collective.stage]
    return loop


def hold_transfers(
    table: Encoded, transfers: Transfers, loop: EventLoop, costs: StageCosts
) -> None:
    """A RECV starts when its device reaches it and ends when its message has arrived, whether or
    not the device waits for it.  Where both sides wait, a SEND starts when its device reaches it.
    """
    both, starts, ends = transfers is Transfers.RENDEZVOUS, loop.starts, loop.ends
    held = np.flatnonzero(table.of_kinds(TRANSFERS if both else RECEIVES)).tolist()
    before = before_in_row(table)
    reached = {i: 0 if before[i] < 0 else ends[before[i]] for i in held}
    for i, start in reached.items():
        send = int(table.producer[i])
        arrived = ends[i] if both else ends[send] + costs.transfer[table.stage[send]]
        starts[i], ends[i] = start, max(ends[i], arrived)


def before_in_row(table: Encoded) -> IntArray:
    """Per action, the last one before it in its row that is not on the link; -1 for none."""
    numbers = np.where(table.of_kinds(LINKED), -1, np.arange(table.num_actions))
    last = np.maximum.accumulate(np.concatenate([[-1], numbers[:-1]]))
    return np.where(last >= np.array(table.first)[table.device], last, -1)


def action_durations(table: Encoded, costs: StageCosts) -> list[float]:
    """Per action, its duration; a pair's is booked on its backward half, and the forward half takes
    no time.
    """
    stages = table.num_stages
    none = (0,) * stages
    times = {spec.kind: costs.of(spec.kind) or none for spec in KINDS}
    for late in table.kinds:  # what it does later, the share that it is part of does not
        if (whole := KINDS[late].part_of) is not None:
            pairs = zip(times[whole], times[late], strict=True)
            times[whole] = tuple(max(0, time - part) for time, part in pairs)
    flat = [time for each in times.values() for time in each]
    factors = costs.factor_of(table.num_microbatches, table.slices)
    keys = (table.kind * stages + table.stage, table.microbatch, table.is_compute & ~table.shares)
    durations = [
        flat[k] * factors[m] if is_sliced else flat[k]
        for k, m, is_sliced in zip(*(key.tolist() for key in keys), strict=True)
    ]
    for i in table.pairs.tolist():
        sum_of_halves = durations[i] + durations[i + 1]
        durations[i + 1] = sum_of_halves if costs.overlap is None else costs.overlap[table.stage[i]]
        durations[i] = 0
    return durations
