"""Lower bounds of the makespan of any schedule, for given costs, placement and cap on
activations.

All microbatches cost the same, so in any schedule the k-th action of a stage and kind may be taken
for that of microbatch k: if the k-th start of a stage comes after k starts of the stage before,
then the k-th of these comes before it.  A schedule is then a job shop in which every stage works in
the order of microbatches, and results about job shops hold for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from ..errors import Count, ScheduleError, typed
from ..table.kinds import COLLECTIVES, Action, Kind, Release, Value, makers
from ..table.placement import Placement
from ..table.schedule import Objective
from .costs import Costs, StageCosts
from .simulate import Timeline

# Pairs of stage and microbatch, and stages, up to which every action has a head and a tail of its
# own.
_MOST_PAIRS, _MOST_STAGES = 1 << 13, 128
_ALMOST = 1 - 1e-12  # of sums of floats
_FAR = 1 << 30
# The halves of a backward: what makes one gradient and not the other.
(_DGRAD,) = set(makers(Value.INPUT_GRAD)) - set(makers(Value.WEIGHT_GRAD))
(_WGRAD,) = set(makers(Value.WEIGHT_GRAD)) - set(makers(Value.INPUT_GRAD))


class Node(NamedTuple):
    """All actions of a stage and kind, in the order of microbatches."""

    stage: int
    kind: Kind
    device: int
    length: float
    begins: bool  # takes a place for activations
    releases: bool  # frees one at its end


class Arc(NamedTuple):
    """Action k of `target` starts `delay` after the end of action k - `lag` of `source`,
    or later.
    """

    source: int
    target: int
    lag: int = 0
    delay: float = 0


class JobShop(NamedTuple):
    """An instance: nodes in an order in which arcs without lag go forwards."""

    nodes: tuple[Node, ...]
    arcs: tuple[Arc, ...]
    devices: int
    microbatches: int
    cap: int | None
    shared: bool  # some stage is on several devices

    @classmethod
    def of(
        cls,
        placement: Placement,
        times: StageCosts,
        release: Release,
        microbatches: int,
        cap: int | None,
    ) -> JobShop:
        """The job shop of an instance whose backwards are I and W: F of each stage, then I and W
        from the last stage on.
        """
        homes, early = placement.devices_of, release is Release.INPUT_GRAD
        count, nodes = len(homes), list[Node]()
        for s, length in enumerate(times.forward):
            nodes.append(Node(s, Kind.F, homes[s][0], length, True, False))
        for s in reversed(range(count)):
            first, rest, device = times.input_grad[s], times.weight_grad[s], homes[s][0]
            nodes.append(Node(s, _DGRAD, device, first, False, early))
            nodes.append(Node(s, _WGRAD, device, rest, False, not early))
        # The numbers of a stage's nodes: that of its F is the stage's.
        dgrad = [3 * count - 2 * s - 2 for s in range(count)]
        wgrad = [number + 1 for number in dgrad]
        arcs = [Arc(count - 1, dgrad[-1]), *map(Arc, dgrad, wgrad)]
        for s in range(1, count):
            near = not set(homes[s]).isdisjoint(homes[s - 1])
            there, back = (0, 0) if near else (times.transfer[s - 1], times.transfer[s])
            arcs += [Arc(s - 1, s, 0, there), Arc(dgrad[s], dgrad[s - 1], 0, back)]
        shared = placement.is_bidirectional
        if not shared:
            arcs += [Arc(n, n, 1) for n in range(len(nodes))]
        if not shared and cap is not None:
            # When F k of a device's v-th stage starts, the v stages before it have begun k + 1
            # microbatches each, and at most cap - 1 live.  None of them has released more than k,
            # so each has released k - cap + v + 1 at the least.
            arcs += [
                Arc(dgrad[before] if early else wgrad[before], stage, cap - v)
                for stages in placement.stages_of
                for v, stage in enumerate(stages)
                for before in stages[: v + 1]
                if cap - v < microbatches
            ]
        return cls(tuple(nodes), tuple(arcs), placement.num_devices, microbatches, cap, shared)

    @property
    def chunks(self) -> int:
        """V, the most stages on a device."""
        held = [node.device for node in self.nodes if node.begins]
        return max(held.count(device) for device in range(self.devices))

    def on(self, device: int) -> list[int]:
        """The nodes of a device."""
        return [n for n, node in enumerate(self.nodes) if node.device == device]

    def rows(self, order: Iterable[int]) -> list[list[Action]]:
        """Each device's actions, of an order of all actions by their nodes."""
        rows: list[list[Action]] = [[] for _ in range(self.devices)]
        coming = [count() for _ in self.nodes]
        for n in order:
            stage, kind, device, *_ = self.nodes[n]
            rows[device].append(Action(stage, kind, next(coming[n])))
        return rows

    def work(self, device: int) -> float:
        """The time that a device needs for one microbatch."""
        return sum(self.nodes[n].length for n in self.on(device))

    def alone(self) -> JobShop:
        """The same of one microbatch."""
        return self._replace(microbatches=1, arcs=tuple(a for a in self.arcs if not a.lag))

    def lives(self, device: int) -> list[float]:
        """The least time from the F of each of a device's stages to its release: that of one
        microbatch alone.
        """
        heads = [head for (head,) in self.alone().heads()]
        mine = [(n, self.nodes[n]) for n in self.on(device)]
        begins = [heads[n] for n, node in mine if node.begins]
        ends = [heads[n] + node.length for n, node in mine if node.releases]
        # Releases come in the opposite order of stages.
        return [end - begin for begin, end in zip(begins, ends[::-1], strict=True)]

    def heads(self) -> list[list[float]]:
        """Per node and microbatch, the earliest start: by longest paths, and after all work of its
        own device that must precede it.
        """
        into: list[list[Arc]] = [[] for _ in self.nodes]
        for arc in self.arcs:
            into[arc.target].append(arc)
        before, opened = self._before(), dict[int, float]()
        starts, ends = ([list[float]() for _ in self.nodes] for _ in range(2))
        for k in range(self.microbatches):
            for n, (node, arcs) in enumerate(zip(self.nodes, into, strict=True)):
                needs = (ends[a.source][k - a.lag] + a.delay for a in arcs if k >= a.lag)
                ready = max(needs, default=0)
                # A device's first action is microbatch 0 of the node that comes first in the order.
                start = max(ready, opened.setdefault(node.device, ready) + before[n][k])
                starts[n].append(start)
                ends[n].append(start + node.length)
        return starts

    def tails(self) -> list[list[float]]:
        """Per node and microbatch, the least time from its end to the end of all: the heads of the
        schedule with time turned round, in which what releases a place takes one, and the last
        microbatch is the first.
        """
        last = len(self.nodes) - 1
        nodes = (n._replace(begins=n.releases, releases=n.begins) for n in self.nodes[::-1])
        arcs = (a._replace(source=last - a.target, target=last - a.source) for a in self.arcs)
        turned = self._replace(nodes=tuple(nodes), arcs=tuple(arcs))
        return [row[::-1] for row in turned.heads()[::-1]]

    def _before(self) -> list[list[float]]:
        """Per node and microbatch, the work of its own device that must be done before it starts,
        with the releases that the cap demands.
        """
        count, most = len(self.nodes), np.arange(self.microbatches)
        if self.microbatches == 1:  # a chain, which is the longest path itself
            return [[0]] * count
        # `[a, n]`: action k of node n comes after action k - lag of node a; _FAR where it never
        # must.
        lags = np.full((count, count), _FAR, np.int64)
        for arc in self.arcs:
            lags[arc.source, arc.target] = min(lags[arc.source, arc.target], arc.lag)
        for via in range(count):
            np.minimum(lags, lags[:, via, None] + lags[None, via, :], out=lags)
        found: list[list[float]] = []
        for number, node in enumerate(self.nodes):
            mine = self.on(node.device)
            done = np.clip(most - lags[mine, number, None] + 1, 0, self.microbatches)
            length, begins, releases = (
                np.array(values) for values in zip(*(self.nodes[n][3:] for n in mine), strict=True)
            )
            work = length @ done
            if self.cap is not None and releases.any():
                held = node.begins + begins @ done - releases @ done
                work = work + np.maximum(held - self.cap, 0) * length[releases].min()
            found.append(work.tolist())
        return found


@typed()
def lower_bound(
    costs: Costs | None = None,
    *,
    microbatches: Count | None = None,
    devices: Count | None = None,
    chunks: Count = 1,
    placement: Placement | None = None,
    max_activations: Count | None = None,
    objective: Objective = Objective.MAKESPAN,
) -> float:
    """A makespan below which no schedule goes that has these costs, this placement and at most so
    many activations on a device.

    For each device it solves the preemptive one-machine problem in which every action has a head
    (what must come before it) and a tail (what must come after it) (Carlier 1982, "The one-machine
    sequencing problem"); the bound is the largest of these, and of the periods of all microbatches.
    Heads and tails count the releases that a cap demands.  Backwards may be whole, split or in
    overlapped pairs, whichever is cheaper.

    Tables with R (`add_recompute`) compute more and hold less.  Where `Costs.recompute` is given
    the bound holds for them too, and so for any memory: a cap then changes nothing.  Where it is
    None they may go below a bound with a cap, and not below one without.

    With `Objective.PERIOD`, a time of a microbatch in the steady state that no schedule goes below
    (modulo scheduling, Rau 1994, section 2): a device's work for one microbatch, and the time for
    which that occupies its memory, divided by the cap.

    Args:
        costs: as for `simulate`; all 1, and transfers 0, where it is None.
        microbatches: M; not needed for a period.
        devices: P; not needed where `placement` is given.
        chunks: V, the stages per device, where no placement is given: the bound is then the lesser
            of that of a loop and that of a V.
        placement: the devices of the stages.
        max_activations: the most activations (stage and microbatch pairs) on a device; no cap where
            it is None.
        objective: whether the bound is one of the makespan or of the period.

    Raises:
        ScheduleError: neither devices nor placement is given, a number is no whole number of at
            least 1, or the cap is too small for one microbatch.
        CostError: a sequence of costs does not have one entry per stage.

    >>> (
    ...     lower_bound(devices=4, microbatches=8),
    ...     lower_bound(devices=4, microbatches=8, max_activations=2),
    ... )
    (27, 39)
    >>> lower_bound(devices=4, max_activations=2, objective=Objective.PERIOD)
    4.5
    """
    if objective is Objective.PERIOD and microbatches is None:
        microbatches = 1
    needed = {"microbatches": microbatches, "devices": placement or devices}
    faults = (
        f"{name} must be a whole number of at least 1, not None"
        for name, given in needed.items()
        if given is None
    )
    ScheduleError.refuse("there is no bound for this", faults)
    places = [placement] if placement else loop_and_vee(devices, chunks)
    least, cap = least_activations(places[0]), max_activations
    if cap is not None and cap < least:
        raise ScheduleError(
            f"max_activations={cap} is less than the {least} that one microbatch needs on a "
            "device: without R, the stages of a device wait for their backwards at the same time; "
            "give a larger max_activations or place fewer stages there"
        )
    costs = costs or Costs()
    times = cheapest(costs.for_stages(places[0].num_stages))
    assert microbatches is not None
    cap = None if costs.recompute is not None else cap
    shops = (JobShop.of(place, times, costs.release, microbatches, cap) for place in places)
    return min(map(bound_of if objective is Objective.MAKESPAN else period_bound_of, shops))


def timeline_bound(timeline: Timeline) -> tuple[float, int | None]:
    """The bound of the makespan for a simulated table's costs, placement and peak of activations,
    and that peak.

    None is the peak of a table with R: its bound holds for any memory, since tables with R go below
    those of a cap.  In a table in which all devices do `last` or `first` together, each device's
    shares are work besides.
    """
    schedule, table = timeline.schedule, timeline.schedule.encoded
    place, count = schedule.placement, schedule.num_microbatches
    cap = None if table.recomputes else max(timeline.peak_activations)
    # The table's own peak says nothing of tables with R.
    costs = replace(timeline.costs, recompute=None)
    found = lower_bound(costs, placement=place, microbatches=count, max_activations=cap)
    times = costs.for_stages(place.num_stages)
    shares = [times.of(kind) or () for kind in table.kinds.intersection(COLLECTIVES)]
    shop = JobShop.of(place, cheapest(times), costs.release, count, None)
    work = [shop.work(d) + sum(share[d] for share in shares) for d in range(shop.devices)]
    return max(found, count * (mean if shop.shared else max)(work)), cap


def loop_and_vee(devices: Any, chunks: Any) -> list[Placement]:
    """The placements of so many chunks: a loop, and a V where that is another one."""
    loop = Placement.loop(devices=devices, chunks=chunks)
    one = chunks == 1 or devices == 1
    return [loop] if one else [loop, Placement.vee(devices=devices, chunks=chunks)]


def least_activations(placement: Placement) -> int:
    """What one microbatch alone holds on some device before its first backward: of a stage on
    several devices, it goes through one.
    """
    found = [devices[0] for devices in placement.devices_of if len(set(devices)) == 1]
    return max((found.count(device) for device in set(found)), default=1)


def bound_of(shop: JobShop) -> float:
    """The bound of the makespan: every device as one machine, with a head and a tail for every
    action; in a large instance, for all actions of a stage and kind as one.  Or the periods of all
    microbatches, if they are more.
    """
    nodes, count = shop.nodes, shop.microbatches
    large = len(nodes) > 3 * _MOST_STAGES or len(nodes) * count > 3 * _MOST_PAIRS
    one = shop.alone() if large or shop.shared else shop
    heads, tails = one.heads(), one.tails()
    if shop.shared:
        chains = (head[0] + node.length for head, node in zip(heads, nodes, strict=True))
        return max(count * period_bound_of(shop), *chains)
    machines = (
        [
            (head, nodes[n].length * (count // one.microbatches), tail)
            for n in shop.on(device)
            for head, tail in zip(heads[n], tails[n], strict=True)
        ]
        for device in range(shop.devices)
    )
    return max(count * period_bound_of(shop), *map(preemptive_one_machine, machines))


def period_bound_of(shop: JobShop) -> float:
    """The bound of the time of a microbatch in the steady state: a device's work, and the time for
    which its memory is occupied.
    """
    if shop.shared:
        return sum(node.length for node in shop.nodes) / shop.devices
    devices = range(shop.devices)
    held = [sum(shop.lives(device)) / (shop.cap or inf) for device in devices]
    return max(*map(shop.work, devices), *held)


def cheapest(costs: StageCosts) -> StageCosts:
    """Times that no schedule goes below: of a whole backward and its halves the cheaper, of pairs
    what their halves add at the least.
    """
    overlap = costs.overlap or (inf,) * len(costs.forward)
    pair = min(overlap, default=inf)
    whole = tuple(min(b, pair) for b in costs.backward)
    dgrad = tuple(min(i, pair) for i in costs.input_grad)
    longest = max((*whole, *dgrad), default=0)
    pairs = zip(costs.forward, overlap, strict=True)
    first = tuple(map(min, dgrad, whole))
    times = zip(dgrad, costs.weight_grad, whole, first, strict=True)
    return replace(
        costs,
        forward=tuple(min(f, max(0, o - longest)) for f, o in pairs),
        input_grad=first,
        weight_grad=tuple(min(i + w, b) - f for i, w, b, f in times),
        backward=whole,
        overlap=None,
    )


def is_cheapest_in_parts(costs: StageCosts) -> bool:
    """Whether neither a whole backward nor an overlapped pair is cheaper than its parts: what no
    table of F, I and W beats, none does.
    """
    parts, least = (
        sum((*times.forward, *times.input_grad, *times.weight_grad))
        for times in (costs, cheapest(costs))
    )
    return least >= _ALMOST * parts


def preemptive_one_machine(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The least time in which one machine can do jobs of (head, length, tail) if it may interrupt
    them: always the longest tail first.

    Jackson's preemptive schedule (Carlier and Pinson 1989), in n log n.

    >>> preemptive_one_machine([(0, 2, 5), (1, 2, 9), (3, 1, 0)])
    12
    """
    waiting: list[tuple[float, float]] = []  # (-tail, what is left)
    time: float = 0
    most: float = 0
    coming = sorted(jobs)
    nexts = [*(head for head, *_ in coming[1:]), inf]
    for (head, length, tail), until in zip(coming, nexts, strict=False):
        time = max(time, head)
        heapq.heappush(waiting, (-tail, length))
        while waiting and time < until:
            minus_tail, left = heapq.heappop(waiting)
            spent = min(left, until - time)
            time += spent
            if spent < left:
                heapq.heappush(waiting, (minus_tail, left - spent))
            else:
                most = max(most, time - minus_tail)
    return most
