"""Transforms: a full backward B split into I and W, and merged again."""

from __future__ import annotations

from ..table.action import Action, Cell, Kind, Overlap, Row
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


@typed()
def merge_backward(schedule: Schedule, *, delayed: bool = False) -> Schedule:
    """Merge each I with its W where the W is the device's next action (idle cells aside); the
    inverse of `split_backward`.

    With `delayed`, each W that comes later in its row merges with its I too, where the I is.  A
    delayed W keeps the activations of its I and what I leaves for it.  With rematerialisation that
    is all that a forward would keep without it.

    The I of an overlapped pair merges with a W right after the pair.  Merging pays only where a
    fused backward is faster than its halves, since what the next device needs is then ready at the
    end of B and not already at the end of I (torch 2.13 has `_merge_bw`).

    >>> import jaxpipe as jp
    >>> print(merge_backward(jp.Schedule.from_csv("0F0,0I0,0W0")).to_csv(), end="")
    0F0,0B0
    >>> late = jp.Schedule.from_csv("0F0,0F1,0I0,0I1,0W0,0W1")
    >>> print(merge_backward(late, delayed=True).to_csv(), end="")
    0F0,0F1,0B0,0B1
    """
    return schedule.with_rows([(_whole if delayed else _merged)(row) for row in schedule.cells])


def _whole(row: Row) -> list[Cell]:
    """A row in which each I is a B, without its W."""
    found: list[Cell] = []
    for cell in row:
        backward = cell.backward if isinstance(cell, Overlap) else cell
        if backward is not None and backward.kind is Kind.I:
            found.append(_with_weight_grad(cell, backward))
        elif backward is None or backward.kind is not Kind.W:
            found.append(cell)
    return found


def _merged(row: Row) -> list[Cell]:
    """A row with its adjacent I and W merged; the idle cells between them go."""
    cells: list[Cell] = []
    where = -1  # of the last cell that is not idle
    for cell in row:
        if isinstance(cell, Action) and cell.kind is Kind.W and where >= 0:
            whole = _with_weight_grad(cells[where], cell)
            if whole is not None:
                cells[where:] = [whole]
                continue
        if cell is not None:
            where = len(cells)
        cells.append(cell)
    return cells


def _with_weight_grad(before: Cell, weight_grad: Action) -> Cell:
    """The cell before a W with its I replaced by B, or None where it does not hold the I of
    this W.
    """
    stage, _, microbatch = weight_grad
    full = Action(stage, Kind.B, microbatch)
    match before:
        case Overlap(forward, (s, Kind.I, m)) if (s, m) == (stage, microbatch):
            return Overlap(forward, full)
        case Action(s, Kind.I, m) if (s, m) == (stage, microbatch):
            return full
    return None
