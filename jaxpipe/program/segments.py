"""Segments: ticks whose static structure repeats, emitted once; and that structure, the template of
a tick: its blocks, permutes and predicates, and when its transfers are issued and written.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.effects import EFFECTS, OF_SLICES, Effect
from ..table.kinds import COLLECTIVES, KINDS, RUNS_FORWARD, SHARES, Kind

# Backwards that executors may run as one block with a forward of their tick.
JOINT = (Kind.B,)


class Payload(enum.IntEnum):
    """The value of a transfer: a stage's output going down the model, or a cotangent going up."""

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

    @classmethod
    def among(cls, needs: NDArray[np.bool_]) -> Presence:
        """That of those who need it among all."""
        return cls.of(int(needs.sum()), needs.size)


class TickPart(enum.IntEnum):
    """Blocks of a tick by what they do with transfers, in the order in which ticks
    have them.
    """

    APART = 0  # neither needs nor makes what is transferred
    BACKWARD = 1  # needs a cotangent and makes one
    FORWARD = 2  # needs an activation and makes one

    @classmethod
    def of(cls, kind: Kind) -> TickPart:
        """The part of a kind."""
        if kind in RUNS_FORWARD:
            return cls.FORWARD
        needs = kind in COLLECTIVES or KINDS[kind].needs is not None
        return cls.BACKWARD if needs else cls.APART


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
FLAGS: dict[Kind, dict[str, None]] = {kind: {} for kind in Kind}
for effect in EFFECTS:
    if effect.when is not None and effect.place not in OF_SLICES:
        FLAGS[effect.kind][effect.when] = None


# The flags whose parts of code are under predicates of their own.
NESTED = ("is_first", "is_last", "is_local")


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
        known = dict(zip(NESTED, (self.first, self.last, self.local), strict=True))
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
        makes_cotangent = self.block.runs_forward and self.last is not Presence.NEVER
        return (
            TickPart.of(self.block.kind) is PART_OF[payload]
            or self.block.is_collective
            or (payload is Payload.COTANGENT and makes_cotangent)
        )

    @property
    def num_nested(self) -> int:
        """The number of predicates that a device evaluates inside of it."""
        flags = FLAGS[self.block.kind]
        return sum(self.presence(flag) is Presence.SOMETIMES for flag in flags)

    def __str__(self) -> str:
        parts = {"^": self.first, "$": self.last, "~": self.local}
        marks = "".join(mark for mark in parts if parts[mark] is not Presence.NEVER)
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
        name = "x" if self.payload is Payload.ACTIVATION else "dx"
        late = f" +{self.delay}" if self.delay else ""
        return f"{name}:{' '.join(f'{s}>{t}' for s, t in self.pairs)}{late}"


def pairs_by[K: tuple[object, ...]](
    edges: Iterable[tuple[K, int, int]],
) -> list[tuple[K, tuple[tuple[int, int], ...]]]:
    """The pairs of permutes that serve edges (key, source, target), by key: those of a permute have
    one direction, distinct sources and distinct targets.  An edge is in the first that it fits.

    >>> pairs_by([((0,), 0, 1), ((0,), 1, 0), ((0,), 0, 2)])
    [((0,), ((0, 1),)), ((0,), ((0, 2),)), ((0,), ((1, 0),))]
    """
    groups: dict[tuple[K, bool], list[dict[int, int]]] = {}
    for key, source, target in edges:
        own = groups.setdefault((key, source > target), [])
        fits = (pairs for pairs in own if source not in pairs and target not in pairs.values())
        if (pairs := next(fits, None)) is None:
            own.append(pairs := {})
        pairs[source] = target
    return [(key, tuple(pairs.items())) for key, up in sorted(groups) for pairs in groups[key, up]]


# Which blocks make and need a payload.
PART_OF = {Payload.ACTIVATION: TickPart.FORWARD, Payload.COTANGENT: TickPart.BACKWARD}


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
        makes = [TickPart.of(use.block.kind) is PART_OF[payload] for use in self.blocks]
        return max((i + 1 for i, each in enumerate(makes) if each), default=0)

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
        """The number of predicates that a device evaluates in a tick: one for each block that not
        every device runs.
        """
        return sum(use.active is not Presence.ALWAYS for use in self.blocks)

    def __str__(self) -> str:
        permutes = " ".join(f"({permute})" for permute in self.permutes)
        return f"[{' '.join(map(str, self.blocks))}] {permutes}".rstrip()


def room_of(period: int, j: int) -> int:
    """The longest delay of a permute of the j-th tick of a trip: to the end of the trip, from the
    last tick to the end of the next trip.
    """
    return period - 1 - j if j < period - 1 else period


class Point(NamedTuple):
    """A moment of a trip: in its tick of that number, before the block of that number, or after all
    of them.
    """

    tick: int
    block: int


class Transit(NamedTuple):
    """One permute of a trip, from where its code issues it to where what it brings is written to
    its slot.
    """

    lane: int
    permute: Permute
    tick: int  # of the trip that has it in its records
    issued: Point
    written: Point
    from_before: bool  # the records are those of the trip before

    @property
    def is_late(self) -> bool:
        """Whether it is awaited in a later tick than the one that makes it."""
        return self.from_before or self.written.tick > self.tick


class TickLoop(NamedTuple):
    """Ticks of a trip that follow each other: one tick `times` times, or the loops of its body
    `times` times.
    """

    times: int
    body: tuple[TickLoop, ...] = ()

    @property
    def ticks(self) -> int:
        """The number of ticks of one turn of the loop."""
        return sum(each.times * each.ticks for each in self.body) or 1

    def __str__(self) -> str:
        inner = f"({' '.join(map(str, self.body))})" if self.body else ""
        return f"{self.times}{inner}"


def ticks_of(loops: Sequence[TickLoop], start: int = 0) -> Iterator[tuple[int, ...]]:
    """Per template that is emitted, the ticks of a trip that have it; the first loop begins at
    `start`.
    """
    for loop in loops:
        if not loop.body:
            yield tuple(range(start, start + loop.times))
        turns = range(0, loop.times * loop.ticks, loop.ticks)
        for once in ticks_of(loop.body, start):
            yield tuple(turn + tick for turn in turns for tick in once)
        start += loop.times * loop.ticks


@dataclass(frozen=True)
class Segment:
    """Ticks `start .. start + repeats * period`, emitted once: a scan of `repeats` trips over the
    templates of one period.
    """

    start: int
    repeats: int
    templates: tuple[TickTemplate, ...]
    # Ticks of a trip that share their code, each loop a scan within the trip; their permutes have
    # no delay.  Empty: none do.
    loops: tuple[TickLoop, ...] = ()

    @property
    def period(self) -> int:
        """Ticks in one trip."""
        return len(self.templates)

    @property
    def stop(self) -> int:
        """The tick after the last one."""
        return self.start + self.repeats * self.period

    @cached_property
    def emitted(self) -> tuple[tuple[int, ...], ...]:
        """Per template that is emitted, the ticks of a trip that have it."""
        return tuple(ticks_of(self.loops or (TickLoop(1),) * self.period))

    def ticks(self, j: int) -> NDArray[np.int64]:
        """The ticks of the j-th template."""
        return np.arange(self.start + j, self.stop, self.period)

    def sharing(self, j: int) -> NDArray[np.int64]:
        """The ticks that run the code emitted for the j-th tick of a trip."""
        (together,) = (ticks for ticks in self.emitted if j in ticks)
        return np.stack([self.ticks(each) for each in together], 1).ravel()

    @property
    def size(self) -> int:
        """Blocks of stage code that are compiled for it."""
        return sum(len(self.templates[j].blocks) for j, *_ in self.emitted)

    @property
    def permutes(self) -> int:
        """Permutes that are compiled for it."""
        return sum(len(self.templates[j].permutes) for j, *_ in self.emitted)

    @property
    def num_collective_predicates(self) -> int:
        """Predicates around collective actions, of all trips."""
        uses = (use for template in self.templates for use in template.blocks)
        shared = (use for use in uses if use.block.is_collective)
        return self.repeats * sum(use.active is not Presence.ALWAYS for use in shared)

    @property
    def num_sends(self) -> int:
        """The number of values that it sends from one device to another, needed or not."""
        permutes = (permute for t in self.templates for permute in t.permutes)
        return self.repeats * sum(len(permute.pairs) for permute in permutes)

    @cached_property
    def transits(self) -> tuple[Transit, ...]:
        """Every permute of a trip.

        A transfer runs during blocks: it is issued after the block that makes it, and written to
        its slot before the first block that may need it.  Ticks that share code issue and write at
        their end.
        """
        return tuple(
            self._transit(lane, permute, j)
            for j, template in enumerate(self.templates)
            for lane, permute in enumerate(template.permutes)
        )

    @property
    def in_flight(self) -> tuple[Transit, ...]:
        """The permutes that a trip leaves to the next, which issues them first of all.  After the
        last trip they are issued at once.
        """
        return tuple(transit for transit in self.transits if transit.from_before)

    def end(self, j: int) -> Point:
        """When the blocks of a tick of a trip are over."""
        return Point(j, len(self.templates[j].blocks))

    def _transit(self, lane: int, permute: Permute, j: int) -> Transit:
        """Issued after its value is made, or in the next trip where more blocks run during it; and
        written before its value is needed.
        """
        if self.loops:
            return Transit(lane, permute, j, self.end(j), self.end(j), False)
        payload = permute.payload
        if j == self.period - 1 and self.repeats > 1:
            written = self._needed(permute.delay, payload)
            if written > Point(0, 0):
                return Transit(lane, permute, j, Point(0, 0), written, True)
        issued = Point(j, self.templates[j].after_makers(payload))
        written = self._needed(j + permute.delay + 1, payload)
        return Transit(lane, permute, j, issued, written, False)

    def _needed(self, j: int, payload: Payload) -> Point:
        """When what is due by a tick of a trip is needed, within the trip; right after the tick
        before where its first block needs it.
        """
        if j >= self.period:
            return self.end(self.period - 1)
        block = self.templates[j].before_readers(payload)
        return Point(j, block) if block or not j else self.end(j - 1)

    def written(self, transit: Transit) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Per trip that makes it, the tick in which what it brings is written to its slot, and
        before which block, or after all.

        What the last trip leaves in flight is written when the segment is over.
        """
        tick = self.ticks(transit.written.tick) + self.period * transit.from_before
        block = np.full(self.repeats, transit.written.block)
        if transit.from_before:
            tick[-1], block[-1] = self.stop - 1, len(self.templates[-1].blocks)
        return tick, block

    def template(self, tick: int) -> TickTemplate:
        """The template of a tick."""
        return self.templates[(tick - self.start) % self.period]

    def __str__(self) -> str:
        head = f"ticks {self.start}..{self.stop - 1}: {self.repeats} x {self.period}"
        lines = [
            f"  {f'{len(ticks)} x ' if len(ticks) > 1 else ''}{self.templates[ticks[0]]}"
            for ticks in self.emitted
        ]
        if any(loop.body for loop in self.loops):
            lines.append(f"  in turns of {' '.join(map(str, self.loops))}")
        return "\n".join([head, *lines])
