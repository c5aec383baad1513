"""Tables in which some backwards are whole and the others split, whichever is shorter."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TypeAlias

from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..table.action import Action, Cell, Kind
from ..table.schedule import Schedule

_Pass: TypeAlias = tuple[int, int]  # (stage, microbatch)
_MOST_ACTIONS = 60_000  # of all tables that are simulated together: about half a second
_SHORTER = 1 - 1e-9


def whole_backwards(schedule: Schedule) -> Schedule:
    """The table with a B where each I is, and no W; no device holds more than before."""
    return _changed(schedule, {a[::2] for _, _, a in schedule.actions() if a.kind is Kind.I})


def mixed(schedule: Schedule, costs: Costs) -> Schedule:
    """The table with those backwards whole, or split, with which it is shorter: all of them, then
    halves of them by time, and halves of these.

    A B is where the I was, and an I with its W where the B was; backwards in overlapped pairs stay.
    """
    timeline = simulate(schedule, costs)
    stages = costs.for_stages(schedule.num_stages)
    # Parts are always worth trying, and a whole backward where it takes less than they do.
    cheaper = [
        whole < first + rest
        for whole, first, rest in zip(
            stages.backward, stages.input_grad, stages.weight_grad, strict=True
        )
    ]
    passes = sorted(
        (timeline.start[a], a[::2])
        for row in schedule.rows
        for a in row
        if isinstance(a, Action) and (a.kind is Kind.B or (a.kind is Kind.I and cheaper[a.stage]))
    )
    groups = deque([[each for _, each in passes]] if passes else [])
    tries = _MOST_ACTIONS // max(1, schedule.encoded.num_actions)
    best, changed, makespan = schedule, set[_Pass](), timeline.makespan
    while groups and tries > 0:
        group, tries = groups.popleft(), tries - 1
        table = _changed(schedule, changed ^ set(group))
        found = simulate(table, costs).makespan
        if found < makespan * _SHORTER:
            best, changed, makespan = table, changed ^ set(group), found
        if len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return best


def _changed(schedule: Schedule, passes: Collection[_Pass]) -> Schedule:
    """The table with these backwards the other way."""

    def cells(cell: Cell) -> tuple[Cell, ...]:
        if not isinstance(cell, Action) or cell[::2] not in passes:
            return (cell,)
        if cell.kind is Kind.B:
            return (cell._replace(kind=Kind.I), cell._replace(kind=Kind.W))
        if cell.kind is Kind.I:
            return (cell._replace(kind=Kind.B),)
        return () if cell.kind is Kind.W else (cell,)

    return schedule.with_rows(
        [[each for cell in row for each in cells(cell)] for row in schedule.rows]
    )
