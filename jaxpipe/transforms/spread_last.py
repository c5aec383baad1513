"""Transform: `last` spread over all devices, as actions L that every device does at the same time.

Vocabulary parallelism (Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary Parallelism, arXiv 2411.05288) cuts the head of a
language model over the pipeline's devices.  Here all devices do their shares of one microbatch in one step of the program, so an L is
where all of them meet.  A meeting costs nothing where every device is between two actions then; what is in the middle of an
action keeps the others waiting.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..errors import ScheduleError
from ..simulation.costs import Costs
from ..simulation.simulate import action_durations, simulate
from ..table.action import Action, Cell, Kind
from ..table.check import check
from ..table.encoded import Encoded
from ..table.kinds import TOGETHER, Value, makers
from ..table.run_order import Transfers, senders, waits
from ..table.schedule import Schedule
from .split_backward import split_backward

# The share of the makespan that devices may lose by waiting for each other before backwards are split: a split costs code and a stash.
_WORTH_A_SPLIT = 0.01


def spread_last(schedule: Schedule, *, costs: Costs | None = None, split: bool | None = None) -> Schedule:
    """Put an L into every row for every microbatch, after the last stage's F and before its B, where all devices lose the least time.

    Every row keeps its order, so no device holds more activations than before.  An L is a meeting of all devices: it begins when the last
    of them is done with what it is doing, and those that are done sooner do what fits into the wait.  Where forwards and
    backwards take equally long, as F, I and W do, nobody waits.  A B that takes twice as long as an F makes neighbours wait in 1F1B; with
    its backwards split into I and W it has no such waits.  Idle cells, and an L that is in the table already, are dropped.

    Args:
        schedule: a compute-only table that `check` accepts, with at least as many stages as devices.
        costs: the costs by which L are placed (`Costs.last` is the time of an L); all 1 where it is None.
        split: split backwards B into I and W (`split_backward`): True, False, or where devices would else wait for each other (None).

    Raises:
        ScheduleError: the table breaks a rule, has SEND and RECV, or fewer stages than devices.
        CostError: a sequence of costs does not have one entry per stage.

    >>> import jaxpipe as jp
    >>> print(spread_last(jp.schedules.build("gpipe", devices=2, microbatches=2), split=False).to_csv(), end="")
    0F0,0F1,0L0,0L1,0B0,0B1
    1F0,1L0,1F1,1L1,1B0,1B1
    """
    plain = remove_spread(schedule)
    _refuse(plain)
    costs = costs or Costs()
    if split is not None:
        return _Run(split_backward(plain) if split else plain, costs).table()
    # Nobody waits at a meeting where the table takes no longer than without L, and all L besides.
    length = max(costs.for_stages(plain.num_stages).last)
    enough = (1 + _WORTH_A_SPLIT) * (simulate(plain, costs).makespan + length * plain.num_microbatches)
    whole = _Run(plain, costs).table()
    if simulate(whole, costs).makespan <= enough or not plain.encoded.of_kinds((Kind.B,)).any():
        return whole
    return min((whole, _Run(split_backward(plain), costs).table()), key=lambda table: simulate(table, costs).makespan)


def remove_spread(schedule: Schedule) -> Schedule:
    """The table without L, everything else as it is: `last` runs with the last stage's F.

    >>> import jaxpipe as jp
    >>> print(remove_spread(jp.Schedule.from_csv("0F0,0L0,0B0")).to_csv(), end="")
    0F0,0B0
    """
    return schedule.with_rows([[c for c in row if not isinstance(c, Action) or c.kind not in TOGETHER] for row in schedule.rows])


def _refuse(schedule: Schedule) -> None:
    """ScheduleError for a table that cannot have an L."""
    check(schedule)
    if schedule.has_transfers:
        raise ScheduleError("the table has SEND and RECV; spread `last` without them (jaxpipe.remove_transfers takes them out)")
    if schedule.num_stages < schedule.num_devices:
        raise ScheduleError(
            f"the table has {schedule.num_stages} stages on {schedule.num_devices} devices; `last` can be spread where every device "
            "has a stage: use as many stages as devices, or more"
        )


@dataclass
class _Device:
    """A device while the table is run: the cells that are left, when it is free, and its new row."""

    left: deque[int]  # by the number of a cell's last action
    free: float = 0
    row: list[Cell] = field(default_factory=list)


class _Run:
    """Runs a table action by action, as early as each can start, with a meeting as soon as an output of the last stage is there."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        table = schedule.encoded
        by_stage = costs.for_stages(table.num_stages)
        self._schedule, self._table = schedule, table
        self._durations = action_durations(table, by_stage)
        wait = waits(table, Transfers.ASYNC)
        latency = np.array(by_stage.transfer)[table.stage[senders(table, wait)]]
        self._needs = _needs_of_cells(table, wait.tolist(), latency.tolist())
        self._users: dict[int, list[int]] = {}
        for user, needs in self._needs.items():
            for need, _ in needs:
                self._users.setdefault(need, []).append(user)
        whole = table.last_half == np.arange(table.num_actions)
        self._devices = [_Device(deque((a + np.flatnonzero(whole[a:b])).tolist())) for a, b in pairwise(table.first)]
        self._ends: dict[int, float] = {}
        self._hop = by_stage.transfer[-1] if table.num_devices > 1 else 0
        self._length = max(by_stage.last[: table.num_devices], default=0)
        last = table.num_stages - 1
        (output,) = makers(Value.OUTPUT)
        self._sources = {int(table.last_half[i]): m for m, i in enumerate(table.at[output, last].tolist())}
        self._held = {int(table.last_half[i]): m for m, i in enumerate(table.backward_at[last].tolist()) if i >= 0}
        self._met: dict[int, float] = {}  # by microbatch, when what L makes is there
        self._due: list[tuple[float, int]] = []  # outputs of the last stage that no L has read
        self._queue: list[tuple[float, int, int]] = []  # (start, device, cell)

    def table(self) -> Schedule:
        """Run it to its end."""
        for device in range(len(self._devices)):
            self._offer(device)
        while self._queue or self._due:
            if self._due and (not self._queue or self._due[0][0] <= self._queue[0][0]):
                self._meet(*heapq.heappop(self._due))
                continue
            start, device, cell = heapq.heappop(self._queue)
            mine = self._devices[device]
            if mine.left and mine.left[0] == cell and start == self._start(device):
                self._run(device, start)
        assert not any(device.left for device in self._devices), "a valid table runs to its end"
        return self._schedule.with_rows([device.row for device in self._devices])

    def _start(self, device: int) -> float | None:
        """When a device's next cell can start; None where it lacks something, or there is none."""
        mine = self._devices[device]
        if not mine.left:
            return None
        ready = mine.free
        cell = mine.left[0]
        for need, latency in self._needs.get(cell, ()):
            if need not in self._ends:
                return None
            ready = max(ready, self._ends[need] + latency)
        if cell in self._held:
            if self._held[cell] not in self._met:
                return None
            ready = max(ready, self._met[self._held[cell]])
        return ready

    def _offer(self, device: int) -> None:
        """Put a device's next cell into the queue, if it can start."""
        start = self._start(device)
        if start is not None:
            heapq.heappush(self._queue, (start, device, self._devices[device].left[0]))

    def _run(self, device: int, start: float) -> None:
        mine = self._devices[device]
        cell = mine.left.popleft()
        mine.row.append(self._schedule.rows[device][int(self._table.position[cell])])
        mine.free = self._ends[cell] = start + self._durations[cell]
        if cell in self._sources:
            heapq.heappush(self._due, (mine.free + self._hop, self._sources[cell]))
        self._offer(device)
        for user in self._users.get(cell, ()):
            other = int(self._table.device[user])
            if self._devices[other].left and self._devices[other].left[0] == user:
                self._offer(other)

    def _meet(self, due: float, microbatch: int) -> None:
        """All devices do their L when the last of them is free; before that, each does what fits."""
        begin = max(due, *(device.free for device in self._devices))
        moved = True
        while moved:
            moved = False
            for number, device in enumerate(self._devices):
                start = self._start(number)
                if start is not None and start + self._durations[device.left[0]] <= begin:
                    self._run(number, start)
                    moved = True
        end = begin + self._length
        self._met[microbatch] = end + self._hop
        for number, device in enumerate(self._devices):
            device.row.append(Action(number, Kind.L, microbatch))
            device.free = end
        for number in range(len(self._devices)):
            self._offer(number)


def _needs_of_cells(table: Encoded, wait: list[int], latency: list[float]) -> dict[int, list[tuple[int, float]]]:
    """By cell, the cells of other devices that feed it and how long their results take to arrive."""
    found: dict[int, list[tuple[int, float]]] = {}
    for i, need in enumerate(wait):
        if need >= 0:
            found.setdefault(int(table.last_half[i]), []).append((int(table.last_half[need]), latency[i]))
    return found
