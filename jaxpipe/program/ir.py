"""The lowered program: static segments, the records of every tick, and the pools that hold what
outlives its tick; as text, and run by a plain interpreter.

A record says what each device does in each tick, as int arrays [ticks, devices].  The interpreter
is the meaning of a `Program`: what the SPMD executor compiles does the same, with arrays of slots
and permutes.  It is slow, in one process, with devices in a loop and slots in lists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, product
from operator import and_, or_
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..table.columns import in_columns
from ..table.effects import (
    EFFECTS,
    MOVES,
    OF_SLICES,
    Access,
    Effect,
    Liveness,
    Of,
    Place,
    by_function,
    effects_of,
)
from ..table.kinds import RUNS_FORWARD, SHARES, By, Kind
from ..table.schedule import Schedule
from .segments import JOINT, Block, BlockUse, Payload, Segment, TickTemplate

IntTable: TypeAlias = NDArray[np.int32]
# An array of the executor's own, of the same meaning: [ticks, devices] here, a scalar inside a tick
# of one device.
A = TypeVar("A")
B = TypeVar("B")

NOBODY = -1


@dataclass(frozen=True)
class Record(Generic[A]):
    """Columns of numbers by name; `record.name` is the column of a name."""

    columns: Mapping[str, A]

    def __getattr__(self, name: str) -> A:
        """The column of this name."""
        columns: Mapping[str, A] = self.__dict__.get("columns", {})
        if name not in columns:
            raise AttributeError(name)
        return columns[name]

    def map(self, function: Callable[[A], B]) -> Record[B]:
        """A function of every column."""
        return Record({name: function(column) for name, column in self.columns.items()})

    def changed(self, **columns: A) -> Record[A]:
        """The record with other columns of these names."""
        return Record({**self.columns, **columns})


# Of an action: its kind (or NOBODY), and of a stage's also the chunk of the device (or NOBODY).
# Then come the flags and the slots of its effects.
_STAGE = ("kind", "chunk", "stage", "microbatch")
_SHARE = ("kind", "microbatch", "is_source")
# What a permute brings: the slot that it writes, where `takes` is 1.  Elsewhere the slot keeps what
# it has: nothing is sent to the device and none of its slots is free, or the tick has no such
# permute.
ARRIVAL = ("slot", "takes")


def links_of(rooms: int) -> tuple[str, ...]:
    """The columns of the chunks whose parameters are gathered into each room before a tick's
    blocks, and of those to which the gradients in each room are reduced before that.
    """
    return tuple(f"{name}_{room}" for name in ("gather", "reduce") for room in range(rooms))


# The residuals of a forward that go to the host's memory in a tick, and those that come back, by
# the numbers of their values (stage * M + microbatch).
MOVE = tuple(chain.from_iterable((m.value, *m.reads, *m.writes) for m in MOVES))


def columns_of(kinds: Collection[Kind], *, slices: bool = True) -> tuple[str, ...]:
    """The columns of the record of these kinds, without slices of sequences those of other pools.

    >>> columns_of({Kind.W}, slices=False)[4:]
    ('x', 'residual_weight', 'cotangent', 'stash')
    """
    head = _SHARE if set(kinds) <= set(SHARES) else _STAGE
    left_out = () if slices else OF_SLICES
    own = (e for e in EFFECTS if e.kind in kinds and e.place not in left_out)
    names = [name for e in own for name in (e.when, *e.unless, e.field)]
    absent = (None, "", "has_loss")
    return tuple(dict.fromkeys(n for n in (*head, *names) if n not in absent))


@dataclass(frozen=True)
class TickRecord(Generic[A]):
    """All that varies of a tick.

    `forward` is an F or an R, `backward` a B, I or W.
    """

    forward: Record[A]
    backward: Record[A]
    arrivals: tuple[Record[A], ...]  # by lane of the template
    # one where the table has such actions, else none
    collectives: tuple[Record[A], ...] = ()
    # one where anything waits on the host, else none
    moves: tuple[Record[A], ...] = ()
    # one where parameters are gathered during the step, else none: see `links_of`
    links: tuple[Record[A], ...] = ()

    def of(self, kind: Kind) -> Record[A]:
        """The record of what a kind does."""
        if kind in SHARES:
            return self.collectives[0]
        return self.forward if kind in RUNS_FORWARD else self.backward

    def pairs(self, joint: Sequence[Kind] = JOINT) -> Any:
        """Whether executors may run the forward and a `joint` backward as one.

        So are overlapped pairs, and cells that lowering puts side by side; but not where the
        backward is that very forward's, and needs it.
        """
        one, two = self.forward, self.backward
        kind = reduce(or_, [two.kind == int(kind) for kind in joint])
        return (one.chunk != NOBODY) & (two.chunk != NOBODY) & kind & self.distinct

    @property
    def distinct(self) -> Any:
        """Whether the backward is not that very forward's."""
        one, two = self.forward, self.backward
        return (one.stage != two.stage) | (one.microbatch != two.microbatch)

    def map(self, function: Callable[[A], B]) -> TickRecord[B]:
        """A function of every column."""
        several = (self.arrivals, self.collectives, self.moves, self.links)
        more = (tuple(record.map(function) for record in records) for records in several)
        return TickRecord(self.forward.map(function), self.backward.map(function), *more)

    @property
    def actions(self) -> tuple[tuple[str, Record[A]], ...]:
        """The records of actions, with their names."""
        shares = tuple(("collective action", record) for record in self.collectives)
        return (("forward", self.forward), ("backward", self.backward), *shares)

    @property
    def columns(self) -> list[A]:
        """All columns in their order."""
        records = [self.forward, self.backward]
        records += (*self.arrivals, *self.collectives, *self.moves, *self.links)
        return [column for record in records for column in record.columns.values()]


# Where a transfer's payload arrives.
POOL_OF = {Payload.ACTIVATION: Place.X, Payload.COTANGENT: Place.COTANGENT}
# By the pool where a transfer arrives, the place that it is sent from.
SENT_TO = {Place.X: Place.SENT_X, Place.COTANGENT: Place.SENT_DX}


# The most forwards whose residuals are between the memories of a device and its host at a time: one
# leaves, and one comes.
UNDER_WAY = 2


class Slots(SimpleNamespace):
    """The number of entries of each pool, by the value of its `Place`: the most that any device
    holds at one time, at least one; 0 where the program has no such pool.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{place.value: 0 for place in Place if place.is_pool} | sizes)


# Ticks that are printed; the steady state is in the segments anyway.
MOST_TICKS = 64


def show(program: Program) -> str:
    """The whole program on a screen, where its ticks fit on one.

    A cell is the action, the slots that it reads, and after ">" those that it writes: `2F3 x1>w0`
    is the forward of microbatch 3 through stage 2, which reads slot 1 of pool x and keeps residuals
    in slot 0 of pool w.  `<x2` is what arrives in slot 2 at the end of the tick, `i0 w0>h3` what
    goes to the host's memory and `h3>i1 w1` what comes back from it.
    """
    schedule, num_ticks = program.schedule, program.num_ticks
    name = schedule.name or "schedule"
    shape = f"{schedule.num_devices} devices, {schedule.num_stages} stages"
    times = f"{schedule.num_microbatches} microbatches, {num_ticks} ticks"
    lines = [f"program of {name}: {shape}, {times}"]
    lines += [
        f"pool {pool.letter} {pool.value}: {slots} slot{'s' if slots > 1 else ''}"
        for pool, slots in program.pools.items()
    ]
    lines += map(str, program.segments)
    shown = min(num_ticks, MOST_TICKS)
    devices = range(schedule.num_devices)
    rows = [["tick", *(f"device {d}" for d in devices)]]
    for segment in program.segments:
        for tick in range(segment.start, min(segment.stop, shown)):
            template = segment.template(tick)
            cells = (_cell(program, template, tick, device) for device in devices)
            rows.append([f"{tick:4}", *cells])
    lines.append(in_columns(rows, between=" | "))
    if shown < num_ticks:
        lines.append(f" ... | {num_ticks - shown} more ticks")
    return "\n".join(lines)


def _cell(program: Program, template: TickTemplate, tick: int, device: int) -> str:
    """The text of one device in one tick."""
    record = program.at(tick, device)
    parts = [
        _action(each, program.effects(Kind(each.kind)), device)
        for each in (*record.collectives, record.backward, record.forward)
        if each.kind != NOBODY
    ]
    if template.blocks and template.blocks[0].block.runs_forward:
        parts.reverse()
    for arrival, permute in zip(record.arrivals, template.permutes, strict=False):
        if arrival.takes and any(target == device for _, target in permute.pairs):
            late = f"+{permute.delay}" if permute.delay else ""
            parts.append(f"<{POOL_OF[permute.payload].letter}{arrival.slot}{late}")
    parts[:0] = [
        f"{chunk}>{name}"
        for each in record.links
        for name, chunk in each.columns.items()
        if chunk != NOBODY
    ]
    parts += [
        f"{_slots(each, move.reads)}>{_slots(each, move.writes)}"
        for each in record.moves
        for move in MOVES
        if getattr(each, move.value) != NOBODY
    ]
    return " ".join(part for part in parts if part)


def _action(record: Record[int], effects: Sequence[Effect], device: int) -> str:
    """An action, what it reads, and after ">" what it writes."""
    slotted = (e for e in effects if e.field)
    happen = [e for e in slotted if e.when is None or getattr(record, e.when)]
    read = {e.field: e.place for e in happen if e.access is Access.READ}
    # What `first` makes inside of a forward is that forward's input.
    written = {e.field: e.place for e in happen if e.field not in read}
    writes = f">{_slots(record, written)}" if written else ""
    stage, kind = getattr(record, "stage", device), Kind(record.kind).name
    return f"{stage}{kind}{record.microbatch} {_slots(record, read)}{writes}".rstrip()


def _slots(record: Record[int], columns: Mapping[str, Place]) -> str:
    """The slots that these columns hold."""
    slots = (f"{place.letter}{getattr(record, name)}" for name, place in columns.items())
    return " ".join(slots)


@dataclass(frozen=True, eq=False)
class Program:
    """The input of an executor: `segments` say which code each tick has, `ticks` what each device
    does in it, with which slots.

    `ticks` holds int32 arrays [T, P].  `liveness` says what the backwards read, for which the slots
    were made. `jaxpipe.program.verify` proves that a program computes its schedule; `str` prints
    it.
    """

    schedule: Schedule
    segments: tuple[Segment, ...]
    ticks: TickRecord[IntTable]
    pools: Mapping[Place, int]  # how many slots each has
    liveness: Liveness
    joint: tuple[Kind, ...] = JOINT  # backwards that a forward of their tick runs with
    together: bool = False  # a microbatch has one slot number in all pools of `TOGETHER`
    # per action of the schedule, the room of its stage's parameters where they are gathered during
    # the step: the chunk of the records
    room: NDArray[np.int64] | None = None

    @property
    def num_rooms(self) -> int:
        """The most stages whose parameters a device gathers at a time; 0 where it has all."""
        return 0 if self.room is None else 1 + int(self.room.max(initial=0))

    @property
    def num_ticks(self) -> int:
        """T, the number of ticks."""
        return int(self.ticks.forward.kind.shape[0])

    def effects(self, kind: Kind) -> tuple[Effect, ...]:
        """The effects of the actions of a kind in this program."""
        return effects_of(kind, self.schedule.encoded.kinds, self.liveness)

    def at(self, tick: int, device: int) -> TickRecord[int]:
        """The numbers of one device in one tick."""
        return self.ticks.map(lambda table: int(table[tick, device]))

    def asks(self, record: TickRecord[A], block: Block) -> Any:
        """Whether a record asks for a block.  What all records of the program have is not asked."""
        own = record.of(block.kind)
        recomputes, asks = self.schedule.encoded.recomputes, []
        if not block.is_share:
            asks.append(own.chunk == block.chunk)
        if block.is_share or recomputes or not block.runs_forward:
            asks.append(own.kind == int(block.kind))
        if block.kind is Kind.F and recomputes:
            asks.append((own.keeps != 0) == block.keeps)
        return reduce(and_, asks)

    @cached_property
    def pairs(self) -> NDArray[np.bool_]:
        """`[tick, device]`: a forward and a backward that run as one."""
        return np.asarray(self.ticks.pairs(self.joint))

    @cached_property
    def slots(self) -> Slots:
        """The number of slots of each pool."""
        return Slots(**{pool.value: slots for pool, slots in self.pools.items()})

    def __str__(self) -> str:
        return show(self)


class Step(NamedTuple):
    """A function of the model in an action (see `table.effects`)."""

    kind: Kind
    by: By
    stage: int  # of a collective action the device, 0 where all devices do it
    microbatch: int
    # what it reads, by place, and what functions that the action ran before it have returned
    held: Mapping[Place, Any]
    makes: Set[Place]  # where it writes


class ActionCode(Protocol):
    """The computations of the actions.  Values (inputs, residuals, cotangents) are opaque to the
    interpreter; gradients and losses are the model's own.
    """

    def run(self, step: Step) -> Mapping[Place, object]:
        """Do an action; its values by `Effect.result`.

        A value that every device has for itself is a list by device.
        """


# By pool, the values in its slots; and by `Place.SENT_X` and `Place.SENT_DX`, the value to send.
_DeviceValues: TypeAlias = dict[Place, Any]


def interpret(program: Program, model: ActionCode) -> None:
    """Run every tick: each device its blocks in the template's order, then the exchange; the model
    collects the results.
    """
    devices: list[_DeviceValues] = [
        {pool: [None] * slots for pool, slots in program.pools.items()}
        for _ in program.schedule.rows
    ]
    for segment in program.segments:
        _Interpreter(program, model, devices).segment(segment)


@dataclass(frozen=True)
class _Interpreter:
    program: Program
    model: ActionCode
    devices: list[_DeviceValues]

    def segment(self, segment: Segment) -> None:
        """The ticks of a segment.  What a transfer brings is written where the program awaits it:
        before a block, or when a tick is over.
        """
        program, devices = self.program, self.devices
        # by tick and block: the tick of the records, the lane, the pool, and a value a device
        awaited: dict[tuple[int, int], list[tuple[int, int, Place, list[Any]]]] = {}
        written = {(t.tick, t.lane): segment.written(t) for t in segment.transits}

        def arrive(tick: int, block: int) -> None:
            for sent_in, lane, pool, brought in awaited.pop((tick, block), ()):
                for number, device in enumerate(devices):
                    arrival = program.at(sent_in, number).arrivals[lane]
                    if arrival.takes:
                        device[pool][arrival.slot] = brought[number]

        for tick in range(segment.start, segment.stop):
            template = segment.template(tick)
            rows = [program.at(tick, number) for number in range(len(devices))]
            moved = list(chain.from_iterable(map(_move, devices, rows)))
            for place, use in enumerate(template.blocks):
                arrive(tick, place)
                self._block(use, rows)
            trip, j = divmod(tick - segment.start, segment.period)
            for lane, permute in enumerate(template.permutes):
                pool, brought = POOL_OF[permute.payload], [None] * len(devices)
                for source, target in permute.pairs:
                    brought[target] = devices[source].get(SENT_TO[pool])
                when, block = (int(each[trip]) for each in written[j, lane])
                awaiting = awaited.setdefault((when, block), [])
                awaiting.append((tick, lane, pool, brought))
            arrive(tick, len(template.blocks))
            for values, slot, value in moved:
                values[slot] = value

    def _block(self, use: BlockUse, rows: Sequence[TickRecord[int]]) -> None:
        """A block on the devices whose records ask for it."""
        kind = use.block.kind
        records = [row.of(kind) for row in rows]
        if use.block.is_collective:
            if records[0].kind == kind:
                # One device gives what all of them read.
                (source,) = (d for d, record in enumerate(records) if record.is_source)
                self._run(kind, records, source, range(len(records)))
            return
        for number, row in enumerate(rows):
            if self.program.asks(row, use.block):
                self._run(kind, records, number, (number,))

    def _run(
        self, kind: Kind, records: Sequence[Record[int]], source: int, members: Sequence[int]
    ) -> None:
        """An action of these devices with what the source has: the reads, the code and the writes
        of each of its functions.
        """

        def happening(device: int, own: Sequence[Effect]) -> list[Effect]:
            record = records[device]
            return [e for e in own if e.when is None or getattr(record, e.when, True)]

        effects, record = self.program.effects(kind), records[source]
        stage = getattr(record, "stage", source if len(members) == 1 else 0)
        results: dict[Place, Any] = {}
        for by, own in by_function(effects):
            now = happening(source, own)
            if not now:
                continue
            values = self.devices[source]
            held = results | {
                e.place: values[e.place][getattr(record, e.field)]
                for e in now
                if e.access is Access.READ and e.field
            }
            makes = {e.place for e in now if e.access is not Access.READ}
            step = Step(kind, by, stage, record.microbatch, held, makes)
            results = {**self.model.run(step)}
            for number in members:
                for effect in happening(number, own):
                    if effect.access is not Access.READ:
                        self._write(effect, number, records[number], results)

    def _write(
        self, effect: Effect, number: int, record: Record[int], results: Mapping[Place, Any]
    ) -> None:
        """An effect on one device."""
        device = self.devices[number]
        if effect.place in SENT_TO.values():
            device[effect.place] = results[effect.result]
        elif effect.field:
            value = results[effect.result]
            value = value[number] if effect.of is Of.DEVICE else value
            device[effect.place][getattr(record, effect.field)] = value


def _move(
    device: _DeviceValues, row: TickRecord[int]
) -> Iterator[tuple[list[object], int, object]]:
    """Values that go to the host, or come back, when the tick is over: pool, slot and value."""
    for record, move in product(row.moves, MOVES):
        if getattr(record, move.value) == NOBODY:
            continue
        reads = move.reads.items()
        values = [device[place][getattr(record, column)] for column, place in reads]
        # The host holds both kinds of residuals of a forward in one slot.
        values = [values] if len(values) > 1 else values[0]
        for (column, place), value in zip(move.writes.items(), values, strict=True):
            yield device[place], getattr(record, column), value
