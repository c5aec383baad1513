"""Lock-step simulation: every action takes one step, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..table.action import Cell
from ..table.check import check
from ..table.encoded import Meeting
from ..table.run_order import Transfers, mates, waits
from ..table.schedule import Schedule
from ..table.typed import typed


@dataclass(frozen=True)
class Steps:
    """`rows[device][step]` is the cell that a device runs in a step, None while it waits; `len()`
    counts the steps.

    As text, a step's cells in order of devices, with `|` between steps.
    """

    rows: tuple[tuple[Cell, ...], ...]

    def __len__(self) -> int:
        return max(map(len, self.rows), default=0)

    def __str__(self) -> str:
        return " | ".join(
            " ".join(str(c) for c in step if c is not None) for step in zip(*self.rows, strict=True)
        )


@typed()
def simulate_steps(schedule: Schedule, *, transfers: Transfers = Transfers.BUFFERED) -> Steps:
    """Run a table in lock-step, each action as soon as it can: compute, SEND and RECV take a step
    each.

    A RECV may share a step with its SEND, but never precedes it (with RENDEZVOUS they always share
    it).  Without SEND and RECV in the table, an action comes at least one step after what it needs
    from another device.  The number of steps compares with that of torch 2.13's
    `_simulate_comms_compute`.

    Args:
        schedule: a table that `check` accepts for these `transfers`.
        transfers: BUFFERED or RENDEZVOUS; ASYNC means BUFFERED here, since a RECV takes a step.

    Raises:
        ScheduleError: the table breaks a rule.

    >>> from jaxpipe import schedules
    >>> str(simulate_steps(schedules.build("gpipe", devices=2, microbatches=1)))
    '0F0 | 1F0 | 1B0 | 0B0'
    """
    held = Transfers.BUFFERED if transfers is Transfers.ASYNC else transfers
    check(schedule, transfers=held)
    table = schedule.encoded
    if not table.has_transfers:
        at = _steps(schedule, Transfers.ASYNC)
    elif held is Transfers.RENDEZVOUS:
        at = _rendezvous_steps(schedule)
    else:
        at = _steps(schedule, Transfers.BUFFERED)
    count = 1 + max(at, default=-1)
    rows: list[list[Cell]] = [[None] * count for _ in schedule.rows]
    for (device, position), step in zip(
        zip(table.device.tolist(), table.position.tolist(), strict=True), at, strict=True
    ):
        rows[device][step] = schedule.rows[device][position]
    return Steps(tuple(map(tuple, rows)))


def _steps(schedule: Schedule, transfers: Transfers) -> list[int]:
    """Per action, its step where a SEND never waits."""
    table = schedule.encoded
    total = table.num_actions
    wait = waits(table, transfers)
    need, device = np.where(wait >= 0, wait, total).tolist(), table.device.tolist()
    # A RECV may share the step of its SEND; a compute action comes a step after its producer.
    lag = (table.is_compute & (wait >= 0)).astype(np.int64).tolist()
    takes = (table.last_half == np.arange(total)).astype(np.int64).tolist()
    at = [0] * (total + 1)
    free = [0] * table.num_devices
    for i in schedule.run_order(transfers).order:
        d = device[i]
        if i in table.meetings:
            _meet(table.meetings[i], i, at, free)
            continue
        at[i] = max(free[d], at[need[i]] + lag[i])
        free[d] = at[i] + takes[i]
    at.pop()
    for i in table.pairs.tolist():
        at[i] = at[i + 1]
    return at


def _meet(meeting: Meeting, number: int, at: list[int], free: list[int]) -> None:
    """One step for what all devices do together, booked at the first of its actions."""
    if number == meeting.members[0]:
        step = max(free)
        for device, member in enumerate(meeting.members):
            at[member], free[device] = step, step + 1


def _rendezvous_steps(schedule: Schedule) -> list[int]:
    """Per action, its step where SEND and RECV share one."""
    table = schedule.encoded
    mate, device = mates(table).tolist(), table.device.tolist()
    takes = (table.last_half == np.arange(table.num_actions)).astype(np.int64).tolist()
    at = [-1] * table.num_actions
    free = [0] * table.num_devices
    for i in schedule.run_order(Transfers.RENDEZVOUS).order:
        if at[i] >= 0:
            continue
        if i in table.meetings:
            _meet(table.meetings[i], i, at, free)
            continue
        j = mate[i]
        at[i] = free[device[i]]
        if j >= 0:
            at[i] = at[j] = max(at[i], free[device[j]])
            free[device[j]] = at[j] + 1
        free[device[i]] = at[i] + takes[i]
    return at
