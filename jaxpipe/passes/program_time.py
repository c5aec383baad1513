"""How long the lowered program takes: its ticks and transfers simulated as a mesh would run them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..action import Cell, Kind, parts
from .assign_ticks import Ticks
from .program import Permute, Segment


class Sync(enum.Enum):
    """Who waits at a transfer."""

    PAIRS = "pairs"  # only the two ends of each pair: GPUs, and CPU devices in processes of their own
    EVERYBODY = "everybody"  # all devices, at every tick that transfers anything: virtual CPU devices of one process


CostOf = Callable[[Cell, int], float]


def unit_cost(cell: Cell, device: int) -> float:
    """F, I and W take 1, B takes 2, an overlapped pair the sum of its halves."""
    return float(sum(2 if a.kind is Kind.B else 1 for a in parts(cell)))


def cost_matrix(ticks: Ticks, cost_of: CostOf = unit_cost) -> NDArray[np.float64]:
    """`[tick, device]` durations."""
    return np.array([[cost_of(c, d) for c in row] for d, row in enumerate(ticks.cells)], dtype=np.float64).T


def program_makespan(costs: NDArray[np.float64], segments: Sequence[Segment], *, sync: Sync = Sync.PAIRS) -> float:
    """Simulate the program: a device runs its ticks in order and leaves a transfer when all its partners are there.

    `costs[tick, device]` are durations; the result has their unit.  Transfers themselves take no time.
    """
    num_devices = costs.shape[1]
    time = np.zeros(num_devices)
    for segment in segments:
        partners = [_partners(p.permutes, num_devices) for p in segment.positions]
        for trip in range(segment.repeats):
            for j, (met, position) in enumerate(zip(partners, segment.positions, strict=True)):
                time = time + costs[segment.start + trip * segment.period + j]
                if not position.permutes:
                    continue
                time = np.full(num_devices, time.max()) if sync is Sync.EVERYBODY else time[met].max(axis=1)
    return float(time.max(initial=0.0))


def _partners(permutes: Sequence[Permute], num_devices: int) -> NDArray[np.intp]:
    """`[device, k]`: each device and the devices it meets at these permutes, padded with the device itself."""
    met: list[list[int]] = [[d] for d in range(num_devices)]
    for permute in permutes:
        for source, target in permute.pairs:
            met[source].append(target)
            met[target].append(source)
    width = max(len(m) for m in met)
    return np.array([m + [d] * (width - len(m)) for d, m in enumerate(met)], dtype=np.intp)
