"""The one event loop: a task starts when its device is free and its input has arrived.

Whatever has a time is its tasks: the actions of a table, the ticks of a program, the columns of a
grid.  They differ in what a task is, and in which task comes next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

NEVER = float("inf")
Policy: TypeAlias = Iterable[int]


class EventLoop:
    """Tasks by number, the times at which they run, and when each device is free.

    A policy says which task comes next: it is an iterator of their numbers.  Between two of them it
    may read the state of the loop, and hold a device back.  A task that it gives again runs again.

    Attributes:
        device, need, latency, duration: per task, its device, the task that it waits for (-1 for
            none), how long the result of that one takes to arrive, and its own time.  What waits
            for several is several tasks of its device, of which the last one takes time.
        groups: by number, the tasks that start together; the first one of a group books all of
            them.
        second_half: of the forward half of an overlapped pair, the other half, which comes next.
        also: by number, a further task that it waits for.
        starts, ends: per task; `NEVER` while it has not run.
        free: per device, the end of its last task.
    """

    def __init__(
        self,
        tasks: Iterable[ArrayLike],
        free: Iterable[float],
        *,
        groups: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        """`tasks`: device, need, latency and duration of each, as four columns."""
        self.device: list[int]
        self.need: list[int]
        self.latency: list[float]
        self.duration: list[float]
        # of any: whole numbers stay whole
        columns = (np.asarray(column, object).tolist() for column in tasks)
        self.device, self.need, self.latency, self.duration = columns
        self.free, self.groups = list(free), groups or {}
        self.second_half: dict[int, int] = {}
        self.also: dict[int, int] = {}
        self.starts: list[float] = [NEVER] * len(self.device)
        self.ends: list[float] = [NEVER] * len(self.device)

    def ready(self, number: int) -> float:
        """When the input of a task arrives; `NEVER` while its maker has not run."""
        need = self.need[number]
        arrives = 0 if need < 0 else self.ends[need] + self.latency[number]
        also = self.also.get(number)
        return arrives if also is None else max(arrives, self.ends[also])

    def begin(self, number: int) -> float:
        """When a task would start if it came next, with its pair or group."""
        group = self.groups.get(number)
        if group is not None:
            return max(*(self.free[self.device[i]] for i in group), self.ready(group[0]))
        start = max(self.free[self.device[number]], self.ready(number))
        second = self.second_half.get(number)
        return start if second is None else max(start, self.ready(second))

    def run(self, policy: Policy) -> None:
        """Book every task that the policy chooses, in its order."""
        device, need, also = self.device, self.need, self.also
        latency, duration = self.latency, self.duration
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
            if also and i in also:
                start = max(start, ends[also[i]])
            starts[i] = start
            free[d] = ends[i] = start + duration[i]

    def _run_group(self, number: int) -> None:
        group = self.groups[number]
        if number != group[0]:
            return
        begin = self.begin(number)
        for i in group:
            self.starts[i] = begin
            self.free[self.device[i]] = self.ends[i] = begin + self.duration[i]
