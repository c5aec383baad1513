"""An order in which all actions of a table can run, or the cycles in which devices wait for each
other.

Each device runs its row in order.  Devices are advanced as far as they can go, and one that must
wait is parked at the action that it waits for.  A cycle is found when its last device stops.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
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


def rendezvous_order(table: Encoded, choose: Chooser | None = None) -> RunOrder:
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
    choose: Chooser | None = None,
) -> RunOrder:
    """Run the rows: each action after the one that it needs (the number of actions: none), and at
    the same time as those that run `together` with it, once all devices have reached them.

    A device is either in `runnable`, once, or it has stopped, or it is done.  Each cycle goes on as
    if one of its devices had not waited.
    """
    total, devices, owner = table.num_actions, table.num_devices, table.device.tolist()
    # By the first of those that run together: how many are not reached yet, and the place of the
    # first that is not.
    absent = {members[0]: len(members) for members in together.values()}
    missing = dict.fromkeys(absent, 0)
    done = bytearray(total + 1)
    done[total] = 1
    order: list[int] = []
    cycles: list[tuple[Wait, ...]] = []
    head, stop = list(table.first[:-1]), table.first[1:]
    stopped = [-1] * devices  # at which action; -1 while it can run
    parked: dict[int, list[int]] = {}  # by action, the devices that wait for it
    runnable = list(range(devices))[::-1]

    def wanted(device: int) -> int:
        """The action that a stopped device waits for; of those together, the first missing one."""
        at = stopped[device]
        if at not in together:
            return need[at]
        members = together[at]
        key = members[0]
        while stopped[owner[members[missing[key]]]] == members[missing[key]]:
            missing[key] += 1
        return members[missing[key]]

    def cycle_from(device: int) -> tuple[Wait, ...]:
        """The cycle to which the waits of a device that has stopped lead; empty for none."""
        trail: dict[int, int] = {}
        while stopped[device] >= 0 and device not in trail:
            trail[device] = wanted(device)
            device = owner[trail[device]]
        if stopped[device] < 0:
            return ()
        found = list(trail)[list(trail).index(device) :]
        first = found.index(min(found))
        devices = found[first:] + found[:first]
        return tuple(Wait(d, stopped[d], trail[d], owner[trail[d]]) for d in devices)

    while runnable:
        device = runnable.pop()
        i, end = head[device], stop[device]
        while i < end:
            if not done[need[i]]:
                parked.setdefault(need[i], []).append(device)
                break
            members = together.get(i, (i,))
            if i in together:
                absent[members[0]] -= 1
                if absent[members[0]]:
                    break
            for k in members:
                done[k] = 1
                order.append(k)
                for other in parked.pop(k, ()):
                    stopped[other] = -1
                    runnable.append(other)
                if k != i:
                    other = owner[k]
                    head[other], stopped[other] = k + 1, -1
                    runnable.append(other)
            i += 1
        head[device] = i
        stopped[device] = i if i < end else -1
        while cycle := cycle_from(device):
            cycles.append(cycle)
            # Pretend, so that later cycles are found too.
            first, at, on, _ = cycle[0 if choose is None else choose(order, cycle)]
            freed = [first]
            if at in together:  # each device does its own alone
                members = together[at]
                freed = [owner[k] for k in members if stopped[owner[k]] == k]
                for k in members:
                    del together[k]
            else:
                parked[on].remove(first)
                need[at] = total
            for other in freed:
                stopped[other] = -1
            runnable += freed
    return RunOrder(tuple(order), tuple(cycles))


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
