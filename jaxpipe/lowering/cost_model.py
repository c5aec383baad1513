"""How long the lowered program takes: its ticks and transfers simulated as a mesh would run them,
trip by trip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.costs import Costs
from ..engine.loop import action_durations
from ..program.segments import Part, Permute, Point, Segment, TickTemplate
from ..table.encoded import IntArray
from ..table.kinds import COLLECTIVES, RUNS_FORWARD, Kind
from .assign_ticks import Ticks, equal_rows, joins_weights
from .prices import NO_OVERHEADS, Overheads

# Partners of each device, and how long the permutes of each device last; None where they take no
# time.
_Exchange: TypeAlias = "tuple[tuple[NDArray[np.intp], ...], NDArray[np.float64] | None]"


# The number of trips that are compared to find a repetition.
_AHEAD = 8


class Durations(NamedTuple):
    """How long ticks last: a tick of code c `of[c, part, device]`.  Large tables have many ticks
    and few codes.
    """

    of: NDArray[np.float64]
    codes: IntArray

    @classmethod
    def from_rows(cls, costs: NDArray[np.float64]) -> Durations:
        """From `[tick, device]` or `[tick, part, device]`."""
        rows = np.ascontiguousarray(costs[:, None] if costs.ndim == 2 else costs)
        codes = equal_rows(rows)
        return cls(rows[np.unique(codes, return_index=True)[1]], codes)

    def of_trips(
        self, segment: Segment, overheads: Overheads
    ) -> list[tuple[NDArray[np.float64], IntArray]]:
        """For each tick of a trip: `[i, part, device]`, with what its predicates take, and the i of
        each trip.
        """
        codes = self.codes[segment.start : segment.stop].reshape(segment.repeats, segment.period)
        found = []
        for j, template in enumerate(segment.templates):
            used, which = np.unique(codes[:, j], return_inverse=True)
            lengths = self.of[used]
            found.append((with_predicates(lengths, template, overheads.predicate), which))
        return found


def with_predicates(
    lengths: NDArray[np.float64], template: TickTemplate, predicate: float
) -> NDArray[np.float64]:
    """`[..., part, device]` with what a tick's predicates take.

    Every device evaluates all of them, and where a block runs also those inside it.
    """
    if not predicate:
        return lengths
    inside = max((use.num_nested for use in template.blocks), default=0)
    found = lengths + np.where(lengths > 0, predicate * inside, 0.0)
    found[..., 0, :] += predicate * template.num_predicates
    return found


def after_segment(
    time: NDArray[np.float64], segment: Segment, durations: Durations, overheads: Overheads
) -> NDArray[np.float64]:
    """Device times after a segment, from device times before it.

    Each permute of a device lasts a hop; predicates take time too.
    """
    _, num_parts, num_devices = durations.of.shape
    ticks = durations.of_trips(segment, overheads)
    code = _Code.of(segment, num_parts, num_devices, overheads.hop)
    # for each step, how long devices run in it by the number of its duration; None where it runs
    # nothing
    work = [ticks[s.tick][0][:, s.parts].sum(axis=1) if s.runs else None for s in code.steps]
    which = [ticks[step.tick][1].tolist() for step in code.steps]
    # equal numbers for trips of equal costs
    trips = equal_rows(np.column_stack([of for _, of in ticks]))
    unit = max((float(rows.max()) for rows in work if rows is not None), default=0.0) or 1.0
    # By device times relative to the last device and some trips ahead: the trip that ended so, and
    # the times.
    seen: dict[bytes, tuple[int, NDArray[np.float64]]] = {}
    trip = 0
    while trip < len(trips):
        lasting = [
            None if rows is None else rows[of[trip]] for rows, of in zip(work, which, strict=True)
        ]
        time = code.trip(time, lasting, is_first=trip == 0)
        trip += 1
        relative = np.round((time - time.max()) / unit, 9) + 0.0
        key = relative.tobytes() + trips[trip : trip + _AHEAD].tobytes()
        begun, before = seen.get(key, (trip, time))
        seen[key] = trip, time
        # Trips that brought devices back to where they were, relative to each other, do so again:
        # as often as the same trips follow, they need not be run.
        if length := trip - begun:
            differs = trips[trip:] != trips[begun:-length]
            turns = (int(differs.argmax()) if differs.any() else len(differs)) // length
            time, trip = time + (time - before) * turns, trip + turns * length
    return code.drain(time)


class _Issue(NamedTuple):
    """Permutes that are issued together, and awaited together."""

    number: int
    from_before: bool
    exchange: _Exchange


class _Step(NamedTuple):
    """What a trip does at a point, then the parts of a tick that it runs from there on."""

    issues: tuple[_Issue, ...]
    awaits: tuple[int, ...]  # numbers of issues
    tick: int
    parts: slice  # of that tick

    @property
    def runs(self) -> bool:
        """Whether it runs anything."""
        return bool(self.parts.stop > self.parts.start)


class _Code(NamedTuple):
    """One trip as steps."""

    steps: tuple[_Step, ...]
    aligned: tuple[bool, ...]  # the ticks that no device begins before the others

    @classmethod
    def of(cls, segment: Segment, num_parts: int, num_devices: int, transfer: float) -> _Code:
        """The steps of a segment's trips."""
        groups: dict[tuple[Point, Point, bool], list[Permute]] = {}
        for transit in segment.transits:
            begin = (
                Point(0, 0) if transit.from_before else _point(segment, transit.issued, num_parts)
            )
            ends = (begin, _point(segment, transit.written, num_parts), transit.from_before)
            groups.setdefault(ends, []).append(transit.permute)
        issues = [
            (ends, _Issue(n, ends[2], _exchange(permutes, num_devices, transfer)))
            for n, (ends, permutes) in enumerate(groups.items())
        ]
        steps: list[_Step] = []
        for j in range(segment.period):
            busy = {p.block for ends, _ in issues for p in ends[:2] if p.tick == j}
            marks = sorted({0, *busy, num_parts})
            for start, stop in zip(marks, [*marks[1:], num_parts], strict=True):
                at = Point(j, start)
                here = tuple(issue for ends, issue in issues if ends[0] == at)
                awaits = tuple(issue.number for ends, issue in issues if ends[1] == at)
                if start < stop or here or awaits:
                    steps.append(_Step(here, awaits, j, slice(start, stop)))
        return cls(
            tuple(steps),
            tuple(
                any(use.block.kind in COLLECTIVES for use in p.blocks) for p in segment.templates
            ),
        )

    def trip(
        self,
        time: NDArray[np.float64],
        work: Sequence[NDArray[np.float64] | None],
        *,
        is_first: bool,
    ) -> NDArray[np.float64]:
        """Device times after it; `work`: how long devices run in each step.  Nothing is in flight
        before the first trip.
        """
        done: dict[int, NDArray[np.float64]] = {}
        for step, lasting in zip(self.steps, work, strict=True):
            for number, from_before, exchange in step.issues:
                if not (is_first and from_before):
                    done[number] = _over(time, exchange)
            for number in step.awaits:
                if number in done:
                    time = np.maximum(time, done.pop(number))
            if step.parts.start == 0 and self.aligned[step.tick]:
                time = np.full_like(time, time.max())
            if lasting is not None:
                time = time + lasting
        return time

    def drain(self, time: NDArray[np.float64]) -> NDArray[np.float64]:
        """Device times when what the last trip left in flight is over."""
        flying = [
            _over(time, issue.exchange)
            for step in self.steps
            for issue in step.issues
            if issue.from_before
        ]
        latest: NDArray[np.float64] = np.max([time, *flying], axis=0)
        return latest


def _over(time: NDArray[np.float64], exchange: _Exchange) -> NDArray[np.float64]:
    """When each device and its partners are ready, and the permutes are over."""
    partners, lasts = exchange
    latest = time
    for each in partners:
        latest = np.maximum(latest, time[each])
    return latest if lasts is None else latest + lasts


def _point(segment: Segment, point: Point, num_parts: int) -> Point:
    """The same by parts instead of by blocks."""
    blocks = segment.templates[point.tick].blocks
    if point.block >= len(blocks):
        return Point(point.tick, num_parts)
    part = Part.of(blocks[point.block].block.kind)
    return Point(point.tick, part if num_parts > 1 else 0)


def _exchange(permutes: Sequence[Permute], num_devices: int, transfer: float) -> _Exchange:
    """The partners at permutes that are awaited together, and how long the permutes last."""
    lasts = np.zeros(num_devices)
    for permute in permutes:
        lasts[sorted({d for pair in permute.pairs for d in pair})] += transfer
    return _partners(permutes, num_devices), lasts if transfer else None


def _partners(permutes: Sequence[Permute], num_devices: int) -> tuple[NDArray[np.intp], ...]:
    """Arrays of the partners of each device at these permutes; a device with fewer partners than
    others is its own partner there.
    """
    met: list[list[int]] = [[] for _ in range(num_devices)]
    for permute in permutes:
        for source, target in permute.pairs:
            met[source].append(target)
            met[target].append(source)
    width = max(len(m) for m in met)
    return tuple(
        np.array([m[i] if i < len(m) else d for d, m in enumerate(met)], np.intp)
        for i in range(width)
    )


# Share of a step that one compiled block of stage code is worth, and one permute.  A share, not a
# time: with a time, code would grow with the number of microbatches.
BLOCK, PERMUTE = 1e-3, 5e-5
# Share of a forward that its collectives are assumed to take, where blocks communicate.
COMMUNICATION = 1 / 3


def cost_matrix(ticks: Ticks, costs: Costs | None = None) -> NDArray[np.float64]:
    """`[tick, device]` durations; F, I and W take 1 and B takes 2 where no costs are given."""
    table = ticks.schedule.encoded
    return _durations(
        ticks, costs, (ticks.when, table.device), (ticks.num_ticks, table.num_devices)
    )


def cost_parts(
    ticks: Ticks, costs: Costs | None = None, *, hides: bool = True
) -> NDArray[np.float64]:
    """`[tick, part, device]`: the same by the parts of a tick (`Part`), in the order in which it
    has them.  With `hides`, a W that is one block with an F hides the collectives of the F.
    """
    table = ticks.schedule.encoded
    place = np.array([Part.of(kind) for kind in Kind])[table.kind]
    ahead, back = (np.zeros((ticks.num_ticks, table.num_devices), bool) for _ in range(2))
    for mine, kinds in ((ahead, RUNS_FORWARD), (back, ticks.joint)):
        runs = table.of_kinds(kinds)
        mine[ticks.when[runs], table.device[runs]] = True
    place[(ahead & back)[ticks.when, table.device]] = 0  # a pair is one block, and the first
    return _durations(
        ticks,
        costs,
        (ticks.when, place, table.device),
        (ticks.num_ticks, len(Part), table.num_devices),
        hides=hides,
    )


@lru_cache(maxsize=4)  # called for each candidate
def tick_durations(ticks: Ticks, costs: Costs | None = None, *, hides: bool = True) -> Durations:
    """The same, where ticks that last equally long share one entry."""
    return Durations.from_rows(cost_parts(ticks, costs, hides=hides))


def _durations(
    ticks: Ticks,
    costs: Costs | None,
    cells: tuple[NDArray[np.int64], ...],
    shape: tuple[int, ...],
    *,
    hides: bool = False,
) -> NDArray[np.float64]:
    """How long the actions of each cell take together; `cells`: where each action is."""
    table = ticks.schedule.encoded
    durations = np.array(action_durations(table, (costs or Costs()).for_stages(table.num_stages)))
    if hides and Kind.W in ticks.joint:
        durations = _less_hidden(ticks, durations, costs)
    return np.asarray(
        np.bincount(np.ravel_multi_index(cells, shape), durations, math.prod(shape)), np.float64
    ).reshape(shape)


def _less_hidden(
    ticks: Ticks, durations: NDArray[np.float64], costs: Costs | None
) -> NDArray[np.float64]:
    """The durations, where each W that is one block with an F hides the collectives of the F.

    Those of a forward take half of what an overlapped pair saves.  Without any costs they take
    `COMMUNICATION` of its time.
    """
    weights = np.flatnonzero(joins_weights(ticks.schedule))
    hidden = COMMUNICATION * durations[weights + 1]
    if costs is not None:
        each = costs.for_stages(ticks.schedule.num_stages)
        apart = np.add(each.forward, each.backward)
        saved = np.maximum(apart - (apart if each.overlap is None else each.overlap), 0)
        hidden = saved[ticks.schedule.encoded.stage[weights + 1]] / 2
    found = durations.astype(np.float64)
    found[weights] -= np.minimum(found[weights], hidden)
    return found


def program_makespan(
    costs: Durations | NDArray[np.float64],
    segments: Sequence[Segment],
    overheads: Overheads = NO_OVERHEADS,
) -> float:
    """Simulate the program.

    A device runs its ticks in order.  Where it awaits a transfer, it waits until all partners have
    issued it. `costs[tick, device]` or `[tick, part, device]` are durations; overheads and result
    have their unit. Without parts, transfers awaited within a tick are awaited before it.
    """
    durations = costs if isinstance(costs, Durations) else Durations.from_rows(costs)
    time = np.zeros(durations.of.shape[-1])
    for segment in segments:
        time = after_segment(time, segment, durations, overheads)
    return float(time.max(initial=0.0))


def program_price(
    makespan: float, segments: Sequence[Segment], num_devices: int, overheads: Overheads
) -> float:
    """A makespan with overheads, the compute time that transfers take, and a share of both for the
    code to compile.
    """
    time = sum(
        overheads.sent * s.num_sends / num_devices
        + overheads.collective * s.num_collective_predicates
        for s in segments
    )
    code = sum(BLOCK * s.stage_size + PERMUTE * s.permutes for s in segments)
    return (makespan + time) * (1 + code)
