"""The one event loop: an action starts when its device is free and its inputs have arrived.

Simulation, list scheduling and the insertion of R and of shares differ in one point: which action
comes next.  A policy is an iterator of action numbers.  It may read the state of the loop between
two actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ..table.encoded import Encoded, Transfers, senders, waits
from ..table.kinds import KINDS, Action, Cell
from ..table.schedule import Schedule
from .costs import StageCosts

NEVER = float("inf")
Policy: TypeAlias = Iterable[int]


class Loop:
    """Actions by number, the times at which they run, and when each device is free.

    Attributes:
        device, need, latency, duration: per action, its device, the action that it waits for (-1
            for none), how long the result of that one takes to arrive, and its own time.
        groups: by number, the actions that start and end together; the first one of a group books
            all of them.
        second_half: of the forward half of an overlapped pair, the other half, which comes next.
        starts, ends: per action; `NEVER` while it has not run.
        free: per device, the end of its last action.
    """

    def __init__(
        self,
        devices: int,
        device: list[int],
        need: list[int],
        latency: list[float],
        duration: list[float],
    ) -> None:
        self.device, self.need, self.latency, self.duration = device, need, latency, duration
        self.groups: dict[int, tuple[int, ...]] = {}
        self.second_half: dict[int, int] = {}
        self.starts: list[float] = [NEVER] * len(device)
        self.ends: list[float] = [NEVER] * len(device)
        self.free: list[float] = [0] * devices

    @classmethod
    def of(cls, table: Encoded, costs: StageCosts, transfers: Transfers = Transfers.ASYNC) -> Loop:
        """The actions of a table, with these costs.

        The forward half of an overlapped pair takes no time; the pair's time is its other half's.
        """
        durations = action_durations(table, costs)
        if table.has_transfers and transfers is Transfers.RENDEZVOUS:
            wait = np.full(table.num_actions, -1)
            latency = [0.0] * table.num_actions
        else:
            wait = waits(table, transfers)
            latency = np.array(costs.transfer)[table.stage[senders(table, wait)]].tolist()
        loop = cls(table.num_devices, table.device.tolist(), wait.tolist(), latency, durations)
        # Alone, a device has all that it needs.
        hop = costs.transfer if table.num_devices > 1 else (0,) * table.num_stages
        loop.second_half = {i: i + 1 for i in table.pairs.tolist()}
        for number, collective in table.collectives.items():
            loop.groups[number] = collective.members
            if collective.source >= 0:
                loop.wait(number, int(table.last_half[collective.source]), hop[collective.stage])
            if collective.user >= 0:
                share = collective.members[loop.device[collective.user]]
                loop.wait(collective.user, share, hop[collective.stage])
        if table.has_transfers and transfers is Transfers.RENDEZVOUS:
            for receive in table.receives.tolist():
                send = int(table.producer[receive])
                for number in (send, receive):
                    loop.groups[number] = (send, receive)
                    loop.duration[number] = costs.transfer[int(table.stage[send])]
        return loop

    def wait(self, number: int, need: int, latency: float) -> None:
        """Let an action wait for another one."""
        self.need[number], self.latency[number] = need, latency

    def add(self, device: int, duration: float) -> int:
        """The number of a further action, which waits for nothing."""
        self.device.append(device)
        self.need.append(-1)
        self.latency.append(0)
        self.duration.append(duration)
        self.starts.append(NEVER)
        self.ends.append(NEVER)
        return len(self.device) - 1

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
    """A table that is run again with further actions in its rows."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        table = schedule.encoded
        self._schedule = schedule
        self.loop = Loop.of(table, costs)
        # Per action of the table, its cell; None for the second half of a pair.
        self.cells = [
            schedule.rows[d][p]
            for d, p in zip(table.device.tolist(), table.position.tolist(), strict=True)
        ]
        for i in self.loop.second_half.values():
            self.cells[i] = None

    def add(self, device: int, action: Action, duration: float) -> int:
        """The number of a further action of a device."""
        self.cells.append(action)
        return self.loop.add(device, duration)

    def filled(self, before: Callable[[int, Sequence[int]], Iterable[int]]) -> Iterator[int]:
        """The table's own order, with what `before` puts in front of each cell or group.

        `before` gets the number and the devices.
        """
        loop, seconds = self.loop, set(self.loop.second_half.values())
        for i in self._schedule.run_order(Transfers.ASYNC).order:
            if i in seconds:
                yield i
            elif i == (group := loop.groups.get(i, (i,)))[0]:
                yield from before(i, [loop.device[member] for member in group])
                yield i

    def run(self, policy: Policy) -> Schedule:
        """The table with each row in the order that the policy chooses."""
        rows: list[list[Cell]] = [[] for _ in self._schedule.rows]
        self.loop.run(self._recorded(policy, rows))
        return self._schedule.with_rows(rows)

    def _recorded(self, policy: Policy, rows: list[list[Cell]]) -> Iterator[int]:
        for number in policy:
            for i in self.loop.groups.get(number, (number,)):
                if (cell := self.cells[i]) is not None:
                    rows[self.loop.device[i]].append(cell)
            yield number


def action_durations(table: Encoded, costs: StageCosts) -> list[float]:
    """Per action, its duration; a pair's is booked on its backward half, and the forward half takes
    no time.
    """
    stages = table.num_stages
    none = (0,) * stages
    costs = costs.shortened(table.kinds)
    flat = [time for spec in KINDS for time in (costs.of(spec.kind) or none)]
    durations = [flat[k] for k in (table.kind * stages + table.stage).tolist()]
    if costs.slice_factors:
        factors = costs.factor_of(table.num_microbatches, table.slices)
        own = (table.is_compute & ~table.shares).tolist()
        durations = [
            time * factors[m] if mine else time
            for time, m, mine in zip(durations, table.microbatch.tolist(), own, strict=True)
        ]
    for i in table.pairs.tolist():
        sum_of_halves = durations[i] + durations[i + 1]
        durations[i + 1] = sum_of_halves if costs.overlap is None else costs.overlap[table.stage[i]]
        durations[i] = 0
    return durations
