"""Reference orders made of waves, and the search for the best schedule that follows one of them.

In a wave each microbatch goes through all stages and back at a steady pace, and the next one
follows a fixed period later: the repeated building block of Pipeline Parallelism with Controllable
Memory (Qi et al. 2024).  The number of activations held is the time that a microbatch takes,
divided by the period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from ..engine.costs import Costs, StageCosts
from ..engine.loop import NEVER
from ..engine.simulate import simulate
from ..table.action import Action, Kind
from ..table.activations import Release
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._list_scheduling import ListSchedule, least_peak, list_schedule
from ._rows import schedule_of

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
    path = _path(placement)
    starts = _starts(placement, costs, wave)
    timed: list[list[tuple[float, int, int]]] = [[] for _ in range(placement.num_devices)]
    for place, ((_, stage), start) in enumerate(zip(path, starts, strict=True)):
        timed[placement.devices_of[stage][0]] += [
            (start + m * wave.period, place, m) for m in range(microbatches)
        ]
    # Equal times are settled by the place on the path, so that no action comes before one that it
    # needs.
    return [
        [Action(path[place][1], path[place][0], m) for _, place, m in sorted(row)] for row in timed
    ]


def _path(placement: Placement) -> list[tuple[Kind, int]]:
    """A microbatch's path through all stages and back."""
    stages = range(placement.num_stages)
    return [(Kind.F, s) for s in stages] + [(Kind.I, s) for s in reversed(stages)]


def _starts(placement: Placement, costs: StageCosts, wave: Wave) -> list[float]:
    """When the first microbatch is at each place of its path."""
    starts: list[float] = [0]
    for kind, stage in _path(placement)[:-1]:
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
    least = _round(placement, costs)
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


def _work(costs: StageCosts, stages: Iterable[int]) -> float:
    """The time that a device with these stages needs for one microbatch."""
    return sum(costs.forward[s] + costs.input_grad[s] + costs.weight_grad[s] for s in stages)


def _round(placement: Placement, costs: StageCosts) -> float:
    """The time the busiest device needs for one microbatch: no schedule has a shorter period."""
    return max(_work(costs, stages) for stages in placement.stages_of)


def fitted(
    order: OrderMaker,
    placement: Placement,
    costs: Costs | None,
    *,
    microbatches: int,
    cap: int,
) -> Schedule:
    """A schedule's own order, list-scheduled under its cap; where costs are given, the best of it
    and of waves.

    The order must fit the cap.
    """
    stages = (costs or Costs()).for_stages(placement.num_stages)
    makers = [order] if costs is None else [order, *cost_waves(placement, stages, cap)]
    release = Release.WEIGHT_GRAD if costs is None else costs.release
    found = best_of(makers, placement, stages, microbatches=microbatches, cap=cap, release=release)
    assert found is not None, f"the order does not fit {cap} activations"
    return schedule_of(found.rows, placement, microbatches)


def shortest(schedules: Iterable[Schedule], costs: Costs) -> Schedule:
    """The schedule with the least makespan under these costs; of equals, the first."""
    return min(schedules, key=lambda schedule: simulate(schedule, costs).makespan)


def best_of(
    makers: Sequence[OrderMaker],
    placement: Placement,
    costs: StageCosts,
    *,
    microbatches: int,
    cap: int,
    release: Release = Release.WEIGHT_GRAD,
) -> ListSchedule | None:
    """The shortest schedule under the cap that follows one of the orders, of equals the one that
    holds least; None if none fits.

    Many orders, or a long job, are ranked by the first microbatches with no patience: warmup and
    cooldown do not change with M, so two short runs give the pace of the steady state.  Only the
    most promising are run in full, with every patience.
    """
    whole = _Trial(placement, costs, microbatches, cap, release)
    # At least two rounds of P microbatches and a dozen microbatches; an even number of rounds, so
    # that half of it is whole rounds too.
    short = 2 * placement.num_devices * -(-6 // placement.num_devices)
    whole_sequences = 2 * (len(costs.slice_factors) or 1)
    short = whole_sequences * -(-short // whole_sequences)
    if len(makers) == 1 or (microbatches <= 2 * short and len(makers) <= _FINALISTS):
        finalists = list(makers)
    else:
        judged = [
            (_forecast(whole, maker, min(microbatches, short)), place)
            for place, maker in enumerate(makers)
        ]
        finalists = [makers[place] for _, place in sorted(judged)[:_FINALISTS]]
    pairs = [(maker, patience) for maker in finalists for patience in _patience(costs)]
    # The most promising come first.
    affordable = max(2, _MOST_ACTIONS // (3 * placement.num_stages * microbatches))
    found = [whole.run(maker, patience) for maker, patience in pairs[:affordable]]
    return min(
        (f for f in found if f is not None), key=lambda f: (f.makespan, f.peak), default=None
    )


_FINALISTS = 5  # orders that are tried with every patience
_MOST_ACTIONS = 300_000  # actions of all full runs together: two or three seconds


def _forecast(whole: _Trial, maker: OrderMaker, short: int) -> tuple[float, int]:
    """Makespan of the whole job, extrapolated from `short` microbatches and half of them,
    and peak.
    """
    half = (short + 1) // 2
    long = whole.of(short).run(maker, 0)
    first = whole.of(half).run(maker, 0) if half < short < whole.microbatches else long
    if first is None or long is None:
        return NEVER, 0
    pace = (long.makespan - first.makespan) / max(1, short - half)
    return long.makespan + pace * (whole.microbatches - short), long.peak


def _patience(costs: StageCosts) -> tuple[float, ...]:
    """The fractions worth trying; where all costs are equal, patience changes nothing."""
    different = {*costs.forward, *costs.input_grad, *costs.weight_grad, *costs.transfer} - {0}
    return PATIENCE if len(different) > 1 else PATIENCE[:1]


class _Trial(NamedTuple):
    """The arguments of `list_schedule` except the order and the patience."""

    placement: Placement
    costs: StageCosts
    microbatches: int
    cap: int
    release: Release

    def of(self, microbatches: int) -> _Trial:
        return self._replace(microbatches=microbatches)

    def run(self, maker: OrderMaker, patience: float) -> ListSchedule | None:
        order = maker(self.microbatches)
        if max(map(least_peak, order)) > self.cap:
            return None
        caps = [self.cap] * len(order)
        return list_schedule(
            order,
            self.placement,
            self.costs,
            microbatches=self.microbatches,
            caps=caps,
            patience=patience,
            release=self.release,
        )
