"""Pass: ticks that lose as little as they can where everybody's tick lasts as long as the longest
action in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..engine.costs import Costs
from ..engine.loop import action_durations
from ..table.encoded import CollectiveAction
from ..table.kinds import RUNS_FORWARD
from ..table.schedule import Schedule
from .assign_ticks import Ticks, needs_of, run_order


def balanced_ticks(schedule: Schedule, costs: Costs | None = None) -> Ticks:
    """Fill tick after tick, each with cells that take about equally long; a device may do an F (or
    R) and the backward after it in one.

    For each tick one length is chosen, and devices run the cells that fit into it.  The choice is
    list scheduling by the critical path (Graham 1969): the length that leaves the least time from
    the end of the tick to the end of the table, then the length that gets most work done.  Every
    device keeps the order of its row.
    """
    table = _Table.of(schedule, costs or Costs())
    state = _State(table, [0] * len(table.rows), [-1] * schedule.encoded.num_actions)
    tick = 0
    while any(at < len(row) for at, row in zip(state.at, table.rows, strict=True)):
        state.run(tick)
        tick += 1
    return Ticks(
        schedule, np.array(state.when, np.int64)[schedule.encoded.last_half], forward_first=True
    )


@dataclass(frozen=True)
class _Table:
    """Cells by the number of their last action, as in the encoded schedule."""

    rows: tuple[tuple[int, ...], ...]
    needs: list[tuple[int, ...]]  # the cells of other devices that feed it
    lengths: list[float]
    tails: list[float]  # from the start of the cell, the least time to the end of the table
    fusible: list[bool]  # an F or R alone, with a backward alone after it
    collectives: dict[int, CollectiveAction]

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> _Table:
        """Cells, and who feeds whom."""
        table = schedule.encoded
        numbers = np.arange(table.num_actions)
        alone = table.last_half == numbers
        cells = [tuple((a + np.flatnonzero(alone[a:b])).tolist()) for a, b in pairwise(table.first)]
        needs: list[tuple[int, ...]] = [() for _ in numbers]
        for last, need in zip(table.last_half.tolist(), needs_of(schedule).tolist(), strict=True):
            if need < len(needs):
                needs[last] += (need,)
        lengths = action_durations(table, costs.for_stages(table.num_stages))
        alone[table.pairs + 1] = False
        forward = table.of_kinds(RUNS_FORWARD)
        backward = ~forward & ~table.is_collective
        fusible = np.append(
            (alone & forward)[:-1] & (alone & backward)[1:] & (np.diff(table.device) == 0), False
        )
        return cls(
            tuple(cells),
            needs,
            lengths,
            _tails(schedule, lengths),
            fusible.tolist(),
            table.collectives,
        )


@dataclass
class _State:
    """How far each device has come in its row, and the tick of each cell that is done."""

    table: _Table
    at: list[int]
    when: list[int]

    def run(self, tick: int) -> None:
        """Run what fits into the best length."""
        reach = [
            self._reach(row[at : at + 2], tick)
            for row, at in zip(self.table.rows, self.at, strict=True)
        ]
        length = self._best_length(reach)
        for device, totals in enumerate(reach):
            for total in totals:
                if total <= length:
                    self.when[self.table.rows[device][self.at[device]]] = tick
                    self.at[device] += 1

    def _reach(self, cells: Sequence[int], tick: int) -> Sequence[float]:
        """The time to the end of a device's next cell, and to that of the one after it, if they can
        run in this tick.
        """
        if not cells or not self._ready(cells[0], tick):
            return ()
        length = self.table.lengths[cells[0]]
        if not self.table.fusible[cells[0]] or not self._ready(cells[1], tick):
            return (length,)
        return (length, length + self.table.lengths[cells[1]])

    def _ready(self, cell: int, tick: int) -> bool:
        if cell in self.table.collectives:
            return all(
                row[at : at + 1] == (i,)
                for row, at, i in zip(
                    self.table.rows, self.at, self.table.collectives[cell].members, strict=True
                )
            )
        return all(-1 < self.when[need] < tick for need in self.table.needs[cell])

    def _best_length(self, reach: Sequence[Sequence[float]]) -> float:
        """The length that leaves the least to do; of equal ones that with the least work left, then
        the one that does most cells.
        """
        scores = []
        for length in sorted({total for totals in reach for total in totals}):
            after = [
                at + sum(total <= length for total in totals)
                for at, totals in zip(self.at, reach, strict=True)
            ]
            left = [
                self.table.tails[row[at]] if at < len(row) else 0.0
                for row, at in zip(self.table.rows, after, strict=True)
            ]
            scores.append(
                (length + max(left), len(after) * length + sum(left), -sum(after), length)
            )
        return min(scores)[-1]


def _tails(schedule: Schedule, lengths: Sequence[float]) -> list[float]:
    """Per cell, the least time from its start to the end of the table."""
    table = schedule.encoded
    feeds: list[list[int]] = [[] for _ in lengths]  # the cells of other devices that a cell feeds
    last_half, device = table.last_half.tolist(), table.device.tolist()
    for i, need in enumerate(needs_of(schedule).tolist()):
        if need < len(feeds):
            feeds[need].append(last_half[i])
    tails = [0.0] * len(lengths)
    rest = [0.0] * table.num_devices
    for i in reversed(run_order(schedule)):
        if i in table.collectives:
            members = table.collectives[i].members
            if i == members[-1]:  # the first of them in this direction
                rest = [max(lengths[j] for j in members) + max(rest)] * table.num_devices
                for j in members:
                    tails[j] = rest[0]
            continue
        if last_half[i] == i:
            d = device[i]
            rest[d] = tails[i] = lengths[i] + max([rest[d], *(tails[user] for user in feeds[i])])
    return tails
