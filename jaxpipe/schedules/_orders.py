"""Reference orders of several schedules: 1F1B on a loop of stages, waves, ZB-V's figure, and modulo
scheduling; and the search for the best schedule that follows one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ..engine.costs import Costs, StageCosts
from ..engine.loop import NEVER
from ..engine.simulate import simulate
from ..table.activations import Release
from ..table.kinds import Action, Kind
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._list_scheduling import Instance, ListSchedule, least_peak, list_schedule
from ._rows import actions, alternate, even_groups, in_groups, in_turns, schedule_of

Order: TypeAlias = list[list[Action]]
# microbatches -> the reference order of F and I of each device
OrderMaker: TypeAlias = Callable[[int], Order]

# By what fraction of its length a W may delay the next action: which is best depends on the costs.
PATIENCE = (0.0, 0.5)


class Wave(NamedTuple):
    """The pace of a wave.

    Args:
        out: time of a hop to another device in units of the stage's cost, in chunks 0, 2, ... (of
            backwards: the last chunk, ...).
        back: the same for the other chunks, which in a V lead back to device 0.
        pause: time between the last stage's F and its I.
        period: time from one microbatch to the next.
    """

    out: float
    back: float
    pause: float
    period: float


def wave_order(placement: Placement, costs: StageCosts, wave: Wave, microbatches: int) -> Order:
    """Each device's F and I in the order in which the wave reaches them."""
    starts = _starts(placement, costs, wave)
    return repeated(placement, starts, wave.period, microbatches)


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
    return [(Kind.F, s) for s in stages] + [(Kind.I, s) for s in reversed(stages)]


def _starts(placement: Placement, costs: StageCosts, wave: Wave) -> list[float]:
    """When the first microbatch is at each place of its path."""
    starts: list[float] = [0]
    for kind, stage in path_of(placement)[:-1]:
        starts.append(starts[-1] + _step(placement, costs, wave, kind, stage))
    return starts


def _step(placement: Placement, costs: StageCosts, wave: Wave, kind: Kind, stage: int) -> float:
    """Time from an action's start to the start of the next on the microbatch's path."""
    last = placement.num_stages - 1
    cost = (costs.forward if kind is Kind.F else costs.input_grad)[stage]
    following = stage + 1 if kind is Kind.F else stage - 1
    if following > last:
        return cost + wave.pause
    if placement.devices_of[following] == placement.devices_of[stage]:
        return cost
    chunk = (stage if kind is Kind.F else last - stage) // placement.num_devices
    return (wave.back if chunk % 2 else wave.out) * (cost + costs.transfer[stage])


def cost_waves(placement: Placement, costs: StageCosts, cap: int) -> list[OrderMaker]:
    """Waves of several paces, each about as dense as the cap allows, and one so sparse that it
    keeps any cap.

    A wave keeps the cap if its microbatches stay on a device, all chunks together, for at most
    `cap` periods.  A somewhat denser one may still fit, and a sparser one leaves `list_schedule`
    more freedom.
    """
    least = round_of(placement, costs)
    paces = [(1.0, 1.0), (1.5, 1.5), (2.0, 2.0)] + (
        [(2.0, 1.0)] if placement.num_chunks > 1 else []
    )
    waves = []
    for out, back in paces:
        dense = _held_time(placement, costs, Wave(out, back, 0, 0)) / cap
        waves += [Wave(out, back, 0, max(dense * factor, least / 2)) for factor in (0.7, 1, 1.4)]
    waves += [Wave(1, 1, pause, least) for pause in (0, costs.weight_grad[-1])]
    waves.append(Wave(1, 1, 0, 2 * placement.num_stages * least))
    return [partial(wave_order, placement, costs, wave) for wave in waves]


def _held_time(placement: Placement, costs: StageCosts, wave: Wave) -> float:
    """The longest time that a device holds a microbatch's activations, summed over its chunks."""
    starts = _starts(placement, costs, wave)
    held = [
        starts[-1 - s] - starts[s] + costs.input_grad[s] + costs.weight_grad[s]
        for s in range(placement.num_stages)
    ]
    return max(sum(held[s] for s in stages) for stages in placement.stages_of)


def round_of(placement: Placement, costs: StageCosts) -> float:
    """The time the busiest device needs for one microbatch: no schedule has a shorter period."""
    each = [
        sum(times) for times in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)
    ]
    return max(sum(each[s] for s in stages) for stages in placement.stages_of)


# Periods, relative to the work of the busiest device, and times after each hop, relative to a
# forward, which leave `list_schedule` room.
_PERIODS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6)
_PAUSES = (0.0, 0.05, 0.25)
_FEW = 2  # of the shortest periods for each pause
_ROUNDING = 1e-9


def packed_orders(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Orders of the shortest periods that keep the cap, by modulo scheduling: one microbatch is
    placed action by action into a turn of its devices, which repeats (Rau 1994, Iterative Modulo
    Scheduling).

    A wave has one pace, so its microbatches meet on devices, wait, and hold activations longer.
    Here each action has a place of its own in the turn, and a cap that is below 1F1B's memory is
    kept with a shorter period.
    """
    least, mean = round_of(placement, costs), sum(costs.forward) / placement.num_stages
    for pause in _PAUSES:
        found = 0
        for factor in _PERIODS:
            starts = _packed_starts(placement, costs, factor * least, pause * mean)
            if starts is None:
                continue
            maker = partial(repeated, placement, starts, factor * least)
            if max(map(least_peak, maker(2 * cap))) <= cap:
                yield maker
                found += 1
            if found == _FEW:
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
        length = (costs.forward if kind is Kind.F else costs.input_grad)[stage]
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


# Of the period with which lives fill the cap, the longest that is tried, and how many there are.
_SPARSEST, _DENSITIES = 1.4, 20


def even_waves(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Waves of many densities in which all forwards take the same time, and all backwards.

    A backward takes as long as a forward, or the geometric mean of that and its own time.  With
    like times, microbatches meet in a like order on every device and wait less, and a tight cap is
    kept with a shorter period.
    """
    ratio = sum(costs.input_grad) / (sum(costs.forward) or 1)
    path = path_of(placement)
    for pace in sorted({1.0, ratio**0.5}):
        times = (1.0 if kind is Kind.F else pace for kind, _ in path)
        starts = [0.0, *accumulate(times)]
        lives = [starts[-1 - s] - starts[s] for s in range(placement.num_stages)]
        dense = max(sum(lives[s] for s in stages) for stages in placement.stages_of) / cap
        for step in range(_DENSITIES):
            period = dense * (1 + (_SPARSEST - 1) * step / (_DENSITIES - 1))
            yield partial(repeated, placement, starts[:-1], period)


def fitted(
    order: OrderMaker, placement: Placement, costs: Costs | None, microbatches: int, *, cap: int
) -> Schedule:
    """A schedule's own order, list-scheduled under its cap; where costs are given, the best of it
    and of waves.

    The order must fit the cap.
    """
    stages = (costs or Costs()).for_stages(placement.num_stages)
    makers = [order] if costs is None else [order, *cost_waves(placement, stages, cap)]
    release = Release.WEIGHT_GRAD if costs is None else costs.release
    found = best_of(makers, Instance(placement, stages, microbatches, release), cap)
    assert found is not None, f"the order does not fit {cap} activations"
    return schedule_of(found.rows, placement, microbatches)


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """The schedule with the least makespan under these costs; of equals, the first."""
    return min(schedules, key=lambda schedule: simulate(schedule, costs).makespan)


def best_of(makers: Sequence[OrderMaker], instance: Instance, cap: int) -> ListSchedule | None:
    """The shortest schedule under the cap that follows one of the orders, of equals the one that
    holds least; None if none fits.

    Many orders, or a long job, are ranked by the first microbatches with no patience: warmup and
    cooldown do not change with M, so two short runs give the pace of the steady state.  Only the
    most promising are run in full, with every patience.
    """
    placement, costs, microbatches, _ = instance
    # At least two rounds of P microbatches and a dozen microbatches; an even number of rounds, so
    # that half of it is whole rounds too.
    short = 2 * placement.num_devices * -(-6 // placement.num_devices)
    whole_sequences = 2 * (len(costs.slice_factors) or 1)
    short = whole_sequences * -(-short // whole_sequences)
    if len(makers) == 1 or (microbatches <= 2 * short and len(makers) <= _FINALISTS):
        finalists = list(makers)
    else:
        judged = [
            (_forecast(maker, instance, cap, min(microbatches, short)), place)
            for place, maker in enumerate(makers)
        ]
        finalists = [makers[place] for _, place in sorted(judged)[:_FINALISTS]]
    pairs = [(maker, patience) for maker in finalists for patience in _patience(costs)]
    # The most promising come first.
    affordable = max(2, _MOST_ACTIONS // (3 * placement.num_stages * microbatches))
    found = [_trial(maker, instance, cap, patience) for maker, patience in pairs[:affordable]]
    return min(
        (f for f in found if f is not None), key=lambda f: (f.makespan, f.peak), default=None
    )


_FINALISTS = 5  # orders that are tried with every patience
_MOST_ACTIONS = 300_000  # actions of all full runs together: two or three seconds


def _forecast(maker: OrderMaker, whole: Instance, cap: int, short: int) -> tuple[float, int]:
    """Makespan of the whole job, extrapolated from `short` microbatches and half of them,
    and peak.
    """
    half = (short + 1) // 2
    long = _trial(maker, whole._replace(microbatches=short), cap)
    first = long
    if half < short < whole.microbatches:
        first = _trial(maker, whole._replace(microbatches=half), cap)
    if first is None or long is None:
        return NEVER, 0
    pace = (long.makespan - first.makespan) / max(1, short - half)
    return long.makespan + pace * (whole.microbatches - short), long.peak


def _trial(
    maker: OrderMaker, instance: Instance, cap: int, patience: float = 0
) -> ListSchedule | None:
    """The schedule that follows an order; None where the order does not fit the cap."""
    order = maker(instance.microbatches)
    if max(map(least_peak, order)) > cap:
        return None
    return list_schedule(order, instance, [cap] * len(order), patience)


def _patience(costs: StageCosts) -> tuple[float, ...]:
    """The fractions worth trying; where all costs are equal, patience changes nothing."""
    different = {*costs.forward, *costs.input_grad, *costs.weight_grad, *costs.transfer} - {0}
    return PATIENCE if len(different) > 1 else PATIENCE[:1]


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
