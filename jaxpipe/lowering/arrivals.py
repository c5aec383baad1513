"""When what a transfer brings is written, and to which lane of which tick it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..program.segments import Segment
from ..program.templates import Payload
from ..table.encoded import IntArray
from .moments import Clock, template_numbers

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
