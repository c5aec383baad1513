"""Reference orders of several schedules: 1F1B on a loop of stages, waves, ZB-V's figure, and modulo
scheduling; and the search for the best schedule that follows one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise, product
from typing import NamedTuple, TypeAlias

from ..engine.costs import Costs, StageCosts
from ..engine.simulate import simulate
from ..table.kinds import Action, Kind, Release
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._list_scheduling import Instance, ListSchedule, least_peak, list_schedule
from ._rows import actions, alternate, even_groups, in_groups, in_turns, schedule_of

Order: TypeAlias = list[list[Action]]
# microbatches -> the reference order of F and I of each device
OrderMaker: TypeAlias = Callable[[int], Order]
F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741

# By what fraction of its length a W may delay the next action: which is best depends on the costs.
_PATIENCE = (0.0, 0.5)


class Wave(NamedTuple):
    """The pace of a wave, in units of the time of an action.

    Args:
        out: time of a hop to another device, in chunks 0, 2, ... (of backwards: the last chunk,
            ...).
        back: the same for the other chunks, which in a V lead back to device 0.
        pause: time between the last stage's F and its I.
        period: time from one microbatch to the next.
    """

    out: float
    back: float
    pause: float
    period: float


def wave_order(placement: Placement, wave: Wave, microbatches: int) -> Order:
    """Each device's F and I in the order in which the wave reaches them."""
    last = placement.num_stages - 1
    times = []
    for (kind, stage), (_, following) in pairwise(path_of(placement)):
        chunk = (stage if kind is F else last - stage) // placement.num_devices
        if stage == following:
            times.append(1 + wave.pause)
        elif placement.devices_of[following] == placement.devices_of[stage]:
            times.append(1.0)
        else:
            times.append(wave.back if chunk % 2 else wave.out)
    return repeated(placement, [0.0, *accumulate(times)], wave.period, microbatches)


def repeated(
    placement: Placement, starts: Sequence[float], period: float, microbatches: int
) -> Order:
    """Each device's F and I in the order in which microbatches reach them, one every period; of
    the first one, `starts` has the time at each place of its path.
    """
    path = path_of(placement)
    timed: list[list[tuple[float, int, int]]] = [[] for _ in range(placement.num_devices)]
    for place, ((_, stage), start) in enumerate(zip(path, starts, strict=True)):
        timed[placement.devices_of[stage][0]] += [
            (start + m * period, place, m) for m in range(microbatches)
        ]
    # Equal times are settled by the place on the path, so that no action comes before one that it
    # needs.
    return [
        [Action(path[place][1], path[place][0], m) for _, place, m in sorted(row)] for row in timed
    ]


def path_of(placement: Placement) -> list[tuple[Kind, int]]:
    """A microbatch's path through all stages and back."""
    stages = range(placement.num_stages)
    return [(F, s) for s in stages] + [(I, s) for s in reversed(stages)]


# Of the period with which lives fill the cap, the shortest and the longest that are tried, and how
# many there are.
_DENSEST, _SPARSEST, _DENSITIES = 0.7, 1.4, 20


def even_waves(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Waves of many densities in which all forwards take the same time, and all backwards; at last
    one microbatch after the other, which keeps any cap.

    A backward takes as long as a forward, or the geometric mean of that and its own time.  With
    like times, microbatches meet in a like order on every device and wait less, and a tight cap is
    kept with a shorter period.
    """
    ratio = sum(costs.input_grad) / (sum(costs.forward) or 1)
    path = path_of(placement)
    for pace in sorted({1.0, ratio**0.5}):
        *starts, end = accumulate((1.0 if kind is F else pace for kind, _ in path), initial=0.0)
        lives = [[*starts, end][-1 - s] - starts[s] for s in range(placement.num_stages)]
        dense = max(sum(lives[s] for s in stages) for stages in placement.stages_of) / cap
        for step in range(_DENSITIES):
            factor = _DENSEST + (_SPARSEST - _DENSEST) * step / (_DENSITIES - 1)
            yield partial(repeated, placement, starts, dense * factor)
    yield partial(repeated, placement, starts, end)


# Periods, relative to the work of the busiest device, and times after each hop, relative to a
# forward, which leave `list_schedule` room.
_PERIODS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6)
_PAUSES = (0.0, 0.05, 0.25)
_FEW = 4  # of the shortest periods for each pause
_ROUNDING = 1e-9


def packed_orders(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Orders of the shortest periods that keep the cap, by modulo scheduling: one microbatch is
    placed action by action into a turn of its devices, which repeats (Rau 1994, Iterative Modulo
    Scheduling).

    A wave has one pace, so its microbatches meet on devices, wait, and hold activations longer.
    Here each action has a place of its own in the turn, and a cap that is below 1F1B's memory is
    kept with a shorter period.
    """
    mean = sum(costs.forward) / placement.num_stages
    each = [
        f + i + w
        for f, i, w in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)
    ]
    # No schedule has a shorter period than the work of the busiest device.
    least = max(sum(each[s] for s in stages) for stages in placement.stages_of)
    for pause in _PAUSES if least else ():
        fitting = 0
        for factor in _PERIODS:
            starts = _packed_starts(placement, costs, factor * least, pause * mean)
            if starts is None:
                continue
            maker = partial(repeated, placement, starts, factor * least)
            if max(map(least_peak, maker(2 * cap))) <= cap:
                yield maker
                fitting += 1
            if fitting == _FEW:
                break


def _packed_starts(
    placement: Placement, costs: StageCosts, period: float, pause: float
) -> list[float] | None:
    """When a microbatch is at each place of its path: as soon as its device is free in that part of
    its turn; None where a turn has no room.
    """
    busy: list[list[tuple[float, float]]] = [[] for _ in range(placement.num_devices)]
    starts: list[float] = []
    ready, here = 0.0, 0
    for kind, stage in path_of(placement):
        device = placement.devices_of[stage][0]
        if starts and device != here:
            ready += costs.transfer[stage] + pause
        length = (costs.forward if kind is F else costs.input_grad)[stage]
        times = [ready, *(ready + (at + took - ready) % period for at, took in busy[device])]
        start = next(
            (t for t in sorted(times) if _fits(busy[device], t % period, length, period)), None
        )
        if start is None:
            return None
        busy[device].append((start % period, length))
        starts.append(start)
        ready, here = start + length, device
    return starts


def _fits(busy: list[tuple[float, float]], at: float, length: float, period: float) -> bool:
    after = (((other - at) % period, took) for other, took in busy)
    return all(
        gap >= length - _ROUNDING and gap + took <= period + _ROUNDING for gap, took in after
    )


def reference_orders(placement: Placement, costs: StageCosts, cap: int) -> list[OrderMaker]:
    """All orders that are tried under a cap."""
    return [*even_waves(placement, costs, cap), *packed_orders(placement, costs, cap)]


def fitted(
    order: OrderMaker, placement: Placement, costs: Costs | None, microbatches: int, *, cap: int
) -> Schedule:
    """A schedule's own order, list-scheduled under its cap; where costs are given, the best of it
    and of waves.

    The order must fit the cap.
    """
    stages = (costs or Costs()).for_stages(placement.num_stages)
    makers = [order] if costs is None else [order, *reference_orders(placement, stages, cap)]
    release = Release.WEIGHT_GRAD if costs is None else costs.release
    found = best_of(makers, Instance(placement, stages, microbatches, release), cap)
    assert found is not None, f"the order does not fit {cap} activations"
    return schedule_of(found.rows, placement, microbatches)


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """The schedule with the least makespan under these costs; of equals, the first."""
    return min(schedules, key=lambda schedule: simulate(schedule, costs).makespan)


_FINALISTS = 5  # orders that are tried with every patience
_MOST_ACTIONS = 300_000  # actions of all full runs together: two or three seconds


def best_of(makers: Sequence[OrderMaker], instance: Instance, cap: int) -> ListSchedule | None:
    """The shortest schedule under the cap that follows one of the orders, of equals the one that
    holds least; None if none fits.

    Many orders are ranked by the first microbatches with no patience.  Only the most promising are
    run in full, with every patience.
    """
    placement, costs, microbatches, _ = instance
    # At least two rounds of P microbatches and a dozen microbatches, of whole sequences.
    slices = len(costs.slice_factors) or 1
    short = 2 * placement.num_devices * -(-6 // placement.num_devices)
    first = instance._replace(microbatches=min(microbatches, slices * -(-short // slices)))

    caps = [cap] * placement.num_devices

    def fitting(count: int) -> Iterator[tuple[int, Order]]:
        for place in places:
            order = makers[place](count)
            if max(map(least_peak, order)) <= cap:
                yield place, order

    places = list(range(len(makers)))
    if len(makers) > _FINALISTS:
        judged = [
            (list_schedule(order, first, caps)[1:], place)
            for place, order in fitting(first.microbatches)
        ]
        places = [place for _, place in sorted(judged)]
    finalists = [order for _, order in islice(fitting(microbatches), _FINALISTS)]
    # Where all costs are equal, patience changes nothing.
    times = {*costs.forward, *costs.input_grad, *costs.weight_grad, *costs.transfer} - {0}
    pairs = product(finalists, _PATIENCE if len(times) > 1 else (0,))
    # The most promising come first.
    affordable = max(2, _MOST_ACTIONS // (3 * placement.num_stages * microbatches))
    results = (list_schedule(o, instance, caps, wait) for o, wait in islice(pairs, affordable))
    return min(results, key=lambda f: (f.makespan, f.peak), default=None)


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
