"""Local search on a table of F, I and W: the whole by beam search, forwards and backwards in time,
then windows of it again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..engine.costs import Costs
from ..engine.job_shop import JobShop
from ..engine.loop import Loop
from ..engine.simulate import simulate
from ..table.action import Action
from ..table.run_order import Transfers
from ..table.schedule import Schedule
from ._beam import Beam, Goal, Partial, Times

_WIDTH, _WINDOW_WIDTH = 32, 16  # partial schedules that are kept, of the whole and of a window
_MEANS = (0.1, 1.0)  # weights of the mean of all devices' bounds
_SIZES = (32, 64)  # actions of a window
# Starts that may be computed (half a second), and actions of a table (more take longer to copy than
# to search).
_BUDGET, _MOST_ACTIONS = 2_500_000, 2_000
_STEP = 1000  # starts, as which a step of a beam counts beforehand
_SET_UP = 20  # starts, as which setting up a window counts, for each action of the table
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
    timeline = simulate(schedule, costs)
    if timeline.makespan <= at_least * (1 + _EQUAL) or schedule.encoded.num_actions > _MOST_ACTIONS:
        return schedule
    search = _Search(shop, at_least, _BUDGET)
    table, number = (
        schedule.encoded,
        {(int(node.kind), node.stage): n for n, node in enumerate(shop.nodes)},
    )
    # Equal times stay in an order in which none needs a later one.  Where microbatches are not in
    # order, renaming them costs nothing.
    order = sorted(schedule.run_order(Transfers.ASYNC).order, key=timeline.starts.__getitem__)
    nodes = [number[int(table.kind[i]), int(table.stage[i])] for i in order]
    better = schedule.with_rows(rows_of(shop, search.run(nodes)))
    return (
        better if simulate(better, costs).makespan < timeline.makespan * (1 - _EQUAL) else schedule
    )


def rows_of(shop: JobShop, order: Sequence[int]) -> list[list[Action]]:
    """Each device's actions, of an order of all actions by their nodes."""
    rows: list[list[Action]] = [[] for _ in range(shop.devices)]
    done = [0] * len(shop.nodes)
    for n in order:
        node = shop.nodes[n]
        rows[node.device].append(Action(node.stage, node.kind, done[n]))
        done[n] += 1
    return rows


class _Times(NamedTuple):
    """An order of all actions, by their nodes, with what follows from it."""

    nodes: list[int]
    ends: Times  # per node and microbatch
    makespan: float


class _Search:
    """Beam searches over all actions and over windows of a table."""

    def __init__(self, shop: JobShop, at_least: float, budget: int) -> None:
        self.shop, self.at_least, self.budget = shop, at_least * (1 + _EQUAL), budget
        self.beam = Beam(shop)
        self.waits = shop.cap is not None and shop.chunks > 1
        self.out: list[list[tuple[int, int, float]]] = [[] for _ in shop.nodes]
        for source, target, lag, delay in shop.arcs:
            self.out[source].append((target, lag, delay))

    def run(self, nodes: list[int]) -> list[int]:
        """The best order that is found."""
        best = self.timed(nodes)
        best = self.whole(best)
        return self.windows(best).nodes

    def is_over(self, best: _Times) -> bool:
        return best.makespan <= self.at_least or self.beam.spent >= self.budget

    def whole(self, best: _Times) -> _Times:
        """Beam search over all actions, from the start on and from the end on."""
        back = Beam(self.shop.turned_round())
        last = len(self.shop.nodes) - 1
        for mean in _MEANS:
            for beam in (self.beam, back):
                if (
                    self.is_over(best)
                    or self.beam.spent + len(best.nodes) * (len(self.shop.nodes) * _WIDTH + _STEP)
                    > self.budget
                ):
                    return best
                limit = best.makespan * (1 - _EQUAL)
                found = beam.search(
                    beam.empty(), beam.whole(limit), width=_WIDTH, mean=mean, waits=False
                )
                if beam is back:
                    self.beam.spent, back.spent = self.beam.spent + back.spent, 0
                if found is None:
                    continue
                order = found[1] if beam is self.beam else [last - n for n in reversed(found[1])]
                best = min(best, self.timed(order), key=lambda times: times.makespan)
        return best

    def windows(self, best: _Times) -> _Times:
        """Windows of the order, one after the other, as long as they shorten it."""
        total = len(best.nodes)
        quiet = 0
        spans = list(self._spans(total))
        turn = 0
        while quiet < len(spans) and not self.is_over(best):
            begin, end = spans[turn % len(spans)]
            turn += 1
            found = self.window(best, begin, end)
            quiet = 0 if found.makespan < best.makespan * (1 - _EQUAL) else quiet + 1
            best = found
        return best

    def _spans(self, total: int) -> Iterator[tuple[int, int]]:
        for size in _SIZES:
            step = size // 2
            for begin in range(0, max(1, total - step), step):
                yield begin, min(total, begin + size)

    def window(self, best: _Times, begin: int, end: int) -> _Times:
        """The order with the actions `begin` to `end` placed again."""
        start, goal = self._start(best, begin), self._goal(best, begin, end)
        self.beam.spent += _SET_UP * len(best.nodes)
        found = self.beam.search(start, goal, width=_WINDOW_WIDTH, mean=1.0, waits=self.waits)
        if found is None:
            return best
        again = self.timed([*best.nodes[:begin], *found[1], *best.nodes[end:]])
        return again if again.makespan <= best.makespan * (1 + _EQUAL) else best

    def _start(self, best: _Times, begin: int) -> Partial:
        """What is placed before a window."""
        start = self.beam.empty()
        for n in best.nodes[:begin]:
            at, device = start.counts[0, n], self.beam.device[n]
            start.ends[0, n, at] = start.free[0, device] = best.ends[n, at]
            start.counts[0, n] += 1
            start.live[0, device] += self.beam.change[n]
        return start

    def _goal(self, best: _Times, begin: int, end: int) -> Goal:
        """What follows a window: tails along the order after it, and along the waits alone
        in it.
        """
        shop, length = self.shop, self.beam.length
        at = [shop.microbatches] * len(shop.nodes)
        tails = np.zeros((len(shop.nodes), shop.microbatches + 1))
        after = np.zeros(shop.devices)
        stop = None
        for place in range(len(best.nodes) - 1, begin - 1, -1):
            if place == end - 1:
                stop = np.array(at)
            n = best.nodes[place]
            at[n] -= 1
            k, device = at[n], shop.nodes[n].device
            tail = float(after[device])
            for target, lag, delay in self.out[n]:
                if k + lag < shop.microbatches:
                    tail = max(tail, delay + float(length[target]) + tails[target, k + lag])
            tails[n, k] = tail
            if place >= end:
                after[device] = tail + length[n]
        assert stop is not None
        return Goal(stop, tails, after, best.makespan * (1 + _EQUAL))

    def timed(self, nodes: Sequence[int]) -> _Times:
        """When the actions of an order end, and the order by their starts."""
        shop, m = self.shop, self.shop.microbatches
        devices, lengths = ([n.device for n in shop.nodes], [n.length for n in shop.nodes])
        loop = Loop(
            shop.devices,
            [device for device in devices for _ in range(m)],
            [-1] * (len(devices) * m),
            [0] * (len(devices) * m),
            [length for length in lengths for _ in range(m)],
        )
        # What an action needs of its own device comes before it in any order.
        for source, target, _, delay in shop.arcs:
            if devices[source] != devices[target]:
                for k in range(m):
                    loop.wait(target * m + k, source * m + k, delay)
        done = [n * m for n in range(len(devices))]
        numbers = []
        for n in nodes:
            numbers.append(done[n])
            done[n] += 1
        loop.run(numbers)
        starts = sorted((loop.starts[i], place, i // m) for place, i in enumerate(numbers))
        ends = np.array(loop.ends, np.float64).reshape(len(devices), m)
        return _Times([n for *_, n in starts], ends, max(loop.free))
