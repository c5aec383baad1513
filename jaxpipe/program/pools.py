"""Pools: what outlives its tick, by kind, and how many entries each has."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from ..table.effects import Place
from .templates import Payload

# Where a transfer's payload arrives.
POOL_OF = {Payload.ACTIVATION: Place.X, Payload.COTANGENT: Place.COTANGENT}


# The most forwards whose residuals are between the memories of a device and its host at a time: one
# leaves, and one comes.
UNDER_WAY = 2


class Slots(SimpleNamespace):
    """How many entries each pool has, by the value of its `Place`: the most that any device holds
    at one time, at least one; 0 where the program has no such pool.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{place.value: 0 for place in Place if place.is_pool} | sizes)


@dataclass(frozen=True)
class Pool:
    """Buffers of one shape."""

    name: Place
    slots: int

    def __str__(self) -> str:
        plural = "s" if self.slots > 1 else ""
        return f"{self.name.letter} {self.name.value}: {self.slots} slot{plural}"
