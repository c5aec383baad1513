"""An order in which all actions of a table can run, or the cycles in which devices wait for each
other.

Each device runs its row in order.  Devices are advanced as far as they can go, and one that must
wait is parked at the action that it waits for.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from .encoded import Encoded, IntArray
from .kinds import KINDS, MESSAGES, SENDS


class Transfers(enum.Enum):
    """The behaviour of the SEND and RECV of a table, from the laxest to the strictest: what runs
    under one runs under those before it.

    A compute-only table has no SEND or RECV, and its transfers are all ASYNC.
    """

    # SEND and RECV are posted and take no device time; the consumer waits for the data
    ASYNC = "async"
    BUFFERED = "buffered"  # SEND returns at once; RECV holds its device until the data is there
    # both hold their devices until both are reached, then for the transfer itself
    RENDEZVOUS = "rendezvous"


class Wait(NamedTuple):
    """A device that cannot go on: it is at action `at` and waits for action `on` of
    device `other`.
    """

    device: int
    at: int
    on: int
    other: int


@dataclass(frozen=True)
class RunOrder:
    """`order` holds every action, each after all that it waits for, where there are no `cycles`."""

    order: tuple[int, ...]
    cycles: tuple[tuple[Wait, ...], ...]


# The order so far and a cycle -> the place of the wait that ends it.
Chooser: TypeAlias = Callable[[Sequence[int], Sequence[Wait]], int]


def waits(table: Encoded, transfers: Transfers) -> IntArray:
    """Per action, the action of another device that must be done first, or -1.

    What the order of a row itself decides is left out: that is the rule of order in the checker.
    """
    found = np.where(table.crosses, table.producer, -1)
    if table.has_transfers:
        found[table.is_compute] = -1
    if table.has_transfers and transfers is Transfers.ASYNC:
        # The action that reads a message waits for its SEND, and the RECV does not.
        found[table.receives] = -1
        for _, users, send, receive in MESSAGES:
            mine = np.flatnonzero(table.crosses & table.of_kinds(users))
            stage = table.stage[mine] + KINDS[receive].came_from
            found[mine] = table.at[send, stage, table.microbatch[mine]]
    # The output of the forward half of an overlapped pair is ready when the whole pair is done.
    return np.where(found >= 0, table.last_half[found], -1)


def run_order(table: Encoded, transfers: Transfers) -> RunOrder:
    """The run order of a table under one kind of transfer, which matters with SEND and RECV."""
    if transfers is Transfers.RENDEZVOUS and table.has_transfers:
        return rendezvous_order(table)
    return buffered_order(table, waits(table, transfers))


def senders(table: Encoded, wait: IntArray) -> IntArray:
    """Per action that waits, the action whose stage sends the message; -1 for the others."""
    return wait if table.has_transfers else np.where(wait >= 0, table.producer, -1)


def buffered_order(table: Encoded, wait: IntArray) -> RunOrder:
    """Run the rows where only `wait` holds a device back (sends never do)."""
    together = {number: each.members for number, each in table.collectives.items()}
    return _run(table, np.where(wait >= 0, wait, table.num_actions).tolist(), together)


def rendezvous_order(table: Encoded, choose: Chooser = lambda order, cycle: 0) -> RunOrder:
    """Run the rows where SEND and RECV each hold their device until the other is reached; a SEND
    comes right before its RECV.

    `choose` gets the order so far and a cycle, and returns the place of the wait that ends.
    """
    together = {number: each.members for number, each in table.collectives.items()}
    mate = mates(table)
    for send in np.flatnonzero(table.of_kinds(SENDS) & (mate >= 0)).tolist():
        both = (send, int(mate[send]))
        together |= dict.fromkeys(both, both)
    return _run(table, [table.num_actions] * table.num_actions, together, choose)


def _run(
    table: Encoded,
    need: list[int],
    together: dict[int, tuple[int, ...]],
    choose: Chooser = lambda order, cycle: 0,
) -> RunOrder:
    """Run the rows: each action after the one that it needs (the number of actions: none), and at
    the same time as those that run `together` with it, once all devices have reached them.

    Where no device can go on, the waits of one that has stopped lead to a cycle, which goes on as
    if one of its devices had not waited: so later cycles are found too.
    """
    total, owner = table.num_actions, table.device.tolist()
    head, stop = list(table.first[:-1]), table.first[1:]
    done, stopped = bytearray(total) + b"\1", [False] * len(head)
    parked: dict[int, list[int]] = {}  # by action, the devices that wait for it
    present: dict[int, int] = {}  # by the first of those together, how many are there in turn
    order: list[int] = []
    cycles: list[tuple[Wait, ...]] = []

    def blocker(number: int) -> int:
        """What the next action of a device waits for: of those together, the first missing one."""
        if not done[need[number]]:
            return need[number]
        members = together.get(number)
        if members is None:
            return total
        place = present.get(members[0], 0)
        while place < len(members) and head[owner[members[place]]] == members[place]:
            place += 1
        present[members[0]] = place
        return members[place] if place < len(members) else total

    def advance(devices: Iterable[int]) -> None:
        """Run devices, and those that wait for them, until none can go on."""
        runnable = list(devices)
        while runnable:
            device = runnable.pop()
            stopped[device] = False
            while (i := head[device]) < stop[device]:
                if (on := blocker(i)) < total:
                    parked.setdefault(on, []).append(device)
                    stopped[device] = True
                    break
                for k in together.get(i, (i,)):
                    done[k] = 1
                    order.append(k)
                    head[owner[k]] = k + 1
                    for other in (owner[k], *parked.pop(k, ())):
                        if stopped[other]:
                            stopped[other] = False
                            runnable.append(other)

    advance(range(table.num_devices))
    while (device := next((d for d, i in enumerate(head) if i < stop[d]), -1)) >= 0:
        cycle = _cycle_from(device, head, blocker, owner)
        cycles.append(cycle)
        at = cycle[choose(order, cycle)].at
        need[at] = total
        members = together.get(at, (at,))
        for k in members:  # each device does its own alone
            together.pop(k, None)
        advance(owner[k] for k in members if head[owner[k]] == k)
    return RunOrder(tuple(order), tuple(cycles))


def _cycle_from(
    device: int, head: Sequence[int], blocker: Callable[[int], int], owner: Sequence[int]
) -> tuple[Wait, ...]:
    """The cycle to which the waits of a device that has stopped lead, where all have."""
    trail: dict[int, int] = {}
    while device not in trail:
        trail[device] = blocker(head[device])
        device = owner[trail[device]]
    found = list(trail)[list(trail).index(device) :]
    first = found.index(min(found))
    devices = found[first:] + found[:first]
    return tuple(Wait(d, head[d], trail[d], owner[trail[d]]) for d in devices)


def mates(table: Encoded) -> IntArray:
    """Per action, the SEND of a RECV and the RECV of a SEND on another device; -1 for compute, or
    where it is missing.
    """
    found = np.full(table.num_actions, -1, np.int64)
    receives = table.receives[table.crosses[table.receives]]
    # One of several equal RECVs is the mate (a duplicate is the checker's business, and must not
    # corrupt the others).
    sends, chosen = np.unique(table.producer[receives], return_index=True)
    found[receives[chosen]] = sends
    found[sends] = receives[chosen]
    return found
