"""Transform: the forwards of a table alone, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from ..table.action import Action, Row, parts
from ..table.kinds import Value, makers
from ..table.schedule import Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, in its order: the table of an evaluation."""
    return schedule.with_rows([tuple(_forwards(row)) for row in schedule.rows])


def _forwards(row: Row) -> Iterator[Action]:
    return (action for cell in row for action in parts(cell) if action.kind in makers(Value.OUTPUT))
