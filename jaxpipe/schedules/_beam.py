"""Beam search over the active schedules of a job shop, on arrays of partial schedules.

Each step gives every partial schedule its next action: on the device where an action can end first,
one of those that could start before that end (Giffler and Thompson 1960).  Of all that result,
those with the least bounds of the makespan are kept.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.bounds import JobShop
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..table.schedule import Schedule

Times: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
NEVER = np.inf
# Partial schedules that a search keeps, and how many starts it may compute (about a second).
_WIDTHS, _BUDGET = (512, 256, 128, 64, 32), 2_500_000
_MEAN = 0.1  # weight of the mean of all devices' bounds beside the largest
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
    most = _BUDGET // (schedule.encoded.num_actions * len(shop.nodes))
    width = next((width for width in _WIDTHS if width <= most), 0)
    # Where no forward waits there is less to choose from, so a small width goes far, and what it
    # finds lowers the limit of the other search.
    for waits, kept in ((False, width // 4), (True, width)):
        if makespan <= at_least * (1 + _EQUAL) or not width:
            return schedule
        order = Beam(shop).search(makespan * (1 - _EQUAL), width=kept, waits=waits)
        better = schedule if order is None else schedule.with_rows(shop.rows(order))
        if (found := simulate(better, costs).makespan) < makespan * (1 - _EQUAL):
            schedule, makespan = better, found
    return schedule


class Partial(NamedTuple):
    """Partial schedules, one a column of each array, and of `ends` a row."""

    counts: Numbers  # per node, how many actions are placed
    # per node and microbatch, the end; NEVER where it is not placed, and in one more column; of one
    # more node, which those need that need nothing, -NEVER
    ends: Times
    # per node, the earliest of its next action; NEVER where none is left, or what it needs is not
    # placed
    starts: Times
    free: Times  # per device
    live: Numbers  # per device, the activations it holds
    reached: Times  # the least makespan after the actions that are placed

    def take(self, which: Numbers) -> Partial:
        """These partial tables."""
        counts, ends, starts, free, live, reached = self
        per_node = counts.take(which, 1), ends.take(which, 0), starts.take(which, 1)
        return Partial(*per_node, free.take(which, 1), live.take(which, 1), reached.take(which))


class Beam:
    """The arrays of a job shop, and the search on them."""

    def __init__(self, shop: JobShop) -> None:
        self.shop = shop
        tails = np.array(shop.tails(), np.float64)
        # By device, those first whose last action has the longest tail.
        order = sorted(range(len(shop.nodes)), key=lambda n: (shop.nodes[n].device, -tails[n, -1]))
        self._node, nodes = np.array(order), [shop.nodes[n] for n in order]
        count, columns = len(nodes), shop.microbatches + 1
        # Of the devices that have nodes: the number of each node's, and the first node of each.
        self._device = np.unique([node.device for node in nodes], return_inverse=True)[1]
        self._first = np.flatnonzero(np.diff(self._device, prepend=-1))
        self._length = np.array([[node.length] for node in nodes], np.float64)
        self._begins = np.array([[node.begins] for node in nodes])
        self._change = np.array([int(node.begins) - int(node.releases) for node in nodes])
        self._cap = shop.cap if shop.cap is not None else count * shop.microbatches
        self._hash = np.random.default_rng(0).integers(1, 1 << 62, count)
        # Per node and microbatch, the least time from its end to the end of all; one more column.
        self._tails = np.pad(tails, ((0, 0), (0, 1)))[self._node]
        self._last = self._tails[:, -2, None]
        # Per node the lengths of those of its device up to it: with any of them come all before it.
        self._work = np.tril(self._device[:, None] == self._device) * self._length[:, 0]
        # A node's action needs that of one other node for the same microbatch.  What else it needs
        # is of its own device, so that it is over when the device is free, or there is no place.
        number = self._node.argsort()
        direct = [arc for arc in shop.arcs if not arc.lag]
        assert len({arc.target for arc in direct}) == len(direct)
        self._row = np.arange(count + 1)[:, None] * columns  # of a node in flat ends and tails
        self._source = np.full((count, 1), count * columns)
        self._delay = np.zeros((count, 1))
        for arc in direct:
            self._source[number[arc.target]] = self._row[number[arc.source]]
            self._delay[number[arc.target]] = arc.delay

    def _empty(self) -> Partial:
        """The schedule with nothing placed."""
        count, microbatches = len(self._node), self.shop.microbatches
        ends = np.full((1, count + 1, microbatches + 1), NEVER)
        ends[:, -1, :-1] = -NEVER
        counts = np.zeros((count, 1), np.int64)
        free = np.zeros((len(self._first), 1))
        live = np.zeros((len(self._first), 1), np.int64)
        return Partial(counts, ends, self._starts(counts, ends, free), free, live, np.zeros(1))

    def search(self, limit: float, *, width: int, waits: bool) -> list[int] | None:
        """The nodes in the order in which the shortest schedule found places their next actions;
        None where none is below the limit.  With `waits`, an F that could start may wait.
        """
        beam, parents, placed = self._empty(), [], []
        for _ in range(len(self.shop.nodes) * self.shop.microbatches):
            parent, node = np.nonzero(self._conflict(beam, waits).T)
            extended = self._place(beam.take(parent), node)
            kept = self._best(extended, limit, width)
            if not len(kept):
                return None
            beam = extended.take(kept)
            parents.append(parent[kept])
            placed.append(self._node[node[kept]])
        last, path = int(beam.reached.argmin()), []
        for parent, node in zip(reversed(parents), reversed(placed), strict=True):
            path.append(int(node[last]))
            last = int(parent[last])
        return path[::-1]

    def _starts(self, counts: Numbers, ends: Times, free: Times) -> Times:
        """Per node, the earliest start of its next action; NEVER where none is left, or what it
        needs is not placed.
        """
        at = counts + self._source + np.arange(len(ends)) * ends[:1].size
        starts: Times = np.maximum(ends.take(at) + self._delay, free[self._device])
        return starts

    def _conflict(self, beam: Partial, waits: bool) -> Flags:
        """Per partial schedule, on the device where an action can end first, the actions that could
        start before that end.
        """
        full = self._begins & (beam.live >= self._cap)[self._device]
        starts = np.where(full, NEVER, beam.starts)
        chosen = self._conflict_of(starts)
        if not waits:
            return chosen
        # An F takes memory, so it may also wait for what comes next without it.
        return chosen | self._conflict_of(np.where(chosen & self._begins, NEVER, starts))

    def _conflict_of(self, starts: Times) -> Flags:
        """The same, of actions with these starts."""
        ends, each = starts + self._length, np.arange(starts.shape[1])
        first = np.minimum.reduceat(ends, self._first)
        mine, end = self._device[:, None] == first.argmin(0), first.min(0)
        chosen: Flags = mine & (starts < end)
        chosen[(mine & (ends == end)).argmax(0), each] = np.isfinite(end)
        return chosen

    def _place(self, beam: Partial, node: Numbers) -> Partial:
        """Each partial schedule with the next action of a node placed; the arrays are changed in
        place.
        """
        each, device = np.arange(len(node)), self._device[node]
        at = beam.counts[node, each]
        end = beam.starts[node, each] + self._length[node, 0]
        beam.counts[node, each] += 1
        beam.ends[each, node, at] = end
        beam.free[device, each] = end
        beam.live[device, each] += self._change[node]
        return beam._replace(
            starts=self._starts(beam.counts, beam.ends, beam.free),
            reached=np.maximum(beam.reached, end + self._tails[node, at]),
        )

    def _best(self, beam: Partial, limit: float, width: int) -> Numbers:
        """Those of least score below the limit, one of those that have placed the same actions:
        what ranks them is the largest bound of a device and some of the mean.

        A device is bounded by each action that can start, and by what is left to do on it: the
        first start, all its work up to some node, and that node's tail.
        """
        counts, starts, first = beam.counts, beam.starts, self._first
        left = self.shop.microbatches - counts.astype(np.float64)  # many times faster than integers
        todo, known = left > 0, starts < NEVER
        alone = np.where(
            known, starts + self._length + self._tails.take(counts + self._row[:-1]), 0
        )
        # What cannot start yet starts no earlier than the first that can.
        soonest = starts.min(0)
        later = np.logical_or.reduceat(todo & ~known, first)
        heads = np.where(later, np.maximum(beam.free, soonest), np.minimum.reduceat(starts, first))
        together = heads[self._device] + self._work @ left + self._last
        bounds = np.maximum(np.where(todo, together, 0), alone)
        device = np.maximum(np.maximum.reduceat(bounds, first), beam.free)
        bound = np.maximum(device.max(0), beam.reached)
        ends = (soonest < NEVER) | ~todo.any(0)  # others wait for what cannot start
        score = np.where(ends & (bound < limit), bound + _MEAN * device.mean(0), NEVER)
        ranked = np.argsort(score, kind="stable")
        ranked = ranked[score[ranked] < NEVER]
        _, unlike = np.unique(self._hash @ counts[:, ranked], return_index=True)
        return ranked[np.sort(unlike)[:width]]
