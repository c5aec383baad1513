"""Pass: cut the ticks into segments whose static structure repeats, so that code size does not grow with M."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .assign_ticks import Ticks
from .facts import TickFacts, collect, position_of
from .program import Segment
from .program_time import CostOf, cost_matrix, program_makespan, unit_cost

LONGEST_PERIOD = 12
# One compiled block of stage code is worth this share of the makespan: a shorter ramp must pay for its code.
BLOCK_PRICE = 5e-4


class Span(NamedTuple):
    """Ticks start..stop, emitted with this period; a span whose length is no multiple of it ends in a shorter segment."""

    start: int
    stop: int
    period: int


def find_segments(ticks: Ticks, *, cost_of: CostOf = unit_cost) -> tuple[Segment, ...]:
    """Find the exact repeats (the steady states), then give the ramps between them the least code that costs no time.

    A ramp's ticks share code by taking the union of their blocks and transfers.  Additional pairs make devices wait for each
    other, so each choice is priced by simulating the program with it (`program_makespan`, pair mode).
    """
    facts = collect(ticks)
    if not facts:
        return ()
    costs = cost_matrix(ticks, cost_of)
    chooser = _Chooser(facts, costs)
    return chooser.segments(chooser.improve(_exact_spans(facts, 0, len(facts))))


class _Chooser:
    """Scores lists of spans."""

    def __init__(self, facts: Sequence[TickFacts], costs: NDArray[np.float64]) -> None:
        self._facts = facts
        self._costs = costs
        self._built: dict[Span, tuple[Segment, ...]] = {}
        self._scores: dict[tuple[Span, ...], float] = {}
        whole = tuple(Span(t, t + 1, 1) for t in range(len(facts)))
        self._best = max(program_makespan(costs, self.segments(whole)), 1e-12)

    def segments(self, spans: Sequence[Span]) -> tuple[Segment, ...]:
        return tuple(s for span in spans for s in self._segments_of(span))

    def score(self, spans: Sequence[Span]) -> float:
        key = tuple(spans)
        if key not in self._scores:
            segments = self.segments(spans)
            time = program_makespan(self._costs, segments) / self._best
            self._scores[key] = time + BLOCK_PRICE * sum(s.size for s in segments)
        return self._scores[key]

    def improve(self, spans: list[Span]) -> list[Span]:
        """Try other periods for each span, and one span for two neighbours, while the score falls."""
        better = True
        while better:
            better = False
            for candidate in self._neighbours(spans):
                if self.score(candidate) < self.score(spans) - 1e-12:
                    spans, better = candidate, True
                    break
        return spans

    def _neighbours(self, spans: list[Span]) -> list[list[Span]]:
        found = []
        periods = sorted({1, 2, 3, 4, 6} | {s.period for s in spans})
        for i, (left, right) in enumerate(pairwise(spans)):
            for period in periods:
                if period <= right.stop - left.start:
                    found.append([*spans[:i], Span(left.start, right.stop, period), *spans[i + 2 :]])
        for i, span in enumerate(spans):
            for period in periods:
                if period != span.period and period <= span.stop - span.start:
                    found.append([*spans[:i], Span(span.start, span.stop, period), *spans[i + 1 :]])
        return found

    def _segments_of(self, span: Span) -> tuple[Segment, ...]:
        if span not in self._built:
            self._built[span] = tuple(_segments(span, self._facts, self._costs.shape[1]))
        return self._built[span]


def _segments(span: Span, facts: Sequence[TickFacts], num_devices: int) -> list[Segment]:
    """The segment of a span, and one more for ticks left over at its end."""
    repeats, left_over = divmod(span.stop - span.start, span.period)
    middle = span.stop - left_over
    found = []
    if repeats:
        positions = (position_of(facts[span.start + j : middle : span.period], num_devices) for j in range(span.period))
        found.append(Segment(span.start, repeats, tuple(positions)))
    if left_over:
        found.append(Segment(middle, 1, tuple(position_of([f], num_devices) for f in facts[middle : span.stop])))
    return found


def _exact_spans(facts: Sequence[TickFacts], start: int, stop: int) -> list[Span]:
    """Longest exact repeat first, then the same on both sides of it; what repeats nowhere is one span of period 1."""
    if start >= stop:
        return []
    numbers: dict[object, int] = {}
    codes = np.array([numbers.setdefault(f.signature, len(numbers)) for f in facts[start:stop]])
    best: Span | None = None
    for period in range(1, min(LONGEST_PERIOD, (stop - start) // 2) + 1):
        begin, length = _longest_true(codes[period:] == codes[:-period])
        trips = (length + period) // period
        if trips < 3 and not (trips == 2 and period == 1):
            continue
        if best is None or trips * period > best.stop - best.start + period:
            best = Span(start + begin, start + begin + trips * period, period)
    if best is None:
        return [Span(start, stop, 1)]
    return [*_exact_spans(facts, start, best.start), best, *_exact_spans(facts, best.stop, stop)]


def _longest_true(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest] - starts[longest])
