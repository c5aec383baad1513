"""Steady states of least period: modulo scheduling of a turn of some microbatches (Rau 1994,
"Iterative Modulo Scheduling"), by CP-SAT.

Action k of a turn starts at `r + q T`, where T is the length of a turn, 0 <= r < T and q is a whole
number of turns.  A device's actions may not overlap modulo T, and the activations that live at any
time modulo T may not exceed the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from ..engine.bounds import JobShop, period_bound_of
from ..engine.costs import Costs
from ..table.placement import Placement
from .shorten import cp_model, in_ticks, solved

_TURNS = (1, 2, 3, 4)  # microbatches of a turn
_MOST_NODES = 400  # stages and kinds, times microbatches of a turn
_EQUAL = 1e-9


class Steady(NamedTuple):
    """A steady state: per node and microbatch of a turn, when it starts in the first turn."""

    starts: tuple[tuple[int, ...], ...]
    turn: int  # length in ticks
    period: float  # of a microbatch, in costs

    def order(self, shop: JobShop) -> list[int]:
        """All actions of a whole step, by their nodes, in the order in which the turns run them."""
        each = len(self.starts[0])
        # At equal times those that take none come first, in an order in which none needs a later
        # one.
        timed = [
            (self.starts[n][k % each] + (k // each) * self.turn, node.length, k, n)
            for n, node in enumerate(shop.nodes)
            for k in range(shop.microbatches)
        ]
        return [n for *_, n in sorted(timed)]


def least_period(
    placement: Placement,
    costs: Costs,
    *,
    microbatches: int,
    cap: int,
    seconds: float,
    seed: int = 0,
) -> Steady | None:
    """The steady state of least period that is found, of those with the least time of a microbatch;
    None where there was no time for one.

    Args:
        placement, costs, microbatches: the instance.
        cap: the most activations on a device.
        seconds: of the solver's deterministic time.
        seed: which random choices the solver makes.
    """
    stages = placement.num_stages
    ticks, scale, _ = in_ticks(costs.for_stages(stages))
    shop = JobShop.of(placement, ticks.for_stages(stages), costs.release, microbatches, cap)
    bound = period_bound_of(shop)
    best: Steady | None = None
    for each in _TURNS:
        if each * len(shop.nodes) > _MOST_NODES or (
            best is not None and best.period <= bound * (1 + _EQUAL)
        ):
            break
        below = None if best is None else best.period
        found = _Turn(shop, each, bound).solve(seconds / (2 * len(_TURNS)), seed, None, below)
        if found is not None and (best is None or found.period < best.period * (1 - _EQUAL)):
            best = found
    if best is None:
        return None
    turn = _Turn(shop, len(best.starts[0]), bound)
    best = turn.solve(seconds / 2, seed, best, None) or best
    return best._replace(period=best.period / scale)


class _Times(NamedTuple):
    """The variables of a model: the length of a turn and its bound, and per node and microbatch the
    time in the turn and the number of the turn.
    """

    model: Any
    turn: Any
    most: int
    rest: Sequence[Sequence[Any]]
    later: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class _Turn:
    """A turn of `each` microbatches; all times are in ticks."""

    shop: JobShop
    each: int
    bound: float  # of a microbatch

    @cached_property
    def lengths(self) -> list[int]:
        """The length of each node."""
        return [int(node.length) for node in self.shop.nodes]

    @cached_property
    def least(self) -> int:
        """The least length of a turn."""
        return max(1, ceil(self.each * self.bound - 1e-6))

    @cached_property
    def most(self) -> int:
        """That of one microbatch after the other."""
        delays = sum(int(arc.delay) for arc in self.shop.arcs if not arc.lag)
        return max(1, self.each * (sum(self.lengths) + delays))

    @cached_property
    def late(self) -> int:
        """The turns that an action may start after the first."""
        cap, shop = self.shop.cap, self.shop
        held = 2 * shop.chunks * shop.devices if cap is None else cap
        return -(-held // self.each) + 2

    def solve(
        self, seconds: float, seed: int, known: Steady | None, below: float | None
    ) -> Steady | None:
        """The shortest turn; of a `known` length, the one in which microbatches take the least
        time.
        """
        most = self.most if below is None else min(self.most, ceil(below * self.each) - 1)
        if most < self.least:
            return None
        model = cp_model.CpModel()
        if known is not None:
            most = known.turn
        turn = model.new_int_var(self.least if known is None else most, most, "")
        times = self._times(model, turn, most)
        _, _, _, rest, later = times
        self._precedences(times)
        self._devices(times)
        self._memory(times)
        if known is None:
            model.minimize(turn)
        else:
            for n, row in enumerate(known.starts):
                for i, start in enumerate(row):
                    model.add_hint(rest[n][i], start % known.turn)
                    model.add_hint(later[n][i], start // known.turn)
            last = model.new_int_var(0, (self.late + 1) * most, "")
            for n, length in enumerate(self.lengths):
                for i in range(self.each):
                    model.add(last >= rest[n][i] + known.turn * later[n][i] + length)
            model.minimize(last)
        solver, status = solved(model, seconds=seconds, seed=seed)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        length = int(solver.value(turn))
        starts = tuple(
            tuple(solver.value(r) + length * solver.value(q) for r, q in zip(rs, qs, strict=True))
            for rs, qs in zip(rest, later, strict=True)
        )
        return Steady(starts, length, length / self.each)

    def _times(self, model: Any, turn: Any, most: int) -> _Times:
        """The variables; microbatch 0 enters at 0."""
        rest = [[model.new_int_var(0, most, "") for _ in range(self.each)] for _ in self.lengths]
        later = [
            [model.new_int_var(0, self.late, "") for _ in range(self.each)] for _ in self.lengths
        ]
        for row in rest:
            for time in row:
                model.add(time < turn)
        model.add(rest[0][0] == 0)
        model.add(later[0][0] == 0)
        return _Times(model, turn, most, rest, later)

    def _precedences(self, times: _Times) -> None:
        """What an action needs is there, some whole number of turns before it or in the
        same one.
        """
        model, turn, _, rest, later = times
        for source, target, lag, delay in self.shop.arcs:
            wait = self.lengths[source] + int(delay)
            for i in range(self.each):
                ago, j = divmod(i - lag, self.each)
                turns = later[target][i] - later[source][j] - ago
                model.add(turns >= 0)
                for between in range(2 + wait // self.least):
                    more = model.new_bool_var("")
                    model.add(turns >= between + 1).only_enforce_if(more)
                    model.add(
                        rest[target][i] + between * turn >= rest[source][j] + wait
                    ).only_enforce_if(~more)

    def _devices(self, times: _Times) -> None:
        """One action at a time, modulo a turn: with a copy of each a turn later, those that reach
        into the next turn count too.
        """
        model, turn, most, rest, _ = times
        for device in range(self.shop.devices):
            intervals = []
            for n, node in enumerate(self.shop.nodes):
                for time in rest[n] if node.device == device else ():
                    again = model.new_int_var(0, 2 * most, "")
                    model.add(again == time + turn)
                    intervals += [
                        model.new_fixed_size_interval_var(at, self.lengths[n], "")
                        for at in (time, again)
                    ]
            model.add_no_overlap(intervals)

    def _memory(self, times: _Times) -> None:
        """A life is some whole turns, in which it takes a place all the time, and a rest."""
        model, turn, most, rest, later = times
        shop = self.shop
        # of one stage a device, the cap is a lag between its W and F
        if shop.cap is None or shop.chunks == 1:
            return
        release = {node.stage: n for n, node in enumerate(shop.nodes) if node.releases}
        for device in range(shop.devices):
            intervals, whole = [], []
            for n, node in enumerate(shop.nodes):
                if node.device != device or not node.begins:
                    continue
                end = release[node.stage]
                for i in range(self.each):
                    size = rest[end][i] + self.lengths[end] - rest[n][i]
                    full = model.new_int_var(0, self.late + 1, "")
                    part = model.new_int_var(0, most, "")
                    cases = [model.new_bool_var("") for _ in range(3)]
                    model.add_exactly_one(cases)
                    for case, more in zip(cases, (-1, 0, 1), strict=True):
                        model.add(part == size - more * turn).only_enforce_if(case)
                        model.add(full == later[end][i] - later[n][i] + more).only_enforce_if(case)
                    model.add(part <= turn)
                    for offset in (0, 1):
                        begin = model.new_int_var(0, 2 * most, "")
                        stop = model.new_int_var(0, 3 * most, "")
                        model.add(begin == rest[n][i] + offset * turn)
                        intervals.append(model.new_interval_var(begin, part, stop, ""))
                    whole.append(full)
            room = model.new_int_var(0, shop.cap, "")
            model.add(room == shop.cap - sum(whole))
            model.add_cumulative(intervals, [1] * len(intervals), room)
