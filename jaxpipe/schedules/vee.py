"""Schedules on a V: two chunks per device, down the devices and up again, so that input and loss
are on the same device.
"""

from __future__ import annotations

from functools import partial

from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._list_scheduling import Instance, least_peak, list_schedule
from ._orders import zbv_order, zbv_rows
from ._rows import schedule_of
from ._waves import Wave, fitted, wave_order


def zbv(*, devices: int, microbatches: int, chunks: int, costs: Costs | None = None) -> Schedule:
    """Zero bubble with 1F1B's memory, on a V (ZB-V, Zero Bubble Pipeline Parallelism, Qi et al.
    2024, section 6).

    Any P and M, two chunks.  Where F, I and W cost the same, and for M >= 2 P - 1, each device is
    busy from its first action to its last, and the makespan is 2 M (F + I + W) + (P - 1) F in costs
    of a chunk.  Every device holds at most 2 P activations (of half a device's layers each), if
    they are released at W.  For a smaller M the order is list-scheduled, where that is shorter.
    `costs` fit the order to the times that actions really take, under the same memory.
    """
    placement = Placement.vee(devices=devices)
    if costs is not None:
        order = partial(zbv_order, devices)
        return fitted(order, placement, costs, microbatches, cap=2 * devices)
    figure = schedule_of(zbv_rows(devices, microbatches), placement, microbatches)
    return figure if microbatches >= 2 * devices - 1 else _shorter(figure)


def _shorter(figure: Schedule) -> Schedule:
    """A list-scheduled wave with the memory of a short job's figure, if it is never longer than the
    figure.
    """
    placement, microbatches = figure.placement, figure.num_microbatches
    stages = Costs().for_stages(placement.num_stages)
    order = wave_order(placement, stages, Wave(out=1.5, back=1.5, pause=0, period=3), microbatches)
    caps = simulate(figure).peak_activations
    if any(least_peak(row) > cap for row, cap in zip(order, caps, strict=True)):
        return figure
    scheduled = figure.with_rows(
        list_schedule(order, Instance(placement, stages, microbatches), caps).rows
    )
    # Its gain at equal costs must not come with a loss where one kind of action takes longer.
    times = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (10, 13, 9), (4, 7, 3))
    panel = [Costs(forward=f, input_grad=i, weight_grad=w) for f, i, w in times]
    longer = any(
        simulate(scheduled, costs).makespan > simulate(figure, costs).makespan for costs in panel
    )
    return figure if longer else scheduled


def v_half(*, devices: int, microbatches: int, chunks: int, costs: Costs | None = None) -> Schedule:
    """Half of 1F1B's memory, and half of its bubble (V-Half, Pipeline Parallelism with Controllable
    Memory, Qi et al. 2024).

    Any P and M, two chunks.  Every device holds at most 2 floor((P + 2) / 2) activations (of half a
    device's layers each), if they are released at W.  Where F, I and W cost the same, and for M >=
    2 P and P >= 3, the makespan is at most 2 M (F + I + W) + (3 P - 4) F in costs of a chunk.
    `costs` fit the order to the times that actions really take.
    """
    block = Wave(out=2, back=1, pause=3 if devices % 2 == 0 else 0, period=6)
    return _from_block(block, devices, microbatches, costs, cap=2 * ((devices + 2) // 2))


def v_min(*, devices: int, microbatches: int, chunks: int, costs: Costs | None = None) -> Schedule:
    """A third of 1F1B's memory, with a bubble like 1F1B's (V-Min, Pipeline Parallelism with
    Controllable Memory, Qi et al. 2024).

    Any P and M, two chunks.  Every device holds at most 2 floor((P + 4) / 3) activations (of half a
    device's layers each), if they are released at W.  Where F, I and W cost the same, and for M >=
    P, the makespan is at most 2 M (F + I + W) + (4 P - 5) F in costs of a chunk.  With so little
    memory, any difference between the costs adds time to every microbatch; `costs` fit the order to
    the times that actions really take.
    """
    block = Wave(out=1, back=1, pause=2 if devices % 3 == 0 else 0, period=6)
    return _from_block(block, devices, microbatches, costs, cap=2 * ((devices + 4) // 3))


def _from_block(
    block: Wave, devices: int, microbatches: int, costs: Costs | None, *, cap: int
) -> Schedule:
    """The paper's building block, repeated, then list-scheduled under the cap."""
    placement = Placement.vee(devices=devices)
    order = partial(wave_order, placement, Costs().for_stages(placement.num_stages), block)
    return fitted(order, placement, costs, microbatches, cap=cap)
