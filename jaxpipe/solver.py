"""What needs OR-tools' CP-SAT, the extra `jaxpipe[solver]`: shorter tables, proofs that none is
shorter, and steady states of least period.

Both models are the job shop of `engine.bounds`: every stage works in the order of microbatches,
which costs nothing.

A small table is ordered as a whole, which may prove it optimal; of a larger one, windows are put
into a better order.  Which activations live is a matter of order alone, so the cap is a reservoir,
which the solver writes as sums over "this W comes before that F"; as intervals that overlap it
propagates far less.

In a steady state a turn of some microbatches repeats (modulo scheduling, Rau 1994, "Iterative
Modulo Scheduling").  An action of a turn starts at `r + q T`, where T is the length of a turn,
0 <= r < T and q is a whole number of turns.  A device's actions may not overlap modulo T, and the
activations that live at any time modulo T may not exceed the cap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from itertools import pairwise, product
from math import ceil, floor, lcm
from random import Random
from typing import Any, NamedTuple, TypeAlias

from .engine.bounds import JobShop, lower_bound, period_bound_of
from .engine.costs import Costs
from .engine.simulate import simulate
from .table.kinds import Action
from .table.placement import Placement
from .table.schedule import Schedule

try:
    from ortools.sat.python import cp_model
except ImportError as error:
    raise ImportError(
        "search= needs OR-tools, which is not installed: pip install 'jaxpipe[solver]'"
    ) from error

JobSlot: TypeAlias = tuple[int, int]  # a node of the job shop, and a microbatch
Starts: TypeAlias = Mapping[JobSlot, cp_model.IntVar]
# actions of a window, and of a table that is ordered as a whole once
_MOST_FREE, _MOST_WHOLE = 160, 800
_MOST_ACTIONS = 20_000  # of a table; a model of more takes longer to build than to solve
_EQUAL = 1e-9  # relative: sums of the same times in another order
# In the solver's deterministic seconds: the least time that a window gets, and what a model counts
# at the least, for building it.
_LEAST_TURN, _LEAST_SPENT = 0.3, 0.05
_TIMES = ("forward", "input_grad", "weight_grad", "transfer")
_FINEST = 4096  # ticks that the longest action takes where times are no small fractions
_WINDOWS = 10  # windows between two orders of the whole table


def _rows(shop: JobShop, starts: Iterable[tuple[int, int, int]]) -> list[list[Action]]:
    """Each device's actions, from the start, node and microbatch of every one.

    At equal times those that take none come first, in an order in which none needs a later one.
    """
    timed = sorted((start, shop.nodes[n].length, k, n) for start, n, k in starts)
    return shop.rows(n for *_, n in timed)


class Improved(NamedTuple):
    """A schedule, and what the solver has proven that none of F, I and W under the same cap goes
    below (0 where it has not), the actions that it could not move as they are.
    """

    schedule: Schedule
    proven: float = 0.0
    spent: float = 0.0  # deterministic seconds
    is_optimal: bool = False


def improve(
    schedule: Schedule, costs: Costs, *, cap: int | None, seconds: float, seed: int = 0
) -> Improved:
    """A schedule of F, I and W, made shorter where the solver finds how; never longer, and the same
    for the same arguments.

    Args:
        schedule: rows of F, I and W, every stage on one device.
        costs: what its makespan is counted in.
        cap: the most activations on a device.
        seconds: of the solver's deterministic time, which does not depend on how busy the machine
            is: one takes about one of an idle core.
        seed: which random choices the solver makes.
    """
    place, microbatches = schedule.placement, schedule.num_microbatches
    at_least = lower_bound(costs, placement=place, microbatches=microbatches, max_activations=cap)
    best, makespan, proven = schedule, simulate(schedule, costs).makespan, 0.0
    actions = schedule.encoded.num_actions
    if actions > _MOST_ACTIONS:
        return Improved(schedule)
    problem = _Problem.of(place, costs, microbatches, cap)
    spent, dice = 0.0, Random(seed)
    for window, share in _windows(actions, dice):
        is_whole = len(window) == actions
        if spent >= seconds or makespan <= max(at_least, proven) * (1 + _EQUAL):
            break
        found = problem.solve(
            best,
            window,
            min(max(_LEAST_TURN, share * seconds), seconds - spent),
            dice.randrange(1 << 30),
            max(at_least, proven) if is_whole else at_least,
        )
        spent += max(found.spent, _LEAST_SPENT)
        shorter = simulate(found.schedule, costs).makespan
        # One of equal length is taken too: it may be the way to a shorter one.
        if shorter <= makespan:
            best, makespan = found.schedule, shorter
        if is_whole:
            proven = max(proven, min(found.proven, makespan))
            if found.is_optimal:
                break
    return Improved(best, proven)


def _windows(actions: int, dice: Random) -> Iterator[tuple[range, float]]:
    """Which actions, in order of their starts, may move, and for what part of the time at most: all
    where the table is small; then windows here and there, and all again from the better table.
    """
    most = min(actions, _MOST_FREE)
    share: float = 0.5
    while True:
        if actions <= _MOST_WHOLE:
            yield range(actions), share
        share = 1
        for _ in range(_WINDOWS):
            size = max(1, min(most, round(most * dice.choice((0.25, 0.4, 0.7)))))
            begin = dice.randrange(actions - size + 1)
            yield range(begin, begin + size), 1 / 40


class _Problem(NamedTuple):
    """The job shop and its costs in whole ticks."""

    shop: JobShop
    ticks: Costs
    scale: float  # ticks of a unit of cost
    exact: bool  # whether times are whole numbers of ticks

    @classmethod
    def of(cls, placement: Placement, costs: Costs, microbatches: int, cap: int | None) -> _Problem:
        """Each time is rounded up; small fractions are whole numbers of ticks."""
        own = costs.for_stages(placement.num_stages)
        fields = {name: getattr(own, name) for name in _TIMES}
        every = [time for values in fields.values() for time in values]
        fractions = [Fraction(t).limit_denominator(1000) for t in every]
        unit, longest = lcm(*(f.denominator for f in fractions)), max(every)
        exact = longest * unit <= _FINEST and all(
            abs(float(f) - t) <= 1e-12 * max(1.0, abs(t))
            for f, t in zip(fractions, every, strict=True)
        )
        scale = float(unit) if exact else _FINEST / longest if longest else 1.0
        whole: dict[str, Any] = {
            name: tuple(ceil(time * scale - 1e-9) for time in values)
            for name, values in fields.items()
        }
        ticks = Costs(**whole)
        times = ticks.for_stages(placement.num_stages)
        shop = JobShop.of(placement, times, costs.release, microbatches, cap)
        return cls(shop, ticks, scale, exact)

    def solve(
        self, schedule: Schedule, window: range, seconds: float, seed: int, at_least: float
    ) -> Improved:
        """The best order of the actions in a window of time that is found; the others keep
        theirs.
        """
        table, timeline = schedule.encoded, simulate(schedule, self.ticks)
        node = {(n.stage, n.kind): number for number, n in enumerate(self.shop.nodes)}
        slots = [(node[a.stage, a.kind], a.microbatch) for *_, a in schedule.actions()]
        rows = [slots[a:b] for a, b in pairwise(table.first)]
        # In an order in which needs come first.
        times = sorted(zip(timeline.starts, timeline.ends, range(len(slots)), strict=True))
        hint = {slots[i]: int(begin) for begin, _, i in times}
        free = frozenset(list(hint)[window.start : window.stop])
        horizon = max(tick + self._length(slot) for slot, tick in hint.items())
        model = cp_model.CpModel()
        start = {slot: model.new_int_var(0, horizon, "") for slot in hint}
        span = model.new_int_var(floor(at_least * self.scale), horizon, "")
        self._precedences(model, start, span)
        for row in rows:
            self._device(model, start, row, free)
        for slot, tick in hint.items():
            model.add_hint(start[slot], tick)
        model.add_hint(span, horizon)
        model.minimize(span)
        solver, status = solved(model, seconds=seconds, seed=seed)
        spent = float(solver.response_proto.deterministic_time)
        proven = self._in_costs(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Improved(schedule, proven if status == cp_model.UNKNOWN else 0.0, spent)
        found = schedule.with_rows(
            _rows(self.shop, ((solver.value(v), *slot) for slot, v in start.items()))
        )
        return Improved(found, proven, spent, status == cp_model.OPTIMAL)

    def _in_costs(self, ticks: float) -> float:
        """A bound in ticks as a bound in units of cost."""
        ticks = ceil(ticks - 1e-6)
        if self.exact:
            return ticks / self.scale
        # Each action and transfer of the longest chain was rounded up by less than a tick.
        shortest = min(node.length for node in self.shop.nodes)
        chain = len(self.shop.nodes) * self.shop.microbatches
        chain = min(chain, floor(ticks / shortest)) if shortest else chain
        return max(0.0, (ticks - 2 * chain) / self.scale)

    def _length(self, slot: JobSlot) -> int:
        return int(self.shop.nodes[slot[0]].length)

    def _precedences(self, model: cp_model.CpModel, start: Starts, span: cp_model.IntVar) -> None:
        for source, target, lag, delay in self.shop.arcs:
            wait = self._length((source, 0)) + int(delay)
            for k in range(lag, self.shop.microbatches):
                model.add(start[target, k] >= start[source, k - lag] + wait)
        for slot, begin in start.items():
            model.add(span >= begin + self._length(slot))

    def _device(
        self, model: cp_model.CpModel, start: Starts, row: list[JobSlot], free: Set[JobSlot]
    ) -> None:
        """One action at a time, those before and after the free ones in their order; and at most
        `cap` activations at once, which only the free ones can change.
        """
        own = [slot for slot in row if slot in free]
        at = row.index(own[0]) if own else len(row)
        before, after = row[:at], row[at + len(own) :]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start[slot], self._length(slot), "") for slot in own]
        )
        borders = [*product(before[-1:], own or after[:1]), *product(own, after[:1])]
        for one, other in (*pairwise(before), *borders, *pairwise(after)):
            model.add(start[other] >= start[one] + self._length(one))
        nodes, cap = self.shop.nodes, self.shop.cap
        begins = [(start[slot], 1) for slot in own if nodes[slot[0]].begins]
        ends = [(start[s] + self._length(s), -1) for s in own if nodes[s[0]].releases]
        # With one stage a device, the cap is an arc of the job shop.
        if begins and cap is not None and self.shop.chunks > 1:
            held = sum(nodes[n].begins - nodes[n].releases for n, _ in before)
            times, changes = zip(*begins, *ends, strict=True)
            model.add_reservoir_constraint(times, changes, -len(ends), cap - held)


def solved(
    model: cp_model.CpModel, *, seconds: float, seed: int
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    """The solver after its search, and its status; the same for the same arguments."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # the result then depends on the seed alone
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = seconds
    return solver, solver.solve(model)


_TURNS = (1, 2, 3, 4)  # microbatches of a turn
_MOST_NODES = 400  # stages and kinds, times microbatches of a turn


class Steady(NamedTuple):
    """The period of a microbatch in costs, and the schedule of turns that have it."""

    period: float
    schedule: Schedule


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
    shop, _, scale, _ = _Problem.of(placement, costs, microbatches, cap)
    bound = period_bound_of(shop)
    delays = sum(arc.delay for arc in shop.arcs if not arc.lag)
    alone = max(1, int(sum(node.length for node in shop.nodes) + delays))  # of one microbatch
    best: _Turn | None = None
    for each in _TURNS:
        least, most = max(1, ceil(each * bound - 1e-6)), alone * each
        if best is not None:
            most = min(most, ceil(best.ticks * each / best.each) - 1)
        if least <= most and each * len(shop.nodes) <= _MOST_NODES:
            turn = _Turn(shop, cap, each, least, most)
            turn.model.minimize(turn.length)
            best = turn if turn.solve(0.8 * seconds / len(_TURNS), seed) else best
    if best is None:
        return None
    quicker = _Turn(shop, cap, best.each, best.ticks, best.ticks)
    quicker.hasten(best.starts)
    best = quicker if quicker.solve(0.2 * seconds, seed) else best
    rows = _rows(
        shop,
        (
            (starts[k % best.each] + k // best.each * best.ticks, n, k)
            for n, starts in enumerate(best.starts)
            for k in range(microbatches)
        ),
    )
    schedule = Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches)
    return Steady(best.ticks / best.each / scale, schedule)


class _Turn:
    """The model of a turn of `each` microbatches, `least` to `most` ticks long; microbatch 0 enters
    at 0.

    Attributes:
        length: how long it is: a variable.
        rest, later: likewise, per node and microbatch, the time in the turn and the number of the
            turn.
        starts, ticks: once it is solved, when actions start, and how long it is.
    """

    def __init__(self, shop: JobShop, cap: int, each: int, least: int, most: int) -> None:
        self.shop, self.each, self.least, self.most = shop, each, least, most
        self.lengths = [int(node.length) for node in shop.nodes]
        self.late = -(-cap // each) + 2  # turns that an action may start after the first
        self.model = cp_model.CpModel()
        self.length = self._integer(most, least)
        self.rest = [[self._integer(most) for _ in range(each)] for _ in self.lengths]
        self.later = [[self._integer(self.late) for _ in range(each)] for _ in self.lengths]
        self.starts: list[list[int]] = []
        self.ticks = 0
        for time in (time for row in self.rest for time in row):
            self.model.add(time < self.length)
        self.model.add(self.rest[0][0] == 0)
        self.model.add(self.later[0][0] == 0)
        self._precedences()
        for device in range(shop.devices):
            self._one_at_a_time(device)
        # of one stage a device, the cap is a lag between its W and F
        for device in range(shop.devices) if shop.chunks > 1 else ():
            self._places(device, cap)

    def solve(self, seconds: float, seed: int) -> bool:
        """Whether there is a solution, which is kept."""
        solver, status = solved(self.model, seconds=seconds, seed=seed)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        self.ticks = int(solver.value(self.length))
        self.starts = [
            [solver.value(r) + self.ticks * solver.value(q) for r, q in zip(rs, qs, strict=True)]
            for rs, qs in zip(self.rest, self.later, strict=True)
        ]
        return True

    def hasten(self, known: Sequence[Sequence[int]]) -> None:
        """Ask for the least time of a microbatch in a turn of known length, from known starts."""
        last = self._integer((self.late + 1) * self.most)
        for n, starts in enumerate(known):
            for i, start in enumerate(starts):
                self.model.add_hint(self.rest[n][i], start % self.most)
                self.model.add_hint(self.later[n][i], start // self.most)
                end = self.rest[n][i] + self.most * self.later[n][i] + self.lengths[n]
                self.model.add(last >= end)
        self.model.minimize(last)

    def _integer(self, most: int, least: int = 0) -> cp_model.IntVar:
        return self.model.new_int_var(least, most, "")

    def _precedences(self) -> None:
        """What an action needs is there, some whole number of turns before it or in the
        same one.
        """
        model, rest, later = self.model, self.rest, self.later
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
                        rest[target][i] + between * self.length >= rest[source][j] + wait
                    ).only_enforce_if(~more)

    def _one_at_a_time(self, device: int) -> None:
        """Modulo a turn: with a copy of each action a turn later, those that reach into the next
        turn count too.
        """
        intervals = []
        for n in self.shop.on(device):
            for time in self.rest[n]:
                again = self._integer(2 * self.most)
                self.model.add(again == time + self.length)
                intervals += [
                    self.model.new_fixed_size_interval_var(at, self.lengths[n], "")
                    for at in (time, again)
                ]
        self.model.add_no_overlap(intervals)

    def _places(self, device: int, cap: int) -> None:
        """A life is some whole turns, in which it takes a place all the time, and a rest."""
        model, shop, rest, later = self.model, self.shop, self.rest, self.later
        release = {node.stage: n for n, node in enumerate(shop.nodes) if node.releases}
        intervals, whole = [], []
        for n in shop.on(device):
            end = release[shop.nodes[n].stage]
            for i in range(self.each) if shop.nodes[n].begins else ():
                size = rest[end][i] + self.lengths[end] - rest[n][i]
                full, part = self._integer(self.late + 1), self._integer(self.most)
                cases = [model.new_bool_var("") for _ in range(3)]
                model.add_exactly_one(cases)
                for case, more in zip(cases, (-1, 0, 1), strict=True):
                    model.add(part == size - more * self.length).only_enforce_if(case)
                    model.add(full == later[end][i] - later[n][i] + more).only_enforce_if(case)
                model.add(part <= self.length)
                for offset in (0, 1):
                    begin, stop = self._integer(2 * self.most), self._integer(3 * self.most)
                    model.add(begin == rest[n][i] + offset * self.length)
                    intervals.append(model.new_interval_var(begin, part, stop, ""))
                whole.append(full)
        room = self._integer(cap)
        model.add(room == cap - sum(whole))
        model.add_cumulative(intervals, [1] * len(intervals), room)
