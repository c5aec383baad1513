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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..engine.timeline import Timeline
from ..errors import ScheduleError
from ..table.action import Action, Cell, Kind
from ..table.encoded import Encoded, IntArray
from ..table.garbage_collection import paused_collector
from ..table.kinds import MESSAGES, makers
from ..table.run_order import Transfers, cycles_of
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
    if schedule.encoded.together.any():
        raise ScheduleError(
            "the table has L or E, for which no SEND and RECV are defined; "
            "jaxpipe.transforms.remove_spread takes them out"
        )
    with paused_collector():
        plan = _plan(simulate(schedule, costs))
        run = _Run(plan)
        run.finish()
        return schedule.with_rows(
            _insert(schedule, plan, np.array(run.early, np.int64), np.array(run.before, np.int64))
        )


@typed()
def remove_transfers(schedule: Schedule) -> Schedule:
    """The compute-only table: without SEND and RECV, everything else as it is."""
    return schedule.with_rows(
        [
            [cell for cell in row if not isinstance(cell, Action) or cell.kind.is_compute]
            for row in schedule.cells
        ]
    )


@dataclass(frozen=True)
class _Plan:
    """The transfers of all devices where they should be, row by row: `first[d] : first[d + 1]` are
    those of device d.

    One entry per transfer: `owner`, its device; `mate`, the other side, and `peer`, the device of
    that one; `served`, the compute action that makes or needs the message; `anchor`, the number of
    the action before which it comes (or one past the row's last); `cells`, how many compute cells
    come before it.  By the costs: `ready`, when the message is there; `wanted`, when the first
    action after the transfer needs to start.  `deadline` is the last step, counted from the end and
    so negative, that delays nothing.
    """

    first: tuple[int, ...]
    owner: list[int]
    is_send: list[bool]
    mate: list[int]
    peer: list[int]
    served: IntArray
    anchor: list[int]
    cells: list[int]
    ready: list[float]
    wanted: list[float]
    deadline: list[int]


def _plan(timeline: Timeline) -> _Plan:
    """Every SEND right after its producer, every RECV right before its consumer."""
    table = timeline.schedule.encoded
    starts, ends = np.asarray(timeline.starts), np.asarray(timeline.ends)
    consumers = np.flatnonzero(table.crosses)
    producers = table.producer[consumers]
    count = len(consumers)
    first_half = np.arange(table.num_actions)
    first_half[table.pairs + 1] -= 1
    anchor = np.concatenate([table.last_half[producers] + 1, first_half[consumers]])
    device = np.concatenate([table.device[producers], table.device[consumers]])
    is_send = np.repeat([1, 0], count)
    # Actions are numbered through all rows; adding the device separates the end of a row from the
    # start of the next. Between two compute cells the sends come first; of two for the same pair,
    # the more urgent one.
    key = 2 * (anchor + device) + (1 - is_send)
    urgency = np.concatenate([starts[consumers], ends[producers]])
    order = np.lexsort((urgency, key)) if len(table.pairs) else _sorting(key)
    place = np.empty_like(order)
    place[order] = np.arange(2 * count)
    in_time = place[
        _sorting(_moments(timeline.schedule, np.concatenate([producers, consumers]), is_send))
    ]
    owner, anchor, is_send = device[order], anchor[order], is_send[order]
    mate = place[order - np.where(is_send == 1, -count, count)]
    first = tuple(np.searchsorted(owner, np.arange(table.num_devices + 1)).tolist())
    cells = _cells_before(table, anchor, owner)
    begin = np.tile(starts[consumers], 2)[order]
    following = np.append(starts, np.inf)[anchor]
    following[anchor == np.array(table.first)[owner + 1]] = np.inf
    return _Plan(
        first=first,
        owner=owner.tolist(),
        is_send=is_send.astype(bool).tolist(),
        mate=mate.tolist(),
        peer=owner[mate].tolist(),
        served=np.concatenate([producers, consumers])[order],
        anchor=anchor.tolist(),
        cells=cells.tolist(),
        ready=np.tile(ends[producers], 2)[order].tolist(),
        wanted=np.minimum(begin, following).tolist(),
        deadline=_deadlines(
            table, in_time[::-1], owner, cells, receiver=np.where(is_send == 1, mate, -1)
        ),
    )


def _sorting(keys: IntArray) -> IntArray:
    """What argsort gives for keys that all differ and are not much larger than their number."""
    slots = np.full(keys.max(initial=-1) + 1, -1, np.int64)
    slots[keys] = np.arange(len(keys))
    return slots[slots >= 0]


def _moments(schedule: Schedule, served: IntArray, is_send: IntArray) -> IntArray:
    """A number for each transfer, all different, that grows along the rows and from each SEND to
    its RECV.
    """
    table = schedule.encoded
    moment = np.empty(table.num_actions, np.int64)
    moment[np.array(schedule.run_order(Transfers.ASYNC).order, np.int64)] = np.arange(
        table.num_actions
    )
    second_half = served != table.last_half[served]
    moments: IntArray = 4 * moment[table.last_half[served]] + 2 * is_send + second_half
    return moments


def _cells_before(table: Encoded, anchor: IntArray, owner: IntArray) -> IntArray:
    """How many compute cells of its row come before each transfer (a pair is one cell)."""
    whole = np.ones(table.num_actions + 1, np.int64)
    whole[table.pairs] = 0
    before = np.cumsum(whole) - whole
    cells: IntArray = before[anchor] - before[np.array(table.first)][owner]
    return cells


def _deadlines(
    table: Encoded, in_time: IntArray, owner: IntArray, cells: IntArray, *, receiver: IntArray
) -> list[int]:
    """Per transfer, the last step at which it delays nothing, where every cell and transfer takes a
    step.

    `in_time` lists the transfers from the last to the first, `receiver` has the RECV of each SEND.
    """
    row_ends = np.bincount(
        table.device[table.last_half == np.arange(table.num_actions)], minlength=table.num_devices
    )
    # deadline minus cells of the next transfer on each device: between two transfers there are only
    # cells.
    margin = (-row_ends).tolist()
    deadline = [0] * len(in_time)
    columns = (column[in_time].tolist() for column in (owner, cells, receiver))
    for k, device, before, recv in zip(in_time.tolist(), *columns, strict=True):
        step = margin[device] + before - 1
        if recv >= 0 and deadline[recv] < step:
            step = deadline[recv]
        deadline[k] = step
        margin[device] = step - before
    return deadline


class _Run:
    """Runs the transfers of a plan with both sides blocking, and receives early where devices wait
    in a cycle.

    `early` lists the RECVs that are moved earlier, in order of time, and `before` the transfer at
    which the receiver waited.
    """

    def __init__(self, plan: _Plan) -> None:
        self.early: list[int] = []
        self.before: list[int] = []
        self._plan = plan
        self._head = list(plan.first[:-1])
        self._taken = bytearray(len(plan.mate) + 1)
        # A transfer t of device d that is reached now takes place in step lag[d] + cells[t],
        # counting all steps before it.
        self._lag = [0] * len(self._head)

    def finish(self) -> None:
        """Run all transfers."""
        plan, head = self._plan, self._head
        peer, last = plan.peer, plan.first[1:]
        self._advance(list(range(len(head)))[::-1])
        while standing := {d: peer[at] for d, at in enumerate(head) if at < last[d]}:
            for cycle in cycles_of(standing):
                self._advance([self._take_early(*self._cheapest(cycle))])

    def _cheapest(self, cycle: Sequence[int]) -> tuple[int, int]:
        """The SEND of a cycle that is cheapest to receive early, and the transfer at which its
        receiver waits.

        First choice is one that does not prolong the makespan, then one that adds no step, then the
        one whose receiver has the most steps to spare.
        """
        plan, head, lag = self._plan, self._head, self._lag
        found, least = (-1, -1), (True, True, 1)
        for device, receiver in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            send, at = head[device], head[receiver]
            if not plan.is_send[send]:
                continue
            too_late = plan.ready[send] > plan.wanted[at]
            later = lag[device] + plan.cells[send] > lag[receiver] + plan.cells[at]
            price = (too_late, later, -plan.deadline[at])
            if found[0] < 0 or price < least:
                found, least = (send, at), price
        return found

    def _take_early(self, send: int, at: int) -> int:
        """Let the receiver of a SEND receive it before `at`, where it waits; return the sender,
        which can run on.
        """
        plan, lag = self._plan, self._lag
        sender, receiver = plan.owner[send], plan.owner[at]
        self.early.append(plan.mate[send])
        self.before.append(at)
        self._taken[plan.mate[send]] = 1
        lag[receiver] = 1 + max(lag[receiver], lag[sender] + plan.cells[send] - plan.cells[at])
        lag[sender] += 1
        self._head[sender] = self._next(send)
        return sender

    def _next(self, transfer: int) -> int:
        """The transfer that its device reaches next."""
        transfer += 1
        while self._taken[transfer]:
            transfer += 1
        return transfer

    def _advance(self, runnable: list[int]) -> None:
        """Run until all devices wait in cycles of more than two."""
        plan, head, lag, last = self._plan, self._head, self._lag, self._plan.first[1:]
        mate, peer, is_send, cells = plan.mate, plan.peer, plan.is_send, plan.cells
        while runnable:
            device = runnable.pop()
            here = head[device]
            while here < last[device]:
                there, other = mate[here], peer[here]
                at = head[other]
                if at != there:
                    if peer[at] != device:
                        break
                    # The most frequent cycle: the two wait for each other.
                    runnable.append(self._take_early(*self._cheapest((device, other))))
                    here = head[device]
                    continue
                # Both sides are reached, and the message passes; a RECV comes no sooner than its
                # SEND.  `later`: by how many steps the other device is later.
                later = lag[other] + cells[there] - lag[device] - cells[here]
                if is_send[here]:
                    lag[other] -= min(later, 0)
                else:
                    lag[device] += max(later, 0)
                lag[device] += 1
                lag[other] += 1
                here = head[device] = self._next(here)
                head[other] = self._next(there)
                runnable.append(other)


def _insert(schedule: Schedule, plan: _Plan, early: IntArray, before: IntArray) -> list[list[Cell]]:
    """The rows with the plan's transfers in them, each early RECV moved before another transfer
    (keys as in the plan).
    """
    table = schedule.encoded
    wanted = np.ones(len(plan.mate), bool)
    wanted[early] = False
    rest = np.flatnonzero(wanted)
    # Of several before the same transfer, the one that was received first comes first.
    order = np.concatenate([early, rest])[
        np.argsort(np.concatenate([2 * before, 2 * rest + 1]), kind="stable")
    ]
    place = np.arange(len(wanted))
    place[early] = before
    anchor, owner = (
        np.array(plan.anchor, np.int64)[place[order]],
        np.array(plan.owner, np.int64)[order],
    )
    firsts = np.ones(table.num_actions, bool)
    firsts[table.pairs + 1] = False
    numbers = np.flatnonzero(firsts)
    keys = np.concatenate([2 * (anchor + owner), 2 * (numbers + table.device[numbers]) + 1])
    cells: list[Cell] = list(_transfer_actions(table, plan, order))
    cells += [cell for row in schedule.cells for cell in row if cell is not None]
    merged = np.argsort(keys, kind="stable")
    devices = np.concatenate([owner, table.device[numbers]])[merged]
    bounds = np.searchsorted(devices, np.arange(table.num_devices + 1)).tolist()
    sequence = merged.tolist()
    return [[cells[i] for i in sequence[a:b]] for a, b in pairwise(bounds)]


def _transfer_actions(table: Encoded, plan: _Plan, order: IntArray) -> list[Action]:
    """The SEND or RECV action of each transfer in `order`."""
    served = plan.served[order]
    # whether it is a SEND, and the kind that it serves
    by_kind = np.zeros((2, len(Kind)), np.int64)
    for value, users, send, receive in MESSAGES:
        by_kind[1, makers(value)] = send
        by_kind[0, users] = receive
    kinds = by_kind[np.array(plan.is_send, np.int64)[order], table.kind[served]]
    every = tuple(Kind)
    fields = zip(
        table.stage[served].tolist(),
        [every[k] for k in kinds.tolist()],
        table.microbatch[served].tolist(),
        strict=True,
    )
    # Action._make does the same through a Python frame of its own for each.
    return list(map(partial(tuple.__new__, Action), fields))
