"""The lowered program: static segments, the records of every tick, and the pools that hold what
outlives its tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..table.effects import Effect, Liveness, effects_of
from ..table.kinds import Kind
from ..table.schedule import Schedule
from .pools import Pool, Slots
from .records import JOINT, IntTable, TickRecord, pairs_of
from .segments import Segment
from .show import show


@dataclass(frozen=True, eq=False)
class Program:
    """What an executor runs: `segments` say which code each tick has, `ticks` what each device does
    in it, with which slots.

    `ticks` holds int32 arrays [T, P].  `liveness` says what the backwards read, for which the slots
    were made. `jaxpipe.program.verify` proves that a program computes its schedule; `str` prints
    it.
    """

    schedule: Schedule
    segments: tuple[Segment, ...]
    ticks: TickRecord[IntTable]
    pools: tuple[Pool, ...]
    liveness: Liveness
    joint: tuple[Kind, ...] = JOINT  # backwards that a forward of their tick runs with

    @property
    def num_ticks(self) -> int:
        """T, the number of ticks."""
        return int(self.ticks.forward.kind.shape[0])

    def effects(self, kind: Kind) -> tuple[Effect, ...]:
        """What the actions of a kind read and write in this program."""
        return effects_of(kind, self.schedule.encoded.kinds, self.liveness)

    @cached_property
    def pairs(self) -> NDArray[np.bool_]:
        """`[tick, device]`: a forward and a backward that run as one."""
        return pairs_of(self.ticks.forward, self.ticks.backward, self.joint)

    @cached_property
    def slots(self) -> Slots:
        """The size of each pool."""
        return Slots(**{pool.name.value: pool.slots for pool in self.pools})

    def __str__(self) -> str:
        return show(self.schedule, self.segments, self.ticks, self.pools, self.effects)
