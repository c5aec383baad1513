"""Pass: the ways in which ticks can be emitted, a fixed list of them.

Ticks are one span, or a warmup, a steady state and a cooldown.  Only what must be static has to
repeat: which kinds of blocks occur in a tick, and which pairs of devices exchange something.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ..table.encoded import BoolArray
from ..table.kinds import RUNS_FORWARD
from .assign_ticks import Ticks
from .collectives import between_collectives, longest_true
from .requirements import Requirements, collect
from .spans import Span

# Ticks of a trip: the turns of the catalogue's steady states.
PERIODS = (1, 2, 3, 4, 6)
# The longest period of an exact repeat: the least common multiple of them.
LONGEST_PERIOD = 12


def span_candidates(ticks: Ticks) -> tuple[tuple[Span, ...], ...]:
    """Every list of spans to choose from.  Ticks that take turns are one span with the period that
    they were made for.
    """
    requirements = collect(ticks)
    if not len(requirements):
        return ((),)
    if ticks.period > 1:
        return ((Span(0, len(requirements), ticks.period),),)
    found = [
        *_whole(len(requirements)),
        *_phases(ticks),
        *_steady(requirements),
        *between_collectives(requirements),
    ]
    return tuple(dict.fromkeys(map(tuple, found)))


def _whole(stop: int) -> Iterator[list[Span]]:
    for period in PERIODS:
        if period <= stop:
            yield [Span(0, stop, period)]


def _phases(ticks: Ticks) -> Iterator[list[Span]]:
    """Warmup, steady state and cooldown, by where forwards and backwards begin and end.

    The steady state begins when some device, or every device, has begun its backwards.  It ends
    when some device, or every device, has done its forwards.
    """
    forward, backward = _directions(ticks)
    stop = len(forward)
    begins = np.where(backward.any(0), backward.argmax(0), stop).tolist()
    ends = np.where(forward.any(0), stop - forward[::-1].argmax(0), 0).tolist()
    if min(begins) >= stop or max(ends) <= 0:
        return
    yield [Span(a, b, 1) for a, b in pairwise(sorted({0, min(begins), max(ends), stop}))]
    for begin in sorted({min(begins), max(begins)}):
        for end in sorted({min(ends), max(ends)}):
            for marks in ({begin, end}, {min(begins), begin, end, max(ends)}):
                pieces = list(pairwise(sorted({0, *marks, stop})))
                for period in PERIODS:
                    if end - begin >= 2 * period:
                        yield [
                            Span(a, b, period if (a, b) == (begin, end) else 1) for a, b in pieces
                        ]


def _steady(requirements: Requirements) -> Iterator[list[Span]]:
    """The longest exact repeat of each period, between a warmup and a cooldown of period 1."""
    codes, stop = requirements.signatures, len(requirements)
    for period in range(1, min(LONGEST_PERIOD, stop // 2) + 1):
        begin, length = longest_true(codes[period:] == codes[:-period])
        end = begin + (length + period) // period * period
        if end - begin > 2 * period:
            spans = Span(0, begin, 1), Span(begin, end, period), Span(end, stop, 1)
            yield [span for span in spans if span.start < span.stop]


def _directions(ticks: Ticks) -> tuple[BoolArray, BoolArray]:
    """`[tick, device]`: whether it runs a forward, and whether it runs a backward."""
    table = ticks.schedule.encoded
    busy = np.zeros((2, ticks.num_ticks, table.num_devices), bool)
    mine = ~table.is_collective
    direction = (~table.of_kinds(RUNS_FORWARD)).astype(np.int64)
    busy[direction[mine], ticks.when[mine], table.device[mine]] = True
    return busy[0], busy[1]
