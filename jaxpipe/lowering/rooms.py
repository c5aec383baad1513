"""Pass: give every run of a stage's gathered parameters a room, by liveness, and say in which ticks
they are gathered and gradients are reduced.

In the program a room is what a chunk is where all parameters are whole: blocks of code are there
for each room.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..table.gathered import runs_of
from ..table.kinds import BESIDE, LINKED, Sharded, droppers, gatherers
from ..table.schedule import Schedule
from ..transforms.add_gathers import Reduce, add_gathers, reduce_each_run
from ..transforms.rewrites import remove_gathers
from .ticks import Rooms


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
    is_gather = table.of_kinds(gatherers(Sharded.PARAMETERS))
    is_drop = table.of_kinds(droppers(Sharded.PARAMETERS))
    room, of_stage = np.zeros(table.num_actions, np.int64), ~table.shares
    for first, stop in pairwise(table.first):
        held, free = dict[int, int](), list[int]()  # by stage its room; rooms that were held
        for i in np.flatnonzero(of_stage[first:stop]) + first:
            stage = int(table.stage[i])
            if is_gather[i]:
                held[stage] = heapq.heappop(free) if free else len(held)
            room[i] = held[stage]
            if is_drop[i]:
                heapq.heappush(free, held.pop(stage))
    own = ~table.of_kinds(BESIDE)
    count = np.concatenate([[0], np.cumsum(own)])
    row = count[np.array(table.first)][table.device]
    before = np.where(count[:-1] > row, count[:-1] - 1, -1)
    columns = np.stack([table.device, room, schedule.chunks, ~is_gather, before])
    return Rooms(remove_gathers(schedule), room[own], columns[:, table.of_kinds(LINKED)])
