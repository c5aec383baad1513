"""Pass: cut the ticks into segments whose static structure repeats, so that code size does not grow with M."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.segments import Block, Loop, Segment, TickTemplate, room_of, ticks_of
from ..simulation.costs import Costs
from ..table.encoded import BoolArray, IntArray
from ..table.kinds import RUNS_FORWARD
from .assign_ticks import Ticks
from .cost_model import CodeCounts, priced_makespan, program_price, tick_durations
from .exchanges import template_of, uses_of
from .limits import LIMITS, LITTLE_CODE, Prices
from .requirements import Requirements, collect
from .trips import Durations, Passage


class Span(NamedTuple):
    """Ticks start..stop, emitted with this period; a span whose length is no multiple of it ends in a shorter segment."""

    start: int
    stop: int
    period: int
    gated: bool = False  # ticks that transfer different things choose among exchanges (`template_of`)
    loops: tuple[Loop, ...] = ()  # ticks of a trip that share their code (`Segment.loops`)


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
    kept = kept_ticks(requirements.codes, twice=any(kind.together for kind in requirements.kinds))
    short = Requirements(requirements.kinds, requirements.codes[kept], requirements.num_devices, requirements.forward_first)
    meetings = _between_meetings(short)
    durations = tick_durations(ticks, costs)
    chooser = _Chooser(short, durations._replace(codes=durations.codes[kept]), prices, meetings.ticks)
    if cuts:
        return _of_kept(chooser.cut(_exact_spans(short, 0, len(short))), kept, requirements, beside=prices.beside)
    starts = [_exact_spans(short, 0, len(short)), *_phases(*(busy[kept] for busy in _directions(ticks)))]
    if prices.beside:
        starts += _steady_starts(starts[0], starts[1])
    besides = [_both_ways(spans) for spans in (meetings.steady, meetings.everywhere)]
    best = chooser.best(_both_ways(starts), besides=besides)
    return _of_kept(best, kept, requirements, beside=prices.beside)


def _of_kept(spans: Sequence[Span], kept: IntArray, requirements: Requirements, *, beside: bool) -> tuple[Segment, ...]:
    """The segments of spans of the kept ticks, with those that were taken out."""
    whole = np.append(kept, len(requirements))
    return segments_of(
        [span._replace(start=int(whole[span.start]), stop=int(whole[span.stop])) for span in spans], requirements, beside=beside
    )


def _both_ways(starts: Sequence[list[Span]]) -> list[list[Span]]:
    """Each as it is, and with ticks that choose among exchanges."""
    return [*starts, *([span._replace(gated=True) for span in start] for start in starts)]


def segments_of(spans: Sequence[Span], requirements: Requirements, *, beside: bool = True) -> tuple[Segment, ...]:
    """The segments of spans that follow each other; `beside`: transfers run beside blocks (`Segment.beside`)."""
    return tuple(segment for span in spans for segment in _segments(span, requirements, beside=beside))


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
        begin, length = _longest_true(codes[cycle:] == codes[:-cycle])
        turn = math.lcm(cycle, LIMITS.longest_period)
        room = length + cycle - turn - 2 * LIMITS.longest_period
        room -= cycle if twice and cycle > LIMITS.longest_period else 0
        count = max(0, room // turn) * turn
        if count > best.stop - best.start:
            margin = (length + cycle - count) // 2
            best = slice(begin + margin, begin + margin + count)
    return best if best.stop > best.start else None


def _directions(ticks: Ticks) -> tuple[BoolArray, BoolArray]:
    """`[tick, device]`: whether it runs a forward, and whether it runs a backward."""
    table = ticks.schedule.encoded
    busy = np.zeros((2, ticks.num_ticks, table.num_devices), bool)
    mine = ~table.together
    direction = (~table.of_kinds(RUNS_FORWARD)).astype(np.int64)
    busy[direction[mine], ticks.when[mine], table.device[mine]] = True
    return busy[0], busy[1]


def _phases(forward: BoolArray, backward: BoolArray) -> list[list[Span]]:
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


class _Meetings(NamedTuple):
    """Spans in which no meeting of all devices has a predicate, and the ticks of the steady state."""

    steady: list[list[Span]]  # none there, and none cut around it
    everywhere: list[list[Span]]
    ticks: range


def _between_meetings(requirements: Requirements) -> _Meetings:
    """Cut at meetings: around the longest stretch of equal intervals, and everywhere.

    Ticks between two meetings share their code.  Ramps too are cut at their meetings: where those come at equal intervals into trips,
    else, where they are few, into pieces that are run once.  In interleaved tables the intervals themselves come back, after P V actions
    of each direction: then what is at equal intervals within such a trip is a loop.
    """
    met = [frozenset(block for block in kind.blocks if block.is_share) for kind in requirements.kinds]
    numbers = {blocks: number for number, blocks in enumerate(dict.fromkeys([frozenset[Block](), *met]))}
    marks = np.array([numbers[blocks] for blocks in met])[requirements.codes]  # 0 where nobody meets
    stop, found = len(marks), _Meetings([], [], range(0))
    for longest in (LIMITS.longest_period, LIMITS.longest_cycle):
        steady = _equal_intervals(marks, 0, stop, longest=longest)
        if steady is not None:
            whole = [Span(0, steady.start, 1), steady, Span(steady.stop, stop, 1)]
            found.steady.append([span for span in whole if span.start < span.stop])
            found.everywhere.append(_few_pieces(_cut_at_meetings(marks, 0, stop, longest)))
            found = found._replace(ticks=range(steady.start, steady.stop))
    return found


def _cut_at_meetings(marks: IntArray, start: int, stop: int, longest: int) -> list[Span]:
    """The longest stretch of equal intervals first, then the same on both sides of it; the rest is cut into pieces that are run once."""
    if start >= stop:
        return []
    best = _equal_intervals(marks, start, stop, longest=longest)
    if best is not None:
        return [*_cut_at_meetings(marks, start, best.start, longest), best, *_cut_at_meetings(marks, best.stop, stop, longest)]
    return [Span(start, stop, stop - start, loops=_loops(marks[start:stop])) if marks[start:stop].any() else Span(start, stop, 1)]


def _few_pieces(spans: list[Span]) -> list[Span]:
    """The spans; of those that come once, the ones with the most pieces share one code instead, where all have too many."""
    left, uncut = LIMITS.most_pieces, set()
    for span in sorted((span for span in spans if span.loops and span.period == span.stop - span.start), key=_num_pieces):
        left -= _num_pieces(span)
        if left < 0:
            uncut.add(span)
    return [Span(span.start, span.stop, 1) if span in uncut else span for span in spans]


def _equal_intervals(marks: IntArray, start: int, stop: int, *, longest: int = LIMITS.longest_period) -> Span | None:
    """The longest stretch that begins at a meeting and repeats, with the shortest period; None where nothing has two trips.

    Trips that are longer than `LIMITS.longest_period` begin after their longest interval.
    """
    best: Span | None = None
    mine = marks[start:stop]
    for period in range(2, min(longest, len(mine) // 2) + 1):
        for begin, length in _runs_of_true(mine[period:] == mine[:-period]):
            if best is not None and length + period < best.stop - best.start + period:
                continue
            first = np.flatnonzero(mine[begin : begin + period])
            if not len(first):
                continue
            after = int(np.diff(first, prepend=first[-1] - period).argmax()) if period > LIMITS.longest_period else 0
            at = begin + int(first[after])
            repeats = (begin + length + period - at) // period
            if repeats < 2 or (best is not None and repeats * period < best.stop - best.start + period):
                continue
            span = Span(start + at, start + at + repeats * period, period, loops=_loops(mine[at : at + period]))
            if period <= LIMITS.longest_period or _num_pieces(span) <= LIMITS.most_pieces:
                best = span
    return best


def _num_pieces(span: Span) -> int:
    """Templates that a span with loops has code for."""
    return sum(1 for _ in ticks_of(span.loops))


def _loops(marks: IntArray) -> tuple[Loop, ...]:
    """The loops of a trip: what comes at equal intervals within it is a loop; the rest is pieces, alike in whether devices meet."""
    inner = _equal_intervals(marks, 0, len(marks))
    if inner is not None:
        turn = Loop((inner.stop - inner.start) // inner.period, inner.loops)
        return (*_loops(marks[: inner.start]), turn, *_loops(marks[inner.stop :]))
    ends = (np.flatnonzero(np.diff(marks)) + 1).tolist()
    return tuple(Loop(length) for length in np.diff([0, *ends, len(marks)]).tolist() if length)


def _in_turns(loops: Sequence[Loop], turn: int) -> tuple[Loop, ...]:
    """The loops with so many templates that take turns, where one was for all ticks: devices may have long and short ticks in turn."""
    found: list[Loop] = []
    for loop in loops:
        if loop.body:
            found.append(loop._replace(body=_in_turns(loop.body, turn)))
            continue
        turns, rest = divmod(loop.times, turn)
        found += [Loop(turns, (Loop(1),) * turn)] if turns > 1 else [Loop(1)] * turns * turn
        found += [Loop(1)] * rest
    return tuple(found)


def _steady_starts(exact: Sequence[Span], phases: Sequence[Span]) -> list[list[Span]]:
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


class _Chooser:
    """Scores lists of spans."""

    def __init__(self, requirements: Requirements, durations: Durations, prices: Prices, steady: range) -> None:
        self._requirements = requirements
        self._steady = steady
        self._durations = durations
        self._prices = prices
        self._work = 0
        self._times: dict[tuple[Span, bytes], NDArray[np.float64]] = {}
        self._bare: dict[Span, _Built] = {}
        self._built: dict[Span, _Built] = {}
        self._passages: dict[Span, tuple[Passage, ...]] = {}
        self._scores: dict[tuple[Span, ...], float] = {}
        self._bounds: dict[tuple[Span, ...], float] = {}
        sends = np.array([len(kind.slack) for kind in requirements.kinds])
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
        better = len(self._requirements) <= LIMITS.most_cut
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
            others += [span._replace(loops=finer) for finer in (_in_turns(span.loops, turn) for turn in (2, 3)) if finer != span.loops]
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
            built = (_with_transfers(each, self._requirements, beside=beside, gated=gated) for each in bare)
            self._built[span] = _Built.of(built, self._steady)
        return self._built[span]

    def _bare_of(self, span: Span) -> _Built:
        alike = span._replace(gated=False)
        if alike not in self._bare:
            self._bare[alike] = _Built.of((_bare(part, self._requirements) for part in _even(alike)), self._steady)
        return self._bare[alike]


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


def _segments(span: Span, requirements: Requirements, *, beside: bool) -> list[Segment]:
    """The segment of a span, and one more for ticks left over at its end."""
    return [_with_transfers(_bare(part, requirements), requirements, beside=beside, gated=span.gated) for part in _even(span)]


def _even(span: Span) -> list[Span]:
    """The part of a span whose length is a multiple of its period, and what is left over."""
    left_over = (span.stop - span.start) % span.period
    if not left_over:
        return [span]
    middle = span.stop - left_over
    parts = [span._replace(stop=middle, loops=()), span._replace(start=middle, period=left_over, loops=())]
    return [part for part in parts if part.start < part.stop]


def _bare(span: Span, requirements: Requirements) -> Segment:
    """The segment of a span whose length is a multiple of its period, without its transfers."""
    repeats = (span.stop - span.start) // span.period
    ticks = np.arange(span.start, span.stop).reshape(repeats, span.period)
    templates: dict[int, TickTemplate] = {}
    for mine in ticks_of(span.loops or (Loop(1),) * span.period):
        templates |= dict.fromkeys(mine, TickTemplate(uses_of(requirements, ticks[:, mine].ravel()), ((),)))
    return Segment(span.start, repeats, tuple(templates[j] for j in range(span.period)), (), span.loops)


def _with_transfers(bare: Segment, requirements: Requirements, *, beside: bool, gated: bool) -> Segment:
    """The same with its transfers; `gated`: ticks choose among exchanges."""
    follows = beside and bare.repeats > 1
    templates = list(bare.templates)
    choices = np.zeros((bare.repeats, bare.period), np.int64)
    for ticks in bare.emitted:
        j = ticks[0]
        room = 0 if bare.loops else room_of(bare.period, j) if follows else bare.period - 1 - j
        template, choice = template_of(requirements, bare.sharing(j), bare.templates[j].blocks, room=room, gated=gated)
        choices[:, ticks] = choice.reshape(-1, len(ticks))
        for tick in ticks:
            templates[tick] = template
    chosen = tuple(choices.ravel().tolist()) if choices.any() else ()
    return replace(bare, templates=tuple(templates), choices=chosen, beside=beside and not bare.loops)


def _exact_spans(requirements: Requirements, start: int, stop: int) -> list[Span]:
    """Longest exact repeat first, then the same on both sides of it; what repeats nowhere is one span of period 1."""
    if start >= stop:
        return []
    codes = requirements.signatures[start:stop]
    best: Span | None = None
    for period in range(1, min(LIMITS.longest_period, (stop - start) // 2) + 1):
        begin, length = _longest_true(codes[period:] == codes[:-period])
        trips = (length + period) // period
        if trips < 3 and not (trips == 2 and period == 1):
            continue
        if best is None or trips * period > best.stop - best.start + period:
            best = Span(start + begin, start + begin + trips * period, period)
    if best is None:
        return [Span(start, stop, 1)]
    return [*_exact_spans(requirements, start, best.start), best, *_exact_spans(requirements, best.stop, stop)]


def _longest_true(flags: BoolArray) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    return max(_runs_of_true(flags), key=lambda run: run[1], default=(0, 0))


def _runs_of_true(flags: BoolArray) -> list[tuple[int, int]]:
    """Start and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))
