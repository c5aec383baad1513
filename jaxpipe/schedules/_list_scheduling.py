"""List scheduling along a reference order, for the schedules that take costs and a memory cap.

A generator gives, for each device, a reference order of F and I.  `list_schedule` simulates it.  A
device runs the next action of its order when the inputs are there.  Where it would wait, it moves
up a later action that is ready and fits into the wait, or runs a pending W.  An F is moved up only
if the rest of the order still fits under the memory cap, so no choice can lead to a dead end: what
is left is always a valid order by itself.  To repeat a building block and then to compress and
reorder it under a memory cap is the idea of Pipeline Parallelism with Controllable Memory (Qi et
al. 2024); here the costs count too.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..engine.costs import StageCosts
from ..table.action import Action, Kind
from ..table.activations import Release
from ..table.placement import Placement

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741
NEVER = float("inf")


class Rule(NamedTuple):
    """How a device fills a wait; which rule is best depends on the costs, so callers try several
    and keep the best.
    """

    # keep memory for the forwards that were passed over, as if nothing were released meanwhile
    reserve: bool
    patience: float  # by what fraction of its length a W may delay the next action


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


def list_schedule(
    order: Sequence[Sequence[Action]],
    placement: Placement,
    costs: StageCosts,
    *,
    microbatches: int,
    caps: Sequence[int],
    rule: Rule,
    release: Release = Release.WEIGHT_GRAD,
) -> ListSchedule:
    """Run a reference order of F and I, with W where there is time for it, under a cap on each
    device's activations.

    Every stage is on one device, and each device's cap is at least `least_peak` of its row.
    """
    run = _Run(order, placement, costs, microbatches, caps, rule, release)
    events, devices = run.events, run.devices
    while events:
        time, number = events[0]
        device = devices[number]
        action = run.choose(device, time) if device.free <= time else None
        if action is None:
            heapq.heappop(events)
        else:
            run.start(device, action, time)
    assert all(device.is_done for device in run.devices), "a reference order got stuck"
    return ListSchedule(
        [d.out for d in run.devices],
        max(d.free for d in run.devices),
        max(d.peak for d in run.devices),
    )


class _Lane:
    """The actions of one stage and kind in a device's order, of which only the first that is left
    can run.
    """

    __slots__ = ("at", "duration", "is_forward", "places", "ready")

    def __init__(
        self, places: list[int], ready: list[float], duration: float, is_forward: bool
    ) -> None:
        self.places = places
        self.ready = ready  # when each may start
        self.duration = duration
        self.is_forward = is_forward
        self.at = 0  # how many have run


class _Device:
    """One simulated device: what is left of its order, what it holds, and what it has run."""

    __slots__ = (
        "cap",
        "done",
        "free",
        "head",
        "lane_of",
        "lanes",
        "live",
        "number",
        "order",
        "out",
        "peak",
        "pending",
    )

    def __init__(
        self, number: int, order: Sequence[Action], cap: int, lanes: dict[tuple[int, Kind], _Lane]
    ) -> None:
        self.number = number
        self.cap = cap
        self.order = order
        self.done = bytearray(len(order))
        self.lane_of = [lanes[stage, kind] for stage, kind, _ in order]
        self.lanes = list(dict.fromkeys(self.lane_of))
        for place, lane in enumerate(self.lane_of):
            lane.places.append(place)
        self.head = 0
        self.live = 0
        self.peak = 0
        self.free: float = 0
        self.pending: deque[Action] = deque()
        self.out: list[Action] = []

    @property
    def is_done(self) -> bool:
        return all(self.done) and not self.pending

    def take(self, place: int) -> Action:
        """Take the action at this place out of the order."""
        self.done[place] = 1
        self.lane_of[place].at += 1
        return self.order[place]

    def skip_done(self) -> int:
        """Move the head to the first action that is not done; return its place."""
        head, done = self.head, self.done
        while head < len(done) and done[head]:
            head += 1
        self.head = head
        return head


class _Run:
    """A running simulation."""

    def __init__(
        self,
        order: Sequence[Sequence[Action]],
        placement: Placement,
        costs: StageCosts,
        microbatches: int,
        caps: Sequence[int],
        rule: Rule,
        release: Release,
    ) -> None:
        stages = placement.num_stages
        self.device_of = [devices[0] for devices in placement.devices_of]
        self.costs, self.rule = costs, rule
        self.last = W if release is Release.WEIGHT_GRAD else I
        self.duration = {F: costs.forward, I: costs.input_grad, W: costs.weight_grad}
        # When an action may start, by (kind, stage, microbatch).  The first F may start at once.
        self.ready = {kind: [[NEVER] * microbatches for _ in range(stages)] for kind in (F, I)}
        self.ready[F][0] = [0] * microbatches
        lanes = {
            (stage, kind): _Lane([], self.ready[kind][stage], self.duration[kind][stage], kind is F)
            for kind in (F, I)
            for stage in range(stages)
        }
        self.devices = [
            _Device(d, row, cap, lanes)
            for d, (row, cap) in enumerate(zip(order, caps, strict=True))
        ]
        self.events: list[tuple[float, int]] = [(0, d) for d in range(len(order))]

    def choose(self, device: _Device, time: float) -> Action | None:
        """The action that the device starts now, taken out of its order, or None to wait."""
        head = device.skip_done()
        if head == len(device.order):
            return device.pending.popleft() if device.pending else None
        lane = device.lane_of[head]
        start = lane.ready[device.order[head].microbatch]
        full = lane.is_forward and device.live >= device.cap
        if start <= time:
            return device.pending.popleft() if full else device.take(head)  # a W, to make room
        place = self._forward(device, time, head, start)
        if place is not None:
            return device.take(place)
        if device.pending and (full or self._has_time_for(device.pending[0], time, start)):
            return device.pending.popleft()
        return None

    def _has_time_for(self, weight: Action, time: float, until: float) -> bool:
        length = self.costs.weight_grad[weight.stage]
        return time + length <= until + self.rule.patience * length

    def _forward(self, device: _Device, time: float, head: int, until: float) -> int | None:
        """The place of the first action after the head that can be moved up, or None."""
        found: list[tuple[int, bool]] = []
        for lane in device.lanes:
            # Microbatches stay in order within a stage and kind.
            if lane.at == len(lane.places):
                continue
            place = lane.places[lane.at]
            if lane.ready[device.order[place].microbatch] <= time and (
                until == NEVER or time + lane.duration <= until
            ):
                found.append((place, lane.is_forward))
        for place, is_forward in sorted(found):
            if not is_forward or self._most_before(device, head, place) < device.cap:
                return place
        return None

    def _most_before(self, device: _Device, head: int, stop: int) -> int:
        """The most activations that a device holds until it has run what is left of its order
        before this place.
        """
        live = most = device.live
        for place in range(head, stop):
            if device.done[place]:
                continue
            if device.lane_of[place].is_forward:
                live += 1
                most = max(most, live)
            elif not self.rule.reserve:
                live -= 1
        return most

    def start(self, device: _Device, action: Action, time: float) -> None:
        """Start an action, for the event that comes first, and wake the device that gets its
        result.
        """
        stage, kind, microbatch = action
        end = time + self.duration[kind][stage]
        device.free = end
        device.out.append(action)
        heapq.heapreplace(self.events, (end, device.number))
        if kind is self.last:
            device.live -= 1
        if kind is F:
            device.live += 1
            device.peak = max(device.peak, device.live)
            self._hand_over(stage, stage + 1, kind, microbatch, time, end)
        elif kind is I:
            device.pending.append(Action(stage, W, microbatch))
            self._hand_over(stage, stage - 1, kind, microbatch, time, end)

    def _hand_over(
        self, source: int, target: int, kind: Kind, microbatch: int, time: float, end: float
    ) -> None:
        """The result of a stage reaches the next one (for I: the one before); the last stage's F is
        followed by its own I.
        """
        if target < 0:
            return
        if target == len(self.device_of):
            target, kind = source, I
        here, there = self.device_of[source], self.device_of[target]
        start = end if here == there else end + self.costs.transfer[source]
        self.ready[kind][target][microbatch] = start
        # A device that is busy until then looks at what is ready when it is free.
        if here != there and (self.devices[there].free < start or start <= time):
            heapq.heappush(self.events, (start, there))
