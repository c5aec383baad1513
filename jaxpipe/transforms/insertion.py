"""Further actions in the rows of a table, which is run again with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from ..engine.costs import StageCosts
from ..engine.loop import loop_of
from ..table.clock import Policy
from ..table.encoded import Transfers, encode
from ..table.kinds import Action, Cell, parts
from ..table.schedule import Schedule


class Insertion:
    """A table that is run again with further actions in its rows.

    Attributes:
        table: the rows, each followed by its further actions.
        own: by the number of an action of the given table, its number in this one.
        cells: per action, its cell; None for the second half of a pair.
        loop: runs all of them.
    """

    def __init__(
        self, schedule: Schedule, costs: StageCosts, added: Sequence[Sequence[Action]]
    ) -> None:
        rows = tuple((*row, *more) for row, more in zip(schedule.rows, added, strict=True))
        self._schedule = schedule
        self.table = table = encode(
            rows, schedule.num_stages, schedule.num_microbatches, schedule.slices
        )
        self.loop = loop_of(table, costs)
        given = schedule.encoded
        shifts = np.subtract(table.first, given.first)
        self.own: list[int] = (np.arange(given.num_actions) + shifts[given.device]).tolist()
        self.cells: list[Cell] = []
        for cell in chain.from_iterable(rows):
            self.cells += (cell, None)[: len(parts(cell))]

    def filled(self, before: Callable[[int, Sequence[int]], Iterable[int]]) -> Iterator[int]:
        """The table's own order, with what `before` puts in front of each cell or group.

        `before` gets the number and the devices.
        """
        loop, seconds = self.loop, set(self.loop.second_half.values())
        for i in map(self.own.__getitem__, self._schedule.run_order(Transfers.ASYNC).order):
            if i in seconds:
                yield i
            elif i == (group := loop.groups.get(i, (i,)))[0]:
                yield from before(i, [loop.device[member] for member in group])
                yield i

    def run(self, policy: Policy) -> Schedule:
        """The table with each row in the order that the policy chooses."""
        rows: list[list[Cell]] = [[] for _ in self._schedule.rows]

        def recorded() -> Iterator[int]:
            for number in policy:
                for i in self.loop.groups.get(number, (number,)):
                    if (cell := self.cells[i]) is not None:
                        rows[self.loop.device[i]].append(cell)
                yield number

        self.loop.run(recorded())
        return self._schedule.with_rows(rows)
