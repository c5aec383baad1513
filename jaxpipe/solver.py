"""Shortens a schedule with OR-tools' CP-SAT, the extra `jaxpipe[solver]`: windows of its table are put into a better order under the cap.

The model is the job shop of `simulation.lower_bound`: every stage works in the order of microbatches, which costs nothing, and a
device's activations are intervals of which at most `cap` may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, lcm
from random import Random
from typing import Any, NamedTuple, TypeAlias

from .simulation.costs import Costs, StageCosts
from .simulation.lower_bound import lower_bound
from .simulation.simulate import simulate
from .table.action import Action, Kind
from .table.kinds import Release
from .table.schedule import Schedule

try:
    from ortools.sat.python import cp_model
except ImportError as error:
    raise ImportError("search= needs OR-tools, which is not installed: pip install 'jaxpipe[solver]'") from error

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741
Starts: TypeAlias = Mapping[Action, int]
_MOST_FREE, _MOST_WHOLE = 160, 800  # actions of a window, and of a table that is ordered as a whole once
_MOST_ACTIONS = 20_000  # of a table; a model of more takes longer to build than to solve
_FINEST = 4096  # ticks that the longest action takes where times are no small fractions
_EQUAL = 1e-9  # relative: sums of the same times in another order
# In the solver's deterministic seconds: the least time that a window gets, and what a turn counts at the least, for building its model.
_LEAST_TURN, _LEAST_SPENT = 0.3, 0.05


def improve(schedule: Schedule, costs: Costs, *, cap: int | None, seconds: float, seed: int = 0) -> Schedule:
    """A schedule of F, I and W, made shorter where the solver finds how; never longer, and the same for the same arguments.

    Args:
        schedule: rows of F, I and W, every stage on one device.
        costs: what its makespan is counted in.
        cap: the most activations on a device.
        seconds: of the solver's deterministic time, of which one takes about two of a processor core, however busy that is.
        seed: which random choices the solver makes.
    """
    at_least = lower_bound(costs, placement=schedule.placement, microbatches=schedule.num_microbatches, max_activations=cap)
    best, makespan = schedule, simulate(schedule, costs).makespan
    if schedule.encoded.num_actions > _MOST_ACTIONS:
        return schedule
    spent, dice = 0.0, Random(seed)
    for window in _windows(schedule.encoded.num_actions, dice):
        if spent >= seconds or makespan <= at_least * (1 + _EQUAL):
            break
        whole = len(window) == schedule.encoded.num_actions
        share = seconds / 6 if whole else max(_LEAST_TURN, seconds / 40)
        problem = _Problem.of(best, costs, cap)
        found = problem.solve(_free(best, costs, window), min(share, seconds - spent), dice.randrange(1 << 30), at_least)
        spent += max(found.spent, _LEAST_SPENT)
        shorter = simulate(found.schedule, costs).makespan
        # One of equal length is taken too: it may be the way to a shorter one.
        if shorter <= makespan:
            best, makespan = found.schedule, shorter
    return best


def _windows(actions: int, dice: Random) -> Iterator[range]:
    """Which actions, in order of their starts, each turn may move: all where the table is small, then windows here and there."""
    most = min(actions, _MOST_FREE)
    if actions <= _MOST_WHOLE:
        yield range(actions)
    while True:
        size = max(1, min(most, round(most * dice.choice((0.25, 0.4, 0.7)))))
        begin = dice.randrange(actions - size + 1)
        yield range(begin, begin + size)


def _free(schedule: Schedule, costs: Costs, window: range) -> frozenset[Action]:
    """The actions of a window of time."""
    timeline = simulate(schedule, costs)
    actions = sorted((timeline.start[a], d, p, a) for d, p, a in schedule.actions())
    return frozenset(a for *_, a in actions[window.start : window.stop])


class _Found(NamedTuple):
    schedule: Schedule
    spent: float


@dataclass(frozen=True)
class _Problem:
    """A schedule with its times in whole ticks, each rounded up."""

    schedule: Schedule
    lengths: Mapping[Kind, Sequence[int]]
    transfer: Sequence[int]
    scale: float  # ticks of a unit of cost
    cap: int | None
    release: Kind

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, cap: int | None) -> _Problem:
        """The problem in ticks."""
        stages = costs.for_stages(schedule.num_stages)
        scale = _scale(stages)
        lengths = {F: stages.forward, I: stages.input_grad, W: stages.weight_grad}
        ticks = {kind: [ceil(time * scale - 1e-9) for time in times] for kind, times in lengths.items()}
        release = I if costs.release is Release.INPUT_GRAD else W
        return cls(schedule, ticks, [ceil(time * scale - 1e-9) for time in stages.transfer], scale, cap, release)

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
            self._places(model, start, row, horizon)
        for action, tick in hint.items():
            model.add_hint(start[action], tick)
        model.minimize(span)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # what it finds then depends on the seed alone
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = seconds
        status = solver.solve(model)
        spent = float(solver.response_proto.deterministic_time)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return _Found(self.schedule, spent)
        place: dict[Any, tuple[int, int]] = {a: (solver.value(v), i) for i, (a, v) in enumerate(start.items())}
        return _Found(self.schedule.with_rows([sorted(row, key=place.__getitem__) for row in rows]), spent)

    def _length(self, action: Action) -> int:
        return self.lengths[action.kind][action.stage]

    def _hint(self, rows: Sequence[Sequence[Action]]) -> dict[Action, int]:
        """The start of each action in ticks, in an order in which none comes before what it needs."""
        ticks = Costs(
            forward=self.lengths[F],
            input_grad=self.lengths[I],
            weight_grad=self.lengths[W],
            transfer=self.transfer,
        )
        timeline = simulate(self.schedule, ticks)
        order = sorted((timeline.start[a], timeline.end[a], d, p) for d, row in enumerate(rows) for p, a in enumerate(row))
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

    def _one_machine(self, model: Any, start: Mapping[Action, Any], row: Sequence[Action], free: frozenset[Action]) -> None:
        """One action at a time; those that are not free stay in the order of the row."""
        model.add_no_overlap([model.new_fixed_size_interval_var(start[a], self._length(a), "") for a in row])
        last: Action | None = None
        waiting: list[Action] = []
        for action in row:
            if last is not None:
                model.add(start[action] >= start[last] + self._length(last))
            if action in free:
                waiting.append(action)
                continue
            # Free actions stay on their side of those that are not.
            for other in waiting:
                model.add(start[action] >= start[other] + self._length(other))
            waiting, last = [], action

    def _places(self, model: Any, start: Mapping[Action, Any], row: Sequence[Action], horizon: int) -> None:
        """At most `cap` activations at once."""
        held = [a for a in row if a.kind is F]
        if self.cap is None or self.cap >= len(held):
            return
        lives = []
        for action in held:
            release = Action(action.stage, self.release, action.microbatch)
            size = model.new_int_var(0, horizon, "")
            lives.append(model.new_interval_var(start[action], size, start[release] + self._length(release), ""))
        model.add_cumulative(lives, [1] * len(lives), self.cap)


def _scale(costs: StageCosts) -> float:
    """Ticks of a unit of cost: exact where times are fractions of small denominators."""
    times = [*costs.forward, *costs.input_grad, *costs.weight_grad, *costs.transfer]
    fractions = [Fraction(t).limit_denominator(1000) for t in times]
    exact = all(abs(float(f) - t) <= 1e-12 * max(1.0, abs(t)) for f, t in zip(fractions, times, strict=True))
    unit = lcm(*(f.denominator for f in fractions))
    longest = max(times)
    if exact and longest * unit <= _FINEST:
        return float(unit)
    return _FINEST / longest if longest else 1.0
