"""Rules of what runs: each action of the table exactly once, in code that its tick has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.kinds import KIND_NAMES, RECOMPUTE, SHARES, TOGETHER, Kind
from .faults import Fault, Rule
from .ir import Program
from .records import NOBODY, Backward, Forward, IntTable
from .segments import Segment
from .templates import Block, BlockUse, Presence

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


def half_of(program: Program, block: Block) -> Forward[IntTable] | Backward[IntTable]:
    """The records that a block reads."""
    return program.ticks.forward if block.runs_forward else program.ticks.backward


def running(program: Program) -> tuple[Running, ...]:
    """Every block of every template, and where the records ask for it."""
    return tuple(_running(program))


def _running(program: Program) -> Iterator[Running]:
    for segment in program.segments:
        for j, template in enumerate(segment.templates):
            ticks = ticks_of(segment, j)
            for place, use in enumerate(template.blocks):
                if use.block.is_share:
                    yield Running(use, place, ticks, _shares(program)[ticks] == int(use.block.kind))
                    continue
                half = half_of(program, use.block)
                runs = (half.chunk[ticks] == use.block.chunk) & (
                    half.kind[ticks] == int(use.block.kind)
                )
                if use.block.kind is Kind.F and not program.schedule.forward_only:
                    runs &= (program.ticks.forward.keeps[ticks] != 0) == use.block.keeps
                yield Running(use, place, ticks, runs)


def _shares(program: Program) -> IntTable:
    """`[tick, device]`: the kind of what all devices do together."""
    for share in program.ticks.shares:
        return share.kind
    return np.full_like(program.ticks.forward.kind, NOBODY)


def ticks_of(segment: Segment, j: int) -> NDArray[np.int64]:
    """The ticks of a segment's j-th template."""
    return np.arange(segment.start + j, segment.stop, segment.period)


def code_faults(program: Program, blocks: Sequence[Running]) -> Iterator[Fault]:
    """Broken rules of actions and of the code that runs them."""
    yield from _limited(_action_faults(program))
    yield from _limited(_template_faults(program, blocks))
    yield from _limited(_missing_shares(program, blocks))
    yield from _limited(_run_faults(program))


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
    for half in (program.ticks.forward, program.ticks.backward):
        tick, device = np.nonzero(half.chunk != NOBODY)
        kind, stage, microbatch, chunk = (
            field[tick, device] for field in (half.kind, half.stage, half.microbatch, half.chunk)
        )
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
            yield Fault(Rule.ACTION, message, int(tick[i]), int(device[i]))
        good = np.flatnonzero(~wrong)
        np.add.at(done, number[good], 1)
        of_stage = good[~table.shares[number[good]]]
        for i in of_stage[
            _wrong_chunk(program, device[of_stage], chunk[of_stage], stage[of_stage])
        ].tolist():
            yield Fault(
                Rule.ACTION,
                f"runs stage {stage[i]} as chunk {chunk[i]}",
                int(tick[i]),
                int(device[i]),
            )
        for what, flag, wanted in _flags(program, half, number):
            for i in good[(flag[tick, device] != wanted)[good]].tolist():
                yield Fault(
                    Rule.ACTION,
                    f"{table.text(int(number[i]))} is marked wrongly: {what}",
                    int(tick[i]),
                    int(device[i]),
                )
    yield from _share_faults(program, done)
    for missing in np.flatnonzero(done != 1).tolist():
        yield Fault(
            Rule.ACTION,
            f"{table.text(missing)} runs {done[missing]} times",
            device=int(table.device[missing]),
        )


def _share_faults(program: Program, done: NDArray[np.int64]) -> Iterator[Fault]:
    """What is wrong with what all devices do together; counts in `done` what runs."""
    table, ticks = program.schedule.encoded, program.ticks
    for share in ticks.shares:
        alone = (ticks.forward.chunk != NOBODY) | (ticks.backward.chunk != NOBODY)
        for tick in np.flatnonzero((share.kind != NOBODY).any(axis=1)).tolist():
            kinds, microbatches = (
                set(share.kind[tick].tolist()),
                set(share.microbatch[tick].tolist()),
            )
            (kind, *others), (microbatch, *more) = kinds, microbatches
            if (
                others
                or more
                or kind not in TOGETHER
                or not 0 <= microbatch < program.schedule.num_microbatches
            ):
                yield Fault(
                    Rule.TOGETHER,
                    f"devices do {sorted(kinds)} of microbatches {sorted(microbatches)}, not all "
                    "the same",
                    tick,
                )
                continue
            for device in np.flatnonzero(alone[tick]).tolist():
                yield Fault(
                    Rule.TOGETHER,
                    "does something else in the tick of what all devices do together",
                    tick,
                    device,
                )
            members = table.at[kind, : program.schedule.num_devices, microbatch]
            done[members] += 1
            source = int(table.device[table.meetings[int(members[0])].home])
            for device, flag in enumerate(share.is_source[tick].tolist()):
                if bool(flag) is not (device == source):
                    yield Fault(
                        Rule.ACTION,
                        f"{table.text(int(members[device]))} is marked wrongly: is_source",
                        tick,
                        device,
                    )


def _wrong_chunk(program: Program, device: Any, chunk: Any, stage: Any) -> BoolTable:
    """Where a chunk is not the stage's on its device."""
    stages_of = program.schedule.placement.stages_of
    width = max(map(len, stages_of))
    stages = np.array([[*row, *[NOBODY] * (width - len(row))] for row in stages_of])
    found: BoolTable = (chunk >= width) | (stages[device, np.minimum(chunk, width - 1)] != stage)
    return found


def _flags(
    program: Program, half: Any, number: Any
) -> Iterator[tuple[str, IntTable, NDArray[np.bool_]]]:
    """(what, the flags, what they are to be for each action `number`)."""
    table = program.schedule.encoded
    user = np.full(table.num_actions, -1, np.int64)
    needed = np.flatnonzero(table.producer >= 0)
    user[table.producer[needed]] = needed
    local = (user >= 0) & (table.device[user] == table.device)
    chain = ~(table.of_kinds(RECOMPUTE) | table.shares)[number]
    yield "is_first", half.is_first, chain & (table.stage[number] == 0)
    yield "is_local", half.is_local, local[number]
    if isinstance(half, Forward):
        yield "is_last", half.is_last, chain & (table.stage[number] == table.num_stages - 1)
        (kind,) = RECOMPUTE
        recomputed = chain & (table.at[kind][table.stage[number], table.microbatch[number]] >= 0)
        yield "keeps", half.keeps, ~recomputed & (not table.forward_only)


def _template_faults(program: Program, blocks: Sequence[Running]) -> Iterator[Fault]:
    """A device finds the code of what it is to do; code without a predicate is what all devices
    want.
    """
    for name, half in (("forward", program.ticks.forward), ("backward", program.ticks.backward)):
        covered = np.zeros(half.chunk.shape, np.int64)
        for use, _, ticks, runs in blocks:
            if use.block.is_share or half_of(program, use.block) is not half:
                continue
            covered[ticks] += runs
            if use.active is Presence.ALWAYS:
                for k, device in zip(*np.nonzero(~runs), strict=True):
                    yield Fault(
                        Rule.CODE,
                        f"runs {use.block} without being asked to",
                        int(ticks[k]),
                        int(device),
                    )
            yield from _part_faults(use, half, ticks, runs)
        for tick, device in zip(*np.nonzero(covered != (half.chunk != NOBODY)), strict=True):
            yield Fault(
                Rule.CODE,
                f"the template has the code of its {name} {covered[tick, device]} times",
                int(tick),
                int(device),
            )


def _run_faults(program: Program) -> Iterator[Fault]:
    """Ticks that share code within a trip have one template, and what they send arrives in the same
    tick.
    """
    for segment in program.segments:
        looped = sum(loop.times * loop.ticks for loop in segment.loops)
        if segment.loops and looped != segment.period:
            yield Fault(
                Rule.CODE,
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
                yield Fault(Rule.CODE, message, segment.start + ticks[0])


def _missing_shares(program: Program, blocks: Sequence[Running]) -> Iterator[Fault]:
    """The same of what all devices do together."""
    kinds = _shares(program)
    covered = np.zeros(kinds.shape, np.int64)
    for use, _, ticks, runs in blocks:
        if use.block.is_share:
            covered[ticks] += runs
            if use.active is Presence.ALWAYS:
                for k in np.flatnonzero(~runs.all(axis=1)).tolist():
                    yield Fault(
                        Rule.CODE, f"runs {use.block} without being asked to", int(ticks[k])
                    )
    for tick in np.flatnonzero((covered != (kinds != NOBODY)).any(axis=1)).tolist():
        yield Fault(
            Rule.CODE, f"the template has the code of its share {covered[tick, 0]} times", tick
        )


def _part_faults(use: BlockUse, half: Any, ticks: Any, runs: BoolTable) -> Iterator[Fault]:
    """The inner parts of a block run exactly where their flags say."""
    parts = [("first", use.first, half.is_first), ("local", use.local, half.is_local)]
    if isinstance(half, Forward):
        parts.append(("last", use.last, half.is_last))
    if use.block.kind in (Kind.W, *SHARES, *RECOMPUTE):
        parts = []  # they hand nothing on
    for part, presence, flag in parts:
        asked = flag[ticks] != 0
        happens = {
            Presence.ALWAYS: np.ones_like(asked),
            Presence.NEVER: np.zeros_like(asked),
            Presence.SOMETIMES: asked,
        }[presence]
        for k, device in zip(*np.nonzero(runs & (asked != happens)), strict=True):
            verb = "is never run" if presence is Presence.NEVER else "always runs"
            yield Fault(
                Rule.CODE,
                f"`{part}` of {use.block} {verb}, against its flag",
                int(ticks[k]),
                int(device),
            )
