"""An order in which all actions of a table can run, or the cycles in which devices wait for each
other.

Each device runs its row in order.  Devices are advanced as far as they can go, and one that must
wait is parked at what it waits for, so the work is linear in the number of actions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .encoded import CollectiveAction, Encoded, IntArray
from .kinds import SENDS

# Where devices wait for each other again and again, each round of looking for cycles takes a step
# for each device.  After so many rounds, times the mean length of a row, no more cycles are looked
# for: the work stays linear in the number of actions.
_ROUNDS_PER_ACTION = 8


class Transfers(enum.Enum):
    """How the SEND and RECV of a table behave, from the laxest to the strictest: what runs under
    one runs under those before it.

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


def waits(table: Encoded, transfers: Transfers) -> IntArray:
    """Per action, the action of another device that must be done first, or -1.

    What the order of a row itself decides is left out: that is the rule of order in the checker.
    """
    found = np.where(table.crosses, table.producer, -1)
    if table.has_transfers:
        received = table.receives_from if transfers is Transfers.ASYNC else np.full_like(found, -1)
        found = np.where(table.is_compute, received, found)
        if transfers is Transfers.ASYNC:
            found[table.receives] = -1
    # What is made by the forward half of an overlapped pair is there when the whole pair is done.
    return np.where(found >= 0, table.last_half[found], -1)


def senders(table: Encoded, wait: IntArray) -> IntArray:
    """Per action that waits, the action whose stage sends the message; -1 for the others."""
    return wait if table.has_transfers else np.where(wait >= 0, table.producer, -1)


def buffered_order(table: Encoded, wait: IntArray) -> RunOrder:
    """Run the rows where only `wait` holds a device back (sends never do)."""
    total = table.num_actions
    return _run(table, np.where(wait >= 0, wait, total).tolist(), [-1] * total)


def rendezvous_order(table: Encoded) -> RunOrder:
    """Run the rows where SEND and RECV each hold their device until the other is reached; a SEND
    comes right before its RECV.
    """
    return _run(table, [table.num_actions] * table.num_actions, mates(table).tolist())


def _run(table: Encoded, need: list[int], mate: list[int]) -> RunOrder:
    """Run the rows: each action after the one that it needs (the number of actions: none), and at
    the same time as its mate (-1: none).

    A device is either in `runnable`, once, or it has stopped, or it is done.
    """
    total, devices = table.num_actions, table.num_devices
    collectives = dict(table.collectives)
    # how many are not there yet
    absent = dict.fromkeys((collective.members[0] for collective in collectives.values()), devices)
    owner, is_send = table.device.tolist(), table.of_kinds(SENDS).tolist()
    done = bytearray(total + 1)
    done[total] = 1
    order: list[int] = []
    cycles: list[tuple[Wait, ...]] = []
    head, stop = list(table.first[:-1]), table.first[1:]
    stopped = [-1] * devices  # at which action; -1 while it can run
    parked = [-1] * (total + 1)  # per action, the device parked last at it
    parked_earlier = [-1] * devices  # per parked device, the one that was parked there before
    runnable = list(range(devices))[::-1]
    rounds = _ROUNDS_PER_ACTION * (1 + total // max(1, devices))
    while True:
        while runnable:
            device = runnable.pop()
            i, end = head[device], stop[device]
            while i < end:
                j = need[i]
                if not done[j]:
                    parked_earlier[device] = parked[j]
                    parked[j] = device
                    break
                at_once: tuple[int, ...] = (i,)
                j = mate[i]
                if j >= 0:
                    if stopped[owner[j]] != j:
                        break
                    at_once = (i, j) if is_send[i] else (j, i)
                elif i in collectives:
                    at_once = collectives[i].members
                    absent[at_once[0]] -= 1
                    if absent[at_once[0]]:
                        break
                for k in at_once:
                    done[k] = 1
                    order.append(k)
                    other = parked[k]
                    while other >= 0:
                        stopped[other] = -1
                        runnable.append(other)
                        other = parked_earlier[other]
                    if k != i:
                        other = owner[k]
                        head[other], stopped[other] = k + 1, -1
                        runnable.append(other)
                i += 1
            head[device] = i
            stopped[device] = i if i < end else -1
        rounds -= 1
        if len(order) == total or rounds < 0:
            return RunOrder(tuple(order), tuple(cycles))
        for cycle in _cycles(_stuck(stopped, collectives, mate, need, owner)):
            cycles.append(cycle)
            # Pretend, so that later cycles are found too.
            device, at, on, _ = cycle[0]
            freed = [device]
            if at in collectives:  # each device does its share alone
                members = collectives[at].members
                freed = [d for d, member in enumerate(members) if stopped[d] == member]
                for member in members:
                    del collectives[member]
            elif mate[at] >= 0:
                mate[on] = mate[at] = -1
            else:
                _unpark(cycle[0], parked, parked_earlier)
                need[at] = total
            for other in freed:
                stopped[other] = -1
            runnable += freed


def _stuck(
    stopped: Sequence[int],
    collectives: Mapping[int, CollectiveAction],
    mate: Sequence[int],
    need: Sequence[int],
    owner: Sequence[int],
) -> Iterator[Wait]:
    """What each device that has stopped waits for; at what all do together, for the first device
    that is not there.
    """
    missing: dict[int, int] = {}
    for device, at in enumerate(stopped):
        if at < 0:
            continue
        if at not in collectives:
            on = mate[at] if mate[at] >= 0 else need[at]
        else:
            members = collectives[at].members
            if members[0] not in missing:
                missing[members[0]] = next(
                    member for d, member in enumerate(members) if stopped[d] != member
                )
            on = missing[members[0]]
        yield Wait(device, at, on, owner[on])


def _unpark(wait: Wait, parked: list[int], parked_earlier: list[int]) -> None:
    """Take a device out of the chain of those parked at what it waits for."""
    if parked[wait.on] == wait.device:
        parked[wait.on] = parked_earlier[wait.device]
        return
    other = parked[wait.on]
    while parked_earlier[other] != wait.device:
        other = parked_earlier[other]
    parked_earlier[other] = parked_earlier[wait.device]


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


def _cycles(stuck: Iterable[Wait]) -> list[tuple[Wait, ...]]:
    """Every cycle among devices that wait, each device for one other."""
    by_device = {wait.device: wait for wait in stuck}
    return [
        tuple(by_device[d] for d in cycle)
        for cycle in cycles_of({d: wait.other for d, wait in by_device.items()})
    ]


def cycles_of(following: Mapping[int, int]) -> list[list[int]]:
    """Every cycle of a map whose values are keys too: lists of keys, each followed by the next, the
    last by the first.
    """
    cycles: list[list[int]] = []
    seen: set[int] = set()
    for key in following:
        trail: list[int] = []
        while key not in seen:
            seen.add(key)
            trail.append(key)
            key = following[key]
        if key in trail:
            cycles.append(trail[trail.index(key) :])
    return cycles
