"""The search: spans are merged, cut and given other periods while the price of the program falls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.segments import Segment
from .cost_model import CodeCounts
from .limits import LIMITS, Prices
from .meetings import in_turns
from .requirements import NO_TRANSFER, Requirements
from .spans import Span, bare, even, with_transfers
from .trips import Durations, Passage


def _cut_elsewhere(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """The spans with one more cut, or with one of the cuts moved a little."""
    for i, span in enumerate(spans):
        for before, after in product(sorted({1, 2, span.period}), repeat=2):
            for mark in range(span.start + before, span.stop - after + 1):
                yield [*spans[:i], Span(span.start, mark, before), Span(mark, span.stop, after), *spans[i + 1 :]]
    for i, (left, right) in enumerate(pairwise(spans)):
        for mark in (left.stop + moved for moved in (-4, -2, -1, 1, 2, 4)):
            if left.start + left.period <= mark <= right.stop - right.period:
                yield [*spans[:i], left._replace(stop=mark), right._replace(start=mark), *spans[i + 2 :]]


class Chooser:
    """Scores lists of spans."""

    def __init__(self, requirements: Requirements, durations: Durations, prices: Prices, steady: range) -> None:
        self._requirements = requirements
        self._steady = steady
        self._durations = durations
        self._prices = prices
        self._work = 0
        self._times: dict[tuple[Span, bytes], NDArray[np.float64]] = {}
        self.bare: dict[Span, _Built] = {}
        self._built: dict[Span, _Built] = {}
        self._passages: dict[Span, tuple[Passage, ...]] = {}
        self._scores: dict[tuple[Span, ...], float] = {}
        self._bounds: dict[tuple[Span, ...], float] = {}
        sends = (requirements.slack < NO_TRANSFER).sum(axis=1)
        self._least_sends = int(sends[requirements.codes].sum())
        self._rest = np.concatenate([np.cumsum(durations.rows()[::-1], axis=0)[::-1], np.zeros((1, requirements.num_devices))])

    def best(self, starts: Sequence[list[Span]], *, besides: Sequence[Sequence[list[Span]]] = ()) -> list[Span]:
        """Improve the most promising starts, and the best of each of those `besides`, whose score says little before they are improved."""
        promising: list[tuple[float, int, list[Span]]] = []
        for number, start in enumerate(map(list, dict.fromkeys(map(tuple, starts)))):
            enough = promising[-1][0] if len(promising) == LIMITS.starts else math.inf
            promising = sorted([*promising, (self.score(start, enough), number, start)])[: LIMITS.starts]
        chosen = [start for *_, start in promising] + [min(each, key=self.score) for each in besides if each]
        return min((self.improve(start) for start in chosen), key=self.score)

    def score(self, spans: Sequence[Span], below: float = math.inf) -> float:
        """The price of the program; something from `below` on where it is no less, and that can be told sooner."""
        key = tuple(spans)
        if key not in self._scores:
            found = max(self._bounds.get(key, -math.inf), self._least(spans) if below < math.inf else -math.inf)
            if found < below:
                time, factor = self._surcharge(self._built_of(span).counts for span in spans)
                found = (self._makespan(spans, below / factor - time) + time) * factor
            if found >= below:
                self._bounds[key] = found
                return found
            self._scores[key] = found
        return self._scores[key]

    def _surcharge(self, counts: Iterable[CodeCounts]) -> tuple[float, float]:
        return CodeCounts(*map(sum, zip(*counts, strict=True))).surcharge(self._requirements.num_devices, self._prices)

    def _least(self, spans: Sequence[Span]) -> float:
        """What the price of a program with the blocks of these spans is at least, whatever it transfers; with room for rounding."""
        time, factor = self._surcharge([CodeCounts(sends=self._least_sends), *(self._bare_of(span).counts for span in spans)])
        return (float(self._rest[0].max()) + time) * factor * (1 - 1e-9)

    def _makespan(self, spans: Sequence[Span], below: float) -> float:
        """The program's makespan, or a lower bound that is no less than `below`; a span's effect on a pattern of times is found once."""
        time = np.zeros(self._requirements.num_devices)
        for span in spans:
            # Every device has the work of the ticks that are left; with room for the rounding of sums in another order.
            if below < math.inf and (least := float((time + self._rest[span.start]).max()) * (1 - 1e-9)) >= below:
                return least
            start = time.min()
            key = (span, (time - start).tobytes())
            if key not in self._times:
                moved = time - start
                for passage in self._passages_of(span):
                    moved = passage.after(moved)
                self._times[key] = moved
                self._work += span.stop - span.start
            time = self._times[key] + start
        return float(time.max(initial=0.0))

    def improve(self, spans: list[Span]) -> list[Span]:
        """Try other periods for each span, and one span for two neighbours, while the score falls."""
        better = True
        while better and self._work < LIMITS.most_work:
            better = False
            enough = self.score(spans) - 1e-12
            for candidate in self._neighbours(spans):
                if self.score(candidate, enough) < enough:
                    spans, better = candidate, True
                    break
        return spans

    def cut(self, spans: list[Span]) -> list[Span]:
        """Cut spans in two, move what is between two, or change periods, each time so that the score falls most."""
        better = True
        while better and self._work < LIMITS.most_work:
            better = False
            least, best = self.score(spans) - 1e-12, spans
            for candidate in chain(self._neighbours(spans), _cut_elsewhere(spans)):
                if not any(span.gated for span in candidate) and (found := self.score(candidate, least)) < least:
                    least, best, better = found, candidate, True
            spans = best
        return spans

    def _neighbours(self, spans: list[Span]) -> list[list[Span]]:
        found = []
        periods = sorted({1, 2, 3, 4, 6} | {s.period for s in spans if s.period <= LIMITS.longest_period})
        for i, (left, right) in enumerate(pairwise(spans)):
            for period in periods:
                if period <= right.stop - left.start:
                    both = Span(left.start, right.stop, period, left.gated or right.gated)
                    found.append([*spans[:i], both, *spans[i + 2 :]])
        for i, span in enumerate(spans):
            others = [span._replace(period=p, loops=()) for p in periods if p != span.period and p <= span.stop - span.start]
            others += [span._replace(loops=finer) for finer in (in_turns(span.loops, turn) for turn in (2, 3)) if finer != span.loops]
            for other in [*others, span._replace(gated=not span.gated)]:
                found.append([*spans[:i], other, *spans[i + 1 :]])
        return found

    def _passages_of(self, span: Span) -> tuple[Passage, ...]:
        if span not in self._passages:
            segments, prices = self._built_of(span).segments, self._prices
            self._passages[span] = tuple(Passage.of(s, self._durations, transfer=prices.transfer, prices=prices) for s in segments)
        return self._passages[span]

    def _built_of(self, span: Span) -> _Built:
        if span not in self._built:
            beside, gated = self._prices.beside, span.gated
            bare = self._bare_of(span).segments
            built = (with_transfers(each, self._requirements, beside=beside, gated=gated) for each in bare)
            self._built[span] = _Built.of(built, self._steady)
        return self._built[span]

    def _bare_of(self, span: Span) -> _Built:
        alike = span._replace(gated=False)
        if alike not in self.bare:
            self.bare[alike] = _Built.of((bare(part, self._requirements) for part in even(alike)), self._steady)
        return self.bare[alike]


class _Built(NamedTuple):
    """The segments of a span, and what counts of them."""

    segments: tuple[Segment, ...]
    counts: CodeCounts

    @classmethod
    def of(cls, segments: Iterable[Segment], steady: range) -> _Built:
        """With the counts; predicates around meetings in the steady state count for the many turns of it that the search does not see."""
        each = tuple(segments)
        counts = CodeCounts.of(each)
        for segment in each:
            common = max(0, min(segment.stop, steady.stop) - max(segment.start, steady.start))
            more = LIMITS.turns_seen * segment.num_meeting_predicates * common // (segment.stop - segment.start)
            counts = counts._replace(meetings=counts.meetings + more)
        return cls(each, counts)
