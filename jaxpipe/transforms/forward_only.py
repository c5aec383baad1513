"""Transform: the forwards of a table alone, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..table.action import Action, Row, parts
from ..table.kinds import Pass, Value, kinds_where, makers
from ..table.schedule import Schedule

_KEPT = (
    *makers(Value.OUTPUT),
    *kinds_where(lambda spec: spec.is_collective and spec.direction is Pass.FORWARD),
)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, with L and E where it has any, in its order: the table of
    an evaluation.
    """
    return schedule.with_rows([tuple(_forwards(row)) for row in schedule.rows])


def first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """The actions of the first `count` microbatches alone, in the table's order: microbatches do
    not wait for each other.

    >>> from jaxpipe import schedules
    >>> print(
    ...     first_microbatches(forward_only(schedules.build("gpipe", devices=2, microbatches=3)), 1)
    ... )
             | 0   1
    device 0 | 0F0
    device 1 |     1F0
    """
    rows = [
        tuple(cell for cell in row if all(action.microbatch < count for action in parts(cell)))
        for row in schedule.rows
    ]
    return replace(schedule.with_rows(rows), num_microbatches=count)


def _forwards(row: Row) -> Iterator[Action]:
    return (action for cell in row for action in parts(cell) if action.kind in _KEPT)


def for_evaluation(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule's forwards alone, under its name; of its first microbatches where it has
    more.
    """
    table = (
        schedule if schedule.forward_only else replace(forward_only(schedule), name=schedule.name)
    )
    fewer = microbatches < schedule.num_microbatches
    return first_microbatches(table, microbatches) if fewer else table
