"""What can be wrong with a program; and the rules of its structure, and of what runs: each action
of the table exactly once, in code that its tick has.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.effects import flags_of
from ..table.kinds import COLLECTIVES, KIND_NAMES
from .ir import Program
from .records import NOBODY
from .segments import FLAGS, BlockUse, Permute, Presence, Segment, room_of


class ProgramRule(enum.Enum):
    """The rules that `verify` checks."""

    SEGMENTS = "segments"  # the segments cover every tick once, in order
    PERMUTE = "permute"  # a permute has distinct sources and targets, and no cycle
    # what arrives has a permute; transfers end in the trip that begins them or the next
    EXCHANGE = "exchange"
    # every action of the table runs exactly once, on its device; so every gradient is added exactly
    # once
    ACTION = "action"
    # a collective action has a tick of its own
    COLLECTIVE = "collective"
    # the template has the code of each action, and its code does nothing else
    CODE = "code"
    SLOT = "slot"  # every slot exists
    VALUE = "value"  # every read finds the value that it needs
    OVERWRITTEN = "overwritten"  # no value is overwritten before its last read
    POOL = "pool"  # no pool is larger, or smaller, than its peak


@dataclass(frozen=True)
class Fault:
    """One broken rule, with where it was found."""

    rule: ProgramRule
    message: str
    tick: int | None = None
    device: int | None = None

    def __str__(self) -> str:
        places = (("tick", self.tick), ("device", self.device))
        where = ", ".join(f"{name} {at}" for name, at in places if at is not None)
        return f"{self.rule.value}{f' [{where}]' if where else ''}: {self.message}"


# Of one kind of fault, so many are listed.
_MOST_LISTED = 10
BoolTable = NDArray[np.bool_]


class Running(NamedTuple):
    """A block of a template, and where it runs: `runs[k, device]` in tick `ticks[k]`, as the
    `place`-th `among` so many blocks of its template.
    """

    use: BlockUse
    place: int
    among: int
    ticks: NDArray[np.int64]
    runs: BoolTable


def running(program: Program) -> Iterator[Running]:
    """Every block of every template, and where the records ask for it."""
    for segment in program.segments:
        for j, template in enumerate(segment.templates):
            ticks, among = segment.ticks(j), len(template.blocks)
            for place, use in enumerate(template.blocks):
                runs = program.asks(program.ticks, use.block)[ticks]
                yield Running(use, place, among, ticks, runs)


def code_faults(program: Program, blocks: Sequence[Running]) -> Iterator[Fault]:
    """Broken rules of actions and of the code that runs them."""
    yield from islice(_action_faults(program), _MOST_LISTED)
    yield from islice(_collective_faults(program), _MOST_LISTED)
    yield from islice(_template_faults(program, blocks), _MOST_LISTED)
    yield from islice(_run_faults(program), _MOST_LISTED)


def _action_faults(program: Program) -> Iterator[Fault]:
    """Each action runs once, on its device and chunk, with the flags that its place in the model
    asks for.
    """
    table = program.schedule.encoded
    done = np.zeros(table.num_actions, np.int64)
    expected = {"chunk": program.schedule.chunks, **flags_of(table)}
    for _, record in program.ticks.actions:
        tick, device = at = np.nonzero(record.kind != NOBODY)
        columns = {name: column[at].astype(int) for name, column in record.columns.items()}
        kind, microbatch = columns["kind"], columns["microbatch"]
        stage = columns.get("stage", device)
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
            entry = columns[name] if name == "chunk" else columns[name] != 0
            for i in np.flatnonzero(right & (entry != expected[name][number])).tolist():
                message = f"{table.text(int(number[i]))} is marked wrongly: {name}"
                if name == "chunk":
                    message = f"runs stage {stage[i]} as chunk {entry[i]}"
                yield Fault(ProgramRule.ACTION, message, int(tick[i]), int(device[i]))
    for i in np.flatnonzero(done != 1).tolist():
        message = f"{table.text(i)} runs {done[i]} times"
        yield Fault(ProgramRule.ACTION, message, device=int(table.device[i]))


def _collective_faults(program: Program) -> Iterator[Fault]:
    """All devices do a collective action in one tick, which has nothing else; H is alone."""
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


def _part_faults(use: BlockUse, record: Any, ticks: Any, runs: BoolTable) -> Iterator[Fault]:
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


def structure_faults(program: Program) -> list[Fault]:
    """Broken rules of the segments and their permutes."""
    found = list(_segment_faults(program.segments, program.num_ticks))
    return found or list(_lane_faults(program))


def _segment_faults(segments: Sequence[Segment], num_ticks: int) -> Iterator[Fault]:
    """Segments follow each other and cover all ticks; what a trip awaits, it issued, or the last
    tick of the trip before.
    """
    tick = 0
    for segment in segments:
        if segment.start != tick:
            message = f"ticks {tick}..{segment.start} are in no segment, or in two"
            yield Fault(ProgramRule.SEGMENTS, message)
        tick = segment.stop
        for j, template in enumerate(segment.templates):
            for permute in template.permutes:
                yield from _permute_faults(permute)
                if permute.delay > room_of(segment.period, j):
                    late = f"is awaited too late for trips of {segment.period} ticks"
                    yield Fault(ProgramRule.EXCHANGE, f"({permute}) of tick {j} {late}")
    if tick != num_ticks:
        message = f"the segments end at tick {tick} of {num_ticks}"
        yield Fault(ProgramRule.SEGMENTS, message)


def _permute_faults(permute: Permute) -> Iterator[Fault]:
    """Distinct sources, distinct targets, no cycle."""
    sources, targets = zip(*permute.pairs, strict=True) if permute.pairs else ((), ())
    if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        yield Fault(ProgramRule.PERMUTE, f"({permute}) has a source or a target twice")
        return
    following = dict(permute.pairs)
    for start in following:
        at: int | None = following[start]
        while at is not None and at != start:
            at = following.get(at)
        if at == start:
            yield Fault(ProgramRule.PERMUTE, f"({permute}) holds a cycle")
            return


def _lane_faults(program: Program) -> Iterator[Fault]:
    """No slot takes what arrives over a lane that the tick's template has not."""
    for segment in program.segments:
        for j, template in enumerate(segment.templates):
            ticks = segment.ticks(j)
            more = program.ticks.arrivals[len(template.permutes) :]
            takes = sum(arrival.takes[ticks].any(axis=1) for arrival in more)
            for tick in ticks[np.flatnonzero(takes)].tolist():
                message = "a slot takes what arrives over a lane that the tick has not"
                yield Fault(ProgramRule.EXCHANGE, message, tick)
