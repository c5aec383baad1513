"""Pass: cut the ticks into segments whose static structure repeats, so that code size does not grow with M."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..action import Kind, parts
from .assign_ticks import Ticks
from .facts import TickFacts, collect, position_of
from .program import Segment
from .program_time import TRANSFER_TIME, CostOf, Sync, advance, cost_matrix, unit_cost

LONGEST_PERIOD = 12
# One compiled block of stage code is worth this share of the makespan: a shorter ramp must pay for its code.
BLOCK_PRICE = 4e-3


class Span(NamedTuple):
    """Ticks start..stop, emitted with this period; a span whose length is no multiple of it ends in a shorter segment."""

    start: int
    stop: int
    period: int


def find_segments(ticks: Ticks, *, sync: Sync = Sync.PAIRS, cost_of: CostOf = unit_cost) -> tuple[Segment, ...]:
    """Find the exact repeats (the steady states), then give the ramps between them the least code that costs no time.

    A ramp's ticks share code by taking the union of their blocks and transfers.  Additional pairs make devices wait for each
    other, so each choice is priced by simulating the program with it (`program_makespan`), for a mesh that waits as `sync` says.
    """
    facts = collect(ticks)
    if not facts:
        return ()
    chooser = _Chooser(facts, cost_matrix(ticks, cost_of), sync)
    starts = [_exact_spans(facts, 0, len(facts)), *_phases(ticks)]
    return chooser.segments(min((chooser.improve(start) for start in starts), key=chooser.score))


def _phases(ticks: Ticks) -> list[list[Span]]:
    """Warmup, ramp, steady state, ramp, cooldown, with several periods of the steady state.

    The steady state begins when some device, or every device, has begun its backwards, and ends when some device, or every
    device, has done its forwards.
    """
    stop = ticks.num_ticks
    first_backward, last_forward = [], []
    for row in ticks.cells:
        kinds = [(t, a.kind) for t, cell in enumerate(row) for a in parts(cell)]
        first_backward += [min((t for t, k in kinds if k is not Kind.F), default=stop)]
        last_forward += [max((t for t, k in kinds if k is Kind.F), default=-1)]
    if min(first_backward) >= stop or max(last_forward) < 0:
        return [[Span(0, stop, 1)]]
    found = []
    for begin in sorted({min(first_backward), max(first_backward)}):
        for end in sorted({min(last_forward) + 1, max(last_forward) + 1}):
            for period in (2, 3, 4, 6):
                if end - begin < 2 * period:
                    continue
                marks = sorted({0, min(first_backward), begin, end, max(last_forward) + 1, stop})
                spans = [Span(a, b, period if (a, b) == (begin, end) else min(b - a, LONGEST_PERIOD)) for a, b in pairwise(marks)]
                found.append(spans)
    return found


class _Chooser:
    """Scores lists of spans."""

    def __init__(self, facts: Sequence[TickFacts], costs: NDArray[np.float64], sync: Sync) -> None:
        self._facts = facts
        self._costs = costs
        self._sync = sync
        self._times: dict[tuple[Span, bytes], NDArray[np.float64]] = {}
        self._built: dict[Span, tuple[Segment, ...]] = {}
        self._scores: dict[tuple[Span, ...], float] = {}
        whole = (Span(0, len(facts), len(facts)),)
        self._best = max(self._makespan(whole), 1e-12)

    def segments(self, spans: Sequence[Span]) -> tuple[Segment, ...]:
        return tuple(s for span in spans for s in self._segments_of(span))

    def score(self, spans: Sequence[Span]) -> float:
        key = tuple(spans)
        if key not in self._scores:
            size = sum(s.size for s in self.segments(spans))
            self._scores[key] = self._makespan(spans) / self._best + BLOCK_PRICE * size
        return self._scores[key]

    def _makespan(self, spans: Sequence[Span]) -> float:
        """The program's makespan; a span's effect on a pattern of device times is simulated once."""
        time = np.zeros(self._costs.shape[1])
        for span in spans:
            start = time.min()
            key = (span, (time - start).tobytes())
            if key not in self._times:
                moved = time - start
                for segment in self._segments_of(span):
                    moved = advance(moved, self._costs, segment, sync=self._sync, transfer=TRANSFER_TIME[self._sync])
                self._times[key] = moved
            time = self._times[key] + start
        return float(time.max(initial=0.0))

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
        positions = (
            position_of(facts[span.start + j : middle : span.period], num_devices, room=span.period - 1 - j) for j in range(span.period)
        )
        found.append(Segment(span.start, repeats, tuple(positions)))
    if left_over:
        rest = enumerate(facts[middle : span.stop])
        found.append(Segment(middle, 1, tuple(position_of([f], num_devices, room=left_over - 1 - j) for j, f in rest)))
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
