"""A span of ticks that are emitted with one period, and its segments: blocks under predicates, and
permutes, that serve all of its ticks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..program.segments import Loop, Segment, room_of, ticks_of
from ..program.templates import Block, BlockUse, Part, Payload, Permute, Presence, TickTemplate
from ..table.encoded import IntArray
from .requirements import NO_TRANSFER, Requirements


def uses_of(requirements: Requirements, group: IntArray) -> tuple[BlockUse, ...]:
    """The union of the blocks of every tick in the group, in the order in which code that serves
    them all has them.
    """
    times = np.bincount(requirements.codes[group])
    present = np.flatnonzero(times)
    total = np.tensordot(times[present], requirements.counts[present], 1).tolist()
    everyone = requirements.num_devices * len(group)
    return tuple(
        BlockUse(
            block,
            Presence.of(active, everyone),
            Presence.of(first, active),
            Presence.of(last, active),
            Presence.of(local, active),
        )
        for block, (active, first, last, local) in sorted(
            zip(requirements.blocks, total, strict=True),
            key=lambda item: _place(item[0]),
        )
        if active
    )


def _place(block: Block) -> tuple[int, Block]:
    """The place of a block in its tick.

    Backward blocks are first, so that the forward of the same tick may write what they free.  Of
    them those that need no transfer are first, so that transfers run beside them.
    """
    return Part.of(block.kind), block


def permutes_of(
    requirements: Requirements, codes: IntArray, *, room: int = 0
) -> tuple[Permute, ...]:
    """The permutes that serve ticks of these codes: every transfer that any of them makes.

    A transfer with slack is awaited later, at most `room` ticks: the longest delay that the trip
    has place for (`room_of`). Edges are coloured greedily by payload, delay and direction, so that
    sources and targets of a permute are distinct. Wrap-around edges of a ring point against their
    payload's direction, so they come out as a permute of their own.
    """
    slack = requirements.slack[codes].min(axis=0, initial=NO_TRANSFER)
    groups: dict[tuple[Payload, int, bool], list[_Colour]] = {}
    for i in np.flatnonzero(slack < NO_TRANSFER).tolist():  # edges are in order
        (payload, source, target), delay = requirements.edges[i], min(int(slack[i]), room)
        colours = groups.setdefault((payload, delay, source > target), [])
        for colour in colours:
            if source not in colour.sources and target not in colour.targets:
                break
        else:
            colours.append(colour := _Colour([], set(), set()))
        colour.pairs.append((source, target))
        colour.sources.add(source)
        colour.targets.add(target)
    return tuple(
        Permute(payload, tuple(c.pairs), delay)
        for (payload, delay, _), colours in sorted(groups.items())
        for c in colours
    )


class _Colour(NamedTuple):
    """The pairs of one permute, and which devices they have at each end."""

    pairs: list[tuple[int, int]]
    sources: set[int]
    targets: set[int]


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
