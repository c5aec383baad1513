"""Simulate a table: when each action starts and ends, which devices idle and why, and how much
memory they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ScheduleError, Violation
from ..table.check import check
from ..table.encoded import Encoded
from ..table.kinds import KINDS
from ..table.run_order import Transfers, mates, senders, waits
from ..table.schedule import Schedule
from ..table.typed import typed
from .costs import Costs, StageCosts
from .timeline import Timeline


@typed()
def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    transfers: Transfers = Transfers.ASYNC,
    max_memory: float | None = None,
) -> Timeline:
    """Simulate a table: each action starts as early as its device is free and its inputs are there.

    An input from another device is there `costs.transfer` after its producer ended.  Idle cells are
    not waited for. What all devices do together (L, E, G) starts and ends at the same time on all
    of them, a transfer after what it needs (L: the last stage's F, G: the first stage's B); what it
    makes is there for that stage (L: for its B, E: for its F) a transfer after its end. In a table
    with SEND and RECV these take no time of their own and the message leaves at the SEND;
    `transfers` says who waits for it: the consumer (ASYNC), the RECV (BUFFERED), or both SEND and
    RECV (RENDEZVOUS).

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
    stage_costs = costs.for_stages(table.num_stages)
    durations = action_durations(table, stage_costs)
    if table.has_transfers and transfers is Transfers.RENDEZVOUS:
        starts, ends = _rendezvous_times(schedule, durations, stage_costs)
    else:
        starts, ends = _times(schedule, durations, stage_costs, transfers)
    timeline = Timeline(schedule, costs, transfers, tuple(starts), tuple(ends))
    if max_memory is not None:
        _check_memory(timeline, max_memory)
    return timeline


def action_durations(table: Encoded, costs: StageCosts) -> list[float]:
    """Per action, its duration; a pair's is booked on its backward half, and the forward half takes
    no time.
    """
    stages = table.num_stages
    none = (0,) * stages
    costs = costs.shortened(table.kinds)
    flat = [time for spec in KINDS for time in (costs.of(spec.kind) or none)]
    durations = [flat[k] for k in (table.kind * stages + table.stage).tolist()]
    for i in table.pairs.tolist():
        sum_of_halves = durations[i] + durations[i + 1]
        durations[i + 1] = sum_of_halves if costs.overlap is None else costs.overlap[table.stage[i]]
        durations[i] = 0
    return durations


def _times(
    schedule: Schedule, durations: list[float], costs: StageCosts, transfers: Transfers
) -> tuple[list[float], list[float]]:
    """Start and end of each action where a SEND returns at once."""
    table = schedule.encoded
    wait = waits(table, transfers)
    total = table.num_actions
    latency = np.array(costs.transfer)[table.stage[senders(table, wait)]].tolist()
    need, device = np.where(wait >= 0, wait, total).tolist(), table.device.tolist()
    starts: list[float] = [0] * total
    ends: list[float] = [0] * (total + 1)
    free: list[float] = [0] * table.num_devices
    met = Meetings(table, durations, costs)
    meets = bool(met.all)
    for i in schedule.run_order(transfers).order:
        if meets and i in met.all:
            met.run(i, starts, ends, free)
            continue
        d, j = device[i], need[i]
        start = met.ready(i, ends, free[d]) if meets else free[d]
        if j < total:
            ready = ends[j] + latency[i]
            if ready > start:
                start = ready
        starts[i] = start
        free[d] = ends[i] = start + durations[i]
    ends.pop()
    _join_pairs(table, starts, ends)
    return _stretch_receives(table, starts, ends, costs) if table.has_transfers else (starts, ends)


class Meetings:
    """What all devices do together, in a simulation: all start when the last is free and what they
    read is everywhere.
    """

    def __init__(self, table: Encoded, durations: Sequence[float], costs: StageCosts) -> None:
        self.all = table.meetings
        self._durations = durations
        # Alone, a device has all that it needs.
        self._latency = costs.transfer if table.num_devices > 1 else (0,) * table.num_stages
        self._before = {meeting.user: meeting for meeting in self.all.values() if meeting.user >= 0}
        self._last_half = table.last_half

    def run(self, number: int, starts: list[float], ends: list[float], free: list[float]) -> None:
        """Book all shares at the first of them."""
        members = self.all[number].members
        if number != members[0]:
            return
        begin = self.begin(number, ends, free)
        end = begin + max(self._durations[i] for i in members)
        for device, i in enumerate(members):
            starts[i], ends[i], free[device] = begin, end, end

    def begin(self, number: int, ends: Sequence[float], free: Sequence[float]) -> float:
        """When a share starts on all devices, which are free from these times on."""
        _, stage, source, _ = self.all[number]
        return max(*free, 0 if source < 0 else ends[self._last_half[source]] + self._latency[stage])

    def ready(self, number: int, ends: Sequence[float], free: float) -> float:
        """When an action of a device that is free from then on has what it needs of such
        a share.
        """
        meeting = self._before.get(number)
        return (
            free
            if meeting is None
            else max(free, ends[meeting.members[0]] + self._latency[meeting.stage])
        )


def _stretch_receives(
    table: Encoded, starts: list[float], ends: list[float], costs: StageCosts
) -> tuple[list[float], list[float]]:
    """A RECV starts when its device reaches it and ends when its message is there, whether or not
    the device waits for it.
    """
    begin, end = np.array(starts), np.array(ends)
    receives, sends = table.receives, table.producer[table.receives]
    arrival = end[sends] + np.array(costs.transfer)[table.stage[sends]]
    before = np.where(np.isin(receives, table.first), 0, end[receives - 1])
    held = end[receives] >= arrival
    # Held, the RECV's own booked time is that of the arrival; its device reached it at the end of
    # what came before.
    begin[receives] = np.where(held, np.minimum(begin[receives], before), begin[receives])
    end[receives] = np.maximum(end[receives], arrival)
    return begin.tolist(), end.tolist()


def _join_pairs(table: Encoded, starts: list[float], ends: list[float]) -> None:
    """The halves of an overlapped pair start and end together."""
    for i in table.pairs.tolist():
        starts[i], ends[i] = starts[i + 1], ends[i + 1]


def _rendezvous_times(
    schedule: Schedule, durations: list[float], costs: StageCosts
) -> tuple[list[float], list[float]]:
    """Start and end of each action where SEND and RECV hold their devices until both are reached,
    and for the transfer.
    """
    table = schedule.encoded
    mate, device = mates(table).tolist(), table.device.tolist()
    latency = [
        costs.transfer[s]
        for s in table.stage[np.where(table.producer >= 0, table.producer, 0)].tolist()
    ]
    starts: list[float] = [0] * table.num_actions
    ends: list[float] = [0] * table.num_actions
    free: list[float] = [0] * table.num_devices
    booked = bytearray(table.num_actions)
    met = Meetings(table, durations, costs)
    for i in schedule.run_order(Transfers.RENDEZVOUS).order:
        if booked[i]:
            continue
        if i in met.all:
            met.run(i, starts, ends, free)
            continue
        d, j = device[i], mate[i]
        starts[i] = met.ready(i, ends, free[d])
        if j < 0:
            free[d] = ends[i] = starts[i] + durations[i]
            continue
        other = device[j]
        starts[j] = free[other]
        ends[i] = ends[j] = free[d] = free[other] = max(free[d], free[other]) + latency[i]
        booked[j] = 1
    _join_pairs(table, starts, ends)
    return starts, ends


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
