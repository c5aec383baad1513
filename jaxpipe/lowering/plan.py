"""From a table to the ticks and segments of its program: of a fixed list of ways to emit it, the
cheapest.  Ticks and transfers are simulated as a mesh would run them, trip by trip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.costs import Costs
from ..engine.loop import action_durations
from ..engine.simulate import simulate
from ..program.ir import Program
from ..program.segments import Part, Permute, Point, Segment, TickTemplate
from ..table.effects import Liveness, Offload
from ..table.encoded import IntArray
from ..table.kinds import COLLECTIVES, Kind
from ..table.schedule import Schedule
from .slots import assign_slots
from .target import FORWARD, GUESSED, NO_OVERHEADS, Awaits, Overheads, Target
from .ticks import (
    NO_TRANSFER,
    Edge,
    Ticks,
    assign_ticks,
    collect,
    equal_rows,
    joined_ticks,
    joins_shares,
    joins_weights,
    modulo_ticks,
    segments_of,
    span_candidates,
)

Seconds: TypeAlias = NDArray[np.float64]

# The number of trips that are compared to find a repetition.
_AHEAD = 8


def with_predicates(lengths: Seconds, template: TickTemplate, predicate: float) -> Seconds:
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
    time: Seconds, segment: Segment, costs: Seconds, overheads: Overheads, awaits: Awaits
) -> Seconds:
    """Device times after a segment, from device times before it.

    Each permute of a device lasts a hop; predicates take time too.
    """
    steps = _steps(segment, len(time), overheads.hop, awaits)
    ticks = costs[segment.start : segment.stop].reshape(
        segment.repeats, segment.period, *costs.shape[1:]
    )
    # equal numbers for trips of equal costs
    trips = equal_rows(ticks.reshape(segment.repeats, -1))
    lengths = [
        with_predicates(ticks[:, j], template, overheads.predicate)
        for j, template in enumerate(segment.templates)
    ]
    # for each step, how long devices run in each trip
    work = [lengths[step.tick][:, step.parts].sum(axis=1) for step in steps]
    unit = max((float(each.max()) for each in work), default=0.0) or 1.0
    # By device times relative to the last device and some trips ahead: the trip that ended so, and
    # the times.
    seen: dict[bytes, tuple[int, Seconds]] = {}
    trip = 0
    while trip < len(trips):
        time = _after_trip(time, steps, [each[trip] for each in work], is_first=trip == 0)
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
    # Transfers that the last trip left in flight are over, too.
    flying = [issue.over(time) for step in steps for issue in step.issues if issue.from_before]
    latest: Seconds = np.max([time, *flying], axis=0)
    return latest


class _Issue(NamedTuple):
    """Permutes that are issued together, and awaited together."""

    from_before: bool
    partners: tuple[IntArray, ...]  # of each device; a device with fewer is its own partner
    lasts: Seconds  # of the permutes of each device

    @classmethod
    def of(
        cls,
        permutes: Sequence[Permute],
        devices: int,
        hop: float,
        *,
        from_before: bool,
        by_all: bool,
    ) -> _Issue:
        """Issue some permutes; with `by_all` every device takes part in each."""
        if by_all:
            others = tuple(np.roll(np.arange(devices), k) for k in range(1, devices))
            return cls(from_before, others, np.full(devices, hop * len(permutes)))
        met: list[list[int]] = [[] for _ in range(devices)]
        lasts = np.zeros(devices)
        for permute in permutes:
            for source, target in permute.pairs:
                met[source].append(target)
                met[target].append(source)
            lasts[sorted({d for pair in permute.pairs for d in pair})] += hop
        partners = tuple(
            np.array([m[i] if i < len(m) else d for d, m in enumerate(met)])
            for i in range(max(map(len, met)))
        )
        return cls(from_before, partners, lasts)

    def over(self, time: Seconds) -> Seconds:
        """When each device and its partners are ready, and the permutes are over."""
        latest = time
        for each in self.partners:
            latest = np.maximum(latest, time[each])
        return latest + self.lasts


class _Step(NamedTuple):
    """Transfers at a point of a trip, then the parts of a tick that it runs from there on."""

    issues: tuple[_Issue, ...]
    awaits: tuple[_Issue, ...]
    tick: int
    parts: slice  # of that tick
    aligned: bool  # no device begins before the others


def _steps(segment: Segment, devices: int, hop: float, awaits: Awaits) -> list[_Step]:
    """One trip of a segment."""
    groups: dict[tuple[Point, Point, bool], list[Permute]] = {}
    for transit in segment.transits:
        over = Point(transit.tick, len(Part))
        ends = over, over, False
        if awaits is Awaits.LATE:
            begin = Point(0, 0) if transit.from_before else _point(segment, transit.issued)
            ends = begin, _point(segment, transit.written), transit.from_before
        groups.setdefault(ends, []).append(transit.permute)
    by_all = awaits is Awaits.ALL_AT_ONCE
    issues = {
        ends: _Issue.of(permutes, devices, hop, from_before=ends[2], by_all=by_all)
        for ends, permutes in groups.items()
    }
    steps: list[_Step] = []
    for j, template in enumerate(segment.templates):
        is_collective = any(use.block.kind in COLLECTIVES for use in template.blocks)
        busy = {point.block for ends in issues for point in ends[:2] if point.tick == j}
        marks = sorted({0, *busy, len(Part)})
        for start, stop in zip(marks, [*marks[1:], len(Part)], strict=True):
            at = Point(j, start)
            begun, ended = (
                tuple(issue for ends, issue in issues.items() if ends[end] == at) for end in (0, 1)
            )
            if start < stop or begun or ended:
                aligned = is_collective and not start
                steps.append(_Step(begun, ended, j, slice(start, stop), aligned))
    return steps


def _point(segment: Segment, point: Point) -> Point:
    """The same by parts instead of by blocks."""
    blocks = segment.templates[point.tick].blocks
    if point.block >= len(blocks):
        return Point(point.tick, len(Part))
    return Point(point.tick, Part.of(blocks[point.block].block.kind))


def _after_trip(
    time: Seconds, steps: Sequence[_Step], work: Sequence[Seconds], *, is_first: bool
) -> Seconds:
    """Device times after a trip; `work`: how long devices run in each step.  Nothing is in flight
    before the first trip.
    """
    done: dict[int, Seconds] = {}
    for step, lasting in zip(steps, work, strict=True):
        for issue in step.issues:
            if not (is_first and issue.from_before):
                done[id(issue)] = issue.over(time)
        for issue in step.awaits:
            if id(issue) in done:
                time = np.maximum(time, done.pop(id(issue)))
        if step.aligned:
            time = np.full_like(time, time.max())
        time = time + lasting
    return time


# Share of a step that one compiled block of stage code is worth, and one permute.  A share, not a
# time: with a time, code would grow with the number of microbatches.
BLOCK, PERMUTE = 1e-3, 5e-5
# Share of a forward that its collectives are assumed to take, where blocks communicate.
COMMUNICATION = 1 / 3


@lru_cache(maxsize=4)  # called for each candidate
def cost_parts(ticks: Ticks, costs: Costs | None = None, *, hides: bool = True) -> Seconds:
    """`[tick, part, device]`: durations by the parts of a tick (`Part`), in the order in which it
    has them; F, I and W take 1 and B takes 2 where no costs are given.  With `hides`, a W that is
    one block with an F hides the collectives of the F.
    """
    table = ticks.schedule.encoded
    durations = np.array(action_durations(table, (costs or Costs()).for_stages(table.num_stages)))
    if hides and Kind.W in ticks.joint:
        durations = _less_hidden(ticks, durations, costs)
    place = np.array([Part.of(kind) for kind in Kind])[table.kind]
    place[ticks.pairs[ticks.when, table.device]] = 0  # a pair is one block, and the first
    shape = ticks.num_ticks, len(Part), table.num_devices
    cells = np.ravel_multi_index((ticks.when, place, table.device), shape)
    return np.bincount(cells, durations, math.prod(shape)).astype(np.float64).reshape(shape)


def _less_hidden(ticks: Ticks, durations: Seconds, costs: Costs | None) -> Seconds:
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
    costs: Seconds,
    segments: Sequence[Segment],
    overheads: Overheads = NO_OVERHEADS,
    awaits: Awaits = Awaits.LATE,
) -> float:
    """Simulate the program.

    A device runs its ticks in order.  Where it awaits a transfer, it waits until all partners have
    issued it.  `costs[tick, part, device]` are durations (`cost_parts`); overheads and result have
    their unit.
    """
    time = np.zeros(costs.shape[-1])
    for segment in segments:
        time = after_segment(time, segment, costs, overheads, awaits)
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


# A program this much longer than another is as good.
KEEPS = 1.005


@dataclass(frozen=True)
class Plan:
    """A schedule with its ticks and segments; its program follows once the stage's liveness is
    known.
    """

    ticks: Ticks
    segments: tuple[Segment, ...]
    offload: Offload = Offload.NOTHING

    @cached_property
    def makespan(self) -> float:
        """How long the program takes with F = I = W = 1 and B = 2."""
        return program_makespan(cost_parts(self.ticks, hides=False), self.segments)

    @property
    def collectives(self) -> int:
        """Predicates around collective actions, in a step."""
        return sum(segment.num_collective_predicates for segment in self.segments)

    def makespan_of(self, costs: Costs | None, overheads: Overheads = NO_OVERHEADS) -> float:
        """How long the program takes with these costs and the longest of their transfers, in their
        unit.
        """
        return program_makespan(
            cost_parts(self.ticks, costs), self.segments, _with_hop(overheads, costs)
        )

    def price(self, costs: Costs | None, overheads: Overheads) -> float:
        """The makespan with overheads and a little for each block of code.  `costs` are in seconds;
        without any F = I = W = 1 and B = 2, where 1 is `FORWARD`.
        """
        own = _with_hop(overheads.in_unit(FORWARD) if costs is None else overheads, costs)
        devices = self.ticks.schedule.num_devices
        return program_price(self.makespan_of(costs, own), self.segments, devices, own)

    def seconds(self, target: Target, costs: Costs) -> float:
        """Seconds of a step: the program simulated for these costs, with a hop's seconds for each
        transfer of a device.  Predicates take time on GPUs and TPUs.
        """
        overheads = replace(target.overheads if target.overlaps else NO_OVERHEADS, hop=0.0)
        return program_makespan(
            cost_parts(self.ticks, costs),
            self.segments,
            _with_hop(overheads, costs),
            target.runs_on.awaits,
        )

    @cached_property
    def late_transfers(self) -> tuple[int, int]:
        """Of the transfers that the table gives a tick or more, those that the program awaits later
        than it issues them; and all.
        """
        requirements = collect(self.ticks)
        having = (requirements.slack > 0) & (requirements.slack < NO_TRANSFER)
        late = np.zeros_like(having)
        for segment in self.segments:
            for transit in (t for t in segment.transits if t.is_late):
                ticks = np.arange(segment.start + transit.tick, segment.stop, segment.period)
                # Transfers in flight after the last trip are awaited at once.
                ticks = ticks[: segment.repeats - transit.from_before]
                ends = {Edge(transit.permute.payload, *pair) for pair in transit.permute.pairs}
                edges = np.flatnonzero([edge in ends for edge in requirements.edges])
                late[np.ix_(ticks, edges)] = True
        return int((late & having).sum()), int(having.sum())

    def program(self, liveness: Liveness | None = None) -> Program:
        """Assign slots; the longest liveness where none is given."""
        return assign_slots(self.ticks, self.segments, liveness=liveness, offload=self.offload)


def _with_hop(overheads: Overheads, costs: Costs | None) -> Overheads:
    """The overheads with the longest transfer of these costs, if there is any."""
    hop = 0.0 if costs is None else float(np.max(costs.transfer))
    return replace(overheads, hop=hop or overheads.hop)


def plans_of(ticks: Ticks) -> Iterator[Plan]:
    """The plans of one way to assign ticks."""
    for spans in span_candidates(ticks):
        yield Plan(ticks, segments_of(spans, collect(ticks)))


@lru_cache(maxsize=64)
def plan_of(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    overheads: Overheads = GUESSED,
    as_one: bool = False,
) -> Plan:
    """Run the passes that need no stage; equal schedules share the plan.

    The ways to assign ticks keep the order of every row; with `as_one` a W and the F of its tick
    may be one block.  Of all plans that keep the table's makespan, or the least that there is, it
    is the cheapest.  Those with the fewest predicates around collective actions come first: no CUDA
    graph holds a collective, so the host waits.
    """
    ways = [assign_ticks(schedule), modulo_ticks(schedule), modulo_ticks(schedule, shift=1)]
    if joins_weights(schedule).any() or joins_shares(schedule).any():
        ways += [joined_ticks(schedule), *([joined_ticks(schedule, as_one=True)] if as_one else [])]
    timed = [(plan.makespan_of(costs), plan) for ticks in ways for plan in plans_of(ticks)]
    table = simulate(schedule, Costs() if costs is None else costs).makespan
    enough = KEEPS * max(table, min(makespan for makespan, _ in timed))
    kept = [plan for makespan, plan in timed if makespan <= enough]
    fewest = min(plan.collectives for plan in kept)
    cheapest = [plan for plan in kept if plan.collectives == fewest]
    return min(cheapest, key=lambda plan: plan.price(costs, overheads))
