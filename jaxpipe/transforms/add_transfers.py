"""Transform: SEND and RECV for every value that crosses devices, without deadlock and with no
receive earlier than necessary.

Each SEND should come right after its producer, each RECV right before its consumer.  With transfers
that block both sides, such rows may deadlock: a cycle of devices, at least one of which waits at a
SEND (a cycle of receives alone would be a deadlock of the compute-only table).  There, and only
there, the receiver of such a SEND receives it early: before the action at which it waits.

At least one SEND of each cycle can be received early at no cost: the one whose producer ended
first, since everything else in the cycle waits for an action that ended later.  So the table keeps
its makespan under the given costs where transfers take no time. Where several SENDs qualify, the
choice counts lock-steps, in which each SEND and RECV takes a step too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..engine.costs import Costs
from ..engine.loop import NEVER, Loop
from ..engine.simulate import Timeline, in_steps, simulate
from ..errors import ScheduleError
from ..table.encoded import Encoded
from ..table.kinds import MESSAGES, SENDS, Action, Cell, parts
from ..table.run_order import Transfers, Wait, buffered_order, mates, rendezvous_order, waits
from ..table.schedule import Schedule
from ..table.typed import typed


@typed()
def add_transfers(schedule: Schedule, *, costs: Costs | None = None) -> Schedule:
    """Put SEND and RECV into the rows of a compute-only table; none between stages on one device.

    The result runs without deadlock both where a SEND returns at once and where SEND and RECV wait
    for each other.  A RECV comes right before its consumer, unless that would deadlock: then it
    comes as late as it can, and where transfers take no time the makespan is still that of the
    compute-only table.  An overlapped pair receives before it and sends after it.  Idle cells are
    dropped (torch 2.13 accepts none in a table with transfers).

    Args:
        schedule: a compute-only table that `check` accepts.
        costs: the costs by which one of several blocked messages is chosen; all 1 where it is None.

    Raises:
        ScheduleError: the table breaks a rule, has transfers already, or has L.

    >>> import jaxpipe as jp
    >>> print(
    ...     add_transfers(jp.schedules.build("gpipe", devices=2, microbatches=1)).to_csv(), end=""
    ... )
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    if schedule.has_transfers:
        raise ScheduleError(
            "the table has SEND and RECV already; jaxpipe.transforms.remove_transfers removes them"
        )
    if schedule.encoded.is_collective.any():
        raise ScheduleError(
            "the table has L or E, for which no SEND and RECV are defined; "
            "jaxpipe.transforms.remove_spread takes them out"
        )
    timeline = simulate(schedule, costs)
    late = schedule.with_rows(_late_receives(timeline))
    return late.with_rows(_early_in_cycles(late, timeline))


_Urgent: TypeAlias = tuple[float, int, Action]


def _late_receives(timeline: Timeline) -> list[list[Cell]]:
    """The rows with each SEND right after its producer and each RECV right before its consumer."""
    table = timeline.schedule.encoded
    actions = [action for *_, action in timeline.schedule.actions()]
    # By action: its transfer, after what sorts those of a pair.
    before: dict[Action, _Urgent] = {}
    after: dict[Action, _Urgent] = {}
    for _, users, send, receive in MESSAGES:
        crossing = np.flatnonzero(table.crosses & table.of_kinds(users))
        for number, source in zip(
            crossing.tolist(), table.producer[crossing].tolist(), strict=True
        ):
            (stage, _, microbatch), (user, _, _) = actions[source], actions[number]
            sent, received = Action(stage, send, microbatch), Action(user, receive, microbatch)
            after[actions[source]] = timeline.starts[number], number, sent
            before[actions[number]] = timeline.ends[source], number, received
    return [
        [
            each
            for cell in row
            if cell is not None
            for each in (*_of(cell, before), cell, *_of(cell, after))
        ]
        for row in timeline.schedule.cells
    ]


def _of(cell: Cell, transfers: Mapping[Action, _Urgent]) -> list[Action]:
    """The transfers of a cell's actions, the most urgent first."""
    return [each for *_, each in sorted(transfers[a] for a in parts(cell) if a in transfers)]


def _early_in_cycles(late: Schedule, timeline: Timeline) -> list[list[Cell]]:
    """The rows, in which a message of each cycle of devices that wait for each other is received
    earlier: before the action at which its receiver waits.
    """
    table = late.encoded
    is_send, mate = table.of_kinds(SENDS).tolist(), mates(table).tolist()
    ready, wanted = _times(table, timeline)
    loop = in_steps(table, Transfers.BUFFERED)
    deadline = _deadlines(table, loop, mate)
    early: dict[int, list[int]] = {}
    booked = 0

    def first_received(order: Sequence[int], cycle: Sequence[Wait]) -> int:
        """The place of the SEND that is cheapest to receive early."""
        nonlocal booked
        loop.run(i for i in order[booked:] if loop.ends[i] == NEVER)
        booked = len(order)

        def price(place: int) -> tuple[bool, bool, bool, float]:
            send, other = cycle[place], cycle[(place + 1) % len(cycle)]
            return (
                not is_send[send.at],
                ready[send.at] > wanted[other.at],
                loop.free[send.device] > loop.free[other.device],
                -deadline[other.at],
            )

        best = min(range(len(cycle)), key=price)
        send, at = cycle[best].at, cycle[(best + 1) % len(cycle)].at
        loop.run((send, mate[send]))
        early.setdefault(at, []).append(mate[send])
        return best

    rendezvous_order(table, first_received)
    moved = {number: table.action(number) for numbers in early.values() for number in numbers}
    rows: list[list[Cell]] = []
    number = 0
    for row in late.rows:
        rows.append([])
        for cell in row:
            rows[-1] += map(moved.__getitem__, early.get(number, ()))
            if number not in moved:
                rows[-1].append(cell)
            number += len(parts(cell))
    return rows


def _times(table: Encoded, timeline: Timeline) -> tuple[list[float], list[float]]:
    """By the costs, for each action: when the message of a SEND is there, and when the first
    compute action from there on starts in its row.
    """
    starts, ends = np.full((2, table.num_actions), np.inf)
    starts[table.is_compute], ends[table.is_compute] = timeline.starts, timeline.ends
    wanted = [np.minimum.accumulate(starts[a:b][::-1])[::-1] for a, b in pairwise(table.first)]
    return ends[table.producer].tolist(), np.concatenate(wanted).tolist()


def _deadlines(table: Encoded, loop: Loop, mate: Sequence[int]) -> list[float]:
    """For each action, the last step that delays nothing, counted back from the end."""
    found: list[float] = [0] * table.num_actions
    ends, sends = set(table.first), table.of_kinds(SENDS).tolist()
    for i in reversed(buffered_order(table, waits(table, Transfers.BUFFERED)).order):
        if i + 1 not in ends:
            found[i] = found[i + 1] - loop.duration[i + 1]
        if sends[i]:
            found[i] = min(found[i], found[mate[i]])
    return found
