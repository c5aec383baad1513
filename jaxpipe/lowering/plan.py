"""From a table to the ticks and segments of its program: of a fixed list of ways to emit it, the
cheapest.  Ticks and transfers are simulated as a mesh would run them, trip by trip.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.costs import Costs
from ..engine.loop import action_durations
from ..engine.simulate import simulate
from ..program.ir import Program
from ..program.segments import Permute, Point, Segment, TickPart, TickTemplate
from ..table.clock import EventLoop
from ..table.effects import TOGETHER, Liveness, Offload
from ..table.kinds import Kind
from ..table.schedule import Schedule
from .slots import assign_slots
from .spans import segments_of, span_candidates
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


class _Trip(NamedTuple):
    """The tasks of a trip of a segment: a device's work from one point of a tick to the next, and
    before it all that the device waits for there.

    Attributes:
        loop: runs them, trip after trip.
        work: `[trip, task]`, the times of those that are work, which have the first numbers.
        order: the tasks in turn.
        in_flight: those that wait for what the trip before has issued.
    """

    loop: EventLoop
    work: Seconds
    order: list[int]
    in_flight: list[int]

    @classmethod
    def of(
        cls,
        segment: Segment,
        costs: Seconds,
        free: Sequence[float],
        overheads: Overheads,
        runs_on: RunsOn,
    ) -> _Trip:
        """The tasks from the times at which devices are free; `costs[trip, tick, part, device]`."""
        templates, devices = segment.templates, len(free)
        work = np.stack(
            [with_predicates(costs[:, j], t, overheads.predicate) for j, t in enumerate(templates)],
            axis=1,
        )
        work = np.pad(work, ((0, 0), (0, 0), (0, _PARTS - costs.shape[2]), (0, 0)))
        rows = np.arange(work[0].size).reshape(-1, devices).tolist()
        # device, the task that it waits for, the time from there on
        tasks = [(d, -1, 0.0) for _ in rows for d in range(devices)]
        coming, in_flight = defaultdict[int, list[int]](list), list[int]()
        for (issued, awaited, from_before), permutes in _exchanges(segment, runs_on).items():
            first, meets = len(tasks), _meetings(permutes, devices, overheads.hop, runs_on)
            tasks += [(d, rows[issued - 1][other], time) for d, other, time in meets]
            coming[awaited] += range(first, len(tasks))
            in_flight += range(first, len(tasks)) if from_before else ()
        # No device begins a collective action before the others.
        shared = [
            n for n, t in enumerate(templates) if any(u.block.is_collective for u in t.blocks)
        ]
        groups = {i: tuple(rows[n * _PARTS]) for n in shared for i in rows[n * _PARTS]}
        device, need, latency = zip(*tasks, strict=True)
        none = np.zeros(len(tasks))
        loop = EventLoop(device, need, latency=latency, duration=none, free=free, groups=groups)
        loop.ends[rows[-1][0] : rows[-1][-1] + 1] = free  # as if a trip had been before
        order = [i for n, row in enumerate(rows) for i in (*coming[n], *row)]
        return cls(loop, work.reshape(len(costs), -1), order, in_flight)

    def trips(self) -> Iterator[int]:
        """The tasks of all trips.

        Trips that brought devices back to where they were, relative to each other, do so again: as
        often as the same trips follow, they need not be run.
        """
        loop, kinds, flying = self.loop, equal_rows(self.work), set(self.in_flight)
        unit = float(self.work.max(initial=0.0)) or 1.0
        # By device times relative to the last device and the kind of the next trip: the trip that
        # ended so, and the time.
        seen: dict[tuple[float, ...], tuple[int, float]] = {}
        trip = 0
        while trip < len(self.work):
            loop.duration[: self.work.shape[1]] = self.work[trip].tolist()
            # Nothing is in flight before the first one.
            yield from self.order if trip else (i for i in self.order if i not in flying)
            trip, latest = trip + 1, max(loop.free)
            relative = [round((time - latest) / unit, 9) for time in loop.free]
            key = (*relative, *kinds[trip : trip + 1].tolist())
            begun, before = seen.get(key, (trip, latest))
            seen[key] = trip, latest
            if length := trip - begun:
                differs = kinds[trip:] != kinds[begun:-length]
                turns = (int(differs.argmax()) if differs.any() else len(differs)) // length
                trip += turns * length
                for times in (loop.free, loop.ends):
                    times[:] = [time + (latest - before) * turns for time in times]
        yield from self.in_flight


_PARTS = len(TickPart) + 1  # the last is when all blocks are done


def _exchanges(segment: Segment, runs_on: RunsOn) -> dict[tuple[int, int, bool], list[Permute]]:
    """The permutes of a trip, by the parts of it in which they are issued and awaited, and whether
    the trip before has issued them.
    """
    found: dict[tuple[int, int, bool], list[Permute]] = {}
    for transit in segment.transits:
        end = transit.tick * _PARTS + len(TickPart)
        ends = end, end, False
        if runs_on in (RunsOn.GPUS, RunsOn.TPUS):
            issued, written = (_part(segment, each) for each in (transit.issued, transit.written))
            ends = (0 if transit.from_before else issued), written, transit.from_before
        found.setdefault(ends, []).append(transit.permute)
    return found


def _part(segment: Segment, point: Point) -> int:
    """The part of a trip, instead of the block of a tick."""
    parts = [TickPart.of(use.block.kind) for use in segment.templates[point.tick].blocks]
    return point.tick * _PARTS + [*parts, len(TickPart)][point.block]


def _meetings(
    permutes: Sequence[Permute], devices: int, hop: float, runs_on: RunsOn
) -> Iterator[tuple[int, int, float]]:
    """Who waits for whom to have come to permutes, itself too, and what these take on the device
    from there on.
    """
    if runs_on is RunsOn.ONE_CPU_PROCESS:
        everyone = product(range(devices), repeat=2)
        yield from ((one, other, hop * len(permutes)) for one, other in everyone)
        return
    lasts = Counter(end for each in permutes for end in set(chain.from_iterable(each.pairs)))
    pairs = chain.from_iterable(each.pairs for each in permutes)
    for one, other in {both for pair in pairs for both in product(pair, repeat=2)}:
        yield one, other, hop * lasts[one]


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
    free = [0.0] * costs.shape[-1]
    for segment in segments:
        mine = costs[segment.start : segment.stop]
        mine = mine.reshape(segment.repeats, segment.period, *costs.shape[1:])
        trip = _Trip.of(segment, mine, free, overheads, runs_on)
        trip.loop.run(trip.trips())
        free = trip.loop.free
    return max(free, default=0.0)


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
