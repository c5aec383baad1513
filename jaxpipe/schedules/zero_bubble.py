"""Zero-bubble schedules, on a loop and on a V: the backward is split into I and W, and W fills what
would be bubble.

On a V each device has two chunks, down the devices and up again, so that input and loss are on the
same device.
"""

from __future__ import annotations

from ..engine.costs import Costs
from ..engine.simulate import shortest, simulate
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._list_scheduling import fitted, least_peaks, list_schedule, wave
from .loop import even_groups, in_chunks, in_groups, in_turns


def zb_h1(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B's memory, a third of its bubble (Zero Bubble Pipeline Parallelism, Qi et al. 2024,
    section 2.1, figure 3 top).

    Any P and M, one chunk.  Makespan M (F + I + W) + (P - 1)(F + I - W) for M >= P, where W is at
    most F and at most I.  Every device holds min(P, M) activations at its peak, if they are
    released at W.
    """
    return interleaved_zb(devices=devices, microbatches=microbatches, chunks=chunks)


def zb_h2(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Twice 1F1B's memory, and no bubble but the start (ZB-H2, Qi et al. 2024, section 2.2, figure
    3 bottom).

    Any P and M, one chunk.  For M >= 2 P - 1, and W at most F and at most I, a device needs M (F +
    I + W) + (P - 1)(F + I - 2 W) from its first action to its last (the timeline's span), and the
    last device starts (P - 1) F after the first.  Every device holds min(2 P - 1, M) activations at
    its peak, if they are released at W.
    """
    held = min(2 * devices - 1, microbatches)
    hops = [devices - 1 - d for d in range(devices)]
    # Two forwards per hop, or as many as there are microbatches for, so that all devices hold the
    # same number.
    ahead = [min(2 * h, max(h, -(-h * (microbatches - 1) // max(1, devices - 1)))) for h in hops]
    return _in_order(devices, 1, microbatches, ahead, delay=[max(0, held - 1 - a) for a in ahead])


def zb_1p(
    *,
    devices: int,
    microbatches: int,
    chunks: int,
    costs: Costs | None = None,
    max_activations: int | None = None,
) -> Schedule:
    """The best order found under 1F1B's memory for given costs (ZB-1p, Qi et al. 2024, section 3).

    Any P and M, one chunk.  Every device holds at most `max_activations`, P if it is not given (2 P
    makes it ZB-2p), if they are released at W.  With neither option the order is zb_h1's, whose
    makespan M (F + I + W) + (P - 1) F at equal costs no order beats; with `costs` it is the
    shortest of that one (where the cap allows it) and of waves of several paces, list-scheduled
    under the cap.
    """
    figure = interleaved_zb(devices=devices, microbatches=microbatches, chunks=chunks)
    if costs is None and max_activations is None:
        return figure
    costs, cap = costs or Costs(), max_activations or devices
    found = fitted(Placement.loop(devices=devices), costs, microbatches, cap=cap)
    return shortest((found, figure), costs) if cap >= devices else found


def interleaved_zb(
    *, devices: int, microbatches: int, chunks: int, costs: Costs | None = None
) -> Schedule:
    """Interleaved 1F1B with zb_h1's order of W (torch's ScheduleInterleavedZeroBubble).

    Any P, V and M.  Microbatches go through the chunks in groups of at least P, as equal as M
    allows.  Makespan V M (F + I + W) + (P - 1)(F + I - W) in costs of a chunk for M >= P, where W
    is at most F and at most I.  With G the longest group, every device holds min(V M, (V - 1) G +
    P) activations at its peak, if they are released at W.  `costs` fit the order to the times that
    actions really take, under the same memory.
    """
    longest = max(even_groups(devices, microbatches))
    ahead = [(chunks - 1) * longest + devices - 1 - d for d in range(devices)]
    if costs is None:
        return _in_order(devices, chunks, microbatches, ahead, delay=list(range(devices)))
    placement = Placement.loop(devices=devices, chunks=chunks)
    return fitted(placement, costs, microbatches, cap=(chunks - 1) * longest + devices)


def _in_order(
    devices: int, chunks: int, microbatches: int, ahead: list[int], *, delay: list[int]
) -> Schedule:
    """Device d runs `ahead[d]` forwards, then F and I in turn, each W `delay[d]` turns after
    its I.
    """
    groups = even_groups(devices, microbatches)
    forward, grad, weight = (in_groups(kind, groups, chunks) for kind in "FIW")
    rows = [
        in_turns(forwards_ahead, forward, grad, [*[None] * turns, *weight])
        for forwards_ahead, turns in zip(ahead, delay, strict=True)
    ]
    return in_chunks(rows, Placement.loop(devices=devices, chunks=chunks), microbatches)


def zbv(*, devices: int, microbatches: int, chunks: int, costs: Costs | None = None) -> Schedule:
    """Zero bubble with 1F1B's memory, on a V (ZB-V, Zero Bubble Pipeline Parallelism, Qi et al.
    2024, section 6).

    Any P and M, two chunks.  Where F, I and W cost the same, and for M >= 2 P - 1, each device is
    busy from its first action to its last, and the makespan is 2 M (F + I + W) + (P - 1) F in costs
    of a chunk.  Every device holds at most 2 P activations (of half a device's layers each), if
    they are released at W.  For a smaller M the order is list-scheduled, where that is shorter.
    `costs` fit the order to the times that actions really take, under the same memory.
    """
    place = Placement.vee(devices=devices)
    if costs is not None:
        return fitted(place, costs, microbatches, cap=2 * devices)
    rows = [_zbv_row(devices - d, d, microbatches) for d in range(devices)]
    figure = in_chunks(rows, place, microbatches)
    return figure if microbatches >= 2 * devices - 1 else _shorter(figure)


def _zbv_row(left: int, device: int, microbatches: int) -> list[str]:
    """Device d's row of the figure for M >= 2 P - 1, with P - d devices left to the turn; in its
    second chunk a microbatch comes back.
    """
    padded = max(microbatches, 2 * (left + device) - 1)
    return [
        *["F0"] * (2 * left - 1),
        *["F1", "F0"] * device,
        *["F1", "I1", "W1"] * left,
        # Steady state; in the end no forward of the first chunk is left.
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (padded - left - device),
        *["I0", "I1"] * device,
        *["I0", "W0"] * left,
        *["W1"] * device,
        *["W0"] * device,
    ]


def _shorter(figure: Schedule) -> Schedule:
    """A list-scheduled wave with the memory of a short job's figure, if it is never longer than the
    figure.
    """
    order = wave(figure.placement, out=1.5, back=1.5, pause=0, period=3)(figure.num_microbatches)
    caps = simulate(figure).peak_activations
    if any(least > cap for least, cap in zip(least_peaks(order), caps, strict=True)):
        return figure
    scheduled = figure.with_rows(list_schedule(order, Costs(), caps).schedule.rows)
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
    place = Placement.vee(devices=devices)
    figure = wave(place, out=2, back=1, pause=3 if devices % 2 == 0 else 0, period=6)
    cap = 2 * ((devices + 2) // 2)
    return fitted(place, costs, microbatches, cap=cap, figure=figure)


def v_min(*, devices: int, microbatches: int, chunks: int, costs: Costs | None = None) -> Schedule:
    """A third of 1F1B's memory, with a bubble like 1F1B's (V-Min, Pipeline Parallelism with
    Controllable Memory, Qi et al. 2024).

    Any P and M, two chunks.  Every device holds at most 2 floor((P + 4) / 3) activations (of half a
    device's layers each), if they are released at W.  Where F, I and W cost the same, and for M >=
    P, the makespan is at most 2 M (F + I + W) + (4 P - 5) F in costs of a chunk.  With so little
    memory, any difference between the costs adds time to every microbatch; `costs` fit the order to
    the times that actions really take.
    """
    place = Placement.vee(devices=devices)
    figure = wave(place, out=1, back=1, pause=2 if devices % 3 == 0 else 0, period=6)
    cap = 2 * ((devices + 4) // 3)
    return fitted(place, costs, microbatches, cap=cap, figure=figure)
