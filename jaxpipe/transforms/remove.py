"""Transforms that leave actions out: transfers, R, collective actions, backwards, microbatches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..errors import ScheduleError
from ..table.action import Action, Kind, parts
from ..table.kinds import (
    KINDS,
    RECOMPUTE,
    SHARES,
    TRANSFERS,
    Pass,
    Value,
    kinds_where,
    makers,
    readers,
)
from ..table.schedule import Schedule
from ..table.typed import typed

_FORWARDS = (
    *makers(Value.OUTPUT),
    *kinds_where(lambda spec: spec.is_collective and spec.direction is Pass.FORWARD),
)


@typed()
def remove_transfers(schedule: Schedule) -> Schedule:
    """The compute-only table: without SEND and RECV, everything else as it is."""
    return _without(schedule, TRANSFERS)


@typed()
def remove_recompute(schedule: Schedule) -> Schedule:
    """The table without R, everything else as it is: every F keeps its activations.

    >>> import jaxpipe as jp
    >>> print(remove_recompute(jp.Schedule.from_csv("0F0,0F1,0R0,0B0,0R1,0B1")).to_csv(), end="")
    0F0,0F1,0B0,0B1
    """
    return _without(schedule, RECOMPUTE)


@typed()
def remove_spread(schedule: Schedule) -> Schedule:
    """The table without L, E, G and H, everything else as it is: `last` and `first` run with the F
    of their stages.

    >>> import jaxpipe as jp
    >>> print(remove_spread(jp.Schedule.from_csv("0F0,0L0,0B0")).to_csv(), end="")
    0F0,0B0
    """
    return _without(schedule, SHARES)


def without_kinds(schedule: Schedule, kinds: Collection[Kind]) -> Schedule:
    """The table without these kinds, without kinds that read only their values (H reads those of
    L), and without idle cells.
    """
    made = (value for kind in kinds if KINDS[kind].is_collective for value in KINDS[kind].makes)
    table = _without(schedule, {*kinds, *(late for value in made for late in readers(value))})
    return table.with_rows([[c for c in row if c is not None] for row in table.rows])


def _without(schedule: Schedule, kinds: Collection[Kind]) -> Schedule:
    return schedule.with_rows(
        [
            [c for c in row if not isinstance(c, Action) or c.kind not in kinds]
            for row in schedule.cells
        ]
    )


def refuse_transfers(schedule: Schedule, how: str) -> None:
    """ScheduleError for a table with SEND and RECV; `how` says what to do without them."""
    if schedule.has_transfers:
        raise ScheduleError(
            f"the table has SEND and RECV; {how} "
            "(jaxpipe.transforms.remove_transfers takes them out)"
        )


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, with L and E where it has any, in its order: the table of
    an evaluation.
    """
    return schedule.with_rows(
        [[a for cell in row for a in parts(cell) if a.kind in _FORWARDS] for row in schedule.rows]
    )


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


def for_evaluation(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule's forwards alone, under its name; of its first microbatches where it has
    more.
    """
    table = (
        schedule if schedule.forward_only else replace(forward_only(schedule), name=schedule.name)
    )
    fewer = microbatches < schedule.num_microbatches
    return first_microbatches(table, microbatches) if fewer else table
