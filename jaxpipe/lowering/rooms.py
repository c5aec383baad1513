"""Pass: give every run of a stage's gathered parameters a room, by liveness, and say in which ticks
they are gathered and gradients are reduced.

In the program a room is what a chunk is where all parameters are whole: blocks of code are there
for each room.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..program.ir import NOBODY, IntTable, Record, links_of
from ..table.encoded import IntArray
from ..table.gathered import runs_of
from ..table.kinds import BESIDE, LINKED, Sharded, gatherers
from ..table.schedule import Schedule
from ..transforms.add_gathers import Reduce, add_gathers, reduce_each_run
from ..transforms.rewrites import remove_gathers


@dataclass(frozen=True, eq=False)
class Rooms:
    """The rooms of a table with U, D and X.

    Attributes:
        plain: the table without them.
        room: per action of that table, the room of its stage's parameters; 0 for an action that
            belongs to no stage.
        gathers, reductions: of each U and X [4, n]: device, room, chunk, and the number of the
            action before it in its row of the plain table (-1 for none).
    """

    plain: Schedule
    room: IntArray
    gathers: IntArray
    reductions: IntArray

    @property
    def count(self) -> int:
        """The most rooms of a device."""
        return 1 + int(self.room.max(initial=0))

    def links(self, when: IntArray, shape: tuple[int, int]) -> Record[IntTable]:
        """The reductions and then the gathers before each tick's blocks, where action i of the
        plain table runs in tick `when[i]`.
        """
        names = links_of(self.count)
        found = {name: np.full(shape, NOBODY, np.int32) for name in names}
        for each, columns in (
            (self.gathers, names[: self.count]),
            (self.reductions, names[self.count :]),
        ):
            for (device, room, chunk, _), tick in zip(each.T, self._ticks(when, each), strict=True):
                found[columns[room]][tick, device] = chunk
        return Record(found)

    def last(self, when: IntArray) -> int:
        """The tick of the last reduction, which may come after all blocks."""
        return max(self._ticks(when, self.reductions), default=-1)

    def _ticks(self, when: IntArray, links: IntArray) -> Iterator[int]:
        """The tick of each of these: that of the next action of its device, beside which it runs,
        where that one does not need its room; else the tick after that of the action before it.
        """
        table = self.plain.encoded
        for device, room, _, before in links.T.tolist():
            after = table.first[device] if before < 0 else before + 1
            both = {after, int(table.last_half[after])} if after < table.first[device + 1] else {}
            if both and all(room != self.room[i] for i in both):
                yield int(when[after])
            else:
                yield 1 + int(when[before]) if before >= 0 else 0


@lru_cache(maxsize=64)
def with_rooms(schedule: Schedule, max_active: int | None) -> Schedule:
    """The table as a program gathers: without U, D and X where each stage is gathered once for the
    whole step.  Else each gradient is reduced at the end of a run, as its room is given away.

    A table without them gets those of `max_active` stages.

    Raises:
        ScheduleError: a pair needs more stages than `max_active`.
    """
    if schedule.encoded.kinds.isdisjoint(LINKED) and max_active is not None:
        schedule = add_gathers(schedule, max_active=max_active, reduce=Reduce.EACH_RUN)
    if _gathers_once(schedule):
        return remove_gathers(schedule)
    return reduce_each_run(schedule) if _reduces_late(schedule) else schedule


def _gathers_once(schedule: Schedule) -> bool:
    """Whether no device gathers more stages than it has."""
    table = schedule.encoded
    gathers = table.device[table.of_kinds(gatherers(Sharded.PARAMETERS))]
    held = np.bincount(gathers, minlength=table.num_devices)
    return bool((held <= [len(stages) for stages in schedule.placement.stages_of]).all())


def _reduces_late(schedule: Schedule) -> bool:
    """Whether a stage is dropped before its gradient is reduced."""
    gather, gradient = (runs_of(schedule.encoded, what) for what in Sharded)
    return bool(((gather.end >= 0) & (gradient.end > gather.end)).any())


@lru_cache(maxsize=64)
def rooms_of(schedule: Schedule) -> Rooms | None:
    """The rooms of a table; None where each device gathers each of its stages once, for the whole
    step.

    A room is free again after the D of its stage; the lowest free one is taken.  The table is one
    of `with_rooms`.
    """
    if _gathers_once(schedule):
        return None
    assert not _reduces_late(schedule), "`with_rooms` has reduced each run"
    table = schedule.encoded
    gather, gradient = (runs_of(table, what) for what in Sharded)
    is_gather = table.of_kinds(gatherers(Sharded.PARAMETERS))
    room = np.zeros(table.num_actions, np.int64)
    begin = np.where(gather.begin >= 0, gather.begin, gradient.begin).tolist()
    for first, stop in pairwise(table.first):
        free, size = list[int](), 0
        for i in range(first, stop):
            if is_gather[i]:
                room[i] = heapq.heappop(free) if free else size
                size = max(size, int(room[i]) + 1)
            elif begin[i] >= 0:
                room[i] = room[begin[i]]
            if gather.end[i] == i:
                heapq.heappush(free, int(room[i]))
    own, linked = ~table.of_kinds(BESIDE), table.of_kinds(LINKED)
    count = np.concatenate([[0], np.cumsum(own)])
    row = count[np.array(table.first)][table.device]
    before = np.where(count[:-1] > row, count[:-1] - 1, -1)
    columns = np.stack([table.device, room, schedule.chunks, before])
    gathers, reductions = (columns[:, linked & each] for each in (is_gather, ~is_gather))
    return Rooms(remove_gathers(schedule), room[own], gathers, reductions)
