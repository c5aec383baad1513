"""The static structure of one tick: which blocks, permutes and predicates its code has."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ..table.effects import EFFECTS, OF_SLICES, Effect
from ..table.kinds import COLLECTIVES, KINDS, RUNS_FORWARD, SHARES, Kind


class Payload(enum.IntEnum):
    """What a transfer carries: a stage's output going down the model, or a cotangent going up."""

    ACTIVATION = 0
    COTANGENT = 1


class Presence(enum.Enum):
    """Among those that share the code, how many need a part of it; only SOMETIMES costs a run-time
    test.
    """

    NEVER = "never"
    SOMETIMES = "sometimes"
    ALWAYS = "always"

    @classmethod
    def of(cls, hits: int, total: int) -> Presence:
        """NEVER for 0 of n, ALWAYS for n of n."""
        if hits == 0:
            return cls.NEVER
        return cls.ALWAYS if hits == total else cls.SOMETIMES


class Part(enum.IntEnum):
    """Blocks of a tick by what they do with transfers, in the order in which ticks
    have them.
    """

    APART = 0  # neither needs nor makes what is transferred
    BACKWARD = 1  # needs a cotangent and makes one
    FORWARD = 2  # needs an activation and makes one

    @classmethod
    def of(cls, kind: Kind) -> Part:
        """That of a kind."""
        if kind in RUNS_FORWARD:
            return cls.FORWARD
        return cls.APART if kind not in COLLECTIVES and KINDS[kind].needs is None else cls.BACKWARD


class Block(NamedTuple):
    """One piece of compute code in a tick: an action kind on one chunk of the device."""

    kind: Kind
    chunk: int
    keeps: bool = True  # of an F: residuals; not where an R makes them

    @property
    def runs_forward(self) -> bool:
        """Whether it runs the code of a stage's forward (F, R)."""
        return self.kind in RUNS_FORWARD

    @property
    def is_collective(self) -> bool:
        """Whether all devices run it at the same time (L, E, G)."""
        return self.kind in COLLECTIVES

    @property
    def is_share(self) -> bool:
        """Whether it runs the device's share of `first` or `last`, and no stage's code."""
        return self.kind in SHARES

    def __str__(self) -> str:
        return f"{self.kind.name}.{self.chunk}" + ("" if self.keeps else "-")


# By kind, the flags of its record that parts of its code depend on.
FLAGS = {
    kind: tuple(
        dict.fromkeys(
            e.when
            for e in EFFECTS
            if e.kind is kind and e.when is not None and e.place not in OF_SLICES
        )
    )
    for kind in Kind
}


@dataclass(frozen=True)
class BlockUse:
    """A block as a template needs it: who runs it, and which of its inner parts occur among those
    who do.
    """

    block: Block
    active: Presence  # over all devices and repeats of the template
    first: Presence  # the stage is the model's first: run `first`, or its gradient
    last: Presence  # the stage is the model's last: run `last` and its gradient
    # the result is consumed on this very device: write it to its slot instead of sending it
    local: Presence

    def presence(self, flag: str) -> Presence:
        """Among those who run it, how many have a flag of the record set."""
        known = {"is_first": self.first, "is_last": self.last, "is_local": self.local}
        keeps = Presence.ALWAYS if self.block.keeps else Presence.NEVER
        return known.get(flag, keeps if flag == "keeps" else Presence.ALWAYS)

    def does(self, effect: Effect) -> bool:
        """Whether its code has an effect of its kind."""
        if effect.when is not None and self.presence(effect.when) is Presence.NEVER:
            return False
        return all(self.presence(flag) is not Presence.ALWAYS for flag in effect.unless)

    def touches(self, payload: Payload) -> bool:
        """Whether it may read what such a transfer has brought, or write to the pool where that
        arrives.
        """
        if Part.of(self.block.kind) is PART_OF[payload] or self.block.is_collective:
            return True
        return (
            payload is Payload.COTANGENT
            and self.block.runs_forward
            and self.last is not Presence.NEVER
        )

    @property
    def num_nested(self) -> int:
        """How many predicates a device evaluates inside of it."""
        return sum(self.presence(flag) is Presence.SOMETIMES for flag in FLAGS[self.block.kind])

    def __str__(self) -> str:
        marks = "".join(
            m
            for m, p in (("^", self.first), ("$", self.last), ("~", self.local))
            if p is not Presence.NEVER
        )
        return f"{self.block}{marks}" + ("" if self.active is Presence.ALWAYS else "?")


@dataclass(frozen=True)
class Permute:
    """One `ppermute`: static pairs with distinct sources and distinct targets, all up or all down,
    so never a cycle.

    XLA:GPU returns zeros for some permutes that hold several cycles (openxla/xla issue 45222); none
    of ours holds one.
    """

    payload: Payload
    pairs: tuple[tuple[int, int], ...]
    # Made in its tick, needed no sooner than this many ticks after the next: compute may run in
    # between (`Segment.transits`).
    delay: int = 0

    def __str__(self) -> str:
        late = f" +{self.delay}" if self.delay else ""
        return (
            f"{'x' if self.payload is Payload.ACTIVATION else 'dx'}:"
            + " ".join(f"{s}>{t}" for s, t in self.pairs)
            + late
        )


# Which blocks make and need a payload.
PART_OF = {Payload.ACTIVATION: Part.FORWARD, Payload.COTANGENT: Part.BACKWARD}


@dataclass(frozen=True)
class TickTemplate:
    """The static structure of one tick of a segment's period: its blocks in order, and its
    permutes.

    The number of a permute is its lane: the arrival of that number in the tick's record.
    """

    blocks: tuple[BlockUse, ...]
    permutes: tuple[Permute, ...]
    # some device runs a forward and a whole backward, maybe as one, so before them all must have
    # arrived
    paired: bool = False

    def after_makers(self, payload: Payload) -> int:
        """After how many of its blocks there is what it sends."""
        makers = [
            i for i, use in enumerate(self.blocks) if Part.of(use.block.kind) is PART_OF[payload]
        ]
        return max(makers, default=-1) + 1

    def before_readers(self, payload: Payload) -> int:
        """Before which of its blocks what arrived must be in its slot: the first that may read it,
        or write anything to that pool.
        """
        if self.paired:
            return 0
        touching = [i for i, use in enumerate(self.blocks) if use.touches(payload)]
        return min(touching, default=len(self.blocks))

    @property
    def num_predicates(self) -> int:
        """How many predicates a device evaluates in a tick: one for each block that not every
        device runs.
        """
        return sum(use.active is not Presence.ALWAYS for use in self.blocks)

    @property
    def num_collective_predicates(self) -> int:
        """Predicates around collective actions."""
        return sum(
            use.active is not Presence.ALWAYS for use in self.blocks if use.block.is_collective
        )

    def __str__(self) -> str:
        permutes = " ".join(f"({permute})" for permute in self.permutes)
        return f"[{' '.join(map(str, self.blocks))}] {permutes}".rstrip()
