"""What the actions of a table wait for, and an order in which all of them can run, or the cycles in
which devices wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from .encoded import Encoded, IntArray, Transfers
from .kinds import KINDS, MESSAGES


class Waiting(NamedTuple):
    """What holds the actions of a table back besides the order of its rows, which the checker has a
    rule for.

    Attributes:
        need: per action, the action of another device that must be done first, or -1.
        together: by number, the actions that devices do at the same time.
    """

    need: IntArray
    together: dict[int, tuple[int, ...]]


def waiting(table: Encoded, transfers: Transfers) -> Waiting:
    """What actions wait for under one kind of transfer, which matters with SEND and RECV.

    Where both sides wait, SEND and RECV each hold their device until the other is reached.
    """
    together = {number: each.members for number, each in table.collectives.items()}
    if table.has_transfers and transfers is Transfers.RENDEZVOUS:
        receives = table.receives[table.crosses[table.receives]]
        # One of several equal RECVs is the mate (a duplicate is the checker's business, and must
        # not corrupt the others).
        sends, chosen = np.unique(table.producer[receives], return_index=True)
        for both in zip(sends.tolist(), receives[chosen].tolist(), strict=True):
            together |= dict.fromkeys(both, both)
        return Waiting(np.full(table.num_actions, -1), together)
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
    return Waiting(np.where(found >= 0, table.last_half[found], -1), together)


class Wait(NamedTuple):
    """A device that cannot go on: it is at action `at` and waits for action `on` of
    device `other`.
    """

    device: int
    at: int
    on: int
    other: int


# Each device waits for the next one, and the last for the first.
Cycle: TypeAlias = tuple[Wait, ...]


@dataclass(frozen=True)
class RunOrder:
    """`order` holds every action, each after all that it waits for, where there are no `cycles`."""

    order: tuple[int, ...]
    cycles: tuple[Cycle, ...]


def run_order(
    table: Encoded, transfers: Transfers, *, broken: Callable[[Cycle], Wait] = itemgetter(0)
) -> RunOrder:
    """Run the rows under one kind of transfer: each action after the one that it needs, and those
    that come together once all their devices have reached them.

    Where no device can go on, the waits of one of them lead to a cycle, which goes on without the
    wait that `broken` chooses: so later cycles are found too.
    """
    needed, together = waiting(table, transfers)
    need: list[int] = needed.tolist()
    owner: list[int] = table.device.tolist()
    head, stop = list(table.first[:-1]), table.first[1:]
    done = bytearray(table.num_actions)
    parked = defaultdict[int, set[int]](set)  # by action, the devices that wait for it
    present: dict[int, int] = {}  # by the first of those together, how many are there in turn
    stops: list[int] = []  # devices, each time that they have to wait
    order: list[int] = []
    cycles: list[Cycle] = []

    def blocker(number: int) -> int:
        """What the next action of a device waits for: of those together, the first missing one; -1
        for nothing.
        """
        if need[number] >= 0 and not done[need[number]]:
            return need[number]
        members = together.get(number, ())
        if not members:
            return -1
        place = present.get(members[0], 0)
        while place < len(members) and head[owner[members[place]]] == members[place]:
            place += 1
        present[members[0]] = place
        return members[place] if place < len(members) else -1

    runnable = [*range(table.num_devices)]
    while True:
        while runnable:
            device = runnable.pop()
            while (i := head[device]) < stop[device]:
                if (on := blocker(i)) >= 0:
                    parked[on].add(device)
                    stops.append(device)
                    break
                for k in together.get(i, (i,)):
                    done[k] = True
                    order.append(k)
                    head[owner[k]] = k + 1
                    runnable += parked.pop(k, ())
        while stops and head[stops[-1]] == stop[stops[-1]]:
            stops.pop()
        if not stops:
            return RunOrder(tuple(order), tuple(sorted(cycles)))
        # Near the device that stopped last, since that is where the table has just gone on.
        cycles.append(_cycle_from(stops[-1], head, blocker, owner))
        at = broken(cycles[-1]).at
        need[at] = -1
        members = together.get(at, (at,))
        runnable = [owner[k] for k in members if head[owner[k]] == k]
        for k in members:  # each device does its own alone
            together.pop(k, None)


def _cycle_from(
    device: int, head: Sequence[int], blocker: Callable[[int], int], owner: Sequence[int]
) -> Cycle:
    """The cycle to which the waits of a device that has stopped lead, where all have."""
    trail: dict[int, int] = {}
    while device not in trail:
        trail[device] = blocker(head[device])
        device = owner[trail[device]]
    found = list(trail)[list(trail).index(device) :]
    first = found.index(min(found))
    devices = found[first:] + found[:first]
    return tuple(Wait(d, head[d], trail[d], owner[trail[d]]) for d in devices)
