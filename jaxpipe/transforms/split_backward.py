"""Transform: each full backward B becomes I and W."""

from __future__ import annotations

from ..table.action import Action, Cell, Kind, Overlap
from ..table.schedule import Schedule
from ..table.typed import typed


@typed()
def split_backward(schedule: Schedule) -> Schedule:
    """Replace each B by its I and, right after it, its W; the inverse of `merge_backward`.

    A B in an overlapped pair becomes an I in the pair and a W after the pair.  In a table with
    transfers the SEND stays where it is, after the W: split first, then add transfers, and the SEND
    comes before the W.

    >>> import jaxpipe as jp
    >>> print(split_backward(jp.Schedule.from_csv("0F0,0F1,0B0,0B1")).to_csv(), end="")
    0F0,0F1,0I0,0W0,0I1,0W1
    """
    return schedule.with_rows(
        [[part for cell in row for part in _split(cell)] for row in schedule.cells]
    )


def _split(cell: Cell) -> tuple[Cell, ...]:
    """The cells that a cell becomes."""
    backward = cell.backward if isinstance(cell, Overlap) else cell
    if backward is None or backward.kind is not Kind.B:
        return (cell,)
    stage, _, microbatch = backward
    dgrad, wgrad = Action(stage, Kind.I, microbatch), Action(stage, Kind.W, microbatch)
    if isinstance(cell, Overlap):
        return (Overlap(cell.forward, dgrad), wgrad)
    return (dgrad, wgrad)
