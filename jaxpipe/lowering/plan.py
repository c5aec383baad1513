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
from ..program.segments import Permute, Point, Segment, TickPart, TickTemplate
from ..table.effects import TOGETHER, Liveness, Offload
from ..table.encoded import BoolArray, IntArray
from ..table.kinds import COLLECTIVES, Kind
from ..table.schedule import Schedule
from .slots import assign_slots
from .target import FORWARD, GUESSED, NO_OVERHEADS, Overheads, RunsOn, Target
from .ticks import (
    F_THEN_PART,
    NO_TRANSFER,
    W_THEN_F,
    Edge,
    Ticks,
    assign_ticks,
    equal_rows,
    followed,
    joined_ticks,
    modulo_ticks,
    segments_of,
    span_candidates,
)

Seconds: TypeAlias = NDArray[np.float64]


def with_predicates(lengths: Seconds, template: TickTemplate, predicate: float) -> Seconds:
    """`[..., part, device]` with what a tick's predicates take.

    Every device evaluates all of them, and where a block runs also those inside it.
    """
    inside = max((use.num_nested for use in template.blocks), default=0)
    found = lengths + np.where(lengths > 0, predicate * inside, 0.0)
    found[..., 0, :] += predicate * template.num_predicates
    return found


class _Issue(NamedTuple):
    """Permutes that are issued together, and awaited together."""

    # in parts of the ticks of a trip
    issued: Point
    awaited: Point
    from_before: bool
    meets: BoolArray  # `[device, device]`: whether the one waits for the other
    lasts: Seconds  # of the permutes of each device

    def over(self, time: Seconds) -> Seconds:
        """When each device and its partners are ready, and the permutes are over."""
        latest: Seconds = np.where(self.meets, time, 0.0).max(axis=1) + self.lasts
        return latest


class _TripStep(NamedTuple):
    """Transfers at a point of a trip, then what devices run from there to the next one."""

    issues: list[_Issue]
    awaits: list[_Issue]
    aligned: bool  # no device begins before the others
    work: Seconds  # `[trip, device]`


def _issues(segment: Segment, devices: int, hop: float, runs_on: RunsOn) -> list[_Issue]:
    """The permutes of a trip."""
    groups: dict[tuple[Point, Point, bool], list[Permute]] = {}
    for transit in segment.transits:
        end = Point(transit.tick, len(TickPart))
        ends = end, end, False
        if runs_on in (RunsOn.GPUS, RunsOn.TPUS):
            points = [_in_parts(segment, each) for each in (transit.issued, transit.written)]
            begin = Point(0, 0) if transit.from_before else points[0]
            ends = begin, points[1], transit.from_before
        groups.setdefault(ends, []).append(transit.permute)
    found = []
    for ends, permutes in groups.items():
        meets, lasts = np.eye(devices, dtype=bool), np.zeros(devices)
        for permute in permutes:
            pairs = np.array(permute.pairs).T
            meets[*pairs] = meets[*pairs[::-1]] = True
            lasts[np.unique(pairs)] += hop
        if runs_on is RunsOn.ONE_CPU_PROCESS:
            meets[:], lasts[:] = True, hop * len(permutes)
        found.append(_Issue(*ends, meets, lasts))
    return found


def _in_parts(segment: Segment, point: Point) -> Point:
    """The same by parts instead of by blocks."""
    parts = [TickPart.of(use.block.kind) for use in segment.templates[point.tick].blocks]
    return Point(point.tick, [*parts, len(TickPart)][point.block])


def _steps(
    segment: Segment, costs: Seconds, overheads: Overheads, runs_on: RunsOn
) -> list[_TripStep]:
    """One trip of a segment; `costs` are of [trip, tick, part, device]."""
    issues = _issues(segment, costs.shape[-1], overheads.hop, runs_on)
    steps: list[_TripStep] = []
    for j, template in enumerate(segment.templates):
        meets = any(use.block.kind in COLLECTIVES for use in template.blocks)
        lengths = np.zeros((len(costs), len(TickPart) + 1, costs.shape[-1]))
        own = with_predicates(costs[:, j], template, overheads.predicate)
        lengths[:, : own.shape[1]] = own
        for part in range(len(TickPart) + 1):
            begun = [issue for issue in issues if issue.issued == (j, part)]
            ended = [issue for issue in issues if issue.awaited == (j, part)]
            if part and not begun and not ended:
                steps[-1].work[:] += lengths[:, part]
            else:
                steps.append(_TripStep(begun, ended, meets and part == 0, lengths[:, part]))
    return steps


def _after_trip(time: Seconds, steps: Sequence[_TripStep], trip: int) -> Seconds:
    """Device times after a trip.  Nothing is in flight before the first one."""
    done: dict[int, Seconds] = {}
    for step in steps:
        for issue in step.issues:
            if trip or not issue.from_before:
                done[id(issue)] = issue.over(time)
        for issue in step.awaits:
            if id(issue) in done:
                time = np.maximum(time, done.pop(id(issue)))
        if step.aligned:
            time = np.full_like(time, time.max())
        time = time + step.work[trip]
    return time


def _after_trips(time: Seconds, steps: Sequence[_TripStep], trips: IntArray) -> Seconds:
    """Device times after all trips of a segment, from device times before them; `trips` has equal
    numbers for those of equal costs.
    """
    unit = max((float(step.work.max()) for step in steps), default=0.0) or 1.0
    # By device times relative to the last device and the kind of the next trip: the trip that
    # ended so, and the times.
    seen: dict[bytes, tuple[int, Seconds]] = {}
    trip = 0
    while trip < len(trips):
        time = _after_trip(time, steps, trip)
        trip += 1
        relative = np.round((time - time.max()) / unit, 9) + 0.0
        key = relative.tobytes() + trips[trip : trip + 1].tobytes()
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
    by_stage = (costs or Costs()).for_stages(table.num_stages)
    durations = np.array(action_durations(table, by_stage))
    if hides and Kind.W in ticks.joint:
        durations = _less_hidden(ticks, durations, costs)
    place = np.array([TickPart.of(kind) for kind in Kind])[table.kind]
    # A pair is one block, and the first.
    place[ticks.pairs[ticks.when, table.device]] = 0
    shape = ticks.num_ticks, len(TickPart), table.num_devices
    cells = np.ravel_multi_index((ticks.when, place, table.device), shape)
    found = np.bincount(cells, durations, math.prod(shape)).astype(np.float64)
    return found.reshape(shape)


def _less_hidden(ticks: Ticks, durations: Seconds, costs: Costs | None) -> Seconds:
    """The durations, where each W that is one block with an F hides the collectives of the F.

    Those of a forward take half of what an overlapped pair saves.  Without any costs they take
    `COMMUNICATION` of its time.
    """
    weights = np.flatnonzero(followed(ticks.schedule, W_THEN_F))
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
    runs_on: RunsOn = RunsOn.GPUS,
) -> float:
    """Simulate the program.

    A device runs its ticks in order.  Each of its permutes lasts a hop; predicates take time too.
    Where it awaits a transfer, it waits until all partners have issued it.
    `costs[tick, part, device]` are durations (`cost_parts`); overheads and result have their unit.
    """
    time = np.zeros(costs.shape[-1])
    for segment in segments:
        mine = costs[segment.start : segment.stop]
        mine = mine.reshape(segment.repeats, segment.period, *costs.shape[1:])
        steps = _steps(segment, mine, overheads, runs_on)
        time = _after_trips(time, steps, equal_rows(mine.reshape(segment.repeats, -1)))
    return float(time.max(initial=0.0))


# A program this much longer than another is as good.
KEEPS = 1.005
# Slots whose numbers are alike in all pools may be so many more.
KEEPS_SLOTS = 1.05


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

    def makespan_of(
        self,
        costs: Costs | None,
        overheads: Overheads = NO_OVERHEADS,
        runs_on: RunsOn = RunsOn.GPUS,
    ) -> float:
        """How long the program takes with these costs and the longest of their transfers, in their
        unit.
        """
        own = _with_hop(overheads, costs)
        return program_makespan(cost_parts(self.ticks, costs), self.segments, own, runs_on)

    def price(self, costs: Costs | None, overheads: Overheads) -> float:
        """The makespan with overheads, the compute time that transfers take, and a share of both
        for the code to compile.  `costs` are in seconds; without any F = I = W = 1 and B = 2, where
        1 is `FORWARD`.
        """
        own = _with_hop(overheads.in_unit(FORWARD) if costs is None else overheads, costs)
        devices, segments = self.ticks.schedule.num_devices, self.segments
        sent = sum(own.sent * segment.num_sends / devices for segment in segments)
        time = self.makespan_of(costs, own) + sent + own.collective * self.collectives
        return time * (1 + sum(BLOCK * s.size + PERMUTE * s.permutes for s in segments))

    def seconds(self, target: Target, costs: Costs) -> float:
        """Seconds of a step: the program simulated for these costs, with a hop's seconds for each
        transfer of a device.  Predicates take time on GPUs and TPUs.
        """
        overheads = NO_OVERHEADS if target.on_cpus else target.overheads
        return self.makespan_of(costs, replace(overheads, hop=0.0), target.runs_on)

    @cached_property
    def late_transfers(self) -> tuple[int, int]:
        """Of the transfers that the table gives a tick or more, those that the program awaits later
        than it issues them; and all.
        """
        (every, slack), late = self.ticks.transfers, 0
        having = (slack > 0) & (slack < NO_TRANSFER)
        for segment in self.segments:
            for transit in (t for t in segment.transits if t.is_late):
                # Transfers in flight after the last trip are awaited at once.
                ticks = segment.ticks(transit.tick)[: segment.repeats - transit.from_before]
                ends = {Edge(transit.permute.payload, *pair) for pair in transit.permute.pairs}
                edges = np.flatnonzero([edge in ends for edge in every])
                late += int(having[np.ix_(ticks, edges)].sum())
        return late, int(having.sum())

    def program(self, liveness: Liveness | None = None, *, most: int = 0) -> Program:
        """Assign slots; the longest liveness where none is given.

        What an action leaves for its backward has one number in all pools, where that takes at most
        `most` slots and hardly more memory.
        """
        program = assign_slots(self.ticks, self.segments, liveness=liveness, offload=self.offload)
        if not most or program.slots.host or program.pairs.any():
            return program
        together = assign_slots(self.ticks, self.segments, liveness=liveness, together=True)
        before, after = (
            sum(each.pools.get(p, 0) for p in TOGETHER) for each in (program, together)
        )
        fits = together.slots.residual_weight <= most and after <= KEEPS_SLOTS * before
        return together if fits else program


def _with_hop(overheads: Overheads, costs: Costs | None) -> Overheads:
    """The overheads with the longest transfer of these costs, if there is any."""
    hop = 0.0 if costs is None else float(np.max(costs.transfer))
    return replace(overheads, hop=hop or overheads.hop)


def plans_of(ticks: Ticks) -> Iterator[Plan]:
    """The plans of one way to assign ticks."""
    for spans in span_candidates(ticks):
        yield Plan(ticks, segments_of(spans, ticks))


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
    if any(followed(schedule, kinds).any() for kinds in (W_THEN_F, *F_THEN_PART)):
        ways += [joined_ticks(schedule), *([joined_ticks(schedule, as_one=True)] if as_one else [])]
    timed = [(plan.makespan_of(costs), plan) for ticks in ways for plan in plans_of(ticks)]
    table = simulate(schedule, Costs() if costs is None else costs).makespan
    enough = KEEPS * max(table, min(makespan for makespan, _ in timed))
    kept = [plan for makespan, plan in timed if makespan <= enough]
    fewest = min(plan.collectives for plan in kept)
    cheapest = [plan for plan in kept if plan.collectives == fewest]
    # The first of those whose prices differ by rounding.
    return min(cheapest, key=lambda plan: float(f"{plan.price(costs, overheads):.12g}"))
