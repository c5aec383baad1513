"""Lock-step: how many steps a table takes in which every action takes one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import typed
from ..table.encoded import Transfers
from ..table.kinds import RECEIVES, Cell
from ..table.schedule import Schedule, check
from .costs import Costs
from .loop import loop_of


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
    """Run a table in lock-step, each action as soon as it can: every action takes a step.

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
    loop = loop_of(table, Costs().for_stages(table.num_stages), held)
    loop.device = table.device.tolist()  # not on a link beside it
    # A step each, both halves of a pair in one; a RECV may share the step of its SEND.
    loop.duration = (table.last_half == np.arange(table.num_actions)).astype(np.int64).tolist()
    loop.latency = (-table.of_kinds(RECEIVES).astype(np.int64)).tolist()
    loop.run(schedule.run_order(held).order)
    count = int(max(loop.ends, default=0))
    rows: list[list[Cell]] = [[None] * count for _ in schedule.rows]
    columns = table.device, table.position, np.array(loop.starts, np.int64)[table.last_half]
    for device, position, step in zip(*(column.tolist() for column in columns), strict=True):
        rows[device][step] = schedule.rows[device][position]
    return Steps(tuple(map(tuple, rows)))
