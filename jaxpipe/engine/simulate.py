"""Simulate a table: when each action starts and ends, which devices idle and why, and how much
memory they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ScheduleError, Violation
from ..table.encoded import Encoded
from ..table.kinds import RECEIVES, Cell
from ..table.run_order import Transfers
from ..table.schedule import Schedule, check
from ..table.typed import typed
from .costs import Costs
from .loop import Loop
from .timeline import Timeline


@typed()
def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    transfers: Transfers = Transfers.ASYNC,
    max_memory: float | None = None,
) -> Timeline:
    """Simulate a table: each action starts when its device is free and its inputs have arrived.

    An input from another device arrives `costs.transfer` after its producer ended.  Idle cells take
    no time.  A collective action (L, E, G) starts and ends at the same time on all devices.  A
    transfer comes before it (from the last stage's F to L, from the first stage's B to G) and after
    it (from L to the last stage's B, from E to the first stage's F).

    SEND and RECV take no time of their own, and the message leaves at the SEND.  `transfers` says
    who waits for it: the consumer (ASYNC), the RECV (BUFFERED), or both SEND and RECV (RENDEZVOUS).

    Args:
        schedule: a table that `check` accepts for these `transfers`.
        costs: times and sizes; all 1, and transfers 0, where it is None.
        transfers: how SEND and RECV behave, in a table that has them.
        max_memory: the most activation memory (in units of `costs.activation`) that a device may
            hold.

    Raises:
        ScheduleError: the table breaks a rule, or needs more than `max_memory`.
        CostError: a sequence of costs does not have one entry per stage.

    >>> import jaxpipe as jp
    >>> t = simulate(
    ...     jp.schedules.build("1f1b", devices=4, microbatches=8),
    ...     Costs(forward=1, input_grad=1, weight_grad=1),
    ... )
    >>> t.makespan, t.start["3F0"], t.peak_activations
    (33, 3, (4, 3, 2, 1))
    """
    costs = costs or Costs()
    check(schedule, transfers=transfers)
    table = schedule.encoded
    times = costs.for_stages(table.num_stages)
    loop = Loop.of(table, times, transfers)
    loop.run(schedule.run_order(transfers).order)
    starts, ends = loop.starts, loop.ends
    if table.has_transfers:
        _hold_transfers(table, transfers, starts, ends, times.transfer)
    _join_pairs(table, starts, ends)
    timeline = Timeline(schedule, costs, transfers, tuple(starts), tuple(ends))
    if max_memory is not None:
        _check_memory(timeline, max_memory)
    return timeline


def _hold_transfers(
    table: Encoded,
    transfers: Transfers,
    starts: list[float],
    ends: list[float],
    latency: Sequence[float],
) -> None:
    """A RECV starts when its device reaches it and ends when its message has arrived, whether or
    not the device waits for it.  Where both sides wait, a SEND starts when its device reaches it.
    """
    both = transfers is Transfers.RENDEZVOUS
    held = ~table.is_compute if both else table.of_kinds(RECEIVES)
    arrived = ends if both else [ends[send] + latency[table.stage[send]] for send in table.producer]
    reached = {i: 0 if i in table.first else ends[i - 1] for i in np.flatnonzero(held).tolist()}
    for i, start in reached.items():
        starts[i], ends[i] = start, max(ends[i], arrived[i])


def _join_pairs(table: Encoded, starts: list[float], ends: list[float]) -> None:
    """The halves of an overlapped pair start and end together."""
    for i in table.pairs.tolist():
        starts[i], ends[i] = starts[i + 1], ends[i + 1]


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
    loop = in_steps(table, held)
    loop.run(schedule.run_order(held).order)
    _join_pairs(table, loop.starts, loop.ends)
    count = int(max(loop.ends, default=0))
    rows: list[list[Cell]] = [[None] * count for _ in schedule.rows]
    cells = zip(table.device.tolist(), table.position.tolist(), loop.starts, strict=True)
    for device, position, step in cells:
        rows[device][int(step)] = schedule.rows[device][position]
    return Steps(tuple(map(tuple, rows)))


def in_steps(table: Encoded, transfers: Transfers) -> Loop:
    """The actions of a table, a step each; a RECV may share the step of its SEND."""
    loop = Loop.of(table, Costs().for_stages(table.num_stages), transfers)
    loop.duration = (table.last_half == np.arange(table.num_actions)).astype(np.int64).tolist()
    loop.latency = (-table.of_kinds(RECEIVES).astype(np.int64)).tolist()
    return loop


def _check_memory(timeline: Timeline, most: float) -> None:
    """ScheduleError naming every device that holds more than `most`, and when."""
    found = []
    for device, peak in enumerate(timeline.peak_memory):
        if peak > most:
            when = next(time for time, held in timeline.memory(device) if held > most)
            found.append(
                Violation(
                    "memory",
                    f"device {device} may hold {most} of activations, but holds {peak} at its "
                    f"peak (more than {most} from time {when} on)",
                )
            )
    if found:
        raise ScheduleError(
            "the schedule needs too much memory:\n" + "\n".join(f"  {v}" for v in found),
            tuple(found),
        )
