"""A plain interpreter of programs: one process, devices in a loop, slots in lists.  Slow, and made
to be read.

It is the meaning of a `Program`: what the SPMD executor compiles does the same, with arrays of
slots and permutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..table.effects import MOVES, Access, Effect, Of, Place
from ..table.kinds import Kind
from .ir import Program
from .records import NOBODY, POOL_OF, SENT_TO, TickRecord
from .segments import BlockUse, Segment


class Step(NamedTuple):
    """An action that a model is to do (see `table.effects`)."""

    kind: Kind
    stage: int  # of a collective action the device, 0 where all devices do it
    microbatch: int
    held: Mapping[str, Any]  # what it reads, by field of its record
    makes: Set[Place]  # where it writes
    prepares: bool  # the first stage's input is to be made first


class Model(Protocol):
    """The computations of the actions.  Values (inputs, residuals, cotangents) are opaque to the
    interpreter; gradients and losses are the model's own.
    """

    def run(self, step: Step) -> Mapping[str, Any]:
        """Do an action; its values by field of the record, with "sent" for the one that is sent.

        A value that every device has for itself is a list by device.
        """


# By pool, the values in its slots; and by `Place.SENT_X` and `Place.SENT_DX`, the value to send.
_Device: TypeAlias = dict[Place, Any]


def interpret(program: Program, model: Model) -> None:
    """Run every tick: each device its blocks in the template's order, then the exchange; the model
    collects the results.
    """

    def device() -> _Device:
        return {pool.name: [None] * pool.slots for pool in program.pools}

    devices = [device() for _ in program.schedule.rows]
    for segment in program.segments:
        _Interpreter(program, model, devices).segment(segment)


@dataclass(frozen=True)
class _Interpreter:
    program: Program
    model: Model
    devices: list[_Device]

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
            moved = [each for pair in zip(devices, rows, strict=True) for each in _move(*pair)]
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
        records: list[Any] = [row.of(kind) for row in rows]
        if use.block.is_collective:
            if records[0].kind == kind:
                # One device gives what all of them read.
                (source,) = (d for d, record in enumerate(records) if record.is_source)
                self._run(kind, records, source, range(len(records)))
            return
        for number, row in enumerate(rows):
            if self.program.asks(row, use.block):
                self._run(kind, records, number, (number,))

    def _run(self, kind: Kind, records: Sequence[Any], source: int, members: Sequence[int]) -> None:
        """An action of these devices with what the source has: its reads, its code, its writes."""

        def happens(effect: Effect, device: int) -> bool:
            flag = effect.when
            return flag is None or bool(getattr(records[device], flag, True))

        effects, record = self.program.effects(kind), records[source]
        happening = [effect for effect in effects if happens(effect, source)]
        held = {
            e.field: self.devices[source][e.place][getattr(record, e.field)]
            for e in happening
            if e.access is Access.READ
        }
        makes = {e.place for e in happening if e.access is not Access.READ}
        prepares = any(e.access is Access.PREPARE for e in happening)
        stage = getattr(record, "stage", source if len(members) == 1 else 0)
        step = Step(kind, stage, record.microbatch, held, makes, prepares)
        results, writes = self.model.run(step), [e for e in effects if e.access is not Access.READ]
        for number in members:
            device = self.devices[number]
            for effect in (effect for effect in writes if happens(effect, number)):
                if effect.place in SENT_TO.values():
                    device[effect.place] = results["sent"]
                elif effect.field:
                    value = results[effect.field]
                    value = value[number] if effect.of is Of.DEVICE else value
                    device[effect.place][getattr(records[number], effect.field)] = value


def _move(device: _Device, row: TickRecord[int]) -> Iterator[tuple[list[Any], int, Any]]:
    """Values that go to the host, or come back, when the tick is over: pool, slot and value."""
    for record, move in product(row.moves, MOVES):
        if getattr(record, move.value) == NOBODY:
            continue
        values = [device[place][getattr(record, column)] for column, place in move.reads.items()]
        # The host holds both kinds of residuals of a forward in one slot.
        values = [values] if len(values) > 1 else values[0]
        for (column, place), value in zip(move.writes.items(), values, strict=True):
            yield device[place], getattr(record, column), value
