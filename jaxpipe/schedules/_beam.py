"""Beam search over active schedules of a job shop, many partial schedules at once as rows of numpy
arrays.

Each step gives every partial schedule its next action: on the device where an action can end first,
one of those that could start before that end (Giffler and Thompson 1960).  Of all extensions, those
with the least bounds of the makespan are kept: a start, a length and a tail for each next action,
and for each device its remaining work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.bounds import JobShop
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..table.kinds import Action
from ..table.schedule import Schedule

Times: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
NEVER = np.inf
# Starts that a search of this width may compute (some seconds), and starts as which each of its
# steps counts.
_WIDTH, _BUDGET, _STEP = 32, 5_000_000, 1000
_EQUAL = 1e-9  # relative: sums of the same times in another order


def improved(schedule: Schedule, costs: Costs, shop: JobShop, *, at_least: float) -> Schedule:
    """A schedule of F, I and W that is never longer, and shorter where one is found; the same for
    the same arguments.

    Args:
        schedule: rows of F, I and W, every stage on one device.
        costs: what its makespan is counted in.
        shop: the instance, with the cap on activations.
        at_least: a makespan below which there is none.
    """
    makespan = simulate(schedule, costs).makespan
    actions = schedule.encoded.num_actions
    price = actions * (len(shop.nodes) * _WIDTH + _STEP)
    if makespan <= at_least * (1 + _EQUAL) or price > _BUDGET:
        return schedule
    order = Beam(shop).search(makespan * (1 - _EQUAL), width=_WIDTH)
    if order is None:
        return schedule
    better = schedule.with_rows(rows_of(shop, order))
    return better if simulate(better, costs).makespan < makespan * (1 - _EQUAL) else schedule


def rows_of(shop: JobShop, order: Sequence[int]) -> list[list[Action]]:
    """Each device's actions, of an order of all actions by their nodes."""
    rows: list[list[Action]] = [[] for _ in range(shop.devices)]
    done = [0] * len(shop.nodes)
    for n in order:
        node = shop.nodes[n]
        rows[node.device].append(Action(node.stage, node.kind, done[n]))
        done[n] += 1
    return rows


class Partial(NamedTuple):
    """Partial schedules, one a row of each array."""

    counts: Numbers  # per node, how many actions are placed
    # per node and microbatch, the end; NEVER where it is not placed; one more column of -NEVER, for
    # "needs nothing"
    ends: Times
    free: Times  # per device
    live: Numbers  # per device, the activations it holds
    reached: Times  # the least makespan after the actions that are placed

    def take(self, rows: Numbers) -> Partial:
        """The partial tables of these rows."""
        counts, ends, free, live, reached = self
        return Partial(counts[rows], ends[rows], free[rows], live[rows], reached[rows])


class Beam:
    """The arrays of a job shop, and the search on them."""

    def __init__(self, shop: JobShop) -> None:
        self.shop = shop
        nodes = shop.nodes
        arcs = sorted(shop.arcs, key=lambda arc: arc.target)
        self.device = np.array([node.device for node in nodes])
        self.length = np.array([node.length for node in nodes], np.float64)
        self.begins = np.array([node.begins for node in nodes])
        self.change = np.array([int(node.begins) - int(node.releases) for node in nodes])
        self._source, self._target, self._lag, self._delay = map(np.array, zip(*arcs, strict=True))
        # Every node comes after itself, so each has an arc.
        self._first_arc = np.searchsorted(self._target, np.arange(len(nodes)))
        self._cap = shop.cap if shop.cap is not None else len(nodes) * shop.microbatches
        self._hash = np.random.default_rng(0).integers(1, 1 << 62, len(nodes))

    def _empty(self) -> Partial:
        """The schedule with nothing placed."""
        shop = self.shop
        nodes, devices, microbatches = len(shop.nodes), shop.devices, shop.microbatches
        ends = np.full((1, nodes, microbatches + 1), NEVER)
        ends[:, :, microbatches] = -NEVER
        none = np.zeros((1, nodes), np.int64)
        free = np.zeros((1, devices))
        return Partial(none, ends, free, np.zeros((1, devices), np.int64), np.zeros(1))

    def search(self, limit: float, *, width: int) -> list[int] | None:
        """The nodes in the order in which the shortest schedule found places their next actions;
        None where none is below the limit.
        """
        # Per node and microbatch, the least time from its end to the end of all; one more column.
        tails = np.array([[*row, -NEVER] for row in self.shop.tails()], np.float64)
        bounds = _DeviceBounds(self, tails, limit)
        beam, parents, placed = self._empty(), [], []
        for _ in range(len(self.shop.nodes) * self.shop.microbatches):
            row, node = np.nonzero(self._conflict(beam))
            if not len(row):
                return None
            extended = self._place(beam.take(row), node, tails)
            kept = self._best(extended, bounds.score(extended, self._starts(extended)), width)
            if not len(kept):
                return None
            beam = extended.take(kept)
            parents.append(row[kept])
            placed.append(node[kept])
        last, path = int(beam.reached.argmin()), []
        for parent, node in zip(reversed(parents), reversed(placed), strict=True):
            path.append(int(node[last]))
            last = int(parent[last])
        return path[::-1]

    def _starts(self, beam: Partial) -> Times:
        """Per node, the earliest start of its next action; NEVER where what it needs is
        not placed.
        """
        at = beam.counts[:, self._target] - self._lag
        rows = np.arange(len(at))[:, None]
        at = np.where(at < 0, self.shop.microbatches, at)
        known = beam.ends[rows, self._source, at] + self._delay
        ready = np.maximum.reduceat(known, self._first_arc, axis=1)
        starts: Times = np.maximum(ready, beam.free[:, self.device])
        return starts

    def _conflict(self, beam: Partial) -> Flags:
        """On the device where an action can end first, the actions that could start before that
        end.
        """
        full = self.begins & (beam.live[:, self.device] >= self._cap)
        over = (beam.counts >= self.shop.microbatches) | full
        starts = np.where(over, NEVER, self._starts(beam))
        ends = starts + self.length
        first = ends.argmin(1)
        rows = np.arange(len(ends))
        end = ends[rows, first]
        chosen: Flags = (self.device == self.device[first][:, None]) & (starts < end[:, None])
        chosen[rows, first] = np.isfinite(end)
        return chosen

    def _place(self, beam: Partial, node: Numbers, tails: Times) -> Partial:
        """Each partial schedule with the next action of a node placed; the arrays are changed in
        place.
        """
        rows = np.arange(len(node))
        at = beam.counts[rows, node]
        device = self.device[node]
        end = self._starts(beam)[rows, node] + self.length[node]
        beam.ends[rows, node, at] = end
        beam.counts[rows, node] += 1
        beam.free[rows, device] = end
        beam.live[rows, device] += self.change[node]
        return beam._replace(reached=np.maximum(beam.reached, end + tails[node, at]))

    def _best(self, beam: Partial, score: Times, width: int) -> Numbers:
        """The rows of least score, one of those that have placed the same actions."""
        ranked = np.argsort(score, kind="stable")
        ranked = ranked[score[ranked] < NEVER]
        key = beam.counts[ranked] @ self._hash
        _, first = np.unique(key, return_index=True)
        found: Numbers = ranked[np.sort(first)[:width]]
        return found


class _DeviceBounds:
    """Bounds of the makespan for partial schedules, a device each."""

    def __init__(self, beam: Beam, tails: Times, limit: float) -> None:
        self._beam, self._tails, self._limit = beam, tails, limit
        device = beam.device
        last = tails[:, beam.shop.microbatches - 1]
        # Nodes of a device, those first whose last action has the longest tail: with any of them
        # come all before it.
        self._order = np.lexsort((-last, device))
        self._tail, self._of = last[self._order], device[self._order]
        self._first = np.searchsorted(self._of, np.arange(beam.shop.devices))
        together = (self._of[:, None] == self._of) & (
            np.arange(len(device))[:, None] <= np.arange(len(device))
        )
        self._work = together * beam.length[self._order][:, None]

    def score(self, partial: Partial, starts: Times) -> Times:
        """What ranks partial schedules: the largest bound and the mean; NEVER for those
        that are of no use.
        """
        beam = self._beam
        left = beam.shop.microbatches - partial.counts
        todo = left > 0
        known = todo & (starts < NEVER)
        tails = self._tails[np.arange(len(beam.device)), np.where(todo, partial.counts, -1)]
        alone = np.where(known, starts, 0) + np.where(known, tails, 0) + beam.length
        # An action whose needs are not placed starts no earlier than the first that can.
        soonest = np.where(known, starts, NEVER).min(1, initial=NEVER)[:, None]
        later = np.maximum(partial.free[:, beam.device], soonest)
        head = np.where(known, starts, np.where(todo, later, NEVER))[:, self._order]
        heads = np.minimum.reduceat(head, self._first, axis=1)[:, self._of]
        work = left[:, self._order] @ self._work
        together = np.where(todo[:, self._order], heads + work + self._tail, 0)
        device = np.maximum(together, alone[:, self._order])
        device = np.maximum(np.maximum.reduceat(device, self._first, axis=1), partial.free)
        bound = np.maximum(device.max(1), partial.reached)
        dead = todo.any(1) & ~known.any(1)
        score: Times = np.where(dead | (bound >= self._limit), NEVER, bound + device.mean(1))
        return score
