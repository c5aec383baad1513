"""The critical path: from the action that ends last back, at each step to the action that released
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..table.encoded import Encoded
from ..table.run_order import Transfers, mates, senders, waits


def critical_chain(
    table: Encoded, transfers: Transfers, ends: Sequence[float], latency: Sequence[float]
) -> list[int]:
    """Numbers of the actions on a longest chain, in order of time (of an overlapped pair, its
    forward half).

    Where its device and its input release an action at the same time, the chain stays on the
    device.
    """
    if table.num_actions == 0:
        return []
    links = _Links(table, transfers, ends, latency)
    # A posted RECV does not count as the last to end: its device may have gone on.
    last = max(np.flatnonzero(table.is_compute).tolist(), key=lambda i: ends[i])
    chain = [links.first_half(last)]
    while (before := links.before(chain[-1])) is not None:
        chain.append(before)
    return chain[::-1]


class _Links:
    """Which actions can release which in one simulation."""

    def __init__(
        self, table: Encoded, transfers: Transfers, ends: Sequence[float], latency: Sequence[float]
    ) -> None:
        wait = waits(table, transfers)
        self._table, self._ends, self._latency = table, ends, latency
        self._posted = set(table.receives.tolist()) if transfers is Transfers.ASYNC else set()
        self._mate = (
            mates(table).tolist() if transfers is Transfers.RENDEZVOUS else [-1] * table.num_actions
        )
        self._wait = wait.tolist()
        self._sender = senders(table, wait).tolist()
        self._before = {
            meeting.user: meeting for meeting in table.meetings.values() if meeting.user >= 0
        }

    def first_half(self, number: int) -> int:
        """The number of the forward half of a pair's backward half; any other number as it is."""
        return number - 1 if number > 0 and self._table.last_half[number - 1] == number else number

    def before(self, number: int) -> int | None:
        """The action that released this one last, or None where it could start at time 0."""
        released = list(self._releases(number))
        if not released:
            return None
        return self.first_half(max(released)[2])

    def _releases(self, number: int) -> Iterator[tuple[float, bool, int]]:
        """(time, on the same device, number) of each action that holds this one back."""
        if self._mate[number] >= 0:
            yield from self._previous(self._mate[number], same=False)
        yield from self._previous(number, same=True)
        yield from self._meeting(number)
        for half in {number, int(self._table.last_half[number])}:
            if (source := self._wait[half]) >= 0 and self._mate[number] < 0:
                yield (
                    self._ends[source] + self._latency[self._table.stage[self._sender[half]]],
                    False,
                    source,
                )

    def _meeting(self, number: int) -> Iterator[tuple[float, bool, int]]:
        """What holds back an action that all devices do together, and the action that needs it."""
        meeting = self._table.meetings.get(number)
        known = meeting or self._before.get(number)
        latency = (
            self._latency[known.stage] if known is not None and self._table.num_devices > 1 else 0
        )
        if meeting is not None:
            for member in meeting.members:
                yield from () if member == number else self._previous(member, same=False)
            if meeting.source >= 0:
                source = int(self._table.last_half[meeting.source])
                yield self._ends[source] + latency, False, source
        elif known is not None:
            share = known.members[self._table.device[number]]
            yield self._ends[share] + latency, False, share

    def _previous(self, number: int, *, same: bool) -> Iterator[tuple[float, bool, int]]:
        """The action before in the row, posted receives left out."""
        first = self._table.first[self._table.device[number]]
        before = number - 1
        while before >= first and before in self._posted:
            before -= 1
        if before >= first:
            yield self._ends[before], same, before
