"""List scheduling along waves, for the schedules that take costs and a memory cap.

An order gives, for each device, its F and I.  `list_schedule` simulates it.  A
device runs the next action of its order when the inputs have arrived.  Where it would wait, it
moves up a later action that is ready and fits into the wait, or runs a pending W.

An F is moved up only if the rest of the order still fits under the memory cap.  So no choice leads
to a dead end: the rest is always a valid order by itself.  Pipeline Parallelism with Controllable
Memory (Qi et al. 2024) also repeats a building block, then compresses and reorders it under a
memory cap; here the costs count too.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from ..engine.costs import Costs, StageCosts
from ..table.clock import NEVER
from ..table.encoded import live_activations, row_peaks
from ..table.kinds import Action, Kind, Release, parts
from ..table.placement import Placement
from ..table.schedule import Schedule
from ..transforms.insertion import Insertion
from .loop import even_groups, in_chunks, in_groups, schedule_of, sliced

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741
# microbatches -> a reference order: a table of F and I, every stage on one device
OrderMaker: TypeAlias = Callable[[int], Schedule]


class ListSchedule(NamedTuple):
    """A table of F, I and W, its makespan, and the most activations that a device holds."""

    schedule: Schedule
    makespan: float
    peak: int


def least_peaks(order: Schedule) -> tuple[int, ...]:
    """The most activations that each device of an order holds if each W follows its I at once: the
    least caps that it can keep.
    """
    return row_peaks(order.encoded, live_activations(order.encoded, Release.INPUT_GRAD))


def list_schedule(
    order: Schedule, costs: Costs, caps: Sequence[int], patience: float = 0
) -> ListSchedule:
    """Run a reference order of F and I, with W where there is time for it, under a cap on each
    device's activations, each at least that of `least_peaks`.

    `patience` is the fraction of its length by which a W may delay the next action.
    """
    run = _ListPolicy(order, costs, caps, patience)
    schedule = run.insertion.run(run.policy())
    assert NEVER not in run.loop.ends, "a reference order got stuck"
    return ListSchedule(schedule, max(run.loop.free), max(d.peak for d in run.devices))


@dataclass(slots=True)
class _Device:
    """One device: the rest of its order, and its activations."""

    rest: list[int]
    cap: int
    lanes: int  # how many stages and kinds its order has
    live: int = 0
    peak: int = 0
    pending: deque[int] = field(default_factory=deque)  # each W whose I has run


class _ListPolicy:
    """The policy of a run: each W is numbered after the order of its row."""

    def __init__(self, order: Schedule, costs: Costs, caps: Sequence[int], patience: float) -> None:
        stages, self.patience = order.num_stages, patience
        self.releases = W if costs.release is Release.WEIGHT_GRAD else I
        weights = [
            [a._replace(kind=W) for cell in row for a in parts(cell) if a.kind is I]
            for row in order.rows
        ]
        self.insertion = Insertion(order, costs.for_stages(stages), weights)
        table, self.loop = self.insertion.table, self.insertion.loop
        self.kind = table.kind.tolist()
        # of an I
        self.weight = table.at[W, table.stage, table.microbatch].tolist()
        # Unlike a table, an order may be changed, so needs of the same device count too.
        closing = (table.kind == I) & (table.stage == stages - 1)
        need = np.where(closing, table.at[F, -1, table.microbatch], table.producer)
        self.loop.need = need.tolist()
        hop = np.array(costs.for_stages(stages).transfer)[table.stage[table.producer]]
        self.loop.latency = np.where(table.crosses, hop, 0).tolist()
        readers, reader = np.flatnonzero(need >= 0), np.full(table.num_actions, -1)
        reader[need[readers]] = readers
        self.reader = reader.tolist()
        # Of a stage and kind only the first action that is left can run.
        self.lane = (table.stage * len(Kind) + table.kind).tolist()
        self.devices = []
        for row, first, cap in zip(order.rows, table.first[:-1], caps, strict=True):
            rest = [*range(first, first + len(row))]
            self.devices.append(_Device(rest, cap, len({self.lane[i] for i in rest})))

    def policy(self) -> Iterator[int]:
        """Each device, in order of time, chooses what it starts when it is free or an input has
        arrived.
        """
        loop = self.loop
        free, ends, latency, on = loop.free, loop.ends, loop.latency, loop.device
        events: list[tuple[float, int]] = [(0, d) for d in range(len(self.devices))]
        while events:
            time, number = events[0]
            device = self.devices[number]
            i = self.choose(device, time) if free[number] <= time else None
            if i is None:
                heapq.heappop(events)
                continue
            yield i
            self._book(device, i)
            heapq.heapreplace(events, (free[number], number))
            reader = self.reader[i]
            if reader < 0:
                continue
            there, start = on[reader], ends[i] + latency[reader]
            # A device that is busy until then looks again when it is free.
            if there != number and (free[there] < start or start <= time):
                heapq.heappush(events, (start, there))

    def _book(self, device: _Device, number: int) -> None:
        """What a device holds after an action, and has left."""
        kind = self.kind[number]
        if kind == W:
            device.pending.popleft()
        else:
            device.rest.remove(number)
        if kind == self.releases:
            device.live -= 1
        if kind == F:
            device.live += 1
            device.peak = max(device.peak, device.live)
        elif kind == I:
            device.pending.append(self.weight[number])

    def choose(self, device: _Device, time: float) -> int | None:
        """The action that the device starts now, or None to wait."""
        pending = device.pending
        if not device.rest:
            return pending[0] if pending else None
        head = device.rest[0]
        start = self.loop.ready(head)
        full = self.kind[head] == F and device.live >= device.cap
        if start <= time:
            return pending[0] if full else head  # a W, to make room
        number = self._forward(device, time, start)
        if number is None and pending:
            length = self.loop.duration[pending[0]]
            if full or time + length <= start + self.patience * length:
                return pending[0]
        return number

    def _forward(self, device: _Device, time: float, until: float) -> int | None:
        """The first action after the head that can be moved up, or None."""
        loop, kind, lane, tried = self.loop, self.kind, self.lane, set[int]()
        # What the device holds when it has run all of its order before an action, as if nothing
        # were released meanwhile.
        held = device.live
        for number in device.rest:
            if lane[number] not in tried:
                has_time = loop.ready(number) <= time and time + loop.duration[number] <= until
                if has_time and (kind[number] != F or held < device.cap):
                    return number
                tried.add(lane[number])
                if len(tried) == device.lanes:
                    break
            held += kind[number] == F
        return None


def wave(
    placement: Placement, *, out: float, back: float, pause: float, period: float
) -> OrderMaker:
    """Each device's F and I in the order in which a wave reaches them, in which all take a unit of
    time.

    Args:
        placement: the devices of the stages.
        out: time from an action to the next one on another device, in chunks 0, 2, ... (of
            backwards: the last chunk, ...).
        back: the same for the other chunks, which in a V lead back to device 0.
        pause: time between the last stage's F and its I.
        period: time from one microbatch to the next.
    """
    last = placement.num_stages - 1
    times = []
    for (kind, stage), (_, following) in pairwise(path_of(placement)):
        chunk = (stage if kind is F else last - stage) // placement.num_devices
        if stage == following:
            times.append(1 + pause)
        elif placement.devices_of[following] == placement.devices_of[stage]:
            times.append(1.0)
        else:
            times.append(back if chunk % 2 else out)
    return partial(repeated, placement, [0.0, *accumulate(times)], period)


def repeated(
    placement: Placement, starts: Sequence[float], period: float, microbatches: int
) -> Schedule:
    """Each device's F and I in the order in which microbatches reach them, one every period; of
    the first one, `starts` has the time at each place of its path.
    """
    path = path_of(placement)
    timed: list[list[tuple[float, int, int]]] = [[] for _ in range(placement.num_devices)]
    for place, ((_, stage), start) in enumerate(zip(path, starts, strict=True)):
        timed[placement.devices_of[stage][0]] += [
            (start + m * period, place, m) for m in range(microbatches)
        ]
    # Equal times are settled by the place on the path, so that no action comes before one that it
    # needs.
    rows = [
        [Action(path[place][1], path[place][0], m) for _, place, m in sorted(row)] for row in timed
    ]
    return schedule_of(rows, placement, microbatches)


def path_of(placement: Placement) -> list[tuple[Kind, int]]:
    """A microbatch's path through all stages and back."""
    stages = range(placement.num_stages)
    return [(F, s) for s in stages] + [(I, s) for s in reversed(stages)]


# Of the period with which lives fill the cap, the shortest and the longest that are tried, and how
# many there are.
_DENSEST, _SPARSEST, _DENSITIES = 0.7, 1.4, 20


def even_waves(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Waves of many densities in which all forwards take the same time, and all backwards; at last
    one microbatch after the other, which keeps any cap.

    A backward takes as long as a forward, or the geometric mean of that and its own time.  With
    like times, microbatches meet in a like order on every device and wait less, and a tight cap is
    kept with a shorter period.
    """
    ratio = sum(costs.input_grad) / (sum(costs.forward) or 1)
    path = path_of(placement)
    for pace in sorted({1.0, ratio**0.5}):
        *starts, end = accumulate((1.0 if kind is F else pace for kind, _ in path), initial=0.0)
        lives = [[*starts, end][-1 - s] - starts[s] for s in range(placement.num_stages)]
        dense = max(sum(lives[s] for s in stages) for stages in placement.stages_of) / cap
        for factor in np.linspace(_DENSEST, _SPARSEST, _DENSITIES).tolist():
            yield partial(repeated, placement, starts, dense * factor)
    yield partial(repeated, placement, starts, end)


# Periods, relative to the work of the busiest device, and the time after each hop, relative to a
# forward, which leave `list_schedule` room.
_PERIODS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6)
_PAUSE = 0.25
_FEW = 4  # of the shortest periods
_ROUNDING = 1e-9


def packed_orders(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Orders of the shortest periods that keep the cap, by modulo scheduling: one microbatch is
    placed action by action into a turn of its devices, which repeats (Rau 1994, Iterative Modulo
    Scheduling).

    A wave has one pace, so its microbatches meet on devices, wait, and hold activations longer.
    Here each action has a place of its own in the turn.  With 8 devices, 4 chunks and 20
    activations tables are 5.0 % above the bound without these orders, and 3.4 % with them.
    """
    pause = _PAUSE * sum(costs.forward) / placement.num_stages
    names = ("forward", "input_grad", "weight_grad")
    works = [
        sum(getattr(costs, name)[s] for name in names for s in stages)
        for stages in placement.stages_of
    ]
    periods = [factor * max(works) for factor in _PERIODS] if max(works) else []
    makers = (
        partial(repeated, placement, starts, period)
        for period in periods
        if (starts := _packed_starts(placement, costs, period, pause)) is not None
    )
    fitting = (maker for maker in makers if max(least_peaks(maker(2 * cap))) <= cap)
    return islice(fitting, _FEW)


def _packed_starts(
    placement: Placement, costs: StageCosts, period: float, pause: float
) -> list[float] | None:
    """When a microbatch is at each place of its path: as soon as its device is free in that part of
    its turn; None where a turn has no room.
    """
    busy: list[list[tuple[float, float]]] = [[] for _ in range(placement.num_devices)]
    starts: list[float] = []
    ready, here = 0.0, 0
    for kind, stage in path_of(placement):
        device = placement.devices_of[stage][0]
        if starts and device != here:
            ready += costs.transfer[stage] + pause
        length = (costs.forward if kind is F else costs.input_grad)[stage]
        times = [ready, *(ready + (at + took - ready) % period for at, took in busy[device])]
        free = (
            t
            for t in sorted(times)
            if all(
                length - _ROUNDING <= (at - t) % period <= period - took + _ROUNDING
                for at, took in busy[device]
            )
        )
        start = next(free, None)
        if start is None:
            return None
        busy[device].append((start % period, length))
        starts.append(start)
        ready, here = start + length, device
    return starts


# By what fraction of its length a W may delay the next action: which is best depends on the costs.
_PATIENCE = (0.0, 0.5)
_FINALISTS = 5  # orders that are run in full, with every patience
_MOST_ACTIONS = 300_000  # actions of all full runs together: two or three seconds


def fitted(
    placement: Placement,
    costs: Costs | None,
    microbatches: int,
    *,
    cap: int,
    figure: OrderMaker | None = None,
) -> Schedule:
    """The shortest table under the cap that follows one of the waves and packed orders for these
    costs, of equals the one that holds least; where no costs are given, one that follows `figure`.

    Many orders are ranked by the first microbatches.  Only the most promising are run in full.
    With `costs.slice_factors` they are orders of slices.
    """
    figure = figure if costs is None else None
    costs = costs or Costs()
    stages = costs.for_stages(placement.num_stages)
    slices, caps = len(stages.slice_factors) or 1, [cap] * placement.num_devices

    def runs(
        makers: Iterable[OrderMaker], count: int, patience: Sequence[float]
    ) -> Iterator[tuple[ListSchedule, OrderMaker]]:
        for maker in makers:
            order = sliced(maker(count + slices - 1), slices)
            if max(least_peaks(order)) <= cap:
                for wait in patience:
                    yield list_schedule(order, costs, caps, wait), maker

    makers = [figure] if figure else []
    if not makers:
        # At least two rounds of P microbatches and a dozen microbatches, of whole sequences.
        short = 2 * placement.num_devices * -(-6 // placement.num_devices)
        short = min(microbatches, slices * -(-short // slices))
        every = (*even_waves(placement, stages, cap), *packed_orders(placement, stages, cap))
        ranked = sorted(runs(every, short, (0,)), key=lambda run: run[0][1:])
        makers = [maker for _, maker in ranked]
    affordable = max(2, _MOST_ACTIONS // (3 * placement.num_stages * microbatches))
    finalists = islice(
        runs(makers, microbatches, _PATIENCE), min(_FINALISTS * len(_PATIENCE), affordable)
    )
    # One sequence after the other keeps every cap.
    return min((run for run, _ in finalists), key=lambda run: run[1:]).schedule


def forward_order(placement: Placement, microbatches: int) -> Schedule:
    """The shortest known order of forwards alone, for any placement with one device per stage.

    On a loop, groups of microbatches go through the chunks, and only the first P - 1 steps are
    lost.  Elsewhere microbatches enter as fast as a device can run all their chunks, and a device
    that would wait runs an action that is ready.
    """
    chunks = placement.num_chunks
    if placement == Placement.loop(devices=placement.num_devices, chunks=chunks):
        groups = even_groups(placement.num_devices, microbatches)
        row = in_groups("F", groups, chunks)
        return in_chunks([row] * placement.num_devices, placement, microbatches)
    timed = [
        sorted((s + chunks * m, -s, m) for s in stages for m in range(microbatches))
        for stages in placement.stages_of
    ]
    rows = [[Action(-s, F, m) for _, s, m in row] for row in timed]
    order = schedule_of(rows, placement, microbatches)
    return list_schedule(order, Costs(), [*map(len, rows)]).schedule
