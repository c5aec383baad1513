"""The grid that people read: one line per device, one column per time step, at unit cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .encoded import Encoded, encode
from .kinds import Cell, Row, parts
from .run_order import Transfers, run_order, waits

MARK = "<-- ERROR HERE"


def grid(
    rows: tuple[Row, ...],
    *,
    marked: Collection[tuple[int, int]] = (),
    most_columns: int | None = None,
    slices: int = 1,
) -> str:
    """Draw rows as text, each action in the first unit time step that its inputs allow.

    `marked` holds (device, position) of cells to point at: they are bracketed and their line ends
    in `<-- ERROR HERE`. A table that cannot run (a deadlock) or that has transfers
    is drawn by position instead of by time. Of more than `most_columns` columns, those
    around the first marks are drawn, or the first ones where nothing is marked.

    With several slices a sequence, `2F1.3` is slice 3 of sequence 1.
    """
    columns = _columns(rows)
    column_of = {(d, p): c for d, row in enumerate(columns) for p, c in enumerate(row)}
    marks = {(cell[0], column_of[cell]) for cell in marked if cell in column_of}
    steps = 1 + max((c for row in columns for c in row), default=-1)
    shown = _shown(steps, sorted({column for _, column in marks}), most_columns)
    texts: list[list[str]] = []
    for row, numbers_of_row in zip(rows, columns, strict=True):
        cells = {-1: "..."}
        for cell, c in zip(row, numbers_of_row, strict=True):
            cells[c] = "" if cell is None else cell_label(cell, slices)
        texts.append([cells.get(c, "") for c in shown])
    places = {(device, shown.index(c)) for device, c in marks if c in shown}
    numbers = [str(c) if c >= 0 else "..." for c in shown]
    bad = {device for device, _ in marks}
    return "\n".join(drawn(texts, places, numbers, bad=bad))


def drawn(
    texts: Sequence[Sequence[str]],
    marked: Collection[tuple[int, int]],
    numbers: Sequence[str] | None = None,
    *,
    bad: Collection[int] | None = None,
) -> list[str]:
    """A line for each device, after one of numbers: marked cells are bracketed, and the lines of
    `bad` devices (all that have a mark) end in `MARK`.
    """
    bad = {device for device, _ in marked} if bad is None else bad
    cells = [
        [f"[{text}]" if (d, p) in marked else text for p, text in enumerate(row)]
        for d, row in enumerate(texts)
    ]
    rows = (numbers or (), *cells)
    width = max((len(text) for row in rows for text in row), default=1)
    label = len(f"device {len(texts) - 1}")
    bodies = ["".join(f" {text:<{width}}" for text in row).rstrip() for row in rows]
    lines = [f"{f'device {d}':<{label}} |{body}" for d, body in enumerate(bodies[1:])]
    lines = [f"{line}  {MARK}" if d in bad else line for d, line in enumerate(lines)]
    return lines if numbers is None else [" " * label + " |" + bodies[0], *lines]


def microbatch_label(microbatch: int, slices: int) -> str:
    """The number of a microbatch; with several slices a sequence, that of the sequence and of the
    slice.

    >>> microbatch_label(7, 1), microbatch_label(7, 4)
    ('7', '1.3')
    """
    sequence, number = divmod(microbatch, slices)
    return str(microbatch) if slices == 1 else f"{sequence}.{number}"


def cell_label(cell: Cell, slices: int) -> str:
    """A cell's text for people."""
    if slices == 1:
        return str(cell)
    numbers = [microbatch_label(action.microbatch, slices) for action in parts(cell)]
    pairs = zip(parts(cell), numbers, strict=True)
    labels = [f"{action.stage}{action.kind.name}{number}" for action, number in pairs]
    return labels[0] if len(labels) == 1 else f"({';'.join(labels)})OVERLAP_F_B"


def _shown(steps: int, marks: Sequence[int], most: int | None) -> list[int]:
    """The columns to draw: all, or as many as allowed around the first marks; -1 where some are
    left out.
    """
    if most is None or steps <= most:
        return list(range(steps))
    reach = 8  # columns drawn on each side of a mark
    chosen: set[int] = set() if marks else set(range(most))
    for mark in marks:
        around = set(range(max(0, mark - reach), min(steps, mark + reach + 1))) - chosen
        if chosen and len(chosen) + len(around) > most:
            break
        chosen |= around
    shown: list[int] = []
    for column in sorted(chosen):
        if column > 0 and column - 1 not in chosen:
            shown.append(-1)
        shown.append(column)
    return shown if shown[-1] == steps - 1 else [*shown, -1]


def _columns(rows: tuple[Row, ...]) -> list[list[int]]:
    """Per device and position, the time step to draw at."""
    by_position = [list(range(len(row))) for row in rows]
    actions = [a for row in rows for c in row for a in parts(c)]
    if not actions or any(not a.kind.is_compute for a in actions):
        return by_position
    stages, _, microbatches = map(max, zip(*actions, strict=True))
    table = encode(rows, 1 + stages, 1 + microbatches)
    if table.too_sparse or not table.in_range.all():
        return by_position
    order = run_order(table, Transfers.ASYNC)
    return by_position if order.cycles else _in_time(rows, table, order.order)


def _in_time(rows: tuple[Row, ...], table: Encoded, order: Sequence[int]) -> list[list[int]]:
    """Columns where every cell, idle ones too, takes one step and comes at least one step after
    what it needs.
    """
    device, position = table.device.tolist(), table.position.tolist()
    need, last_half = waits(table, Transfers.ASYNC).tolist(), table.last_half.tolist()
    column, before = [-1] * len(rows), [-1] * len(rows)
    at = [-1] * (table.num_actions + 1)  # the last is that of what needs nothing
    for i in order:
        members = table.collectives[i].members if i in table.collectives else (i,)
        if i != members[0]:
            continue
        step = max(at[need[j]] + 1 for j in members)
        for j in members:
            step = max(step, column[device[j]] + position[j] - before[device[j]])
        for j in members:
            column[device[j]] = at[j] = step
            before[device[j]] = position[j]
    places: list[list[int]] = [[-1] * len(row) for row in rows]
    for i in range(table.num_actions):
        places[device[i]][position[i]] = at[last_half[i]]
    for row in places:
        for p in (p for p, place in enumerate(row) if place < 0):  # idle
            row[p] = row[p - 1] + 1 if p else 0
    return places
