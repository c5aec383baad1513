"""Pass: ticks that hold a forward and a backward each, for meshes on which every transfer makes everybody wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..table.action import Action, Kind, parts
from ..table.grid import inputs_of
from ..table.schedule import Schedule
from .assign_ticks import Ticks


def fuse_ticks(schedule: Schedule, *, more_memory: bool) -> Ticks | None:
    """Run the next forward and the next backward of each device in one tick wherever both can run, forward first.

    In lock-step a tick is as long as its longest action, so 1F1B, whose neighbours do F and B in turn, loses a third of its speed
    where B takes twice as long as F.  With F and B in each tick every device is busy for F + B, and the makespan is the table's.
    Forwards keep their order among themselves, and so do backwards.

    The price can be memory.  Pools have one size on all devices, so the table's greatest peak is free for every device; with
    `more_memory` a device may hold up to twice its own peak less one.  None where the table cannot run fused within that.
    """
    last_stage = schedule.num_stages - 1
    forwards = [[a for c in row for a in parts(c) if a.kind is Kind.F] for row in schedule.rows]
    backwards = [[a for c in row for a in parts(c) if a.kind is not Kind.F] for row in schedule.rows]
    peaks = _peaks(schedule)
    caps = [max(2 * peak - 1 if more_memory else 0, max(peaks)) for peak in peaks]
    done: dict[Action, int] = {}
    next_forward, next_backward, live = ([0] * len(caps) for _ in range(3))
    tick = 0
    while any(next_forward[d] < len(forwards[d]) or next_backward[d] < len(backwards[d]) for d in range(len(caps))):
        before = len(done)
        for device, cap in enumerate(caps):
            forward = _ready(forwards[device], next_forward[device], done, tick, last_stage)
            if forward is not None and live[device] >= cap:
                forward = None
            if forward is not None:
                done[forward] = tick
                next_forward[device] += 1
                live[device] += 1
            backward = _ready(backwards[device], next_backward[device], done, tick, last_stage)
            if backward is not None:
                done[backward] = tick
                next_backward[device] += 1
                live[device] -= backward.kind in (Kind.B, Kind.W)
        if len(done) == before:
            return None
        tick += 1
    return Ticks(schedule, np.array([done[action] for _, _, action in schedule.actions()], np.int64), forward_first=True)


def _ready(order: Sequence[Action], index: int, done: dict[Action, int], tick: int, last_stage: int) -> Action | None:
    """The next action of an order if all its inputs are there: made in an earlier tick, or by this tick's forward."""
    if index >= len(order):
        return None
    action = order[index]
    for alternatives in inputs_of(action, last_stage):
        found = [a for a in alternatives if a in done]
        if not found:
            return None
        own = found[0].stage == action.stage and found[0].kind is Kind.F
        if done[found[0]] >= tick and not own:
            return None
    return action


def _peaks(schedule: Schedule) -> list[int]:
    """Per device, the most microbatch-stages that its row holds between forward and B or W."""
    found = []
    for row in schedule.rows:
        live = highest = 0
        for cell in row:
            for action in parts(cell):
                live += action.kind is Kind.F
                highest = max(highest, live)
                live -= action.kind in (Kind.B, Kind.W)
        found.append(highest)
    return found
