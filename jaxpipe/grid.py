"""The grid people read: a line a device, a column a time step, drawn at unit cost."""

from __future__ import annotations

from collections.abc import Collection

from .action import Action, Cell, Kind, Row, parts

MARK = "<-- ERROR HERE"


def grid(rows: tuple[Row, ...], *, marked: Collection[tuple[int, int]] = ()) -> str:
    """Draw rows as text, each action in the first unit time step that its inputs allow.

    `marked` holds (device, position) of cells to point at: they are bracketed and their line ends in `<-- ERROR HERE`.
    A table that cannot run (a deadlock, a missing producer) is drawn by position instead of by time.
    """
    columns = _columns(rows)
    width = max((len(str(c)) for row in rows for c in row if c is not None), default=1)
    width += 2 if marked else 0
    steps = 1 + max((c for row in columns for c in row), default=-1)
    label = len(f"device {len(rows) - 1}")
    lines = [" " * label + " |" + "".join(f" {t:<{width}}" for t in range(steps)).rstrip()]
    for device, (row, places) in enumerate(zip(rows, columns, strict=True)):
        cells = [""] * steps
        for position, (cell, column) in enumerate(zip(row, places, strict=True)):
            text = "" if cell is None else str(cell)
            cells[column] = f"[{text}]" if (device, position) in marked else text
        body = "".join(f" {c:<{width}}" for c in cells).rstrip()
        tail = f"  {MARK}" if any((device, p) in marked for p in range(len(row))) else ""
        lines.append(f"{f'device {device}':<{label}} |{body}{tail}")
    return "\n".join(lines)


def inputs_of(action: Action, last_stage: int) -> tuple[tuple[Action, ...], ...]:
    """What must be done before a compute action: a tuple of alternatives for each input.

    A backward's input gradient comes from B or from I, whichever the table uses.
    """
    stage, kind, microbatch = action
    if kind is Kind.F:
        return () if stage == 0 else ((Action(stage - 1, Kind.F, microbatch),),)
    if kind is Kind.W:
        return ((Action(stage, Kind.I, microbatch),),)
    own = (Action(stage, Kind.F, microbatch),)
    if stage == last_stage:
        return (own,)
    return (own, (Action(stage + 1, Kind.B, microbatch), Action(stage + 1, Kind.I, microbatch)))


def _columns(rows: tuple[Row, ...]) -> list[list[int]]:
    """Per device and position, the time step to draw at."""
    if any(not a.kind.is_compute for row in rows for c in row for a in parts(c)):
        return [list(range(len(row))) for row in rows]
    last_stage = max((a.stage for row in rows for c in row for a in parts(c)), default=0)
    done: dict[Action, int] = {}
    columns: list[list[int]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            while len(columns[device]) < len(row):
                step = _earliest(row[len(columns[device])], done, last_stage)
                if step is None:
                    break
                step = max(step, columns[device][-1] + 1 if columns[device] else 0)
                for action in parts(row[len(columns[device])]):
                    done[action] = step
                columns[device].append(step)
                moved = True
    if any(len(c) < len(row) for c, row in zip(columns, rows, strict=True)):
        return [list(range(len(row))) for row in rows]
    return columns


def _earliest(cell: Cell, done: dict[Action, int], last_stage: int) -> int | None:
    """The first step at which a cell's inputs are all done, or None while one is not."""
    step = 0
    own = parts(cell)
    for action in own:
        for alternatives in inputs_of(action, last_stage):
            times = [done[a] + 1 for a in alternatives if a in done]
            if not times and not any(a in own for a in alternatives):
                return None
            step = max(step, *times, 0)
    return step
