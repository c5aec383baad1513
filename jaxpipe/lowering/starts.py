"""Where the search for segments starts: exact repeats, and the phases between first and last forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..table.encoded import BoolArray
from ..table.kinds import RUNS_FORWARD
from .assign_ticks import Ticks
from .limits import LIMITS
from .requirements import Requirements
from .spans import Span


def both_ways(starts: Sequence[list[Span]]) -> list[list[Span]]:
    """Each as it is, and with ticks that choose among exchanges."""
    return [*starts, *([span._replace(gated=True) for span in start] for start in starts)]


def directions(ticks: Ticks) -> tuple[BoolArray, BoolArray]:
    """`[tick, device]`: whether it runs a forward, and whether it runs a backward."""
    table = ticks.schedule.encoded
    busy = np.zeros((2, ticks.num_ticks, table.num_devices), bool)
    mine = ~table.together
    direction = (~table.of_kinds(RUNS_FORWARD)).astype(np.int64)
    busy[direction[mine], ticks.when[mine], table.device[mine]] = True
    return busy[0], busy[1]


def phases(forward: BoolArray, backward: BoolArray) -> list[list[Span]]:
    """Before the first backward, after the last forward, and what is between; and that cut into ramp, steady state and ramp.

    The steady state begins when some device, or every device, has begun its backwards, and ends when some device, or every
    device, has done its forwards; it gets several periods.
    """
    stop = len(forward)
    first_backward = np.where(backward.any(0), backward.argmax(0), stop).tolist()
    after_forward = np.where(forward.any(0), stop - forward[::-1].argmax(0), 0).tolist()
    if min(first_backward) >= stop or max(after_forward) <= 0:
        return [[Span(0, stop, 1)]]
    found = [[Span(a, b, 1) for a, b in pairwise(sorted({0, min(first_backward), max(after_forward), stop}))]]
    for begin in sorted({min(first_backward), max(first_backward)}):
        for end in sorted({min(after_forward), max(after_forward)}):
            for period in (2, 3, 4, 6):
                if end - begin < 2 * period:
                    continue
                marks = sorted({0, min(first_backward), begin, end, max(after_forward), stop})
                spans = [Span(a, b, period if (a, b) == (begin, end) else min(b - a, LIMITS.longest_period)) for a, b in pairwise(marks)]
                found.append(spans)
    return found


def steady_starts(exact: Sequence[Span], phases: Sequence[Span]) -> list[list[Span]]:
    """The longest steady state with code of its own, and between it and the ends the fewest spans, or those of the phases.

    All of its transfers are known, so that none is chosen and what has slack runs beside compute.
    """
    steady = max(exact, key=lambda span: (span.period > 1, span.stop - span.start))
    ends = {0, exact[-1].stop, steady.start, steady.stop}
    marks = {span.start for span in phases if not steady.start < span.start < steady.stop}
    found = []
    for chosen in (ends, ends | marks):
        spans = [Span(a, b, 1) for a, b in pairwise(sorted(chosen))]
        for gated in (False, True):
            found.append([steady if span.start == steady.start else span._replace(gated=gated) for span in spans])
    return found


def exact_spans(requirements: Requirements, start: int, stop: int) -> list[Span]:
    """Longest exact repeat first, then the same on both sides of it; what repeats nowhere is one span of period 1."""
    if start >= stop:
        return []
    codes = requirements.signatures[start:stop]
    best: Span | None = None
    for period in range(1, min(LIMITS.longest_period, (stop - start) // 2) + 1):
        begin, length = longest_true(codes[period:] == codes[:-period])
        trips = (length + period) // period
        if trips < 3 and not (trips == 2 and period == 1):
            continue
        if best is None or trips * period > best.stop - best.start + period:
            best = Span(start + begin, start + begin + trips * period, period)
    if best is None:
        return [Span(start, stop, 1)]
    return [*exact_spans(requirements, start, best.start), best, *exact_spans(requirements, best.stop, stop)]


def longest_true(flags: BoolArray) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    return max(runs_of_true(flags), key=lambda run: run[1], default=(0, 0))


def runs_of_true(flags: BoolArray) -> list[tuple[int, int]]:
    """Start and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))
