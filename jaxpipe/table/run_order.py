"""An order in which all actions of a table can run, or the cycles in which devices wait for each other.

Each device runs its row in order.  Devices are advanced as far as they can go, and one that must wait is parked at
what it waits for, so the work is linear in the number of actions.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .encoded import Encoded, IntArray, Meeting
from .kinds import SENDS


class Transfers(enum.Enum):
    """How the SEND and RECV of a table behave, from the laxest to the strictest: what runs under one runs under those before it.

    A compute-only table has no SEND or RECV, and its transfers are all ASYNC.
    """

    ASYNC = "async"  # SEND and RECV are posted and take no device time; the consumer waits for the data
    BUFFERED = "buffered"  # SEND returns at once; RECV holds its device until the data is there
    RENDEZVOUS = "rendezvous"  # both hold their devices until both are reached, then for the transfer itself


class Wait(NamedTuple):
    """A device that cannot go on: it is at action `at` and waits for action `on` of device `other`."""

    device: int
    at: int
    on: int
    other: int


@dataclass(frozen=True)
class RunOrder:
    """`order` holds every action, each after all that it waits for; it is valid only where there are no `cycles`."""

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
    need = np.where(wait >= 0, wait, total).tolist()
    meetings = dict(table.meetings)
    done = bytearray(total + 1)
    done[total] = 1
    order: list[int] = []
    cycles: list[tuple[Wait, ...]] = []
    head, stop = list(table.first[:-1]), table.first[1:]
    parked = [-1] * (total + 1)  # per action, the device parked last at it
    parked_earlier = [-1] * table.num_devices  # per parked device, the one that was parked there before
    runnable = list(range(table.num_devices))[::-1]
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
                if i in meetings:
                    members = meetings[i].members
                    if any(head[d] != at for d, at in enumerate(members) if d != device):
                        break
                    order += members
                    head = [at + 1 for at in members]
                    runnable += [d for d in range(table.num_devices) if d != device]
                    i += 1
                    continue
                done[i] = 1
                order.append(i)
                other = parked[i]
                while other >= 0:
                    runnable.append(other)
                    other = parked_earlier[other]
                i += 1
            head[device] = i
        if len(order) == total:
            return RunOrder(tuple(order), tuple(cycles))
        owner = table.device
        stuck = [
            _absent(meetings[i], head, d) if i in meetings else Wait(d, i, need[i], int(owner[need[i]]))
            for d, i in enumerate(head)
            if i < stop[d]
        ]
        for cycle in _cycles(stuck):
            cycles.append(cycle)
            # Pretend, so that later cycles are found too.
            if cycle[0].at in meetings:
                runnable += _dissolve(meetings, cycle[0].at, head)
                continue
            _unpark(cycle[0], parked, parked_earlier)
            need[cycle[0].at] = total
            runnable.append(cycle[0].device)


def _absent(meeting: Meeting, head: Sequence[int], device: int) -> Wait:
    """A device that is at what all do together waits for the first that is not."""
    other = next(d for d, at in enumerate(meeting.members) if head[d] != at)
    return Wait(device, meeting.members[device], meeting.members[other], other)


def _dissolve(meetings: dict[int, Meeting], number: int, head: Sequence[int]) -> list[int]:
    """Let each device do its share alone; the devices that were waiting for the others."""
    members = meetings[number].members
    for member in members:
        del meetings[member]
    return [d for d, at in enumerate(members) if head[d] == at]


def _unpark(wait: Wait, parked: list[int], parked_earlier: list[int]) -> None:
    """Take a device out of the chain of those parked at what it waits for."""
    if parked[wait.on] == wait.device:
        parked[wait.on] = parked_earlier[wait.device]
        return
    other = parked[wait.on]
    while parked_earlier[other] != wait.device:
        other = parked_earlier[other]
    parked_earlier[other] = parked_earlier[wait.device]


def rendezvous_order(table: Encoded) -> RunOrder:
    """Run the rows where SEND and RECV each hold their device until the other is reached; a SEND comes right before its RECV."""
    total = table.num_actions
    mate = mates(table).tolist()
    order: list[int] = []
    cycles: list[tuple[Wait, ...]] = []
    head, stop = list(table.first[:-1]), table.first[1:]
    owner = table.device.tolist()
    is_send = table.of_kinds(SENDS).tolist()
    meetings = dict(table.meetings)
    runnable = list(range(table.num_devices))[::-1]
    while True:
        while runnable:
            device = runnable.pop()
            i, end = head[device], stop[device]
            while i < end:
                j = mate[i]
                if i in meetings:
                    members = meetings[i].members
                    if any(head[d] != at for d, at in enumerate(members) if d != device):
                        break
                    order += members
                    head = [at + 1 for at in members]
                    runnable += [d for d in range(table.num_devices) if d != device]
                elif j < 0:
                    order.append(i)
                else:
                    other = owner[j]
                    if head[other] != j:
                        break
                    head[other] = j + 1
                    runnable.append(other)
                    order += (i, j) if is_send[i] else (j, i)
                i += 1
                head[device] = i
            head[device] = i
        if len(order) == total:
            return RunOrder(tuple(order), tuple(cycles))
        stuck = [
            _absent(meetings[i], head, d) if i in meetings else Wait(d, i, mate[i], owner[mate[i]])
            for d, i in enumerate(head)
            if i < stop[d]
        ]
        for cycle in _cycles(stuck):
            cycles.append(cycle)
            if cycle[0].at in meetings:
                runnable += _dissolve(meetings, cycle[0].at, head)
                continue
            mate[mate[cycle[0].at]] = mate[cycle[0].at] = -1
            runnable.append(cycle[0].device)


def mates(table: Encoded) -> IntArray:
    """Per action, the SEND of a RECV and the RECV of a SEND on another device; -1 for compute, or where it is missing."""
    found = np.full(table.num_actions, -1, np.int64)
    receives = table.receives[table.crosses[table.receives]]
    # One of several equal RECVs is the mate (a duplicate is the checker's business, and must not corrupt the others).
    sends, chosen = np.unique(table.producer[receives], return_index=True)
    found[receives[chosen]] = sends
    found[sends] = receives[chosen]
    return found


def _cycles(stuck: Sequence[Wait]) -> list[tuple[Wait, ...]]:
    """Every cycle among devices that wait, each device for one other."""
    by_device = {wait.device: wait for wait in stuck}
    return [tuple(by_device[d] for d in cycle) for cycle in cycles_of({d: wait.other for d, wait in by_device.items()})]


def cycles_of(following: Mapping[int, int]) -> list[list[int]]:
    """Every cycle of a map whose values are keys too: lists of keys, each followed by the next, the last by the first."""
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
