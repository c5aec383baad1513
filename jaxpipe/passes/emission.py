"""From a table to the ticks and segments of its program: of several ways to emit it, the fastest for its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..schedule import Schedule
from ..simulate import simulate
from .assign_ticks import Ticks, assign_ticks, turn_ticks
from .facts import collect
from .find_segments import find_segments
from .fuse_ticks import fuse_ticks
from .level_ticks import level_ticks
from .program import Segment
from .program_time import EARLY_TRANSFERS, LITTLE_CODE, Prices, Sync, cost_matrix, least_makespan, program_makespan, program_price

# A program this much longer than its table keeps the table's makespan; if none does, more costly ways are tried.
KEEPS_MAKESPAN = 1.005


class Emission(NamedTuple):
    """Ticks and segments, and what they cost with F = I = W = 1, B = 2 (the overlapped pair: the sum of its halves)."""

    ticks: Ticks
    segments: tuple[Segment, ...]
    makespan: float  # of the program
    price: float  # the makespan with a little for each transfer and each block of code


def choose_emission(schedule: Schedule, *, sync: Sync = Sync.PAIRS, prefer_speed: bool = False) -> Emission:
    """Assign ticks in several ways, find the segments of each, and take the cheapest of those that keep the table's makespan.

    Ticks that keep the order of every row are tried first: the fewest ticks, kinds that take turns, and, where neither keeps the
    makespan, level ticks.  Where these do not either, fused ticks may change the order of a device's forwards and backwards,
    within the table's memory.  Where nothing keeps the makespan, the shortest is taken.

    `prefer_speed` pays for speed with memory and with code: fused ticks may hold up to twice the table's activations, and the
    steady state gets code of its own where transfers can then run beside blocks.
    """
    prices = EARLY_TRANSFERS if prefer_speed else LITTLE_CODE
    enough = KEEPS_MAKESPAN * simulate(schedule).makespan
    found: list[Emission] = []
    for candidates in _more_and_more(schedule, more_memory=prefer_speed):
        bounds = [least_makespan(collect(ticks), cost_matrix(ticks), sync=sync) for ticks in candidates]
        worst = max(enough, min(bounds, default=0.0))
        found += [_emission(ticks, sync, prices) for ticks, bound in zip(candidates, bounds, strict=True) if bound <= worst]
        if min(each.makespan for each in found) <= enough:
            break
    worst = max(enough, min(each.makespan for each in found))
    return min((each for each in found if each.makespan <= worst), key=lambda each: each.price)


def _more_and_more(schedule: Schedule, *, more_memory: bool) -> Iterator[Sequence[Ticks]]:
    """Ways to assign ticks, the simple ones first."""
    yield assign_ticks(schedule), turn_ticks(schedule), turn_ticks(schedule, shift=1)
    yield (level_ticks(schedule),)
    fused = None if schedule.forward_only else fuse_ticks(schedule, more_memory=more_memory)
    yield () if fused is None else (fused,)


def _emission(ticks: Ticks, sync: Sync, prices: Prices) -> Emission:
    segments = find_segments(ticks, sync=sync, prices=prices)
    costs = cost_matrix(ticks)
    makespan = program_makespan(costs, segments, sync=sync)
    priced = program_makespan(costs, segments, sync=sync, transfer=prices.transfer)
    return Emission(ticks, segments, makespan, program_price(priced, segments, costs.shape[1], prices))
