"""An instance as a job shop: all actions of a stage and kind are a node, nodes wait for each other,
a cap limits what lives.

All microbatches cost the same, so in any schedule the k-th action of a stage and kind may be taken
for that of microbatch k: if the k-th start of a stage comes after k starts of the stage before,
then the k-th of these comes before it.  A schedule is then a job shop in which every stage works in
the order of microbatches, and results about job shops hold for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.kinds import Kind, Release, Value, makers
from ..table.placement import Placement
from .costs import StageCosts

_FAR = 1 << 30


# The halves of a backward: what makes one gradient and not the other.
(_INPUT_GRAD,) = set(makers(Value.INPUT_GRAD)) - set(makers(Value.WEIGHT_GRAD))
(_WEIGHT_GRAD,) = set(makers(Value.WEIGHT_GRAD)) - set(makers(Value.INPUT_GRAD))


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
    lag: int
    delay: float


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
        stages = range(placement.num_stages)
        last = len(stages) - 1
        at_input = release is Release.INPUT_GRAD
        nodes = [
            Node(s, Kind.F, placement.devices_of[s][0], times.forward[s], True, False)
            for s in stages
        ]
        number: dict[tuple[str, int], int] = {("F", s): s for s in stages}
        for s in reversed(stages):
            device = placement.devices_of[s][0]
            number["I", s], number["W", s] = len(nodes), len(nodes) + 1
            nodes.append(Node(s, _INPUT_GRAD, device, times.input_grad[s], False, at_input))
            nodes.append(Node(s, _WEIGHT_GRAD, device, times.weight_grad[s], False, not at_input))
        arcs = [Arc(number["F", last], number["I", last], 0, 0)]
        for s in stages:
            arcs.append(Arc(number["I", s], number["W", s], 0, 0))
            if s:
                near = set(placement.devices_of[s]) & set(placement.devices_of[s - 1])
                arcs.append(
                    Arc(number["F", s - 1], number["F", s], 0, 0 if near else times.transfer[s - 1])
                )
                arcs.append(
                    Arc(number["I", s], number["I", s - 1], 0, 0 if near else times.transfer[s])
                )
        if not placement.is_bidirectional:
            arcs += [Arc(n, n, 1, 0) for n in range(len(nodes))]
            if cap is not None:
                arcs += _cap_arcs(placement, number, cap, "I" if at_input else "W", microbatches)
        return cls(
            tuple(nodes),
            tuple(arcs),
            placement.num_devices,
            microbatches,
            cap,
            placement.is_bidirectional,
        )

    @property
    def chunks(self) -> int:
        """V, the most stages on a device."""
        held = [node.device for node in self.nodes if node.begins]
        return max(held.count(device) for device in range(self.devices))

    def on(self, device: int) -> list[int]:
        """The nodes of a device."""
        return [n for n, node in enumerate(self.nodes) if node.device == device]

    def work(self, device: int) -> float:
        """The time that a device needs for one microbatch."""
        return sum(self.nodes[n].length for n in self.on(device))

    def alone(self) -> tuple[list[float], list[float]]:
        """Of one microbatch alone: per node, its earliest start and the least time from its end to
        the end of all.
        """
        plain = [arc for arc in self.arcs if arc.lag == 0]
        heads = self._longest(plain, 1, None)
        tails = self.turned_round()._longest(_turned(plain, len(self.nodes)), 1, None)[::-1]
        return [head for (head,) in heads], [tail for (tail,) in tails]

    def heads(self) -> list[list[float]]:
        """Per node and microbatch, the earliest start."""
        return self._longest(self.arcs, self.microbatches, self._lags())

    def tails(self) -> list[list[float]]:
        """Per node and microbatch, the least time from its end to the end of all: the heads of the
        schedule read backwards.
        """
        turned = self.turned_round()
        return [
            row[::-1]
            for row in turned._longest(turned.arcs, self.microbatches, turned._lags())[::-1]
        ]

    def turned_round(self) -> JobShop:
        """The same instance with time turned round: what releases a place takes one, and the last
        microbatch is the first.
        """
        nodes = tuple(
            n._replace(begins=n.releases, releases=n.begins) for n in reversed(self.nodes)
        )
        return self._replace(nodes=nodes, arcs=_turned(self.arcs, len(nodes)))

    def _longest(
        self, arcs: Sequence[Arc], microbatches: int, lags: NDArray[np.int64] | None
    ) -> list[list[float]]:
        """Longest paths; with `lags`, a start also comes after all work of its own device that must
        precede it.
        """
        into: list[list[Arc]] = [[] for _ in self.nodes]
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
                        start = max(
                            start, starts[source][k - lag] + self.nodes[source].length + delay
                        )
                # A device's first action is microbatch 0 of the node that comes first in the order.
                start = max(
                    start,
                    opening.setdefault(node.device, start)
                    + (0 if counts is None else counts[n][k]),
                )
                starts[n][k] = start
        return starts

    def _lags(self) -> NDArray[np.int64]:
        """`[a, n]`: action k of node n comes after action k - lag of node a; _FAR where it never
        must.
        """
        count = len(self.nodes)
        least = np.full((count, count), _FAR, np.int64)
        for arc in self.arcs:
            least[arc.source, arc.target] = min(least[arc.source, arc.target], arc.lag)
        for via in range(count):
            np.minimum(least, least[:, via, None] + least[None, via, :], out=least)
        return least

    def _before(self, number: int, lags: NDArray[np.int64]) -> list[float]:
        """Per microbatch, the work of its own device that must be done before it starts, with the
        releases that the cap demands.
        """
        node, most = self.nodes[number], np.arange(self.microbatches)
        work: NDArray[np.float64] | NDArray[np.int64] = np.zeros(self.microbatches, np.int64)
        begun = np.full(self.microbatches, int(node.begins))
        released = np.zeros(self.microbatches, np.int64)
        cheapest: float | None = None
        for a in self.on(node.device):
            other = self.nodes[a]
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


def _turned(arcs: Sequence[Arc], count: int) -> tuple[Arc, ...]:
    """The arcs between nodes that are numbered from the other end."""
    return tuple(Arc(count - 1 - a.target, count - 1 - a.source, a.lag, a.delay) for a in arcs)


def _cap_arcs(
    placement: Placement,
    number: dict[tuple[str, int], int],
    cap: int,
    release: str,
    microbatches: int,
) -> list[Arc]:
    """When F k of a device's v-th stage starts, the v stages before it have begun k + 1
    microbatches each, and at most cap - 1 live.

    None of them has released more than k, so each has released k - cap + v + 1 at the least.
    """
    return [
        Arc(number[release, before], number["F", stage], cap - v, 0)
        for stages in placement.stages_of
        for v, stage in enumerate(stages)
        for before in stages[: v + 1]
        if cap - v < microbatches
    ]
