"""Pools: what outlives its tick, by kind, and how many entries each has."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .templates import Payload


class PoolName(enum.Enum):
    """What a pool holds; the value is its field in `Slots`."""

    X = "x"  # inputs of stages
    RESIDUAL_INPUT = "residual_input"  # what a forward keeps for I (or B) alone
    RESIDUAL_WEIGHT = "residual_weight"  # what a forward keeps for W (or B)
    COTANGENT = "cotangent"  # gradients of outputs of stages
    STASH = "stash"  # what I leaves for W
    # what `first` keeps for its gradient; gradients of the first stage's input that wait for G,
    # where it is spread
    FIRST = "first"
    LAST = "last"  # outputs of the last stage that wait for L
    SHARE = "share"  # what L leaves for H, on every device
    # residuals of both kinds that live long, in the host's memory (`Offload.RESIDUALS`)
    HOST = "host"

    @property
    def letter(self) -> str:
        """How it is named in a printed program."""
        return _LETTERS[self]


_LETTERS = {
    PoolName.X: "x",
    PoolName.RESIDUAL_INPUT: "i",
    PoolName.RESIDUAL_WEIGHT: "w",
    PoolName.COTANGENT: "c",
    PoolName.STASH: "s",
    PoolName.FIRST: "f",
    PoolName.LAST: "y",
    PoolName.SHARE: "l",
    PoolName.HOST: "h",
}
# Where a transfer's payload arrives.
POOL_OF = {Payload.ACTIVATION: PoolName.X, Payload.COTANGENT: PoolName.COTANGENT}


# Residuals of so many forwards are between the memories of a device and its host at a time: what
# leaves, and what comes.
UNDER_WAY = 2


@dataclass(frozen=True)
class Slots:
    """How many entries each pool has: the most that any device holds at one time (at least one)."""

    x: int
    residual_input: int
    residual_weight: int
    cotangent: int
    stash: int
    first: int
    last: int = 0  # of a table without L there is no such pool
    share: int = 0  # nor this one of a table without H
    host: int = 0  # nor is there this one where nothing waits on the host


@dataclass(frozen=True)
class Pool:
    """Buffers of one shape: `slots` entries of `entry`, which is a text for each array, "float32[4,
    8]", where shapes are known.
    """

    name: PoolName
    slots: int
    entry: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = (
            f"{self.name.letter} {self.name.value}: {self.slots} "
            f"slot{'s' if self.slots > 1 else ''}"
        )
        return f"{count} of {', '.join(self.entry)}" if self.entry else count
