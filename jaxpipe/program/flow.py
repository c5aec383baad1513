"""Rules of what slots hold: every read finds its value, nothing alive is overwritten, no pool is
larger than its peak.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..table.effects import OF_SLICES
from .accesses import NOTHING, Accesses
from .faults import Fault, ProgramRule
from .pools import Pool

_MOST_LISTED = 10


def flow_faults(pool: Pool, found: Accesses) -> Iterator[Fault]:
    """Broken rules of one pool."""
    outside = np.flatnonzero((found.slot < 0) | (found.slot >= pool.slots))
    for i in outside[:_MOST_LISTED].tolist():
        message = f"slot {found.slot[i]} of pool {pool.name.value}, which has {pool.slots}"
        yield Fault(ProgramRule.SLOT, message, int(found.tick[i]), int(found.device[i]))
    if len(outside):
        return
    # By slot, then in the order of time.
    order = np.lexsort((found.order, found.place, found.tick, found.slot, found.device))
    found = Accesses._make(column[order] for column in found)
    last = _last_write(found)
    held = np.where(last >= 0, found.value[last], NOTHING)
    wrong = np.flatnonzero(found.is_read & (held != found.value))
    yield from _wrong_reads(pool, found, held, wrong)
    if len(wrong):
        return
    if pool.name in OF_SLICES:
        found = found._replace(is_read=found.is_read | _updates(found, last))
    yield from _size_faults(pool, found, _last_write(found))


def _updates(found: Accesses, last: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Writings of rows among the others of a sequence: they find its value in the slot, and leave
    it there.
    """
    before = np.concatenate([[-1], last[:-1]])[: len(last)]
    here = (found.device[before] == found.device) & (found.slot[before] == found.slot)
    same: NDArray[np.bool_] = here & (found.value[before] == found.value)
    return ~found.is_read & (before >= 0) & same


def _last_write(found: Accesses) -> NDArray[np.int64]:
    """Per access in order, the last write to the same slot before it, or -1."""
    number = np.arange(len(found.slot))
    cell = np.stack([found.device, found.slot], 1)
    starts = np.ones(len(number), bool)
    starts[1:] = (cell[1:] != cell[:-1]).any(axis=1)
    begin = np.maximum.accumulate(np.where(starts, number, 0)) if len(number) else number
    write = np.maximum.accumulate(np.where(found.is_read, -1, number)) if len(number) else number
    return np.where(write >= begin, write, -1)


def _wrong_reads(
    pool: Pool, found: Accesses, held: NDArray[np.int64], wrong: NDArray[np.int64]
) -> Iterator[Fault]:
    """A missing value was overwritten if it was in the slot before; else it never arrived."""
    for i in wrong[:_MOST_LISTED].tolist():
        same = (found.device == found.device[i]) & (found.slot == found.slot[i])
        was_here = (same & ~found.is_read & (found.value == found.value[i]))[:i].any()
        what = f"slot {found.slot[i]} of pool {pool.name.value}"
        rule = ProgramRule.OVERWRITTEN if was_here else ProgramRule.VALUE
        message = f"{what} holds value {held[i]}, not {found.value[i]} (stage x M + microbatch)"
        message += ", which was overwritten" if was_here else ""
        yield Fault(rule, message, int(found.tick[i]), int(found.device[i]))


def _size_faults(pool: Pool, found: Accesses, last: NDArray[np.int64]) -> Iterator[Fault]:
    """The pool has as many slots as values are alive at once, from their writing to their last
    reading, on the device with most.
    """
    end = np.full(len(found.slot), -1)
    reads = np.flatnonzero(found.is_read)
    np.maximum.at(end, last[reads], reads)
    alive = np.flatnonzero(end >= 0)
    # Reading and writing in one block is one moment: what is read last there still has its slot.
    span = int(found.place.max(initial=0)) + 1
    moment = found.tick * span + found.place
    times = np.concatenate([2 * moment[alive], 2 * moment[end[alive]] + 1])
    steps = np.concatenate([np.ones(len(alive), np.int64), -np.ones(len(alive), np.int64)])
    device = np.concatenate([found.device[alive]] * 2)
    order = np.lexsort((times, device))
    # Each device's steps sum to nothing, so one running sum serves all.
    peak = max(1, int(np.cumsum(steps[order]).max(initial=0)))
    if peak != pool.slots:
        yield Fault(
            ProgramRule.POOL,
            f"pool {pool.name.value} has {pool.slots} slots; {peak} values are alive at its peak",
        )
