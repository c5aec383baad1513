"""What can be wrong with a program; and the rules of what runs: each action of the table exactly
once, in code that its tick has.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.kinds import COLLECTIVES, KIND_NAMES, RECOMPUTE, Kind
from .ir import Program
from .records import NOBODY
from .segments import FLAGS, BlockUse, Presence, Segment


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
        where = [
            f"{name} {at}"
            for name, at in (("tick", self.tick), ("device", self.device))
            if at is not None
        ]
        return f"{self.rule.value}{' [' + ', '.join(where) + ']' if where else ''}: {self.message}"


# Of one kind of fault, so many are listed.
_MOST_LISTED = 10
BoolTable = NDArray[np.bool_]


class Running(NamedTuple):
    """A block of a template, and where it runs: `runs[k, device]` in tick `ticks[k]`, as the
    `place`-th block of its template.
    """

    use: BlockUse
    place: int
    ticks: NDArray[np.int64]
    runs: BoolTable


def running(program: Program) -> Iterator[Running]:
    """Every block of every template, and where the records ask for it."""
    for segment in program.segments:
        for j, template in enumerate(segment.templates):
            ticks = ticks_of(segment, j)
            for place, use in enumerate(template.blocks):
                record: Any = program.ticks.of(use.block.kind)
                runs = record.kind[ticks] == int(use.block.kind)
                if not use.block.is_share:
                    runs &= record.chunk[ticks] == use.block.chunk
                if use.block.kind is Kind.F and not program.schedule.forward_only:
                    runs &= (record.keeps[ticks] != 0) == use.block.keeps
                yield Running(use, place, ticks, runs)


def ticks_of(segment: Segment, j: int) -> NDArray[np.int64]:
    """The ticks of a segment's j-th template."""
    return np.arange(segment.start + j, segment.stop, segment.period)


def code_faults(program: Program, blocks: Sequence[Running]) -> Iterator[Fault]:
    """Broken rules of actions and of the code that runs them."""
    yield from _limited(_action_faults(program))
    yield from _limited(_collective_faults(program))
    yield from _limited(_template_faults(program, blocks))
    yield from _limited(_run_faults(program))


def _records(program: Program) -> Iterator[tuple[str, Any]]:
    """The records of actions, with their names."""
    yield "forward", program.ticks.forward
    yield "backward", program.ticks.backward
    for record in program.ticks.collectives:
        yield "collective action", record


def _limited(found: Iterator[Fault]) -> Iterator[Fault]:
    for number, fault in enumerate(found):
        if number == _MOST_LISTED:
            return
        yield fault


def _action_faults(program: Program) -> Iterator[Fault]:
    """Each action runs once, on its device and chunk, with the flags that its place in the model
    asks for.
    """
    table, schedule = program.schedule.encoded, program.schedule
    done = np.zeros(table.num_actions, np.int64)
    for _, record in _records(program):
        at = np.nonzero(record.kind != NOBODY)
        tick, device = at
        kind, microbatch = record.kind[at], record.microbatch[at]
        stage = record.stage[at] if hasattr(record, "stage") else device
        inside = (kind >= 0) & (kind < len(Kind)) & (stage >= 0) & (stage < schedule.num_stages)
        inside &= (microbatch >= 0) & (microbatch < schedule.num_microbatches)
        number = np.full(len(tick), -1)
        number[inside] = table.at[kind[inside], stage[inside], microbatch[inside]]
        wrong = number < 0
        wrong |= np.where(wrong, False, table.device[number] != device)
        for i in np.flatnonzero(wrong).tolist():
            name = KIND_NAMES[kind[i]] if 0 <= kind[i] < len(Kind) else f"kind {kind[i]}"
            message = (
                f"runs {stage[i]}{name}{microbatch[i]}, which the table does not give to "
                "this device"
            )
            yield Fault(ProgramRule.ACTION, message, int(tick[i]), int(device[i]))
        good = np.flatnonzero(~wrong)
        np.add.at(done, number[good], 1)
        if hasattr(record, "chunk"):
            chunk = record.chunk[at]
            for i in good[_wrong_chunk(program, device[good], chunk[good], stage[good])].tolist():
                message = f"runs stage {stage[i]} as chunk {chunk[i]}"
                yield Fault(ProgramRule.ACTION, message, int(tick[i]), int(device[i]))
        for what, wanted in _flags(program).items():
            if hasattr(record, what):
                differs = (getattr(record, what)[at] != 0) != wanted[number]
                for i in good[differs[good]].tolist():
                    message = f"{table.text(int(number[i]))} is marked wrongly: {what}"
                    yield Fault(ProgramRule.ACTION, message, int(tick[i]), int(device[i]))
    for missing in np.flatnonzero(done != 1).tolist():
        yield Fault(
            ProgramRule.ACTION,
            f"{table.text(missing)} runs {done[missing]} times",
            device=int(table.device[missing]),
        )


def _collective_faults(program: Program) -> Iterator[Fault]:
    """All devices do a collective action in one tick, which has nothing else; H is alone."""
    ticks = program.ticks
    busy = (ticks.forward.kind != NOBODY) | (ticks.backward.kind != NOBODY)
    for record in ticks.collectives:
        for tick in np.flatnonzero(np.isin(record.kind, COLLECTIVES).any(axis=1)).tolist():
            kinds, microbatches = (
                sorted(set(column[tick].tolist())) for column in (record.kind, record.microbatch)
            )
            if len(kinds) > 1 or len(microbatches) > 1:
                message = f"devices do {kinds} of microbatches {microbatches}, not all the same"
                yield Fault(ProgramRule.COLLECTIVE, message, tick)
                continue
            for device in np.flatnonzero(busy[tick]).tolist():
                message = "does something else in the tick of a collective action"
                yield Fault(ProgramRule.COLLECTIVE, message, tick, device)


def _wrong_chunk(program: Program, device: Any, chunk: Any, stage: Any) -> BoolTable:
    """Where a chunk is not the stage's on its device."""
    stages_of = program.schedule.placement.stages_of
    width = max(map(len, stages_of))
    stages = np.array([[*row, *[NOBODY] * (width - len(row))] for row in stages_of])
    found: BoolTable = (chunk >= width) | (stages[device, np.minimum(chunk, width - 1)] != stage)
    return found


def _flags(program: Program) -> dict[str, BoolTable]:
    """Per action, what its flags are to be."""
    table = program.schedule.encoded
    user = np.full(table.num_actions, -1, np.int64)
    needed = np.flatnonzero(table.producer >= 0)
    user[table.producer[needed]] = needed
    chain = ~(table.of_kinds(RECOMPUTE) | table.shares)
    (kind,) = RECOMPUTE
    stage = np.where(table.shares, 0, table.stage)
    recomputed = chain & (table.at[kind][stage, table.microbatch] >= 0)
    source = np.zeros(table.num_actions, bool)
    for number, collective in table.collectives.items():
        source[number] = table.device[number] == table.device[collective.partner]
    return {
        "is_first": chain & (table.stage == 0),
        "is_last": chain & (table.stage == table.num_stages - 1),
        "is_local": (user >= 0) & (table.device[user] == table.device),
        "keeps": ~recomputed & (not table.forward_only),
        "is_source": source,
        "continues": table.slice > 0,
        "is_followed": table.slice < table.slices - 1,
    }


def _template_faults(program: Program, blocks: Sequence[Running]) -> Iterator[Fault]:
    """The template has the code of each action.  Code without a predicate is for all devices."""
    for name, record in _records(program):
        covered = np.zeros(record.kind.shape, np.int64)
        for use, _, ticks, runs in blocks:
            if program.ticks.of(use.block.kind) is not record:
                continue
            covered[ticks] += runs
            if use.active is Presence.ALWAYS:
                for k, device in zip(*np.nonzero(~runs), strict=True):
                    message = f"runs {use.block} without being asked to"
                    yield Fault(ProgramRule.CODE, message, int(ticks[k]), int(device))
            yield from _part_faults(use, record, ticks, runs)
        for tick, device in zip(*np.nonzero(covered != (record.kind != NOBODY)), strict=True):
            message = f"the template has the code of its {name} {covered[tick, device]} times"
            yield Fault(ProgramRule.CODE, message, int(tick), int(device))


def _run_faults(program: Program) -> Iterator[Fault]:
    """Ticks that share code within a trip have one template, and what they send arrives in the same
    tick.
    """
    for segment in program.segments:
        looped = sum(loop.times * loop.ticks for loop in segment.loops)
        if segment.loops and looped != segment.period:
            yield Fault(
                ProgramRule.CODE,
                f"has loops of {looped} ticks in trips of {segment.period}",
                segment.start,
            )
            continue
        for ticks in segment.emitted:
            first = segment.templates[ticks[0]]
            alike = all(segment.templates[j] == first for j in ticks)
            if len(ticks) > 1 and not (
                alike and all(permute.delay == 0 for permute in first.permutes)
            ):
                message = (
                    "shares code with other ticks of its trip, which need other code or "
                    "await its transfers"
                )
                yield Fault(ProgramRule.CODE, message, segment.start + ticks[0])


def _part_faults(use: BlockUse, record: Any, ticks: Any, runs: BoolTable) -> Iterator[Fault]:
    """The inner parts of a block run exactly where their flags say."""
    for flag in {"is_first", "is_last", "is_local"}.intersection(FLAGS[use.block.kind]):
        presence, wanted = use.presence(flag), getattr(record, flag)[ticks] != 0
        happens = wanted if presence is Presence.SOMETIMES else presence is Presence.ALWAYS
        for k, device in zip(*np.nonzero(runs & (wanted != happens)), strict=True):
            verb = "is never run" if presence is Presence.NEVER else "always runs"
            message = f"`{flag[3:]}` of {use.block} {verb}, against its flag"
            yield Fault(ProgramRule.CODE, message, int(ticks[k]), int(device))
