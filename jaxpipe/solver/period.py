"""Steady states of least period: modulo scheduling of a turn of some microbatches (Rau 1994,
"Iterative Modulo Scheduling"), by CP-SAT.

Action k of a turn starts at `r + q T`, where T is the length of a turn, 0 <= r < T and q is a whole
number of turns.  A device's actions may not overlap modulo T, and the activations that live at any
time modulo T may not exceed the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from ..engine.bounds import period_bound_of
from ..engine.costs import StageCosts
from ..engine.job_shop import JobShop
from .cp import cp_model, tick_scale

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
    shop: JobShop, costs: StageCosts, *, seconds: float, seed: int = 0
) -> Steady | None:
    """The steady state of least period that is found, of those with the least time of a microbatch;
    None where there was no time for one.

    Args:
        shop: the instance; its number of microbatches does not count.
        costs: its costs, which say how fine a tick is.
        seconds: of the solver's deterministic time.
        seed: which random choices the solver makes.
    """
    scale, _ = tick_scale(costs)
    bound = period_bound_of(shop)
    best: Steady | None = None
    best_turn = 1
    for each in _TURNS:
        if each * len(shop.nodes) > _MOST_NODES or (
            best is not None and best.period <= bound * (1 + _EQUAL)
        ):
            break
        turn = _Turn.of(shop, scale, each, bound)
        found = turn.solve(
            seconds / (2 * len(_TURNS)), seed, None, None if best is None else best.period
        )
        if found is not None and (best is None or found.period < best.period * (1 - _EQUAL)):
            best, best_turn = found, each
    if best is None:
        return None
    return _Turn.of(shop, scale, best_turn, bound).solve(seconds / 2, seed, best, None) or best


@dataclass(frozen=True)
class _Turn:
    """A turn of `each` microbatches, in ticks."""

    shop: JobShop
    scale: float
    each: int
    lengths: Sequence[int]
    least: int  # ticks of a turn
    most: int
    late: int  # turns that an action may start after the first

    @classmethod
    def of(cls, shop: JobShop, scale: float, each: int, bound: float) -> _Turn:
        """The turn of an instance."""
        lengths = [_ticks(node.length, scale) for node in shop.nodes]
        # One microbatch after the other.
        most = each * (
            sum(lengths) + sum(_ticks(arc.delay, scale) for arc in shop.arcs if not arc.lag)
        )
        held = shop.cap if shop.cap is not None else 2 * shop.chunks * shop.devices
        return cls(
            shop,
            scale,
            each,
            lengths,
            max(1, ceil(each * bound * scale - 1e-6)),
            max(1, most),
            -(-held // each) + 2,
        )

    def solve(
        self, seconds: float, seed: int, known: Steady | None, below: float | None
    ) -> Steady | None:
        """The shortest turn; of a `known` length, the one in which microbatches take the least
        time.
        """
        most = (
            self.most if below is None else min(self.most, ceil(below * self.each * self.scale) - 1)
        )
        if most < self.least:
            return None
        model = cp_model.CpModel()
        turn = (
            model.new_int_var(self.least, most, "")
            if known is None
            else model.new_constant(known.turn)
        )
        most = most if known is None else known.turn
        rest, later = self._times(model, turn, most)
        self._precedences(model, turn, rest, later)
        self._devices(model, turn, rest, most)
        self._memory(model, turn, rest, later, most)
        if known is None:
            model.minimize(turn)
        else:
            self._hint(model, known, rest, later)
            last = model.new_int_var(0, (self.late + 1) * most, "")
            for n, length in enumerate(self.lengths):
                for i in range(self.each):
                    model.add(last >= rest[n][i] + known.turn * later[n][i] + length)
            model.minimize(last)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = seconds
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        length = int(solver.value(turn))
        starts = tuple(
            tuple(
                int(solver.value(r)) + length * int(solver.value(q))
                for r, q in zip(rs, qs, strict=True)
            )
            for rs, qs in zip(rest, later, strict=True)
        )
        return Steady(starts, length, length / self.each / self.scale)

    def _times(self, model: Any, turn: Any, most: int) -> tuple[list[list[Any]], list[list[Any]]]:
        """Of each action the time in its turn and the number of the turn; microbatch 0 enters
        at 0.
        """
        rest = [[model.new_int_var(0, most, "") for _ in range(self.each)] for _ in self.lengths]
        later = [
            [model.new_int_var(0, self.late, "") for _ in range(self.each)] for _ in self.lengths
        ]
        for row in rest:
            for time in row:
                model.add(time < turn)
        model.add(rest[0][0] == 0)
        model.add(later[0][0] == 0)
        return rest, later

    def _hint(
        self,
        model: Any,
        known: Steady,
        rest: Sequence[Sequence[Any]],
        later: Sequence[Sequence[Any]],
    ) -> None:
        for n, row in enumerate(known.starts):
            for i, start in enumerate(row):
                model.add_hint(rest[n][i], start % known.turn)
                model.add_hint(later[n][i], start // known.turn)

    def _precedences(
        self, model: Any, turn: Any, rest: Sequence[Sequence[Any]], later: Sequence[Sequence[Any]]
    ) -> None:
        """What an action needs is there, some whole number of turns before it or in the
        same one.
        """
        for source, target, lag, delay in self.shop.arcs:
            wait = self.lengths[source] + _ticks(delay, self.scale)
            for i in range(self.each):
                ago, j = divmod(i - lag, self.each)
                turns = later[target][i] - later[source][j] - ago
                model.add(turns >= 0)
                for given in range(2 + wait // self.least):
                    more = model.new_bool_var("")
                    model.add(turns >= given + 1).only_enforce_if(more)
                    model.add(
                        rest[target][i] + given * turn >= rest[source][j] + wait
                    ).only_enforce_if(~more)

    def _devices(self, model: Any, turn: Any, rest: Sequence[Sequence[Any]], most: int) -> None:
        """One action at a time, modulo a turn: with a copy of each a turn later, those that reach
        into the next turn count too.
        """
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

    def _memory(
        self,
        model: Any,
        turn: Any,
        rest: Sequence[Sequence[Any]],
        later: Sequence[Sequence[Any]],
        most: int,
    ) -> None:
        """A life is some whole turns, in which it takes a place all the time, and a rest."""
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
                    full, part = (
                        model.new_int_var(0, self.late + 1, ""),
                        model.new_int_var(0, most, ""),
                    )
                    cases = [model.new_bool_var("") for _ in range(3)]
                    model.add_exactly_one(cases)
                    for case, more in zip(cases, (-1, 0, 1), strict=True):
                        model.add(part == size - more * turn).only_enforce_if(case)
                        model.add(full == later[end][i] - later[n][i] + more).only_enforce_if(case)
                    model.add(part <= turn)
                    for offset in (0, 1):
                        begin, stop = (
                            model.new_int_var(0, 2 * most, ""),
                            model.new_int_var(0, 3 * most, ""),
                        )
                        model.add(begin == rest[n][i] + offset * turn)
                        intervals.append(model.new_interval_var(begin, part, stop, ""))
                    whole.append(full)
            room = model.new_int_var(0, shop.cap, "")
            model.add(room == shop.cap - sum(whole))
            model.add_cumulative(intervals, [1] * len(intervals), room)


def _ticks(time: float, scale: float) -> int:
    return ceil(time * scale - 1e-9)
