"""Pass: cut the ticks into segments whose static structure repeats, so that code size does not grow with M."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..program.segments import Segment
from ..simulation.costs import Costs
from ..table.encoded import IntArray
from .assign_ticks import Ticks
from .choose_spans import Chooser
from .cost_model import priced_makespan, program_price, tick_durations
from .limits import LIMITS, LITTLE_CODE, Prices
from .meetings import between_meetings
from .requirements import Requirements, collect
from .spans import Span, segments_of
from .starts import both_ways, directions, exact_spans, longest_true, phases, steady_starts


def find_segments(ticks: Ticks, *, costs: Costs | None = None, prices: Prices = LITTLE_CODE, cuts: bool = False) -> tuple[Segment, ...]:
    """Find the exact repeats (the steady states), then give the ramps between them the least code that costs no time.

    A ramp's ticks share code by taking the union of their blocks and transfers.  Additional pairs make devices wait for each
    other, so each choice is priced by simulating the program with it (`program_price`).
    The search sees only a few turns of each steady state, so neither its time nor what it chooses depends on M.
    Ticks that take turns are one segment, and only whether they choose among exchanges is left to find.  With `cuts` none do:
    ramps are cut anywhere instead, in a longer search, until the transfers of each piece are few enough to be all made in each tick.
    """
    requirements = collect(ticks)
    if not len(requirements):
        return ()
    if ticks.period > 1:
        spans = [Span(0, len(requirements), ticks.period, gated) for gated in (False, True)]
        both = [segments_of([span], requirements, beside=prices.beside) for span in spans]
        durations = tick_durations(ticks, costs)

        def price(segments: tuple[Segment, ...]) -> float:
            makespan = priced_makespan(durations, segments, prices)
            return program_price(makespan, segments, requirements.num_devices, prices)

        return min(both, key=price)
    kept = kept_ticks(requirements.codes, twice=bool(requirements.together.any()))
    short = replace(requirements, codes=requirements.codes[kept])
    meetings = between_meetings(short)
    durations = tick_durations(ticks, costs)
    chooser = Chooser(short, durations._replace(codes=durations.codes[kept]), prices, meetings.ticks)
    if cuts:
        return _of_kept(chooser.cut(exact_spans(short, 0, len(short))), kept, requirements, beside=prices.beside)
    starts = [exact_spans(short, 0, len(short)), *phases(*(busy[kept] for busy in directions(ticks)))]
    if prices.beside:
        starts += steady_starts(starts[0], starts[1])
    besides = [both_ways(spans) for spans in (meetings.steady, meetings.everywhere)]
    best = chooser.best(both_ways(starts), besides=besides)
    return _of_kept(best, kept, requirements, beside=prices.beside)


def can_be_cut(ticks: Ticks) -> bool:
    """Whether they are few enough to be cut anywhere."""
    requirements = collect(ticks)
    return len(kept_ticks(requirements.codes, twice=bool(requirements.together.any()))) <= LIMITS.most_cut


def _of_kept(spans: Sequence[Span], kept: IntArray, requirements: Requirements, *, beside: bool) -> tuple[Segment, ...]:
    """The segments of spans of the kept ticks, with those that were taken out."""
    whole = np.append(kept, len(requirements))
    return segments_of(
        [span._replace(start=int(whole[span.start]), stop=int(whole[span.stop])) for span in spans], requirements, beside=beside
    )


def kept_ticks(codes: IntArray, *, twice: bool = False) -> IntArray:
    """The ticks that are left when all but a few turns of each steady state are taken out; `twice`: two of those that make no trip.

    What is taken out are whole turns, and multiples of all common periods, so that ticks keep their place in a period.
    """
    kept = np.arange(len(codes))
    while (removal := _longest_removal(codes[kept], twice=twice)) is not None:
        kept = np.delete(kept, removal)
    return kept


def _longest_removal(codes: IntArray, *, twice: bool) -> slice | None:
    """Turns in the middle of the longest steady state, so that one turn, or two, and a little more are left; None if there are none."""
    best = slice(0, 0)
    for cycle in range(1, min(LIMITS.longest_cycle, len(codes) // 2) + 1):
        if codes[cycle:].size <= best.stop - best.start:
            break
        begin, length = longest_true(codes[cycle:] == codes[:-cycle])
        turn = math.lcm(cycle, LIMITS.longest_period)
        room = length + cycle - turn - 2 * LIMITS.longest_period
        room -= cycle if twice and cycle > LIMITS.longest_period else 0
        count = max(0, room // turn) * turn
        if count > best.stop - best.start:
            margin = (length + cycle - count) // 2
            best = slice(begin + margin, begin + margin + count)
    return best if best.stop > best.start else None
