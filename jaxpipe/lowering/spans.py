"""A span of ticks that are emitted with one period, and the segments that it becomes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..program.segments import Loop, Segment, room_of, ticks_of
from ..program.templates import TickTemplate
from .requirements import Requirements
from .transfers import permutes_of, uses_of


class Span(NamedTuple):
    """Ticks start..stop, emitted with this period; a span whose length is no multiple of it ends in
    a shorter segment.
    """

    start: int
    stop: int
    period: int
    loops: tuple[Loop, ...] = ()  # ticks of a trip that share their code (`Segment.loops`)


def segments_of(spans: Iterable[Span], requirements: Requirements) -> tuple[Segment, ...]:
    """The segments of spans that follow each other."""
    return tuple(_segment(part, requirements) for span in spans for part in _even(span))


def _even(span: Span) -> list[Span]:
    """The part of a span whose length is a multiple of its period, and the rest."""
    rest = (span.stop - span.start) % span.period
    if not rest:
        return [span]
    middle = span.stop - rest
    parts = [span._replace(stop=middle, loops=()), Span(middle, span.stop, rest)]
    return [part for part in parts if part.start < part.stop]


def _segment(span: Span, requirements: Requirements) -> Segment:
    """The segment of a span whose length is a multiple of its period: each template has what any of
    its ticks needs.
    """
    repeats = (span.stop - span.start) // span.period
    ticks = np.arange(span.start, span.stop).reshape(repeats, span.period)
    templates: dict[int, TickTemplate] = {}
    for mine in ticks_of(span.loops or (Loop(1),) * span.period):
        j, group = mine[0], ticks[:, mine].ravel()
        room = 0 if span.loops else room_of(span.period, j) if repeats > 1 else span.period - 1 - j
        code = np.unique(requirements.codes[group])
        template = TickTemplate(
            uses_of(requirements, group),
            permutes_of(requirements, code, room=room),
            bool(requirements.paired[code].any()),
        )
        templates |= dict.fromkeys(mine, template)
    return Segment(span.start, repeats, tuple(templates[j] for j in range(span.period)), span.loops)
