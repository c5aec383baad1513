"""Spans: every list of stretches in which the ticks of a table can be emitted, and their segments.

Ticks are one span, or a warmup, a steady state and a cooldown.  Only what must be static has to
repeat: which kinds of blocks occur in a tick, and which pairs of devices exchange something.  In
cuts at collective actions these have no predicate, where they come at equal intervals or in bursts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.segments import (
    BlockUse,
    Permute,
    Presence,
    Segment,
    TickLoop,
    TickPart,
    TickTemplate,
    pairs_by,
    room_of,
    ticks_of,
)
from ..table.encoded import BoolArray, IntArray
from ..table.kinds import BACKWARDS, COLLECTIVES, RUNS_FORWARD
from .ticks import NO_TRANSFER, Ticks


def uses_of(ticks: Ticks, counts: IntArray, num_ticks: int) -> tuple[BlockUse, ...]:
    """The union of the blocks of some ticks, which are counted together, in the order in which code
    that serves them all has them.

    Backward blocks are first, so that the forward of the same tick may write what they free.  Of
    them those that need no transfer are first, so that transfers run beside them.
    """
    everyone, uses = ticks.schedule.num_devices * num_ticks, []
    for block, (active, *some) in zip(ticks.blocks[0], counts.tolist(), strict=True):
        if active:
            parts = (Presence.of(n, active) for n in some)
            uses.append(BlockUse(block, Presence.of(active, everyone), *parts))
    return tuple(sorted(uses, key=lambda use: (TickPart.of(use.block.kind), use.block)))


def permutes_of(ticks: Ticks, slack: NDArray[np.int32], *, room: int = 0) -> tuple[Permute, ...]:
    """The permutes that serve ticks: every transfer that any of them makes, with its least slack.

    A transfer with slack is awaited later, at most `room` ticks: the longest delay that the trip
    has place for (`room_of`).  Wrap-around edges of a ring point against their payload's direction,
    so they come out as a permute of their own.
    """
    edges = []
    for i in np.flatnonzero(slack < NO_TRANSFER).tolist():  # edges are in order
        payload, source, target = ticks.transfers[0][i]
        edges.append(((payload, min(int(slack[i]), room)), source, target))
    return tuple(Permute(payload, pairs, delay) for (payload, delay), pairs in pairs_by(edges))


class Span(NamedTuple):
    """Ticks start..stop, emitted with this period; a span whose length is no multiple of it ends in
    a shorter segment.
    """

    start: int
    stop: int
    period: int
    # ticks of a trip that share their code (`Segment.loops`)
    loops: tuple[TickLoop, ...] = ()


def segments_of(spans: Iterable[Span], ticks: Ticks) -> tuple[Segment, ...]:
    """The segments of spans that follow each other."""
    return tuple(_segment(part, ticks) for span in spans for part in _even(span))


def _even(span: Span) -> list[Span]:
    """The part of a span whose length is a multiple of its period, and the rest."""
    rest = (span.stop - span.start) % span.period
    if not rest:
        return [span]
    middle = span.stop - rest
    parts = [span._replace(stop=middle, loops=()), Span(middle, span.stop, rest)]
    return [part for part in parts if part.start < part.stop]


def _segment(span: Span, ticks: Ticks) -> Segment:
    """The segment of a span whose length is a multiple of its period: each template has what any of
    its ticks needs.
    """
    repeats = (span.stop - span.start) // span.period

    def by_trip[T: np.generic](values: NDArray[T]) -> NDArray[T]:
        own = values[span.start : span.stop]
        return own.reshape(repeats, span.period, *values.shape[1:])

    # of the ticks of a trip, over all trips
    counts = by_trip(ticks.blocks[1]).sum(axis=0)
    slack = by_trip(ticks.transfers[1]).min(axis=0)
    paired = np.logical_or.reduce(by_trip(ticks.pairs), axis=(0, 2))
    templates: dict[int, TickTemplate] = {}
    for mine in map(list, ticks_of(span.loops or (TickLoop(1),) * span.period)):
        room = span.period - 1 - mine[0]
        if repeats > 1:
            room = room_of(span.period, mine[0])
        template = TickTemplate(
            uses_of(ticks, counts[mine].sum(axis=0), repeats * len(mine)),
            permutes_of(ticks, slack[mine].min(axis=0), room=0 if span.loops else room),
            bool(paired[mine].any()),
        )
        templates |= dict.fromkeys(mine, template)
    in_order = tuple(templates[j] for j in range(span.period))
    return Segment(span.start, repeats, in_order, span.loops)


# The most templates of a span that is cut at collective actions.
MOST_PIECES = 24
# The most ticks of a trip between equal collective actions: interleaved tables repeat after P V
# microbatches.
LONGEST_TRIP = 512


def between_collectives(ticks: Ticks) -> Iterator[list[Span]]:
    """Cut at collective actions, where there are any.

    Ticks between two collective actions share their code.  The longest stretch of equal intervals
    is one span.  Ramps are cut in the same way: into trips where the intervals are equal, and into
    pieces that run once where they are few.  In interleaved tables the intervals repeat after P V
    actions of each direction.  Equal intervals within such a trip are a loop.
    """
    marks = ticks.collective
    if marks.any():
        pieces = _cut_at_collectives(marks, 0, len(marks))
        yield pieces
        yield [span._replace(loops=_in_turns(span.loops)) for span in pieces]


def _cut_at_collectives(marks: IntArray, start: int, stop: int) -> list[Span]:
    """The longest stretch of equal intervals first, then the same on both sides of it; the rest is
    cut into pieces that are run once, where they are few.
    """
    if start >= stop:
        return []
    best = _equal_intervals(marks, start, stop)
    if best is not None:
        before = _cut_at_collectives(marks, start, best.start)
        return [*before, best, *_cut_at_collectives(marks, best.stop, stop)]
    cut = Span(start, stop, stop - start, _loops(marks[start:stop]))
    return [cut if marks[start:stop].any() and _is_short(cut) else Span(start, stop, 1)]


def _equal_intervals(marks: IntArray, start: int, stop: int) -> Span | None:
    """The longest stretch that begins at a collective action and repeats, with its shortest period;
    None where no stretch has two trips.
    """
    best, mine = Span(start, start, 0), marks[start:stop]
    for period in range(2, min(LONGEST_TRIP, len(mine) // 2) + 1):
        for begin, length in runs_of_true(mine[period:] == mine[:-period]):
            if length < best.stop - best.start:
                continue
            first = np.flatnonzero(mine[begin : begin + period])
            if not len(first):
                continue
            at = begin + int(first[0])
            repeats = (begin + length + period - at) // period
            if repeats < 2 or (repeats - (best.period > 0)) * period < best.stop - best.start:
                continue
            loops = _loops(mine[at : at + period])
            span = Span(start + at, start + at + repeats * period, period, loops)
            best = span if _is_short(span) else best
    return best if best.period else None


def _is_short(span: Span) -> bool:
    """Whether a span with loops has code for few templates."""
    return sum(1 for _ in ticks_of(span.loops)) <= MOST_PIECES


def _loops(marks: IntArray) -> tuple[TickLoop, ...]:
    """The loops of a trip: what comes at equal intervals within it is a loop; the rest is pieces,
    alike in whether they have a collective action.
    """
    inner = _equal_intervals(marks, 0, len(marks))
    if inner is not None:
        turn = TickLoop((inner.stop - inner.start) // inner.period, inner.loops)
        return (*_loops(marks[: inner.start]), turn, *_loops(marks[inner.stop :]))
    ends = (np.flatnonzero(np.diff(marks)) + 1).tolist()
    return tuple(TickLoop(length) for length in np.diff([0, *ends, len(marks)]).tolist() if length)


def _in_turns(loops: Sequence[TickLoop]) -> tuple[TickLoop, ...]:
    """The loops with two templates that alternate, instead of one for all ticks: devices may have
    long and short ticks in turn.
    """
    found: list[TickLoop] = []
    for loop in loops:
        if loop.body:
            found.append(loop._replace(body=_in_turns(loop.body)))
            continue
        turns, rest = divmod(loop.times, 2)
        found += [TickLoop(turns, (TickLoop(1),) * 2)] if turns > 1 else [TickLoop(1)] * turns * 2
        found += [TickLoop(1)] * rest
    return tuple(found)


def runs_of_true(flags: BoolArray) -> list[tuple[int, int]]:
    """Start and length of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))


# Ticks of a trip: the turns of the catalogue's steady states.
PERIODS = (1, 2, 4, 6)
# The longest period of an exact repeat: the least common multiple of them.
LONGEST_PERIOD = 12


def span_candidates(ticks: Ticks) -> tuple[tuple[Span, ...], ...]:
    """Every list of spans to choose from.  Ticks that take turns are one span with the period that
    they were made for.

    Others are one span, or warmup, steady state and cooldown.  The ramps may be cut where the first
    device begins its backwards and where the last one has done its forwards.  Beside the longest
    exact repeat they may be cut at all edges and have two ticks a trip: each piece makes its own
    transfers alone, which is shorter where a transfer takes long.
    """
    stop = ticks.num_ticks
    if not stop or ticks.period > 1:
        return ((Span(0, stop, ticks.period),) if stop else (),)
    edges, repeats = _edges(ticks), _exact_repeats(ticks)
    found = [
        _around(steady, stop, cuts)
        for steady in (*_phases(stop, *edges), *repeats)
        for cuts in ((), edges[::2])
    ]
    if repeats:
        longest = max(repeats, key=lambda span: span.stop - span.start)
        found.append(_around(longest, stop, edges, period=2))
    return tuple(dict.fromkeys(map(tuple, [*found, *between_collectives(ticks)])))


def _edges(ticks: Ticks) -> tuple[int, int, int, int]:
    """The ticks in which some device, and every device, has begun its backwards; and after which
    every device, and some device, has done its forwards.
    """
    stop, forward = ticks.num_ticks, ticks.runs(RUNS_FORWARD)
    backward = ticks.runs({*BACKWARDS}.difference(RUNS_FORWARD, COLLECTIVES))
    begins = np.where(backward.any(0), backward.argmax(0), stop)
    ends = np.where(forward.any(0), stop - forward[::-1].argmax(0), 0)
    return int(begins.min()), int(begins.max()), int(ends.max()), int(ends.min())


def _phases(stop: int, *edges: int) -> Iterator[Span]:
    """All ticks; and those from where some device, or every device, has begun its backwards, to
    where some device, or every device, has done its forwards.
    """
    for (begin, end), period in product(((0, stop), *product(edges[:2], edges[2:])), PERIODS):
        if period == 1 or end - begin >= 2 * period:
            yield Span(begin, end, period)  # may be empty: cuts alone


def _exact_repeats(ticks: Ticks) -> list[Span]:
    """The longest exact repeat of each period."""
    codes, found = ticks.signatures, []
    for period in range(1, min(LONGEST_PERIOD, ticks.num_ticks // 2) + 1):
        runs = runs_of_true(codes[period:] == codes[:-period])
        begin, length = max(runs, key=lambda run: run[1], default=(0, 0))
        end = begin + (length + period) // period * period
        if end - begin > 2 * period:
            found.append(Span(begin, end, period))
    return found


def _around(steady: Span, stop: int, cuts: Iterable[int], *, period: int = 1) -> list[Span]:
    """A steady state, and the ramps before and after it, which are cut where a cut is in them and
    have this period.
    """
    outside = (tick for tick in cuts if not steady.start < tick < steady.stop)
    marks = sorted({0, stop, steady.start, steady.stop, *outside})
    return [
        steady if (a, b) == steady[:2] else Span(a, b, min(b - a, period))
        for a, b in pairwise(marks)
    ]
