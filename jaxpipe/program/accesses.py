"""Every reading and writing of a pool's slots by a program, with the value that is written or
needed; and its rules: every read finds its value, nothing alive is overwritten, no pool is larger
than its peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.effects import OF_SLICES, Access, Effect, Of, Place
from ..table.kinds import RUNS_FORWARD
from .code_rules import Fault, ProgramRule, Running, ticks_of
from .ir import Program
from .records import NOBODY, POOL_OF, Pool
from .segments import Payload, Segment

Ints = NDArray[np.int64]
# What is in a slot that nobody wrote, or that a permute without a message for the device wrote.
NOTHING = -1
_SENT_FROM = {Payload.ACTIVATION: Place.SENT_X, Payload.COTANGENT: Place.SENT_DX}


class Accesses(NamedTuple):
    """One entry an access, in no order.  A value is the number stage * M + microbatch of what the
    pool holds.
    """

    device: Ints
    slot: Ints
    tick: Ints
    # within the tick: 2 n before block n, one more in it; after all blocks the numbers of more
    # blocks than there are
    place: Ints
    order: Ints  # within the block
    value: Ints
    is_read: NDArray[np.bool_]

    @classmethod
    def of(cls, at: tuple[Ints, Ints], slots: Any, place: Any, order: Any, value: Any) -> Accesses:
        """Those in cells (ticks, devices) `at`; `slots` is a field of the records."""
        tick, device = at
        given: tuple[Any, ...] = (device, slots[at], tick, place, order, value)
        columns: Any = [np.broadcast_to(column, tick.shape).astype(np.int64) for column in given]
        return cls._make([*columns, columns[4] == Access.READ])


def accesses(program: Program, pool: Place, blocks: Sequence[Running]) -> Accesses:
    """Those of one pool."""
    nothing = np.zeros(0, np.int64)
    none = Accesses.of((nothing, nothing), np.zeros((0, 0)), nothing, nothing, nothing)
    parts = [none, *_of_blocks(program, pool, blocks)]
    if pool in POOL_OF.values():
        parts += [
            part
            for segment in program.segments
            for part in _of_exchanges(program, segment, pool, blocks)
        ]
    parts += _of_moves(program, pool)
    return Accesses(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _of_blocks(program: Program, pool: Place, blocks: Sequence[Running]) -> Iterator[Accesses]:
    """The effects of the actions."""
    # A pair runs as one: the backward may read until the forward has written.
    for block in blocks:
        kind = block.use.block.kind
        record: Any = program.ticks.of(kind)
        # of the template's blocks
        end = 2 + _during(max(other.place for other in blocks if other.ticks[0] == block.ticks[0]))
        for effect in program.effects(kind):
            if effect.place is not pool:
                continue
            flag = True if effect.when is None else getattr(record, effect.when)[block.ticks] != 0
            k, device = np.nonzero(block.runs & flag)
            at = (block.ticks[k], device)
            late = program.pairs[at] & (effect.access is Access.READ) & (kind not in RUNS_FORWARD)
            place = np.where(late, end, _during(block.place))
            value = _value(program, effect, record, at)
            yield Accesses.of(at, getattr(record, effect.field), place, effect.access, value)


def _value(program: Program, effect: Effect, record: Any, at: tuple[Ints, Ints]) -> Any:
    """Which value of its place an effect is about."""
    steps = {Of.NEXT: 1, Of.BEFORE: -1}
    stage: Any = {Of.FIRST: 0, Of.LAST: program.schedule.num_stages - 1, Of.DEVICE: at[1]}.get(
        effect.of
    )
    microbatch = record.microbatch[at].astype(np.int64)
    if stage is None:
        stage = record.stage[at].astype(np.int64) + steps.get(effect.of, 0)
    if effect.of is Of.NEXT_SLICE:
        microbatch = microbatch + 1
    if effect.of is Of.SEQUENCE:
        microbatch = microbatch - microbatch % program.schedule.slices
    return stage * program.schedule.num_microbatches + microbatch


def _of_exchanges(
    program: Program, segment: Segment, pool: Place, blocks: Sequence[Running]
) -> Iterator[Accesses]:
    """What permutes write; a device that is no target gets nothing, and writes that."""
    devices = program.schedule.num_devices
    for j, template in enumerate(segment.templates):
        ticks = ticks_of(segment, j)
        here = [block for block in blocks if block.ticks[0] == ticks[0]]
        for lane, permute in enumerate(template.permutes):
            if POOL_OF[permute.payload] is not pool:
                continue
            value = np.full((len(ticks), devices), NOTHING, np.int64)
            made = _produced(program, ticks, here, permute.payload)
            for source, target in permute.pairs:
                value[:, target] = made[:, source]
            arrival = program.ticks.arrivals[lane]
            k, device = np.nonzero(arrival.takes[ticks] != 0)
            (transit,) = (t for t in segment.transits if (t.tick, t.lane) == (j, lane))
            tick, block = segment.written(transit)
            place = np.where(block < segment.num_blocks(tick), 2 * block, _after(program))
            found = Accesses.of(
                (ticks[k], device), arrival.slot, place[k], Access.WRITE + lane, value[k, device]
            )
            yield found._replace(tick=tick[k])


def _during(block: int) -> int:
    """The place of what a block of this number does; what is written before it has the number
    before.
    """
    return 2 * block + 1


def _after(program: Program) -> int:
    """The place of what is done when a tick is over, after all that its blocks do."""
    return 2 + _during(
        max(len(template.blocks) for segment in program.segments for template in segment.templates)
    )


def _of_moves(program: Program, pool: Place) -> Iterator[Accesses]:
    """What goes between the memories of devices and hosts: on the device at the ends of ticks, on
    the host between them.
    """
    on_host = pool is Place.HOST
    for move in program.ticks.moves:
        stored, fetched = {
            Place.RESIDUAL_INPUT: (move.from_input, move.to_input),
            Place.RESIDUAL_WEIGHT: (move.from_weight, move.to_weight),
            Place.HOST: (move.to_host, move.from_host),
        }.get(pool, (None, None))
        for slots, value, order in (
            (stored, move.stores, Access.WRITE if on_host else Access.READ),
            (fetched, move.fetches, Access.READ if on_host else Access.WRITE),
        ):
            if slots is None:
                continue
            at = np.nonzero(value != NOBODY)
            place = 0 if on_host else _after(program)
            found = Accesses.of((at[0], at[1]), slots, place, order, value[at])
            # A device's slot is read when the tick before is over.
            early = not on_host and order is Access.READ
            yield found._replace(tick=found.tick - 1) if early else found


def _produced(program: Program, ticks: Ints, blocks: Sequence[Running], payload: Payload) -> Ints:
    """`[k, device]`: the value that a device has to send at the end of a template's k-th tick, made
    in that very tick.
    """
    found = np.full((len(ticks), program.schedule.num_devices), NOTHING, np.int64)
    for block in blocks:
        kind = block.use.block.kind
        for effect in program.effects(kind):
            if effect.place is _SENT_FROM[payload] and block.use.does(effect):
                k, device = np.nonzero(block.runs)
                at = (ticks[k], device)
                found[k, device] = _value(program, effect, program.ticks.of(kind), at)
    return found


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
