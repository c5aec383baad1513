"""What no schedule can go below: bounds of the makespan for given costs, placement and cap on activations.

All microbatches cost the same, so in any schedule the k-th action of a stage and kind may be taken for that of microbatch k: if
the k-th start of a stage comes after k starts of the stage before, then the k-th of these comes before it.  A schedule is then a
job shop in which every stage works in the order of microbatches, and the bounds of job shops hold for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError, listed, quoted
from ..table.kinds import Release
from ..table.limits import is_whole
from ..table.placement import Placement
from .costs import Costs, StageCosts

# Pairs of stage and microbatch, and stages, up to which every action has a head and a tail of its own.
_MOST_PAIRS, _MOST_STAGES = 1 << 13, 128
_FAR = 1 << 30


def lower_bound(
    costs: Costs | None = None,
    *,
    microbatches: int,
    devices: int | None = None,
    chunks: int = 1,
    placement: Placement | None = None,
    max_activations: int | None = None,
) -> float:
    """A makespan below which no schedule goes that has these costs, this placement and at most so many activations on a device.

    The largest of three: the longest chain of actions that wait for each other; for each device the preemptive one-machine problem in
    which every action has a head (what must come before it) and a tail (what must come after it) (Carlier 1982, "The one-machine
    sequencing problem"); and for each device the time for which activations occupy its places, divided by their number.  Heads and
    tails count the releases that a cap demands.  Backwards may be whole or split, whichever is cheaper.

    Args:
        costs: as for `simulate`; all 1, and transfers 0, where it is None.
        microbatches: M.
        devices: P; not needed where `placement` is given.
        chunks: V, the stages per device, where no placement is given: the bound is then the lesser of that of a loop and that of a V.
        placement: the devices of the stages.
        max_activations: the most activations (stage and microbatch pairs) on a device; no cap where it is None.

    Raises:
        ScheduleError: neither devices nor placement is given, a number is no whole number of at least 1, or the cap is too small for one
            microbatch.
        CostError: a sequence of costs does not have one entry per stage.

    >>> lower_bound(devices=4, microbatches=8), lower_bound(devices=4, microbatches=8, max_activations=2)
    (27, 39)
    """
    places = _placements(devices, chunks, placement, microbatches, max_activations)
    costs = costs or Costs()
    return min(_Bound.of(place, costs, microbatches, max_activations).value() for place in places)


def _placements(devices: object, chunks: object, placement: Placement | None, microbatches: object, cap: object) -> list[Placement]:
    """Where stages may be; ScheduleError for arguments that make no sense."""
    numbers = [("microbatches", microbatches), ("chunks", chunks)]
    numbers += [("devices", devices)] if placement is None else []
    numbers += [("max_activations", cap)] if cap is not None else []
    faults = [f"{name} must be a whole number of at least 1, not {quoted(n)}" for name, n in numbers if not (is_whole(n) and n >= 1)]
    if faults:
        raise ScheduleError(listed("there is no bound for this", faults))
    if placement is not None:
        found = [placement]
    else:
        assert is_whole(devices)
        assert is_whole(chunks)
        loop, vee = Placement.loop(devices=devices, chunks=chunks), Placement.vee(devices=devices, chunks=chunks)
        found = [loop] if chunks == 1 or devices == 1 else [loop, vee]
    if is_whole(cap) and cap < found[0].num_chunks:
        raise ScheduleError(f"max_activations={cap} is less than the {found[0].num_chunks} that one microbatch needs on a device")
    return found


class _Node(NamedTuple):
    """All actions of a stage and kind, in the order of microbatches."""

    device: int
    length: float
    begins: bool  # takes a place for activations
    releases: bool  # frees one at its end


class _Arc(NamedTuple):
    """Action k of `target` starts `delay` after the end of action k - `lag` of `source`, or later."""

    source: int
    target: int
    lag: int
    delay: float


class _Bound(NamedTuple):
    """An instance: nodes in an order in which arcs without lag go forwards."""

    nodes: tuple[_Node, ...]
    arcs: tuple[_Arc, ...]
    devices: int
    microbatches: int
    cap: int | None
    shared: bool  # some stage is on several devices

    @classmethod
    def of(cls, placement: Placement, costs: Costs, microbatches: int, cap: int | None) -> _Bound:
        """The job shop of an instance: F of each stage, then I and W from the last stage on."""
        times = _cheapest(costs.for_stages(placement.num_stages))
        stages = range(placement.num_stages)
        last = len(stages) - 1
        at_input = costs.release is Release.INPUT_GRAD
        nodes = [_Node(placement.devices_of[s][0], times.forward[s], True, False) for s in stages]
        number: dict[tuple[str, int], int] = {("F", s): s for s in stages}
        for s in reversed(stages):
            device = placement.devices_of[s][0]
            number["I", s], number["W", s] = len(nodes), len(nodes) + 1
            nodes.append(_Node(device, times.input_grad[s], False, at_input))
            nodes.append(_Node(device, times.weight_grad[s], False, not at_input))
        arcs = [_Arc(number["F", last], number["I", last], 0, 0)]
        for s in stages:
            arcs.append(_Arc(number["I", s], number["W", s], 0, 0))
            if s:
                near = set(placement.devices_of[s]) & set(placement.devices_of[s - 1])
                arcs.append(_Arc(number["F", s - 1], number["F", s], 0, 0 if near else times.transfer[s - 1]))
                arcs.append(_Arc(number["I", s], number["I", s - 1], 0, 0 if near else times.transfer[s]))
        if not placement.is_bidirectional:
            arcs += [_Arc(n, n, 1, 0) for n in range(len(nodes))]
            if cap is not None:
                arcs += _cap_arcs(placement, number, cap, "I" if at_input else "W", microbatches)
        return cls(tuple(nodes), tuple(arcs), placement.num_devices, microbatches, cap, placement.is_bidirectional)

    def value(self) -> float:
        """The largest of the bounds."""
        if self.shared:
            return max(sum(node.length for node in self.nodes) * self.microbatches / self.devices, self._chain())
        if len(self.nodes) > 3 * _MOST_STAGES or len(self.nodes) * self.microbatches > 3 * _MOST_PAIRS:
            return max(self._work(), self._area())
        return max(self._one_machine(), self._area())

    def _chain(self) -> float:
        """The time of one microbatch alone."""
        return max(self._first_starts(self.arcs, 1)[n][0] + node.length for n, node in enumerate(self.nodes))

    def _work(self) -> float:
        """A device waits for its first action, then does all its work, then the rest of the last chain must follow."""
        plain = [arc for arc in self.arcs if arc.lag == 0]
        heads, tails = self._first_starts(plain, 1), self._last_ends(plain, 1)
        found: list[float] = [0]
        for device in range(self.devices):
            mine = [n for n, node in enumerate(self.nodes) if node.device == device]
            work = sum(self.nodes[n].length for n in mine) * self.microbatches
            found.append(min(heads[n][0] for n in mine) + work + min(tails[n][0] for n in mine))
        return max(found)

    def _one_machine(self) -> float:
        """Every device as one machine, with a head and a tail for every action."""
        heads, tails = self._heads(), self._tails()
        found: list[float] = [0]
        for device in range(self.devices):
            jobs = [
                (heads[n][k], node.length, tails[n][k])
                for n, node in enumerate(self.nodes)
                if node.device == device
                for k in range(self.microbatches)
            ]
            found.append(preemptive_one_machine(jobs))
        return max(found)

    def _area(self) -> float:
        """Activations of a device live for so long in all, in as many places as the cap has."""
        if self.cap is None:
            return 0
        plain = [arc for arc in self.arcs if arc.lag == 0]
        heads, tails = self._first_starts(plain, 1), self._last_ends(plain, 1)
        found: list[float] = [0]
        for device in range(self.devices):
            begins = [n for n, node in enumerate(self.nodes) if node.device == device and node.begins]
            # Releases come in the opposite order of stages.
            releases = [n for n, node in enumerate(self.nodes) if node.device == device and node.releases][::-1]
            lives = [
                heads[r][0] + self.nodes[r].length - heads[b][0] for b, r in zip(begins, releases, strict=True)
            ]  # one microbatch alone takes the least time from a stage's F to its release
            places = min(self.cap, len(begins) * self.microbatches)
            ramp = places * (places - 1) // 2
            full = self.microbatches * sum(lives) + ramp * min(self.nodes[n].length for n in begins)
            full += ramp * min(self.nodes[n].length for n in releases)
            found.append(min(heads[n][0] for n in begins) + min(tails[n][0] for n in releases) + full / places)
        return _rounded_up(max(found), self.nodes, self.arcs)

    def _first_starts(self, arcs: Sequence[_Arc], microbatches: int) -> list[list[float]]:
        return self._longest(arcs, microbatches, None)

    def _last_ends(self, arcs: Sequence[_Arc], microbatches: int) -> list[list[float]]:
        return self._backwards()._longest(_turned(arcs, len(self.nodes)), microbatches, None)[::-1]

    def _heads(self) -> list[list[float]]:
        """Per node and microbatch, the earliest start."""
        return self._longest(self.arcs, self.microbatches, self._lags())

    def _tails(self) -> list[list[float]]:
        """Per node and microbatch, the least time from its end to the end of all: the heads of the schedule read backwards."""
        turned = self._backwards()
        return [row[::-1] for row in turned._longest(turned.arcs, self.microbatches, turned._lags())[::-1]]

    def _backwards(self) -> _Bound:
        """The same instance with time turned round: what releases a place takes one, and the last microbatch is the first."""
        nodes = tuple(_Node(n.device, n.length, n.releases, n.begins) for n in reversed(self.nodes))
        return self._replace(nodes=nodes, arcs=_turned(self.arcs, len(nodes)))

    def _longest(self, arcs: Sequence[_Arc], microbatches: int, lags: NDArray[np.int64] | None) -> list[list[float]]:
        """Longest paths; with `lags`, a start also comes after all work of its own device that must precede it."""
        into: list[list[_Arc]] = [[] for _ in self.nodes]
        for arc in arcs:
            into[arc.target].append(arc)
        starts: list[list[float]] = [[0] * microbatches for _ in self.nodes]
        counts = None if lags is None else [self._before(n, lags) for n in range(len(self.nodes))]
        opening: dict[int, float] = {}
        for k in range(microbatches):
            for n, node in enumerate(self.nodes):
                start: float = 0
                for source, _, lag, delay in into[n]:
                    if k >= lag:
                        start = max(start, starts[source][k - lag] + self.nodes[source].length + delay)
                # A device's first action is microbatch 0 of the node that comes first in the order.
                start = max(start, opening.setdefault(node.device, start) + (0 if counts is None else counts[n][k]))
                starts[n][k] = start
        return starts

    def _lags(self) -> NDArray[np.int64]:
        """`[a, n]`: action k of node n comes after action k - lag of node a; _FAR where it never must."""
        count = len(self.nodes)
        least = np.full((count, count), _FAR, np.int64)
        for arc in self.arcs:
            least[arc.source, arc.target] = min(least[arc.source, arc.target], arc.lag)
        for via in range(count):
            np.minimum(least, least[:, via, None] + least[None, via, :], out=least)
        return least

    def _before(self, number: int, lags: NDArray[np.int64]) -> list[float]:
        """Per microbatch, the work of its own device that must be done before it starts, with the releases that the cap demands."""
        node, most = self.nodes[number], np.arange(self.microbatches)
        work: NDArray[np.float64] | NDArray[np.int64] = np.zeros(self.microbatches, np.int64)
        begun = np.full(self.microbatches, int(node.begins))
        released = np.zeros(self.microbatches, np.int64)
        cheapest: float | None = None
        for a, other in enumerate(self.nodes):
            if other.device != node.device:
                continue
            done = np.clip(most - lags[a, number] + 1, 0, self.microbatches)
            work = work + done * other.length
            begun += done * other.begins
            released += done * other.releases
            if other.releases:
                cheapest = other.length if cheapest is None else min(cheapest, other.length)
        if self.cap is not None and cheapest is not None:
            work = work + np.maximum(begun - self.cap - released, 0) * cheapest
        found: list[float] = work.tolist()
        return found


def _turned(arcs: Sequence[_Arc], count: int) -> tuple[_Arc, ...]:
    """The arcs between nodes that are numbered from the other end."""
    return tuple(_Arc(count - 1 - a.target, count - 1 - a.source, a.lag, a.delay) for a in arcs)


def _cap_arcs(placement: Placement, number: dict[tuple[str, int], int], cap: int, release: str, microbatches: int) -> list[_Arc]:
    """When F k of a device's v-th stage starts, the v stages before it have begun k + 1 microbatches each, and at most cap - 1 live.

    None of them has released more than k, so each has released k - cap + v + 1 at the least.
    """
    return [
        _Arc(number[release, before], number["F", stage], cap - v, 0)
        for stages in placement.stages_of
        for v, stage in enumerate(stages)
        for before in stages[: v + 1]
        if cap - v < microbatches
    ]


def _cheapest(costs: StageCosts) -> StageCosts:
    """Times that no schedule goes below: of a whole backward and its halves the cheaper, of pairs what their halves add at the least."""
    forward, whole, dgrad, wgrad = costs.forward, costs.backward, costs.input_grad, costs.weight_grad
    if costs.overlap is not None:
        pair = min(costs.overlap)
        whole, dgrad = tuple(min(b, pair) for b in whole), tuple(min(i, pair) for i in dgrad)
        longest = max((*whole, *dgrad))
        forward = tuple(min(f, max(0, o - longest)) for f, o in zip(forward, costs.overlap, strict=True))
    first = tuple(min(i, b) for i, b in zip(dgrad, whole, strict=True))
    rest = tuple(min(i + w, b) - f for i, w, b, f in zip(dgrad, wgrad, whole, first, strict=True))
    return StageCosts(
        forward=forward,
        input_grad=first,
        weight_grad=rest,
        backward=whole,
        transfer=costs.transfer,
        overlap=None,
        activation=costs.activation,
        recompute=costs.recompute,
        checkpoint=costs.checkpoint,
        last=costs.last,
        first=costs.first,
        first_grad=costs.first_grad,
    )


def _rounded_up(value: float, nodes: Sequence[_Node], arcs: Sequence[_Arc]) -> float:
    """The next whole number where all times are whole, since then every makespan is."""
    whole = all(isinstance(n.length, int) for n in nodes) and all(isinstance(a.delay, int) for a in arcs)
    return ceil(value - 1e-9) if whole else value


def preemptive_one_machine(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The least time in which one machine can do jobs of (head, length, tail) if it may interrupt them: always the longest tail first.

    Jackson's preemptive schedule (Carlier and Pinson 1989), in n log n.

    >>> preemptive_one_machine([(0, 2, 5), (1, 2, 9), (3, 1, 0)])
    12
    """
    waiting: list[tuple[float, float]] = []  # (-tail, what is left)
    time: float = 0
    most: float = 0
    coming = sorted(jobs)
    at = 0
    while at < len(coming) or waiting:
        if not waiting:
            time = max(time, coming[at][0])
        while at < len(coming) and coming[at][0] <= time:
            heapq.heappush(waiting, (-coming[at][2], coming[at][1]))
            at += 1
        tail, left = heapq.heappop(waiting)
        until = coming[at][0] if at < len(coming) else float("inf")
        if time + left <= until:
            time += left
            most = max(most, time - tail)
        else:
            heapq.heappush(waiting, (tail, left - (until - time)))
            time = until
    return most
