"""How long the lowered program takes: its ticks and transfers simulated as a mesh would run them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..action import Cell, Kind, parts
from .assign_ticks import Ticks
from .program import Permute, Position, Segment


class Sync(enum.Enum):
    """Who waits at a transfer."""

    PAIRS = "pairs"  # only the two ends of each pair: GPUs, and CPU devices in processes of their own
    EVERYBODY = "everybody"  # all devices, at every tick that transfers anything: virtual CPU devices of one process


# (delay, partners of each device, how long the permutes of each device last)
_Meetings: TypeAlias = "list[tuple[int, NDArray[np.intp], NDArray[np.float64]]]"
CostOf = Callable[[Cell, int], float]


# What a transfer costs when emissions are compared, in units of a forward: enough that none is made for nothing.
TRANSFER_TIME: Mapping[Sync, float] = MappingProxyType({Sync.PAIRS: 0.1, Sync.EVERYBODY: 0.01})
UNIT_DURATIONS: Mapping[Kind, int] = MappingProxyType({Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2})


def unit_cost(cell: Cell, device: int) -> float:
    """F, I and W take 1, B takes 2, an overlapped pair the sum of its halves."""
    return float(sum(UNIT_DURATIONS[a.kind] for a in parts(cell)))


def cost_matrix(ticks: Ticks, cost_of: CostOf = unit_cost) -> NDArray[np.float64]:
    """`[tick, device]` durations."""
    return np.array([[cost_of(c, d) for c in row] for d, row in enumerate(ticks.cells)], dtype=np.float64).T


def program_makespan(costs: NDArray[np.float64], segments: Sequence[Segment], *, sync: Sync = Sync.PAIRS, transfer: float = 0.0) -> float:
    """Simulate the program: a device runs its ticks in order; where it awaits a transfer it waits until all partners have issued it.

    `costs[tick, device]` are durations; the result has their unit.  Each permute that a device takes part in lasts `transfer`.
    """
    time = np.zeros(costs.shape[1])
    for segment in segments:
        time = advance(time, costs, segment, sync=sync, transfer=transfer)
    return float(time.max(initial=0.0))


def advance(
    time: NDArray[np.float64], costs: NDArray[np.float64], segment: Segment, *, sync: Sync, transfer: float = 0.0
) -> NDArray[np.float64]:
    """Device times after a segment, from device times before it."""
    num_devices = costs.shape[1]
    meetings = [_meetings(p, num_devices, transfer) for p in segment.positions]
    rows = costs[segment.start : segment.stop].reshape(segment.repeats, segment.period, num_devices)
    same = _equal_ahead(rows)
    trip, growth = 0, None
    while trip < segment.repeats:
        before = time
        time = _one_trip(time, rows[trip], meetings, sync)
        # Trips of equal costs that moved every device by the same time will go on doing so.
        settled = growth is not None and np.array_equal(time - before, growth) and np.ptp(growth) == 0
        growth = time - before
        trip += 1
        if settled and trip < segment.repeats and (ahead := int(same[trip - 1])):
            time = time + growth * ahead
            trip, growth = trip + ahead, None
    return time


def _one_trip(time: NDArray[np.float64], rows: NDArray[np.float64], meetings: Sequence[_Meetings], sync: Sync) -> NDArray[np.float64]:
    """Device times after one trip."""
    awaited: dict[int, list[NDArray[np.float64]]] = {}
    for j, meets in enumerate(meetings):
        time = time + rows[j]
        if sync is Sync.EVERYBODY:
            time = np.full(len(time), time.max() + sum(lasts.max() for _, _, lasts in meets)) if meets else time
            continue
        for delay, met, lasts in meets:
            awaited.setdefault(j + delay, []).append(time[met].max(axis=1) + lasts)
        for done in awaited.pop(j, ()):
            time = np.maximum(time, done)
    return time


def _equal_ahead(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each trip, how many trips after it have the same costs as it, without a gap."""
    equal = (rows[1:] == rows[:-1]).all(axis=(1, 2)) if len(rows) > 1 else np.zeros(0, bool)
    ahead = np.zeros(len(rows), np.int64)
    for i in range(len(rows) - 2, -1, -1):
        ahead[i] = ahead[i + 1] + 1 if equal[i] else 0
    return ahead


def _meetings(position: Position, num_devices: int, transfer: float) -> _Meetings:
    """One entry for each delay that a position's permutes have."""
    found = []
    for delay in sorted({p.delay for p in position.permutes}):
        permutes = [p for p in position.permutes if p.delay == delay]
        lasts = np.zeros(num_devices)
        for permute in permutes:
            lasts[sorted({d for pair in permute.pairs for d in pair})] += transfer
        found.append((delay, _partners(permutes, num_devices), lasts))
    return found


def _partners(permutes: Sequence[Permute], num_devices: int) -> NDArray[np.intp]:
    """`[device, k]`: each device and the devices it meets at these permutes, padded with the device itself."""
    met: list[list[int]] = [[d] for d in range(num_devices)]
    for permute in permutes:
        for source, target in permute.pairs:
            met[source].append(target)
            met[target].append(source)
    width = max(len(m) for m in met)
    return np.array([m + [d] * (width - len(m)) for d, m in enumerate(met)], dtype=np.intp)
