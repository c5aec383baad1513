"""Pass: give every cell of a table the lock-step tick in which the lowered program runs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..action import Action, Cell, Kind, parts
from ..errors import ScheduleError
from ..grid import grid, inputs_of
from ..schedule import Schedule

Durations: TypeAlias = Mapping[Kind, int]


@dataclass(frozen=True)
class Ticks:
    """`cells[device][tick]`: what each device does in each tick, None where it idles; all rows have one length T.

    Within a tick a device does at most one cell; then what the tick produced is transferred.
    """

    schedule: Schedule
    cells: tuple[tuple[Cell, ...], ...]
    forward_first: bool = False  # in a tick with a forward and a backward, the forward runs first (else the backward does)

    @property
    def num_ticks(self) -> int:
        """T, the number of ticks."""
        return len(self.cells[0]) if self.cells else 0

    def __str__(self) -> str:
        return grid(self.cells)


def assign_ticks(schedule: Schedule) -> Ticks:
    """Put each cell in the first tick after its device's previous cell and after every producer on another device.

    This is the longest path through the table's order and data dependencies, so T is the least that any lock-step
    program of this table can have.  Linear in the number of cells.  ScheduleError if the table cannot run.
    """
    last_stage = schedule.num_stages - 1
    rows = [[cell for cell in row if cell is not None] for row in schedule.rows]
    tick_of: dict[Action, int] = {}
    placed: list[list[int]] = [[] for _ in rows]
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    ready = list(range(len(rows)))
    while ready:
        device = ready.pop()
        row, ticks = rows[device], placed[device]
        while len(ticks) < len(row):
            cell = row[len(ticks)]
            missing, earliest = _when(cell, tick_of, last_stage)
            if missing:
                for producer in missing:
                    waiting[producer].append(device)
                break
            tick = max(earliest, ticks[-1] + 1 if ticks else 0)
            ticks.append(tick)
            for action in parts(cell):
                tick_of[action] = tick
                ready.extend(waiting.pop(action, ()))
    stuck = [d for d, row in enumerate(rows) if len(placed[d]) < len(row)]
    if stuck:
        first = [f"{rows[d][len(placed[d])]} on device {d}" for d in stuck]
        raise ScheduleError(f"the table deadlocks: {', '.join(first)} wait for each other; run jaxpipe.check on it")
    count = 1 + max((t for ticks in placed for t in ticks), default=-1)
    cells: list[list[Cell]] = [[None] * count for _ in rows]
    for device, row in enumerate(rows):
        for cell, tick in zip(row, placed[device], strict=True):
            cells[device][tick] = cell
    return Ticks(schedule, tuple(tuple(row) for row in cells))


def clock_ticks(schedule: Schedule, durations: Durations) -> Ticks:
    """Put each cell in the tick in which it ends on a clock of whole time units, so that transfers meet where the table has them.

    With B twice as long as F, lock-step ticks make an interleaved table wait wherever an F meets a B at a transfer; on the
    clock both ends of every transfer reach it at the same time.  Costs more code: a period is F + B time units, not two ticks.
    """
    last_stage = schedule.num_stages - 1
    order = assign_ticks(schedule)
    end: dict[Action, int] = {}
    cells: list[dict[int, Cell]] = [{} for _ in order.cells]
    free = [0] * len(order.cells)
    for tick in range(order.num_ticks):
        for device, row in enumerate(order.cells):
            cell = row[tick]
            if cell is None:
                continue
            own = parts(cell)
            inputs = [end[a] for action in own for group in inputs_of(action, last_stage) for a in group if a in end and a not in own]
            free[device] = max(free[device], max(inputs, default=0)) + sum(durations[a.kind] for a in own)
            end.update((a, free[device]) for a in own)
            cells[device][free[device]] = cell
    used = sorted({t for row in cells for t in row})
    return Ticks(schedule, tuple(tuple(row.get(t) for t in used) for row in cells))


def _when(cell: Cell, tick_of: dict[Action, int], last_stage: int) -> tuple[list[Action], int]:
    """The producers still missing (every alternative of them), and the first tick after those that are there."""
    own = parts(cell)
    earliest = 0
    for action in own:
        for alternatives in inputs_of(action, last_stage):
            found = [tick_of[a] for a in alternatives if a in tick_of]
            if found:
                earliest = max(earliest, found[0] + 1)
            elif not any(a in own for a in alternatives):
                return list(alternatives), 0
    return [], earliest


def is_backward(action: Action) -> bool:
    """True for B, I and W: what runs in a tick's backward block."""
    return action.kind in (Kind.B, Kind.I, Kind.W)
