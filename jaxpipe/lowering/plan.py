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
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.costs import Costs
from ..engine.loop import action_durations
from ..engine.simulate import simulate
from ..program.ir import Program
from ..program.segments import Permute, Point, Segment, TickPart, TickTemplate
from ..table.clock import EventLoop
from ..table.effects import TOGETHER, Liveness
from ..table.kinds import Kind, Offload
from ..table.schedule import Schedule
from ..transforms.rewrites import remove_gathers
from .rooms import rooms_of
from .slots import assign_slots
from .spans import segments_of, span_candidates
from .target import ASSUMED, COMMUNICATING, GUESSED, NO_OVERHEADS, Overheads, RunsOn, Target, Worth
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


_PARTS = len(TickPart) + 1  # the last is when all blocks are done


def _after(
    free: list[float], segment: Segment, costs: Seconds, overheads: Overheads, runs_on: RunsOn
) -> list[float]:
    """When devices are done with a segment, from when they are free before it.

    A trip has a task for what a device does in a part of a tick, whose time is that of
    `costs[trip, tick, part, device]`, and before it those for all that the device waits for there.
    """
    templates, devices, predicate = segment.templates, len(free), overheads.predicate
    lengths = [with_predicates(costs[:, j], t, predicate) for j, t in enumerate(templates)]
    missing = (0, 0), (0, _PARTS - costs.shape[2]), (0, 0)
    work = np.stack([np.pad(length, missing) for length in lengths], axis=1)
    rows = np.arange(work[0].size).reshape(-1, devices).tolist()
    # device, the task that it waits for, the time from there on, its own time
    tasks = [(d, -1, 0.0, 0.0) for _ in rows for d in range(devices)]
    coming, in_flight = defaultdict[int, list[int]](list), list[int]()
    for (issued, awaited, from_before), permutes in _exchanges(segment, runs_on).items():
        first, meets = len(tasks), _meetings(permutes, devices, overheads.hop, runs_on)
        tasks += [(d, rows[issued - 1][other], time, 0.0) for d, other, time in meets]
        coming[awaited] += range(first, len(tasks))
        in_flight += range(first, len(tasks)) if from_before else ()
    groups: dict[int, tuple[int, ...]] = {}
    for row, template in zip(rows[::_PARTS], templates, strict=True):
        # No device begins a collective action before the others.
        if any(use.block.is_collective for use in template.blocks):
            groups |= dict.fromkeys(row, tuple(row))
    loop = EventLoop(zip(*tasks, strict=True), free, groups=groups)
    loop.ends[rows[-1][0] : rows[-1][-1] + 1] = free  # as if a trip had been before
    order = [i for n, row in enumerate(rows) for i in (*coming[n], *row)]
    loop.run(_trips(loop, work.reshape(len(costs), -1), order, in_flight))
    return loop.free


def _trips(
    loop: EventLoop, work: Seconds, order: Sequence[int], in_flight: Sequence[int]
) -> Iterator[int]:
    """The tasks of all trips; `work[trip, task]` are the times of the first of them.

    Trips that brought devices back to where they were, relative to each other, do so again: as
    often as the same trips follow, they need not be run.
    """
    kinds, flying = equal_rows(work), set(in_flight)
    unit = float(work.max(initial=0.0)) or 1.0
    # By device times relative to the last device and the kind of the next trip: the trip that ended
    # so, and the time.
    seen: dict[tuple[float, ...], tuple[int, float]] = {}
    trip = 0
    while trip < len(work):
        loop.duration[: work.shape[1]] = work[trip].tolist()
        # Nothing is in flight before the first one.
        yield from order if trip else (i for i in order if i not in flying)
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
    yield from in_flight  # is over when the segment is


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


@lru_cache(maxsize=4)  # called for each candidate
def cost_parts(ticks: Ticks, costs: Costs | None = None) -> Seconds:
    """`[tick, part, device]`: durations by the parts of a tick (`TickPart`), in the order in which
    it has them; F, I and W take 1 and B takes 2 where no costs are given.

    A W that is one block with an F hides the collectives of the F: half of what an overlapped pair
    saves.
    """
    table = ticks.schedule.encoded
    times = (costs or Costs()).for_stages(table.num_stages)
    durations = np.array(action_durations(table, times))
    if Kind.W in ticks.joint and times.overlap is not None:
        weights = np.flatnonzero(followed(ticks.schedule, W_THEN_F))
        saved = np.add(times.forward, times.backward) - times.overlap
        hidden = np.maximum(saved, 0)[table.stage[weights + 1]] / 2
        durations = durations.astype(np.float64)
        durations[weights] -= np.minimum(durations[weights], hidden)
    place = np.array([TickPart.of(kind) for kind in Kind])[table.kind]
    # A pair is one block, and the first.
    place[ticks.pairs[ticks.when, table.device]] = 0
    shape = ticks.num_ticks, len(TickPart), table.num_devices
    cells = np.ravel_multi_index((ticks.when, place, table.device), shape)
    found = np.bincount(cells, durations, math.prod(shape)).astype(np.float64)
    return found.reshape(shape)


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
        free = _after(free, segment, mine, overheads, runs_on)
    return max(free, default=0.0)


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
        return program_makespan(cost_parts(self.ticks), self.segments)

    @property
    def collectives(self) -> int:
        """Predicates around collective actions, in a step."""
        return sum(segment.num_collective_predicates for segment in self.segments)

    def makespan_of(
        self, costs: Costs, overheads: Overheads = NO_OVERHEADS, runs_on: RunsOn = RunsOn.GPUS
    ) -> float:
        """Seconds that the program takes with these costs and the longest of their transfers."""
        own = _with_hop(overheads, costs)
        return program_makespan(cost_parts(self.ticks, costs), self.segments, own, runs_on)

    def price(self, costs: Costs, overheads: Overheads) -> float:
        """Seconds of the program with overheads, those of the compute that transfers take away, and
        those that the code to compile is worth.
        """
        own, devices = _with_hop(overheads, costs), self.ticks.schedule.num_devices
        sent = sum(own.sent * segment.num_sends / devices for segment in self.segments)
        time = self.makespan_of(costs, own) + sent + own.collective * self.collectives
        worth = Worth.of(time)
        return time + sum(worth.block * s.size + worth.permute * s.permutes for s in self.segments)

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
                ends = (Edge(transit.permute.payload, *pair) for pair in transit.permute.pairs)
                late += int(having[np.ix_(ticks, [*map(every.index, ends)])].sum())
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


def _with_hop(overheads: Overheads, costs: Costs) -> Overheads:
    """The overheads with the longest transfer of these costs, if there is any."""
    return replace(overheads, hop=float(np.max(costs.transfer)) or overheads.hop)


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
    may be one block, and blocks communicate.  `costs` are in seconds; without any they are
    `ASSUMED`.  Of all plans that keep the table's makespan, or the least that there is, it is the
    cheapest.  Those with the fewest predicates around collective actions come first: no CUDA
    graph holds a collective, so the host waits.
    """
    seconds, plain = costs or (COMMUNICATING if as_one else ASSUMED), remove_gathers(schedule)
    table = simulate(plain, seconds).makespan
    rooms, schedule = rooms_of(schedule), plain
    ways = [assign_ticks(schedule), modulo_ticks(schedule), modulo_ticks(schedule, shift=1)]
    if rooms is not None:  # a W and the F after it may use one room in turn
        ways = [replace(ticks, rooms=rooms) for ticks in ways]
    elif any(followed(schedule, kinds).any() for kinds in (W_THEN_F, *F_THEN_PART)):
        ways += [joined_ticks(schedule), *([joined_ticks(schedule, as_one=True)] if as_one else [])]
    timed = [(plan.makespan_of(seconds), plan) for ticks in ways for plan in plans_of(ticks)]
    shortest = max(table, min(makespan for makespan, _ in timed))
    enough = shortest + Worth.of(shortest).nothing
    kept = [plan for makespan, plan in timed if makespan <= enough]
    fewest = min(plan.collectives for plan in kept)
    cheapest = [plan for plan in kept if plan.collectives == fewest]
    # The first of those whose prices differ by rounding.
    return min(cheapest, key=lambda plan: float(f"{plan.price(seconds, overheads):.12g}"))
