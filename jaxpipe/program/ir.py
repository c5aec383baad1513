"""The lowered program: static segments, the records of every tick, and the pools that hold what
outlives its tick; and the program as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..table.effects import MOVES, Access, Effect, Liveness, Place, effects_of
from ..table.kinds import Kind
from ..table.schedule import Schedule
from .records import JOINT, NOBODY, POOL_OF, IntTable, Pool, Slots, TickRecord, pairs_of
from .segments import Block, Segment, TickTemplate

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
    lines += [f"pool {pool}" for pool in program.pools]
    lines += map(str, program.segments)
    shown = min(num_ticks, MOST_TICKS)
    devices = range(schedule.num_devices)
    rows = [["tick", *(f"device {d}" for d in devices)]]
    for segment in program.segments:
        for tick in range(segment.start, min(segment.stop, shown)):
            template = segment.template(tick)
            rows.append([f"{tick:4}", *(_cell(program, template, tick, d) for d in devices)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(" | ".join(cells).rstrip())
    if shown < num_ticks:
        lines.append(f" ... | {num_ticks - shown} more ticks")
    return "\n".join(lines)


def _cell(program: Program, template: TickTemplate, tick: int, device: int) -> str:
    """The text of one device in one tick."""
    record: Any = program.at(tick, device)
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
    parts += [
        f"{_slots(each, move.reads)}>{_slots(each, move.writes)}"
        for each in record.moves
        for move in MOVES
        if getattr(each, move.value) != NOBODY
    ]
    return " ".join(part for part in parts if part)


def _action(record: Any, effects: Sequence[Effect], device: int) -> str:
    """An action, what it reads, and after ">" what it writes."""
    slotted = (e for e in effects if e.field)
    happen = [e for e in slotted if e.when is None or getattr(record, e.when)]
    read = {e.field: e.place for e in happen if e.access is Access.READ}
    # What `first` makes inside of a forward is that forward's input.
    written = {e.field: e.place for e in happen if e.field not in read}
    writes = f">{_slots(record, written)}" if written else ""
    stage, kind = getattr(record, "stage", device), Kind(record.kind).name
    return f"{stage}{kind}{record.microbatch} {_slots(record, read)}{writes}".rstrip()


def _slots(record: Any, columns: Mapping[str, Place]) -> str:
    """The slots that these columns hold."""
    slots = ((place.letter, getattr(record, column)) for column, place in columns.items())
    return " ".join(f"{letter}{slot}" for letter, slot in slots)


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
    pools: tuple[Pool, ...]
    liveness: Liveness
    joint: tuple[Kind, ...] = JOINT  # backwards that a forward of their tick runs with

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

    def asks(self, record: TickRecord[Any], block: Block) -> Any:
        """Whether a record asks for a block.  What all records of the program have is not asked."""
        own: Any = record.of(block.kind)
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
        found: NDArray[np.bool_] = pairs_of(self.ticks, self.joint)
        return found

    @cached_property
    def slots(self) -> Slots:
        """The number of slots of each pool."""
        return Slots(**{pool.name.value: pool.slots for pool in self.pools})

    def __str__(self) -> str:
        return show(self)
