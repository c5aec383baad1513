"""Transform: the microbatches of a table become slices of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..table.action import Action, Cell, Overlap, parts
from ..table.kinds import KINDS, Pass
from ..table.schedule import Schedule


def sliced(schedule: Schedule, slices: int) -> Schedule:
    """The table whose M microbatches are slices of sequences, made of one for M + slices - 1
    microbatches (Seq1F1B, Sun et al. 2024, section 3.2).

    On every stage of the given table, forwards and backwards run in the order of microbatches.
    Backward n becomes that of microbatch n - (slices - 1), and the order within each sequence is
    reversed; forwards from M on are left out, and so are the first slices - 1 backwards.  By then
    all forwards that a backward needs have run, so the table cannot deadlock where the given one
    cannot.  A device holds at most slices - 1 activations more for each of its stages.

    >>> from jaxpipe import schedules
    >>> print(sliced(schedules.build("1f1b", devices=1, microbatches=5), 2))
             | 0     1     2     3     4     5     6     7
    device 0 | 0F0.0 0F0.1 0B0.1 0F1.0 0B0.0 0F1.1 0B1.1 0B1.0
    """
    count = schedule.num_microbatches - (slices - 1)
    rows = sliced_rows(schedule.rows, count, slices)
    return replace(schedule.with_rows(rows), num_microbatches=count, slices=slices)


def sliced_rows(rows: Iterable[Sequence[Cell]], count: int, slices: int) -> list[list[Any]]:
    """Rows for `count` + slices - 1 microbatches in order -> rows for `count` slices."""
    return [
        [cell for cell in (_renamed(c, count, slices) for c in row) if cell is not None]
        for row in rows
    ]


def _renamed(cell: Cell, count: int, slices: int) -> Cell:
    """The cell for slices; None where nothing of it is left."""
    left = []
    for stage, kind, number in parts(cell):
        if KINDS[kind].direction is Pass.BACKWARD:
            place = number - (slices - 1)
            number = place - place % slices + slices - 1 - place % slices
            left += [Action(stage, kind, number)] if place >= 0 else []
        else:
            left += [Action(stage, kind, number)] if number < count else []
    return Overlap(*left) if len(left) == 2 else left[0] if left else None
