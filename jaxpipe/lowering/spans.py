"""A span of ticks that are emitted with one period, and the segments that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..program.segments import Loop, Segment, room_of, ticks_of
from ..program.templates import TickTemplate
from .exchanges import template_of, uses_of
from .requirements import Requirements


class Span(NamedTuple):
    """Ticks start..stop, emitted with this period; a span whose length is no multiple of it ends in a shorter segment."""

    start: int
    stop: int
    period: int
    gated: bool = False  # ticks that transfer different things choose among exchanges (`template_of`)
    loops: tuple[Loop, ...] = ()  # ticks of a trip that share their code (`Segment.loops`)


def segments_of(spans: Sequence[Span], requirements: Requirements, *, beside: bool = True) -> tuple[Segment, ...]:
    """The segments of spans that follow each other; `beside`: transfers run beside blocks (`Segment.beside`)."""
    return tuple(segment for span in spans for segment in _segments(span, requirements, beside=beside))


def _segments(span: Span, requirements: Requirements, *, beside: bool) -> list[Segment]:
    """The segment of a span, and one more for ticks left over at its end."""
    return [with_transfers(bare(part, requirements), requirements, beside=beside, gated=span.gated) for part in even(span)]


def even(span: Span) -> list[Span]:
    """The part of a span whose length is a multiple of its period, and what is left over."""
    left_over = (span.stop - span.start) % span.period
    if not left_over:
        return [span]
    middle = span.stop - left_over
    parts = [span._replace(stop=middle, loops=()), span._replace(start=middle, period=left_over, loops=())]
    return [part for part in parts if part.start < part.stop]


def bare(span: Span, requirements: Requirements) -> Segment:
    """The segment of a span whose length is a multiple of its period, without its transfers."""
    repeats = (span.stop - span.start) // span.period
    ticks = np.arange(span.start, span.stop).reshape(repeats, span.period)
    templates: dict[int, TickTemplate] = {}
    for mine in ticks_of(span.loops or (Loop(1),) * span.period):
        templates |= dict.fromkeys(mine, TickTemplate(uses_of(requirements, ticks[:, mine].ravel()), ((),)))
    return Segment(span.start, repeats, tuple(templates[j] for j in range(span.period)), (), span.loops)


def with_transfers(bare: Segment, requirements: Requirements, *, beside: bool, gated: bool) -> Segment:
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
