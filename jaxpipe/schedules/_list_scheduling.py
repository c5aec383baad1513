"""List scheduling along a reference order, for the schedules that take costs and a memory cap.

A generator gives, for each device, a reference order of F and I.  `list_schedule` simulates it.  A
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
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..engine.costs import StageCosts
from ..engine.loop import NEVER, Loop
from ..table.activations import Release
from ..table.encoded import encode
from ..table.kinds import Action, Kind
from ..table.placement import Placement

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741


class ListSchedule(NamedTuple):
    """Rows of F, I and W, their simulated makespan, and the most activations that a
    device holds.
    """

    rows: list[list[Action]]
    makespan: float
    peak: int


def least_peak(row: Iterable[Action]) -> int:
    """The most activations that a row of F and I holds if each W follows its I at once: the least
    cap that it can keep.
    """
    live = most = 0
    for action in row:
        live += 1 if action.kind is F else -1
        most = max(most, live)
    return most


class Instance(NamedTuple):
    """What is scheduled: stages on devices, their costs, and a number of microbatches.  Every stage
    is on one device.
    """

    placement: Placement
    costs: StageCosts
    microbatches: int
    release: Release = Release.WEIGHT_GRAD  # of activations


def list_schedule(
    order: Sequence[Sequence[Action]],
    instance: Instance,
    caps: Sequence[int],
    patience: float = 0,
) -> ListSchedule:
    """Run a reference order of F and I, with W where there is time for it, under a cap on each
    device's activations.

    `patience` is the fraction of its length by which a W may delay the next action.  Each device's
    cap is at least `least_peak` of its row.
    """
    rows = [
        [*row, *(Action(a.stage, W, a.microbatch) for a in row if a.kind is I)] for row in order
    ]
    run = _Run(rows, instance, caps, patience)
    run.loop.run(run.policy())
    assert all(device.is_done for device in run.devices), "a reference order got stuck"
    actions = [action for row in rows for action in row]
    return ListSchedule(
        [[actions[i] for i in d.out] for d in run.devices],
        max(run.loop.free),
        max(d.peak for d in run.devices),
    )


class _Lane:
    """The actions of one stage and kind in a device's order, of which only the first that is left
    can run.
    """

    __slots__ = ("at", "is_forward", "places")

    def __init__(self, is_forward: bool) -> None:
        self.places: list[int] = []
        self.is_forward = is_forward
        self.at = 0  # how many have run


class _Device:
    """One device: the rest of its order, its activations, and the actions that it has run."""

    __slots__ = (
        *("cap", "done", "first", "head", "lane_of", "lanes"),
        *("live", "out", "peak", "pending"),
    )

    def __init__(self, order: Sequence[Action], first: int, cap: int) -> None:
        self.cap, self.first = cap, first  # the number of its first action
        self.done = bytearray(len(order))
        lanes = {each: _Lane(each[1] is F) for each in dict.fromkeys(a[:2] for a in order)}
        self.lane_of = [lanes[a[:2]] for a in order]
        for place, lane in enumerate(self.lane_of):
            lane.places.append(place)
        self.lanes = list(lanes.values())
        self.head = self.live = self.peak = 0
        self.pending: deque[int] = deque()
        self.out: list[int] = []

    @property
    def is_done(self) -> bool:
        return all(self.done) and not self.pending

    def take(self, place: int) -> int:
        """Take the action at this place out of the order."""
        self.done[place] = 1
        self.lane_of[place].at += 1
        return self.first + place

    def skip_done(self) -> int:
        """Move the head to the first action that is not done; return its place."""
        head, done = self.head, self.done
        while head < len(done) and done[head]:
            head += 1
        self.head = head
        return head


class _Run:
    """The policy of a run: actions are numbered row by row, each W after its row's order."""

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        instance: Instance,
        caps: Sequence[int],
        patience: float,
    ) -> None:
        placement, costs, microbatches, release = instance
        stages, slices = placement.num_stages, len(costs.slice_factors) or 1
        table = encode(tuple(map(tuple, rows)), stages, microbatches, slices)
        self.patience = patience
        self.releases = W if release is Release.WEIGHT_GRAD else I
        self.kind = table.kind.tolist()
        # of an I
        self.weight = table.at[W, table.stage, table.microbatch].tolist()
        self.loop = loop = Loop.of(table, costs)
        # Unlike a table, an order may be changed, so needs of the same device count too.
        closing = (table.kind == I) & (table.stage == stages - 1)
        output = table.at[F, -1, table.microbatch]
        loop.need = np.where(closing, output, table.producer).tolist()
        hop = np.array(costs.transfer)[table.stage[table.producer]]
        loop.latency = np.where(table.crosses, hop, 0).tolist()
        self.reader = [-1] * table.num_actions
        for user, need in enumerate(loop.need):
            if need >= 0:
                self.reader[need] = user
        self.devices = [
            _Device([a for a in row if a.kind is not W], first, cap)
            for row, first, cap in zip(rows, table.first, caps, strict=False)
        ]

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
        """What a device holds after an action."""
        device.out.append(number)
        kind = self.kind[number]
        if kind == self.releases:
            device.live -= 1
        if kind == F:
            device.live += 1
            device.peak = max(device.peak, device.live)
        elif kind == I:
            device.pending.append(self.weight[number])

    def choose(self, device: _Device, time: float) -> int | None:
        """The action that the device starts now, taken out of its order, or None to wait."""
        head = device.skip_done()
        if head == len(device.done):
            return device.pending.popleft() if device.pending else None
        start = self.loop.ready(device.first + head)
        full = device.lane_of[head].is_forward and device.live >= device.cap
        if start <= time:
            return device.pending.popleft() if full else device.take(head)  # a W, to make room
        place = self._forward(device, time, head, start)
        if place is not None:
            return device.take(place)
        if device.pending and (full or self._has_time_for(device.pending[0], time, start)):
            return device.pending.popleft()
        return None

    def _has_time_for(self, weight: int, time: float, until: float) -> bool:
        length = self.loop.duration[weight]
        return time + length <= until + self.patience * length

    def _forward(self, device: _Device, time: float, head: int, until: float) -> int | None:
        """The place of the first action after the head that can be moved up, or None."""
        found: list[tuple[int, bool]] = []
        need, ends, latency = self.loop.need, self.loop.ends, self.loop.latency
        for lane in device.lanes:
            # Microbatches stay in order within a stage and kind.
            if lane.at == len(lane.places):
                continue
            place = lane.places[lane.at]
            i = device.first + place
            if (need[i] < 0 or ends[need[i]] + latency[i] <= time) and (
                until == NEVER or time + self.loop.duration[i] <= until
            ):
                found.append((place, lane.is_forward))
        for place, is_forward in sorted(found):
            if not is_forward or self._most_before(device, head, place) < device.cap:
                return place
        return None

    def _most_before(self, device: _Device, head: int, stop: int) -> int:
        """The most activations that a device holds until it has run what is left of its order
        before this place, as if nothing were released meanwhile.
        """
        live = device.live
        for place in range(head, stop):
            if device.done[place]:
                continue
            if device.lane_of[place].is_forward:
                live += 1
        return live
