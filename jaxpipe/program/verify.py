"""Proof that a program computes its schedule: every value is followed through the slots, with
symbols for arrays.

It reads nothing but the program, knows nothing of the passes that made it, and takes microseconds
an action, so that it can run before every compilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, islice, product
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ProgramError
from ..table.effects import MOVES, OF_SLICES, TOGETHER, Access, Effect, Place, flags_of
from ..table.kinds import COLLECTIVES, KIND_NAMES
from .gathers import Fault, ProgramRule, gather_faults
from .ir import NOBODY, POOL_OF, SENT_TO, IntTable, Program, Record
from .segments import FLAGS, BlockUse, Permute, Presence, Segment, Transit, room_of

Ints: TypeAlias = NDArray[np.int64]
At: TypeAlias = tuple[Ints, Ints]
BoolTable: TypeAlias = NDArray[np.bool_]
# The value of a slot that nobody wrote, or that a permute without a message for the device wrote.
NOTHING = -1


# The place of what is done when a tick is over, after all that its blocks do.
_AFTER = 2**20
# Of one kind of fault, so many are listed.
_MOST_LISTED = 10


def verify(program: Program) -> Program:
    """Return the program if it is valid, or raise ProgramError with every broken rule in `.faults`.

    The rules are those of `ProgramRule`: segments cover the ticks; permutes have distinct ends and
    one direction; each action of the table runs exactly once, on its device, in code that its tick
    has; every read finds the value that it needs; nothing alive is overwritten; slots exist; and no
    pool is larger than its peak.

    Raises:
        ProgramError: a rule is broken, which is a fault of the lowering and not of the caller.

    >>> import jaxpipe as jp
    >>> from jaxpipe.lowering.plan import plan_of
    >>> program = plan_of(jp.schedules.build("zb_h1", devices=4, microbatches=8)).program()
    >>> verify(program) is program
    True
    """
    name = program.schedule.name or "this schedule"
    head = f"the lowering of {name} is wrong, which is a bug in jaxpipe"
    ProgramError.refuse(head, map(str, faults(program)))
    return program


def faults(program: Program) -> tuple[Fault, ...]:
    """Every broken rule; what a broken structure means for values is looked at once the structure
    holds.
    """
    if found := tuple(_segment_faults(program)):
        return found
    blocks = tuple(_running(program))
    rules = (_action_faults, _collective_faults, _run_faults, gather_faults)
    broken = [*(rule(program) for rule in rules), _template_faults(program, blocks)]
    if found := tuple(fault for rule in broken for fault in islice(rule, _MOST_LISTED)):
        return found
    # Of pools whose values have one number, the largest says how many slots each has.
    largest = max(program.pools.get(pool, 0) for pool in TOGETHER)
    flows = (
        _flow_faults(
            pool,
            size,
            _accesses(program, pool, blocks),
            spare=program.together and pool in TOGETHER and size == largest,
        )
        for pool, size in program.pools.items()
    )
    return tuple(chain.from_iterable(flows))


class Running(NamedTuple):
    """A block of a template, and where it runs: `runs[k, device]` in tick `ticks[k]`, as the
    `place`-th `among` so many blocks of its template.
    """

    use: BlockUse
    place: int
    among: int
    ticks: NDArray[np.int64]
    runs: BoolTable


def _running(program: Program) -> Iterator[Running]:
    """Every block of every template, and where the records ask for it."""
    for segment in program.segments:
        for j, template in enumerate(segment.templates):
            ticks, among = segment.ticks(j), len(template.blocks)
            for place, use in enumerate(template.blocks):
                runs = program.asks(program.ticks, use.block)[ticks]
                yield Running(use, place, among, ticks, runs)


def _action_faults(program: Program) -> Iterator[Fault]:
    """Each action runs once, on its device and chunk, with the flags that its place in the model
    asks for.
    """
    table = program.schedule.encoded
    done = np.zeros(table.num_actions, np.int64)
    chunks = program.schedule.chunks if program.room is None else program.room
    expected = {"chunk": chunks, **flags_of(table)}
    for _, record in program.ticks.actions:
        tick, device = at = np.nonzero(record.kind != NOBODY)
        columns = {"stage": device} | {
            name: column[at].astype(int) for name, column in record.columns.items()
        }
        kind, microbatch = columns["kind"], columns["microbatch"]
        stage = columns["stage"]
        sizes = zip((kind, stage, microbatch), table.at.shape, strict=True)
        inside = np.all([(n >= 0) & (n < size) for n, size in sizes], axis=0)
        number = np.full(len(tick), -1)
        number[inside] = table.at[kind[inside], stage[inside], microbatch[inside]]
        right = (number >= 0) & (table.device[number] == device)
        for i in np.flatnonzero(~right).tolist():
            name = dict(enumerate(KIND_NAMES)).get(int(kind[i]), f"kind {kind[i]}")
            action = f"{stage[i]}{name}{microbatch[i]}"
            message = f"runs {action}, which the table does not give to this device"
            yield Fault(ProgramRule.ACTION, message, int(tick[i]), int(device[i]))
        np.add.at(done, number[right], 1)
        for name in (name for name in expected if name in columns):
            wrong = right & (columns[name] != expected[name][number])
            for i in np.flatnonzero(wrong).tolist():
                action = table.text(int(number[i]))
                message = f"{action} is marked wrongly: {name} is {columns[name][i]}"
                yield Fault(ProgramRule.ACTION, message, int(tick[i]), int(device[i]))
    for i in np.flatnonzero(done != 1).tolist():
        message = f"{table.text(i)} runs {done[i]} times"
        yield Fault(ProgramRule.ACTION, message, device=int(table.device[i]))


def _collective_faults(program: Program) -> Iterator[Fault]:
    """All devices do a collective action in one tick, which has nothing else."""
    ticks = program.ticks
    busy = (ticks.forward.kind != NOBODY) | (ticks.backward.kind != NOBODY)
    for record in ticks.collectives:
        together = np.isin(record.kind, COLLECTIVES).any(axis=1)
        for tick in np.flatnonzero(together).tolist():
            kinds = sorted(set(record.kind[tick].tolist()))
            microbatches = sorted(set(record.microbatch[tick].tolist()))
            if len(kinds) > 1 or len(microbatches) > 1:
                message = f"devices do {kinds} of microbatches {microbatches}, not all the same"
                yield Fault(ProgramRule.COLLECTIVE, message, tick)
                continue
            for device in np.flatnonzero(busy[tick]).tolist():
                message = "does something else in the tick of a collective action"
                yield Fault(ProgramRule.COLLECTIVE, message, tick, device)


def _template_faults(program: Program, blocks: Sequence[Running]) -> Iterator[Fault]:
    """The template has the code of each action.  Code without a predicate is for all devices."""
    for name, record in program.ticks.actions:
        covered = np.zeros(record.kind.shape, np.int64)
        for use, _, _, ticks, runs in blocks:
            if program.ticks.of(use.block.kind) is not record:
                continue
            covered[ticks] += runs
            if use.active is Presence.ALWAYS:
                for k, device in np.argwhere(~runs).tolist():
                    message = f"runs {use.block} without being asked to"
                    yield Fault(ProgramRule.CODE, message, int(ticks[k]), device)
            yield from _part_faults(use, record, ticks, runs)
        for tick, device in np.argwhere(covered != (record.kind != NOBODY)).tolist():
            times = covered[tick, device]
            message = f"the template has the code of its {name} {times} times"
            yield Fault(ProgramRule.CODE, message, tick, device)


def _run_faults(program: Program) -> Iterator[Fault]:
    """Ticks that share code within a trip have one template, and what they send arrives in the same
    tick.
    """
    for segment in program.segments:
        looped = sum(loop.times * loop.ticks for loop in segment.loops)
        if segment.loops and looped != segment.period:
            message = f"has loops of {looped} ticks in trips of {segment.period}"
            yield Fault(ProgramRule.CODE, message, segment.start)
            continue
        for ticks in segment.emitted:
            first = segment.templates[ticks[0]]
            alike = all(segment.templates[j] == first for j in ticks)
            late = any(permute.delay for permute in first.permutes)
            if len(ticks) > 1 and (late or not alike):
                why = "which need other code or await its transfers"
                message = f"shares code with other ticks of its trip, {why}"
                yield Fault(ProgramRule.CODE, message, segment.start + ticks[0])


def _part_faults(
    use: BlockUse, record: Record[IntTable], ticks: Ints, runs: BoolTable
) -> Iterator[Fault]:
    """The inner parts of a block run exactly where their flags say."""
    for flag in {"is_first", "is_last", "is_local"}.intersection(FLAGS[use.block.kind]):
        presence, flags = use.presence(flag), getattr(record, flag)[ticks]
        if presence is Presence.SOMETIMES:
            continue
        happens = presence is Presence.ALWAYS
        for k, device in np.argwhere(runs & ((flags != 0) != happens)).tolist():
            verb = "always runs" if happens else "is never run"
            message = f"`{flag[3:]}` of {use.block} {verb}, against its flag"
            yield Fault(ProgramRule.CODE, message, int(ticks[k]), device)


def _segment_faults(program: Program) -> Iterator[Fault]:
    """Segments follow each other and cover all ticks; what a trip awaits, it issued, or the last
    tick of the trip before; and no slot takes what arrives over a lane that its tick has not.
    """
    end = 0
    for segment in program.segments:
        if segment.start != end:
            message = f"ticks {end}..{segment.start} are in no segment, or in two"
            yield Fault(ProgramRule.SEGMENTS, message)
        end = segment.stop
        for j, template in enumerate(segment.templates):
            ticks = segment.ticks(j)
            for arrival in program.ticks.arrivals[len(template.permutes) :]:
                takes = arrival.takes[ticks[ticks < program.num_ticks]].any(axis=1)
                for tick in ticks[np.flatnonzero(takes)].tolist():
                    message = "a slot takes what arrives over a lane that the tick has not"
                    yield Fault(ProgramRule.EXCHANGE, message, tick)
            for permute in template.permutes:
                yield from _permute_faults(permute)
                if permute.delay > room_of(segment.period, j):
                    late = f"is awaited too late for trips of {segment.period} ticks"
                    yield Fault(ProgramRule.EXCHANGE, f"({permute}) of tick {j} {late}")
    if end != program.num_ticks:
        message = f"the segments end at tick {end} of {program.num_ticks}"
        yield Fault(ProgramRule.SEGMENTS, message)


def _permute_faults(permute: Permute) -> Iterator[Fault]:
    """Distinct sources, distinct targets; and all up or all down, so that there is no cycle."""
    if any(len(set(ends)) < len(ends) for ends in zip(*permute.pairs, strict=True)):
        yield Fault(ProgramRule.PERMUTE, f"({permute}) has a source or a target twice")
    elif len({source < target for source, target in permute.pairs}) > 1:
        yield Fault(ProgramRule.PERMUTE, f"({permute}) goes both up and down")


# Some accesses: tick, device, slot, place, order and value of each; a number applies to all.  The
# place within the tick is 4 n before block n or after n blocks, two more in it, and `_AFTER` all of
# them; the order within the block is that of `Access`.  A value is the number of what the pool
# holds, stage * M + microbatch.
_Columns: TypeAlias = tuple[ArrayLike, ...]


def _accesses(
    program: Program, pool: Place, blocks: Sequence[Running]
) -> Iterator[tuple[int, ...]]:
    """The accesses of one pool: device, slot, tick, place, order and value; by slot, then in the
    order of time.
    """
    parts = [*_of_blocks(program, pool, blocks), *_of_moves(program, pool)]
    parts += _of_exchanges(program, pool, blocks)
    if not parts:
        return iter(())
    alike = ([np.broadcast_to(each, np.shape(part[0])) for each in part] for part in parts)
    tick, device, slot, *rest = map(np.concatenate, zip(*alike, strict=True))
    columns = device, slot, tick, *rest
    order = np.lexsort(columns[::-1])
    return zip(*(column[order].tolist() for column in columns), strict=True)


def _happening(
    program: Program, place: Place, block: Running
) -> Iterator[tuple[Effect, At, Record[IntTable], Ints]]:
    """The effects of a block on a place: where they happen, the record, and the values."""
    kind = block.use.block.kind
    record: Record[IntTable] = program.ticks.of(kind)
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


def _of_blocks(program: Program, pool: Place, blocks: Sequence[Running]) -> Iterator[_Columns]:
    """The effects of the actions."""
    for block in blocks:
        is_forward = block.use.block.runs_forward
        for effect, at, record, value in _happening(program, pool, block):
            # A pair runs as one: the backward may read until the forward has written.
            late = program.pairs[at] & (effect.access is Access.READ) & (not is_forward)
            place = np.where(late, 4 * block.among - 1, 4 * block.place + 2)
            slot = getattr(record, effect.field)[at]
            yield *at, slot, place, effect.access, value


def _of_exchanges(program: Program, pool: Place, blocks: Sequence[Running]) -> Iterator[_Columns]:
    """Writings of permutes; a device that is no target gets nothing, and writes that."""
    if pool not in SENT_TO:
        return
    # What a device has to send when a tick is over, made in that very tick.
    sent = np.full((program.num_ticks, program.schedule.num_devices), NOTHING)
    made = np.zeros_like(sent)  # after how many blocks
    for block in blocks:
        for _, at, _, value in _happening(program, SENT_TO[pool], block):
            sent[at], made[at] = value, block.place + 1
    for segment, transit in ((s, t) for s in program.segments for t in s.transits):
        if POOL_OF[transit.permute.payload] is not pool:
            continue
        arrival = program.ticks.arrivals[transit.lane]
        ticks = segment.ticks(transit.tick)
        value = np.full((len(ticks), program.schedule.num_devices), NOTHING)
        issued = _AFTER if transit.from_before else transit.issued.block
        for source, target in transit.permute.pairs:
            is_there = made[ticks, source] <= issued
            value[:, target] = np.where(is_there, sent[ticks, source], NOTHING)
        k, device = np.nonzero(arrival.takes[ticks] != 0)
        tick, before = _arrives(segment, transit)
        slot, order = arrival.slot[ticks[k], device], Access.WRITE + transit.lane
        yield tick[k], device, slot, 4 * before[k], order, value[k, device]


def _arrives(segment: Segment, transit: Transit) -> At:
    """Per trip that makes it, the tick in which the code writes what a permute brings, and before
    which block: in the same trip or in the next one, and after the last trip when all is done.
    """
    trip = np.arange(segment.repeats) + transit.from_before
    tick = segment.start + trip * segment.period + transit.written.tick
    last = len(segment.templates[-1].blocks)
    block = np.where(tick < segment.stop, transit.written.block, last)
    return np.minimum(tick, segment.stop - 1), block


def _of_moves(program: Program, pool: Place) -> Iterator[_Columns]:
    """Moves between the memories of devices and hosts: on the device at the ends of ticks, on
    the host between them.
    """
    on_host = pool is Place.HOST
    place = 0 if on_host else _AFTER
    for record, move in product(program.ticks.moves, MOVES):
        value: IntTable = getattr(record, move.value)
        tick, device = at = np.nonzero(value != NOBODY)
        for order, columns in ((Access.READ, move.reads), (Access.WRITE, move.writes)):
            # A device's slot is read when the tick before is over.
            when = tick if on_host or order is Access.WRITE else tick - 1
            for name in (name for name, where in columns.items() if where is pool):
                slot = getattr(record, name)[at]
                yield when, device, slot, place, order, value[at]


def _flow_faults(
    pool: Place, size: int, accesses: Iterable[tuple[int, ...]], *, spare: bool
) -> list[Fault]:
    """Broken rules of one pool: every slot exists, and every read finds its value there.

    The pool has as many slots as values are alive at once, from their writing to their last
    reading, on the device with most; with `spare` slots, at least as many.
    """
    found: list[Fault] = []
    # device, tick and place; and by how much that changes what is alive
    steps: list[tuple[int, ...]] = []
    for (device, slot), own in groupby(accesses, itemgetter(0, 1)):
        what, held, written = f"slot {slot} of pool {pool.value}", NOTHING, set[int]()
        # of each value, when it is written and read
        lives: list[list[tuple[int, int]]] = []
        for _, _, tick, place, order, value in own:
            now = tick, place
            if not 0 <= slot < size:
                message = f"{what}, which has {size}"
                found.append(Fault(ProgramRule.SLOT, message, tick, device))
            elif order != Access.READ and (value != held or pool not in OF_SLICES):
                written.add(value)
                lives.append([now])
                held = value
            elif value == held:  # rows among the others of a sequence are added to its value
                lives[-1].append(now)
            else:
                # A missing value was overwritten if it was in the slot before; else it never
                # arrived.
                was_here = value in written
                rule = ProgramRule.OVERWRITTEN if was_here else ProgramRule.VALUE
                message = f"{what} holds value {held}, not {value} (stage x M + microbatch)"
                message += ", which was overwritten" if was_here else ""
                found.append(Fault(rule, message, tick, device))
        # In one moment, what is read last still has its slot.
        for life in (life for life in lives if len(life) > 1):
            steps += (device, *life[0], 0, 1), (device, *life[-1], 1, -1)
    if found:
        return sorted(found, key=attrgetter("tick"))[:_MOST_LISTED]
    # Each device's steps sum to nothing, so one running sum serves all.
    peak = max(chain([1], accumulate(step for *_, step in sorted(steps))))
    if peak > size or (peak < size and not spare):
        message = f"pool {pool.value} has {size} slots; {peak} values are alive at its peak"
        found.append(Fault(ProgramRule.POOL, message))
    return found
