"""Shortens a schedule, and proves how short it can be, with OR-tools' CP-SAT, the extra
`jaxpipe[solver]`.

The model is the job shop of `engine.bounds`: every stage works in the order of microbatches,
which costs nothing.  A small table is ordered as a whole, which may prove it optimal; of a larger
one, windows are put into a better order.  Which activations live is a matter of order alone, so the
cap is written as sums over "this W comes before that F"; as intervals that overlap it propagates
far less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, lcm
from random import Random
from typing import Any, NamedTuple, TypeAlias

from ..engine.bounds import JobShop, lower_bound
from ..engine.costs import Costs, StageCosts
from ..engine.simulate import simulate
from ..table.kinds import Action
from ..table.schedule import Schedule

try:
    from ortools.sat.python import cp_model as cp_model
except ImportError as error:
    raise ImportError(
        "search= needs OR-tools, which is not installed: pip install 'jaxpipe[solver]'"
    ) from error

Slot: TypeAlias = tuple[int, int]  # a node of the job shop, and a microbatch
# actions of a window, and of a table that is ordered as a whole once
_MOST_FREE, _MOST_WHOLE = 160, 800
_MOST_ACTIONS = 20_000  # of a table; a model of more takes longer to build than to solve
_EQUAL = 1e-9  # relative: sums of the same times in another order
# In the solver's deterministic seconds: the least time that a window gets, and what a turn counts
# at the least, for building its model.
_LEAST_TURN, _LEAST_SPENT = 0.3, 0.05
_WINDOWS = 10  # windows between two turns of the whole table


class Improved(NamedTuple):
    """A schedule, and what the solver has proven that none of F, I and W under the same cap goes
    below (0 where it has not).
    """

    schedule: Schedule
    proven: float


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
    shape: dict[str, Any] = {
        "placement": schedule.placement,
        "microbatches": schedule.num_microbatches,
    }
    at_least = lower_bound(costs, **shape, max_activations=cap)
    best, makespan, proven = schedule, simulate(schedule, costs).makespan, 0.0
    actions = schedule.encoded.num_actions
    if actions > _MOST_ACTIONS:
        return Improved(schedule, proven)
    ticks, scale, exact = in_ticks(costs.for_stages(schedule.num_stages))
    times = ticks.for_stages(schedule.num_stages)
    shop = JobShop.of(**shape, times=times, release=costs.release, cap=cap)
    problem = _Problem(shop, ticks, scale, exact)
    spent, dice = 0.0, Random(seed)
    for turn in _turns(actions, dice):
        if spent >= seconds or makespan <= max(at_least, proven) * (1 + _EQUAL):
            break
        share = max(_LEAST_TURN, turn.share * seconds)
        found = problem.solve(
            best,
            turn.window,
            min(share, seconds - spent),
            dice.randrange(1 << 30),
            max(at_least, proven) if turn.is_whole else at_least,
        )
        spent += max(found.spent, _LEAST_SPENT)
        shorter = simulate(found.schedule, costs).makespan
        # One of equal length is taken too: it may be the way to a shorter one.
        if shorter <= makespan:
            best, makespan = found.schedule, shorter
        if turn.is_whole:
            proven = max(proven, min(found.proven, makespan))
            if found.is_optimal:
                break
    return Improved(best, proven)


class _Turn(NamedTuple):
    """Which actions, in order of their starts, may move, and for what part of the time at most."""

    window: range
    share: float
    is_whole: bool = False


def _turns(actions: int, dice: Random) -> Iterator[_Turn]:
    """All actions where the table is small; then windows here and there, and all again from the
    better table.
    """
    most = min(actions, _MOST_FREE)
    small = actions <= _MOST_WHOLE
    share = 0.5
    while True:
        if small:
            yield _Turn(range(actions), share, True)
        share = 1
        for _ in range(_WINDOWS):
            size = max(1, min(most, round(most * dice.choice((0.25, 0.4, 0.7)))))
            begin = dice.randrange(actions - size + 1)
            yield _Turn(range(begin, begin + size), 1 / 40)


class _Found(NamedTuple):
    schedule: Schedule
    spent: float
    proven: float = 0.0  # for the free actions
    is_optimal: bool = False


class _Problem(NamedTuple):
    """The job shop and its costs in whole ticks."""

    shop: JobShop
    ticks: Costs
    scale: float  # ticks of a unit of cost
    exact: bool  # whether times are whole numbers of ticks

    def solve(
        self, schedule: Schedule, window: range, seconds: float, seed: int, at_least: float
    ) -> _Found:
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
            self._one_machine(model, start, row, free)
            self._places(model, start, row, free)
        for slot, tick in hint.items():
            model.add_hint(start[slot], tick)
        model.add_hint(span, horizon)
        model.minimize(span)
        solver, status = solved(model, seconds=seconds, seed=seed)
        spent = float(solver.response_proto.deterministic_time)
        proven = self._in_costs(solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Found(schedule, spent, proven if status == cp_model.UNKNOWN else 0.0)
        # At equal times those that take none come first, in an order in which none needs a later
        # one.
        place = {
            (n, k): (solver.value(v), self._length((n, k)), k, n) for (n, k), v in start.items()
        }
        ordered = [
            [
                Action(self.shop.nodes[n].stage, self.shop.nodes[n].kind, k)
                for n, k in sorted(row, key=place.__getitem__)
            ]
            for row in rows
        ]
        return _Found(schedule.with_rows(ordered), spent, proven, status == cp_model.OPTIMAL)

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

    def _length(self, slot: Slot) -> int:
        return int(self.shop.nodes[slot[0]].length)

    def _precedences(self, model: Any, start: Mapping[Slot, Any], span: Any) -> None:
        for source, target, lag, delay in self.shop.arcs:
            wait = self._length((source, 0)) + int(delay)
            for k in range(lag, self.shop.microbatches):
                model.add(start[target, k] >= start[source, k - lag] + wait)
        for slot, begin in start.items():
            model.add(span >= begin + self._length(slot))

    def _one_machine(
        self, model: Any, start: Mapping[Slot, Any], row: Sequence[Slot], free: frozenset[Slot]
    ) -> None:
        """One action at a time; those that are not free stay in the order of the row, and free ones
        on their side of them.
        """
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start[slot], self._length(slot), "")
                for slot in row
                if slot in free
            ]
        )
        last: Slot | None = None
        waiting: list[Slot] = []
        for slot in row:
            if last is not None:
                model.add(start[slot] >= start[last] + self._length(last))
            if slot in free:
                waiting.append(slot)
                continue
            for other in waiting:
                model.add(start[slot] >= start[other] + self._length(other))
            waiting, last = [], slot

    def _places(
        self, model: Any, start: Mapping[Slot, Any], row: Sequence[Slot], free: frozenset[Slot]
    ) -> None:
        """At most `cap` activations at once, when any of the free F starts; before and after the
        free actions nothing changes.
        """
        nodes, cap = self.shop.nodes, self.shop.cap
        stages = {nodes[n].stage for n, _ in row}
        # With one stage a device, the cap is an arc of the job shop.
        if cap is None or len(stages) == 1 or cap >= len(stages) * self.shop.microbatches:
            return
        begins = [slot for slot in row if slot in free and nodes[slot[0]].begins]
        ends = [slot for slot in row if slot in free and nodes[slot[0]].releases]
        first = next((place for place, slot in enumerate(row) if slot in free), 0)
        held = sum(nodes[n].begins - nodes[n].releases for n, _ in row[:first])
        known: dict[tuple[Slot, Slot], Any] = {}

        def before(one: Slot, other: Slot) -> Any:
            """Whether `one` ends before `other` starts; if not, it starts after its end."""
            if (one, other) not in known:
                known[one, other] = found = model.new_bool_var("")
                known[other, one] = ~found
                later, sooner = start[other] - start[one], start[one] - start[other]
                model.add(later >= self._length(one)).only_enforce_if(found)
                model.add(sooner >= self._length(other)).only_enforce_if(~found)
            return known[one, other]

        for slot in begins:
            stage, microbatch = nodes[slot[0]].stage, slot[1]
            # A stage works in the order of microbatches, and a release comes after its F.
            mine = [s for s in begins if nodes[s[0]].stage == stage and s[1] <= microbatch]
            taken = [s for s in begins if nodes[s[0]].stage != stage]
            freed = [s for s in ends if nodes[s[0]].stage != stage or s[1] < microbatch]
            model.add(
                held + len(mine) + sum(before(s, slot) for s in taken)
                <= cap + sum(before(s, slot) for s in freed)
            )


_TIMES = ("forward", "input_grad", "weight_grad", "transfer")
_FINEST = 4096  # ticks that the longest action takes where times are no small fractions


def in_ticks(times: StageCosts) -> tuple[Costs, float, bool]:
    """Times of F, I, W and transfers in whole ticks, each rounded up; the ticks of a unit of cost;
    and whether all are whole numbers of ticks, as fractions of small denominators are.
    """
    fields = {name: getattr(times, name) for name in _TIMES}
    every = [time for values in fields.values() for time in values]
    fractions = [Fraction(t).limit_denominator(1000) for t in every]
    unit = lcm(*(f.denominator for f in fractions))
    longest = max(every)
    exact = longest * unit <= _FINEST and all(
        abs(float(f) - t) <= 1e-12 * max(1.0, abs(t)) for f, t in zip(fractions, every, strict=True)
    )
    scale = float(unit) if exact else _FINEST / longest if longest else 1.0
    ticks: dict[str, Any] = {
        name: tuple(ceil(time * scale - 1e-9) for time in values) for name, values in fields.items()
    }
    return Costs(**ticks), scale, exact


def solved(model: Any, *, seconds: float, seed: int) -> tuple[Any, Any]:
    """The solver after its search, and its status; the same for the same arguments."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # the result then depends on the seed alone
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = seconds
    return solver, solver.solve(model)
