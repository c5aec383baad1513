"""From what ticks need to the code that serves them all: blocks under predicates, and permutes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..program.templates import Block, BlockUse, Part, Payload, Permute, Presence
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
