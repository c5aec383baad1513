"""Shortens a schedule, and proves how short it can be, with OR-tools' CP-SAT, the extra
`jaxpipe[solver]`.

The model is the job shop of `engine.job_shop`: every stage works in the order of microbatches,
which costs nothing.  A small table is ordered as a whole, which may prove it optimal; of a larger
one, windows are put into a better order.  Which activations live is a matter of order alone, so the
cap is written as sums over "this W comes before that F"; as intervals that overlap it propagates
far less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from random import Random
from typing import Any, NamedTuple, TypeAlias

from ..engine.bounds import lower_bound
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..table.action import Action, Kind
from ..table.kinds import Release
from ..table.schedule import Schedule
from .cp import cp_model, tick_scale

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741
Starts: TypeAlias = Mapping[Action, int]
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
    at_least = lower_bound(
        costs,
        placement=schedule.placement,
        microbatches=schedule.num_microbatches,
        max_activations=cap,
    )
    best, makespan, proven = schedule, simulate(schedule, costs).makespan, 0.0
    actions = schedule.encoded.num_actions
    if actions > _MOST_ACTIONS:
        return Improved(schedule, proven)
    spent, dice = 0.0, Random(seed)
    for turn in _turns(actions, dice):
        if spent >= seconds or makespan <= max(at_least, proven) * (1 + _EQUAL):
            break
        share = max(_LEAST_TURN, turn.share * seconds)
        problem = _Problem.of(best, costs, cap)
        least = max(at_least, proven) if turn.is_whole else at_least
        found = problem.solve(
            _free(best, costs, turn.window),
            min(share, seconds - spent),
            dice.randrange(1 << 30),
            least,
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


def _free(schedule: Schedule, costs: Costs, window: range) -> frozenset[Action]:
    """The actions of a window of time."""
    timeline = simulate(schedule, costs)
    actions = sorted((timeline.start[a], d, p, a) for d, p, a in schedule.actions())
    return frozenset(a for *_, a in actions[window.start : window.stop])


class _Found(NamedTuple):
    schedule: Schedule
    spent: float
    proven: float = 0.0  # for the free actions
    is_optimal: bool = False


@dataclass(frozen=True)
class _Problem:
    """A schedule with its times in whole ticks, each rounded up."""

    schedule: Schedule
    lengths: Mapping[Kind, Sequence[int]]
    transfer: Sequence[int]
    scale: float  # ticks of a unit of cost
    exact: bool  # whether times are whole numbers of ticks
    cap: int | None
    release: Kind

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, cap: int | None) -> _Problem:
        """The problem in ticks."""
        stages = costs.for_stages(schedule.num_stages)
        scale, exact = tick_scale(stages)
        lengths = {F: stages.forward, I: stages.input_grad, W: stages.weight_grad}
        ticks = {
            kind: [ceil(time * scale - 1e-9) for time in times] for kind, times in lengths.items()
        }
        release = I if costs.release is Release.INPUT_GRAD else W
        return cls(
            schedule,
            ticks,
            [ceil(time * scale - 1e-9) for time in stages.transfer],
            scale,
            exact,
            cap,
            release,
        )

    def solve(self, free: frozenset[Action], seconds: float, seed: int, at_least: float) -> _Found:
        """The best order of the free actions that is found; the others keep theirs."""
        rows = [[a for a in row if isinstance(a, Action)] for row in self.schedule.rows]
        hint = self._hint(rows)
        horizon = max(hint[a] + self._length(a) for a in hint)
        model = cp_model.CpModel()
        start = {a: model.new_int_var(0, horizon, "") for a in hint}
        span = model.new_int_var(floor(at_least * self.scale), horizon, "")
        self._precedences(model, start, span)
        for row in rows:
            self._one_machine(model, start, row, free)
            self._places(model, start, row, free)
        for action, tick in hint.items():
            model.add_hint(start[action], tick)
        model.add_hint(span, horizon)
        model.minimize(span)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # what it finds then depends on the seed alone
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = seconds
        status = solver.solve(model)
        spent = float(solver.response_proto.deterministic_time)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Found(
                self.schedule,
                spent,
                self._in_costs(solver.best_objective_bound) if status == cp_model.UNKNOWN else 0.0,
            )
        # At equal times those that take none come first, in an order in which none needs a later
        # one.
        place: dict[Any, tuple[int, ...]] = {
            a: (solver.value(v), self._length(a), a.microbatch, self._depth(a))
            for a, v in start.items()
        }
        ordered = self.schedule.with_rows([sorted(row, key=place.__getitem__) for row in rows])
        return _Found(
            ordered, spent, self._in_costs(solver.best_objective_bound), status == cp_model.OPTIMAL
        )

    def _in_costs(self, ticks: float) -> float:
        """What no schedule goes below in units of cost if none goes below so many ticks."""
        ticks = ceil(ticks - 1e-6)
        if self.exact:
            return ticks / self.scale
        # Each action and transfer of the longest chain was rounded up by less than a tick.
        shortest = min(min(times) for times in self.lengths.values())
        chain = self.schedule.encoded.num_actions
        chain = min(chain, floor(ticks / shortest)) if shortest else chain
        return max(0.0, (ticks - 2 * chain) / self.scale)

    def _depth(self, action: Action) -> int:
        """The place of a stage and kind on a microbatch's way through the stages and back."""
        last = self.schedule.num_stages - 1
        return (
            action.stage
            if action.kind is F
            else 2 * (last - action.stage) + last + 1 + (action.kind is W)
        )

    def _length(self, action: Action) -> int:
        return self.lengths[action.kind][action.stage]

    def _hint(self, rows: Sequence[Sequence[Action]]) -> dict[Action, int]:
        """The start of each action in ticks, in an order in which none comes before what
        it needs.
        """
        ticks = Costs(
            forward=self.lengths[F],
            input_grad=self.lengths[I],
            weight_grad=self.lengths[W],
            transfer=self.transfer,
        )
        timeline = simulate(self.schedule, ticks)
        order = sorted(
            (timeline.start[a], timeline.end[a], d, p)
            for d, row in enumerate(rows)
            for p, a in enumerate(row)
        )
        return {rows[d][p]: int(begin) for begin, _, d, p in order}

    def _before(self, action: Action) -> list[tuple[Action, int]]:
        """What an action comes after, and how long after its end."""
        stage, kind, microbatch = action
        found = [(Action(stage, kind, microbatch - 1), 0)] if microbatch else []
        device = self.schedule.stage_to_device
        if kind is W:
            return [*found, (Action(stage, I, microbatch), 0)]
        source = stage - 1 if kind is F else stage + 1
        if source < 0:
            return found
        if source == self.schedule.num_stages:
            return [*found, (Action(stage, F, microbatch), 0)]
        delay = 0 if device[source] == device[stage] else self.transfer[source]
        return [*found, (Action(source, kind, microbatch), delay)]

    def _precedences(self, model: Any, start: Mapping[Action, Any], span: Any) -> None:
        for action, begin in start.items():
            for other, delay in self._before(action):
                model.add(begin >= start[other] + self._length(other) + delay)
            model.add(span >= begin + self._length(action))

    def _one_machine(
        self,
        model: Any,
        start: Mapping[Action, Any],
        row: Sequence[Action],
        free: frozenset[Action],
    ) -> None:
        """One action at a time; those that are not free stay in the order of the row, and free ones
        on their side of them.
        """
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start[a], self._length(a), "")
                for a in row
                if a in free
            ]
        )
        last: Action | None = None
        waiting: list[Action] = []
        for action in row:
            if last is not None:
                model.add(start[action] >= start[last] + self._length(last))
            if action in free:
                waiting.append(action)
                continue
            for other in waiting:
                model.add(start[action] >= start[other] + self._length(other))
            waiting, last = [], action

    def _places(
        self,
        model: Any,
        start: Mapping[Action, Any],
        row: Sequence[Action],
        free: frozenset[Action],
    ) -> None:
        """At most `cap` activations at once, when any of the free F starts; before and after the
        free actions nothing changes.
        """
        stages = sorted({a.stage for a in row})
        if self.cap is None or self.cap >= len(stages) * self.schedule.num_microbatches:
            return
        begins = {s: [a for a in row if a in free and a.kind is F and a.stage == s] for s in stages}
        ends = {
            s: [a for a in row if a in free and a.kind is self.release and a.stage == s]
            for s in stages
        }
        first = next((place for place, a in enumerate(row) if a in free), 0)
        held = sum(a.kind is F for a in row[:first]) - sum(
            a.kind is self.release for a in row[:first]
        )
        order = _Order(model, start, self._length)
        for stage in stages:
            for passed, action in enumerate(begins[stage]):
                # So many activations live if the F of other stages come after it and nothing is
                # released.
                live = held + passed + 1 - self.cap
                others = [s for s in stages if s != stage]
                # A microbatch's own release comes after its F.
                mine = [a for a in ends[stage] if a.microbatch < action.microbatch]
                if others:
                    freed = [*mine, *(a for s in others for a in ends[s])]
                    taken = [a for s in others for a in begins[s]]
                    model.add(
                        live + sum(order.before(a, action) for a in taken)
                        <= sum(order.before(a, action) for a in freed)
                    )
                elif live > 0:
                    assert live <= len(mine), "the table breaks the cap"
                    model.add(start[action] >= start[mine[live - 1]] + self._length(mine[live - 1]))


class _Order:
    """Which of two actions of a device comes first, as variables that are made when they are asked
    for.
    """

    def __init__(
        self, model: Any, start: Mapping[Action, Any], length: Callable[[Action], int]
    ) -> None:
        self._model, self._start, self._length = model, start, length
        self._known: dict[tuple[Action, Action], Any] = {}

    def before(self, one: Action, other: Action) -> Any:
        """Whether `one` ends before `other` starts; if not, it starts after its end."""
        found = self._known.get((one, other))
        if found is None:
            found = self._model.new_bool_var("")
            self._model.add(
                self._start[other] >= self._start[one] + self._length(one)
            ).only_enforce_if(found)
            self._model.add(
                self._start[one] >= self._start[other] + self._length(other)
            ).only_enforce_if(~found)
            self._known[one, other], self._known[other, one] = found, ~found
        return found
