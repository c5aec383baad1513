"""Proof that a program computes its schedule: every value is followed through the slots, with
symbols for arrays.

It reads nothing but the program, knows nothing of the passes that made it, and is linear in the
number of actions (arrays of numpy, no loop over ticks), so that it can run before every
compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ProgramError
from ..table.effects import MOVES, OF_SLICES, Access, Effect, Place
from .code_rules import Fault, ProgramRule, Running, code_faults, running, structure_faults
from .ir import Program
from .records import NOBODY, POOL_OF, SENT_TO, Pool

Ints: TypeAlias = NDArray[np.int64]
At: TypeAlias = tuple[Ints, Ints]
# What is in a slot that nobody wrote, or that a permute without a message for the device wrote.
NOTHING = -1


# An error's text stays readable: the rest is in `.faults`.
_MOST_SHOWN = 20


def verify(program: Program) -> Program:
    """Return the program if it is valid, or raise ProgramError with every broken rule in `.faults`.

    The rules are those of `ProgramRule`: segments cover the ticks; permutes have distinct ends and
    no cycle; each action of the table runs exactly once, on its device, in code that its tick has;
    every read finds the value that it needs; nothing alive is overwritten; slots exist; and no pool
    is larger than its peak.

    Raises:
        ProgramError: a rule is broken, which is a fault of the lowering and not of the caller.

    >>> import jaxpipe as jp
    >>> from jaxpipe.lowering.plan import plan_of
    >>> program = plan_of(jp.schedules.build("zb_h1", devices=4, microbatches=8)).program()
    >>> verify(program) is program
    True
    """
    found = faults(program)
    if not found:
        return program
    name = program.schedule.name or "this schedule"
    lines = [
        f"the lowering of {name} is wrong, which is a bug in jaxpipe ({len(found)} faults):",
        *map(str, found[:_MOST_SHOWN]),
    ]
    raise ProgramError("\n  ".join(lines), tuple(map(str, found)))


def faults(program: Program) -> tuple[Fault, ...]:
    """Every broken rule; what a broken structure means for values is looked at once the structure
    holds.
    """
    if found := structure_faults(program):
        return tuple(found)
    blocks = tuple(running(program))
    if found := list(code_faults(program, blocks)):
        return tuple(found)
    flows = (_flow_faults(p, _accesses(program, p.name, blocks)) for p in program.pools)
    return tuple(chain.from_iterable(flows))


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
    def of(
        cls, at: At, slots: Any, place: Any, order: int, value: Any, tick: Ints | None = None
    ) -> Accesses:
        """Those that cells (ticks, devices) of the records ask for; `slots` is a column of the
        records, `tick` the tick of the access where that is another.
        """
        device, when = at[1], at[0] if tick is None else tick
        entries: tuple[Any, ...] = (device, slots[at], when, place, order, value)
        columns: Any = [np.broadcast_to(each, device.shape).astype(np.int64) for each in entries]
        is_read = columns[4] == Access.READ
        return cls._make([*columns, is_read])


def _accesses(program: Program, pool: Place, blocks: Sequence[Running]) -> Accesses:
    """Those of one pool."""
    nothing = np.zeros(0, np.int64)
    none = Accesses.of((nothing, nothing), np.zeros((0, 0)), 0, 0, nothing)
    parts = [none, *_of_blocks(program, pool, blocks), *_of_moves(program, pool)]
    parts += _of_exchanges(program, pool, blocks)
    return Accesses(*map(np.concatenate, zip(*parts, strict=True)))


def _happening(
    program: Program, place: Place, block: Running
) -> Iterator[tuple[Effect, At, Any, Any]]:
    """The effects of a block on a place: where they happen, the record, and the values."""
    kind = block.use.block.kind
    record: Any = program.ticks.of(kind)
    for effect in program.effects(kind):
        if effect.place is not place or not block.use.does(effect):
            continue
        runs = block.runs
        if effect.when is not None:
            runs = runs & (getattr(record, effect.when)[block.ticks] != 0)
        k, device = np.nonzero(runs)
        at = (block.ticks[k], device)
        microbatch = record.microbatch[at].astype(np.int64)
        stages = record.columns.get("stage")
        stage = device if stages is None else stages[at].astype(np.int64)
        value = effect.of.value_in(program.schedule.encoded, stage, microbatch, device)
        yield effect, at, record, value


def _of_blocks(program: Program, pool: Place, blocks: Sequence[Running]) -> Iterator[Accesses]:
    """The effects of the actions."""
    for block in blocks:
        is_forward = block.use.block.runs_forward
        for effect, at, record, value in _happening(program, pool, block):
            # A pair runs as one: the backward may read until the forward has written.
            late = program.pairs[at] & (effect.access is Access.READ) & (not is_forward)
            place = np.where(late, _during(block.among), _during(block.place))
            slots = getattr(record, effect.field)
            yield Accesses.of(at, slots, place, effect.access, value)


def _of_exchanges(program: Program, pool: Place, blocks: Sequence[Running]) -> Iterator[Accesses]:
    """What permutes write; a device that is no target gets nothing, and writes that."""
    if pool not in SENT_TO:
        return
    # What a device has to send when a tick is over, made in that very tick.
    sent = np.full((program.num_ticks, program.schedule.num_devices), NOTHING)
    for block in blocks:
        for _, at, _, value in _happening(program, SENT_TO[pool], block):
            sent[at] = value
    for segment, transit in ((s, t) for s in program.segments for t in s.transits):
        if POOL_OF[transit.permute.payload] is not pool:
            continue
        arrival = program.ticks.arrivals[transit.lane]
        ticks = segment.ticks(transit.tick)
        value = np.full((len(ticks), program.schedule.num_devices), NOTHING)
        for source, target in transit.permute.pairs:
            value[:, target] = sent[ticks, source]
        k, device = np.nonzero(arrival.takes[ticks] != 0)
        tick, before = segment.written(transit)
        place = np.where(before < segment.num_blocks(tick), 2 * before, _after(program))
        order, at = Access.WRITE + transit.lane, (ticks[k], device)
        yield Accesses.of(at, arrival.slot, place[k], order, value[k, device], tick[k])


def _during(block: int) -> int:
    """The place of what a block of this number does; what is written before it has the number
    before.
    """
    return 2 * block + 1


def _after(program: Program) -> int:
    """The place of what is done when a tick is over, after all that its blocks do."""
    most = max(len(t.blocks) for segment in program.segments for t in segment.templates)
    return 2 + _during(most)


def _of_moves(program: Program, pool: Place) -> Iterator[Accesses]:
    """What goes between the memories of devices and hosts: on the device at the ends of ticks, on
    the host between them.
    """
    on_host = pool is Place.HOST
    place = 0 if on_host else _after(program)
    for record, move in product(program.ticks.moves, MOVES):
        value: Any = getattr(record, move.value)
        tick, device = np.nonzero(value != NOBODY)
        for order, columns in ((Access.READ, move.reads), (Access.WRITE, move.writes)):
            for column in (name for name, where in columns.items() if where is pool):
                slots, at = getattr(record, column), (tick, device)
                # A device's slot is read when the tick before is over.
                when = tick if on_host or order is Access.WRITE else tick - 1
                yield Accesses.of(at, slots, place, order, value[at], when)


_MOST_LISTED = 10


def _flow_faults(pool: Pool, found: Accesses) -> Iterator[Fault]:
    """Broken rules of one pool."""
    outside = np.flatnonzero((found.slot < 0) | (found.slot >= pool.slots))
    for i in outside[:_MOST_LISTED].tolist():
        what = f"slot {found.slot[i]} of pool {pool.name.value}"
        message = f"{what}, which has {pool.slots}"
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
    begin = np.maximum.accumulate(np.where(starts, number, 0))
    write = np.maximum.accumulate(np.where(found.is_read, -1, number))
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
    steps = np.repeat([1, -1], len(alive))
    device = np.concatenate([found.device[alive]] * 2)
    order = np.lexsort((times, device))
    # Each device's steps sum to nothing, so one running sum serves all.
    peak = max(1, int(np.cumsum(steps[order]).max(initial=0)))
    if peak != pool.slots:
        alive_at_once = f"{peak} values are alive at its peak"
        message = f"pool {pool.name.value} has {pool.slots} slots; {alive_at_once}"
        yield Fault(ProgramRule.POOL, message)
