"""When things happen in a program, as numbers: before, within and after the blocks of each tick;
and when what a transfer brings is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..program.segments import Segment
from ..program.templates import Payload
from ..table.encoded import IntArray
from ..table.kinds import Kind
from .assign_ticks import Ticks
from .requirements import chunks_of, keeps


class Clock(NamedTuple):
    """Moments: before each block of a tick and during it, in the order in which its template has
    them, then after them all.
    """

    span: int  # of a tick

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Clock:
        """With room for the longest template."""
        return cls(
            2
            * max(
                (len(template.blocks) for segment in segments for template in segment.templates),
                default=0,
            )
            + 2
        )

    def before(self, tick: IntArray, block: IntArray | int = 0) -> IntArray:
        """Right before a block: what arrives is written to its slot."""
        return self.span * tick + 2 * block

    def during(self, tick: IntArray, block: IntArray) -> IntArray:
        """While a block runs."""
        return self.before(tick, block) + 1

    def blocks_done(self, tick: IntArray) -> IntArray:
        """When a pair, which runs as one, has read and written all that its blocks do."""
        return self.after(tick) - 1

    def after(self, tick: IntArray) -> IntArray:
        """When a tick is over."""
        return self.span * (tick + 1) - 1


def places(ticks: Ticks, segments: Sequence[Segment]) -> IntArray:
    """Per action, the number of its block in the template of its tick."""
    table, chunk = ticks.schedule.encoded, chunks_of(ticks.schedule)
    chunks = 1 + int(chunk.max(initial=0))
    templates = [template for segment in segments for template in segment.templates]
    number = np.zeros((len(templates), len(Kind), chunks, 2), np.int64)
    for blocks, template in zip(number, templates, strict=True):
        for place, use in enumerate(template.blocks):
            blocks[use.block.kind, use.block.chunk, int(use.block.keeps)] = place
    found: IntArray = number[
        template_numbers(segments)[ticks.when], table.kind, chunk, keeps(table).astype(np.int64)
    ]
    return found


def template_numbers(segments: Sequence[Segment]) -> IntArray:
    """Per tick, the number of its template among those of all segments."""
    first = np.cumsum([0, *(segment.period for segment in segments)]).tolist()
    found = [
        np.tile(np.arange(segment.period) + at, segment.repeats)
        for segment, at in zip(segments, first, strict=False)
    ]
    return np.concatenate([*found, np.zeros(0, np.int64)])


NO_PAYLOAD = -1


class Arrivals:
    """What is sent in every tick: `payload[tick, lane]` (-1 where nothing is) and the moment in
    which it is `written[tick, lane]`.
    """

    def __init__(
        self, segments: Sequence[Segment], num_ticks: int, num_devices: int, clock: Clock
    ) -> None:
        templates = [template for segment in segments for template in segment.templates]
        self.widest = max((len(template.permutes) for template in templates), default=0)
        payload = np.full((len(templates), self.widest), NO_PAYLOAD)
        self._lane = np.full((len(templates), len(Payload), num_devices, num_devices), -1)
        for at, template in enumerate(templates):
            for lane, permute in enumerate(template.permutes):
                payload[at, lane] = permute.payload
                for source, target in permute.pairs:
                    self._lane[at, permute.payload, source, target] = lane
        self._template = template_numbers(segments)
        self.payload = payload[self._template]
        self.written = np.repeat(clock.after(np.arange(num_ticks))[:, None], self.widest, axis=1)
        for segment in segments:
            for transit in segment.transits:
                sent = slice(segment.start + transit.tick, segment.stop, segment.period)
                tick, block = segment.written(transit)
                ended = block == segment.num_blocks(tick)
                self.written[sent, transit.lane] = np.where(
                    ended, clock.after(tick), clock.before(tick, block)
                )

    def find(
        self, tick: IntArray, payload: Payload, source: IntArray, target: IntArray
    ) -> tuple[IntArray, IntArray]:
        """The lane of the permute that carries each transfer, and the moment in which what it
        brings is written.
        """
        lane = self._lane[self._template[tick], payload, source, target]
        assert (lane >= 0).all(), "no permute carries a transfer"
        return lane, self.written[tick, lane]
