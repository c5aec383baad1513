"""The one event loop: an action starts when its device is free and its inputs have arrived.

Simulation, list scheduling and the insertion of R and of shares differ in one point: which action
comes next.  A policy is an iterator of action numbers.  It may read the state of the loop between
two actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np

from ..table.encoded import Encoded, Transfers, encode, waits
from ..table.kinds import KINDS, Action, Cell, parts
from ..table.schedule import Schedule
from .costs import StageCosts

NEVER = float("inf")
Policy: TypeAlias = Iterable[int]


class EventLoop:
    """The actions of a table by number, the times at which they run, and when each device is free.

    Attributes:
        device, need, latency, duration: per action, its device, the action that it waits for (-1
            for none), how long the result of that one takes to arrive, and its own time.  The
            forward half of an overlapped pair takes no time; the pair's time is its other half's.
        groups: by number, the actions that start and end together; the first one of a group books
            all of them.
        second_half: of the forward half of an overlapped pair, the other half, which comes next.
        starts, ends: per action; `NEVER` while it has not run.
        free: per device, the end of its last action.
    """

    def __init__(
        self, table: Encoded, costs: StageCosts, transfers: Transfers = Transfers.ASYNC
    ) -> None:
        count = table.num_actions
        self.device: list[int] = table.device.tolist()
        self.duration = action_durations(table, costs)
        self.groups = {number: each.members for number, each in table.collectives.items()}
        self.second_half = {i: i + 1 for i in table.pairs.tolist()}
        self.starts: list[float] = [NEVER] * count
        self.ends: list[float] = [NEVER] * count
        self.free: list[float] = [0] * table.num_devices
        if table.has_transfers and transfers is Transfers.RENDEZVOUS:
            self.need, self.latency = [-1] * count, [0.0] * count
            for receive in table.receives.tolist():
                send = int(table.producer[receive])
                for number in (send, receive):
                    self.groups[number] = (send, receive)
                    self.duration[number] = costs.transfer[int(table.stage[send])]
        else:
            wait = waits(table, transfers)
            self.need = wait.tolist()
            sender = wait if table.has_transfers else table.producer
            self.latency = np.array(costs.transfer)[table.stage[sender]].tolist()
        # Alone, a device has all that it needs.
        hop = costs.transfer if table.num_devices > 1 else (0,) * table.num_stages
        for number, collective in table.collectives.items():
            if collective.source >= 0:
                self.need[number] = int(table.last_half[collective.source])
                self.latency[number] = hop[collective.stage]
            if (user := collective.user) >= 0:
                self.need[user] = collective.members[self.device[user]]
                self.latency[user] = hop[collective.stage]

    def ready(self, number: int) -> float:
        """When the inputs of an action arrive; `NEVER` while a producer has not run."""
        need = self.need[number]
        return 0 if need < 0 else self.ends[need] + self.latency[number]

    def begin(self, number: int) -> float:
        """When an action would start if it came next, with its pair or group."""
        group = self.groups.get(number)
        if group is not None:
            return max(*(self.free[self.device[i]] for i in group), self.ready(group[0]))
        start = max(self.free[self.device[number]], self.ready(number))
        second = self.second_half.get(number)
        return start if second is None else max(start, self.ready(second))

    def run(self, policy: Policy) -> None:
        """Book every action that the policy chooses, in its order."""
        device, need, latency, duration = self.device, self.need, self.latency, self.duration
        starts, ends, free, groups = self.starts, self.ends, self.free, self.groups
        for i in policy:
            if groups and i in groups:
                self._run_group(i)
                continue
            d, j = device[i], need[i]
            start = free[d]
            if j >= 0:
                ready = ends[j] + latency[i]
                if ready > start:
                    start = ready
            starts[i] = start
            free[d] = ends[i] = start + duration[i]

    def _run_group(self, number: int) -> None:
        group = self.groups[number]
        if number != group[0]:
            return
        begin = self.begin(number)
        end = begin + max(self.duration[i] for i in group)
        for i in group:
            self.starts[i], self.ends[i], self.free[self.device[i]] = begin, end, end


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
        self.loop = EventLoop(table, costs)
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


def action_durations(table: Encoded, costs: StageCosts) -> list[float]:
    """Per action, its duration; a pair's is booked on its backward half, and the forward half takes
    no time.
    """
    stages = table.num_stages
    none = (0,) * stages
    times = {spec.kind: costs.of(spec.kind) or none for spec in KINDS}
    for late in table.kinds:  # what it does later, the share that it is part of does not
        if (whole := KINDS[late].part_of) is not None:
            pairs = zip(times[whole], times[late], strict=True)
            times[whole] = tuple(max(0, time - part) for time, part in pairs)
    flat = [time for each in times.values() for time in each]
    factors = costs.factor_of(table.num_microbatches, table.slices)
    keys = (table.kind * stages + table.stage, table.microbatch, table.is_compute & ~table.shares)
    durations = [
        flat[k] * factors[m] if is_sliced else flat[k]
        for k, m, is_sliced in zip(*(key.tolist() for key in keys), strict=True)
    ]
    for i in table.pairs.tolist():
        sum_of_halves = durations[i] + durations[i + 1]
        durations[i + 1] = sum_of_halves if costs.overlap is None else costs.overlap[table.stage[i]]
        durations[i] = 0
    return durations
