"""Reference orders that several schedules share: 1F1B on a loop of stages, and ZB-V's figure."""

from __future__ import annotations

from ..engine.costs import Costs
from ..table.action import Action, Kind
from ..table.placement import Placement
from ._list_scheduling import Instance, list_schedule
from ._rows import actions, alternate, even_groups, in_groups, in_turns
from ._waves import Order

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741


def turn_order(placement: Placement, hop: int, most_ahead: int, microbatches: int) -> Order:
    """One F and one I in turn on a loop of stages, after a warmup of `hop` forwards for each hop to
    the last device.

    The last device warms up with all chunks but one of the first group.  No device runs more than
    `most_ahead` forwards ahead.
    """
    groups = even_groups(placement.num_devices, microbatches)
    rows = []
    for device, stages in enumerate(placement.stages_of):
        ahead = (placement.num_chunks - 1) * max(groups) + hop * (
            placement.num_devices - 1 - device
        )
        rows.append(
            in_turns(
                in_groups(stages, F, groups),
                in_groups(stages[::-1], I, groups),
                min(ahead, most_ahead),
            )
        )
    return rows


def forward_order(placement: Placement, microbatches: int) -> Order:
    """The shortest known order of forwards alone, for any placement with one device per stage.

    On a loop, groups of microbatches go through the chunks, and only the first P - 1 steps are
    lost.  Elsewhere microbatches enter as fast as a device can run all their chunks, and a device
    that would wait runs an action that is ready.
    """
    chunks = placement.num_chunks
    if placement == Placement.loop(devices=placement.num_devices, chunks=chunks):
        groups = even_groups(placement.num_devices, microbatches)
        return [in_groups(stages, F, groups) for stages in placement.stages_of]
    timed = [
        sorted((s + chunks * m, -s, m) for s in stages for m in range(microbatches))
        for stages in placement.stages_of
    ]
    order = [[Action(-s, F, m) for _, s, m in row] for row in timed]
    instance = Instance(placement, Costs().for_stages(placement.num_stages), microbatches)
    return list_schedule(order, instance, [len(row) for row in order]).rows


def zbv_order(devices: int, microbatches: int) -> Order:
    """The F and I of the figure's order, in which M is at least 2 P - 1."""
    return [[a for a in row if a.kind is not W] for row in zbv_rows(devices, microbatches)]


def zbv_rows(devices: int, microbatches: int) -> Order:
    """The figure's rows, without the microbatches that a smaller M does not have."""
    rows = [zbv_row(devices, d, max(microbatches, 2 * devices - 1)) for d in range(devices)]
    return [[action for action in row if action.microbatch < microbatches] for row in rows]


def zbv_row(devices: int, device: int, microbatches: int) -> list[Action]:
    """Device d's row for M >= 2 P - 1; "down" is its first chunk, "up" its second, where a
    microbatch comes back.
    """
    down, up, every = device, 2 * devices - 1 - device, range(microbatches)
    f0, i0, w0 = (actions(down, kind, every) for kind in (F, I, W))
    f1, i1, w1 = (actions(up, kind, every) for kind in (F, I, W))
    left = devices - device
    first, both = 2 * left - 1, 2 * devices - 1 - device
    fill, rest = f0[:first], alternate(f1[:device], f0[first:both])
    turn = alternate(f1[device:devices], i1[:left], w1[:left])
    # Steady state: six actions a microbatch, then the same without the forward that has run out.
    todo = microbatches - both
    done = microbatches - devices
    steady = alternate(
        f0[both:], i0[:todo], w0[:todo], f1[devices:][:todo], i1[left:][:todo], w1[left:][:todo]
    )
    fading = alternate(
        i0[todo:done],
        w0[todo:done],
        f1[devices + todo :],
        i1[left + todo : left + done],
        w1[left + todo : left + done],
    )
    drain = alternate(i0[done : done + device], i1[left + done :])
    tail = alternate(i0[done + device :], w0[done : done + left])
    return [
        *fill,
        *rest,
        *turn,
        *steady,
        *fading,
        *drain,
        *tail,
        *w1[left + done :],
        *w0[done + left :],
    ]
