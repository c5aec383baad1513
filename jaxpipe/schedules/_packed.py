"""Reference orders by modulo scheduling: one microbatch is placed action by action into a turn of
its devices, which repeats (Rau 1994, Iterative Modulo Scheduling).

A wave has one pace, so its microbatches meet on devices, wait, and hold activations longer.  Here
each action has a place of its own in the turn, and a cap that is below 1F1B's memory is kept with
a shorter period.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..engine.costs import StageCosts
from ..table.action import Kind
from ..table.placement import Placement
from ._list_scheduling import least_peak
from ._waves import OrderMaker, path_of, repeated, round_of

# Periods, relative to the work of the busiest device, and times after each hop, relative to a
# forward, which leave `list_schedule` room.
_PERIODS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6)
_PAUSES = (0.0, 0.05, 0.25)
_FEW = 2  # of the shortest periods for each pause
_ROUNDING = 1e-9


def packed_orders(placement: Placement, costs: StageCosts, cap: int) -> Iterator[OrderMaker]:
    """Orders of the shortest periods that keep the cap."""
    least, mean = round_of(placement, costs), sum(costs.forward) / placement.num_stages
    for pause in _PAUSES:
        found = 0
        for factor in _PERIODS:
            starts = _starts(placement, costs, factor * least, pause * mean)
            if starts is None:
                continue
            maker = partial(repeated, placement, starts, factor * least)
            if max(map(least_peak, maker(2 * cap))) <= cap:
                yield maker
                found += 1
            if found == _FEW:
                break


def _starts(
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
