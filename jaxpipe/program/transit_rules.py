"""The rule of transfers that run beside blocks: nothing touches the slot of what has arrived before that is written there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .accesses import Accesses
from .faults import Fault, Rule
from .ir import Program
from .pools import POOL_OF, Pool
from .segments import Point, Segment, Transit

_MOST_LISTED = 10


class _Late(NamedTuple):
    """What is written to slots after the ticks at whose ends the slots are taken: one entry an arrival."""

    device: NDArray[np.int64]
    slot: NDArray[np.int64]
    due: NDArray[np.int64]  # the tick
    written: NDArray[np.int64]
    block: NDArray[np.int64]  # of that tick, before which it is written


def transit_faults(program: Program, pool: Pool, found: Accesses) -> Iterator[Fault]:
    """Broken rules of one pool, whose accesses have what arrives written as soon as its slot is taken."""
    late = [each for segment in program.segments if segment.beside for each in _late(program, segment, pool)]
    if not late or not len(found.slot):
        return
    device, slot, due, written, block = (np.concatenate(column) for column in zip(*late, strict=True))
    span = int(found.place.max()) + 2
    line = program.num_ticks * span
    moments = np.sort((found.device * pool.slots + found.slot) * line + found.tick * span + found.place)
    cell = (device * pool.slots + slot) * line
    # From the end of the tick to the block before which it is written.
    touched = np.searchsorted(moments, cell + written * span + block) - np.searchsorted(moments, cell + (due + 1) * span)
    for i in np.flatnonzero(touched > 0)[:_MOST_LISTED].tolist():
        message = f"slot {slot[i]} of pool {pool.name.value} is touched before what arrives in tick {due[i]} is written to it"
        yield Fault(Rule.EXCHANGE, message, int(written[i]), int(device[i]))


def _late(program: Program, segment: Segment, pool: Pool) -> Iterator[_Late]:
    ticks = np.arange(segment.start, segment.stop).reshape(segment.repeats, segment.period)
    for transit in segment.transits:
        # What the last trip leaves is written when the segment is over.
        trips = ticks[: -1 if transit.from_before else None]
        base = trips[:, 0] + segment.period * transit.from_before
        if POOL_OF[transit.permute.payload] is not pool.name or transit.written.tick <= transit.due or not len(trips):
            continue
        arrival = program.ticks.arrivals[transit.lane]
        k, device = np.nonzero(arrival.takes[trips[:, transit.tick]] != 0)
        count = np.ones(len(k), np.int64)
        slot = arrival.slot[trips[k, transit.tick], device].astype(np.int64)
        yield _Late(device, slot, base[k] + transit.due, base[k] + transit.written.tick, _place(segment, transit) * count)


def _place(segment: Segment, transit: Transit) -> int:
    """The number of the first access of its tick that may be after it is written: blocks have their own, and pairs the one after them."""
    blocks: Sequence[object] = segment.templates[transit.written.tick].blocks
    at: Point = transit.written
    return at.block if at.block < len(blocks) else len(blocks) + 1
