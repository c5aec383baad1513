"""The varying part of a lowered program: what each device does in each tick, as int arrays [ticks,
devices]; and its pools, which hold what outlives its tick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..table.effects import EFFECTS, MOVES, OF_SLICES, Place
from ..table.kinds import RUNS_FORWARD, SHARES, Kind
from .segments import Payload

IntTable: TypeAlias = NDArray[np.int32]
# An array of the executor's own, of the same meaning: [ticks, devices] here, a scalar inside a tick
# of one device.
A = TypeVar("A")

NOBODY = -1


@dataclass(frozen=True)
class Record(Generic[A]):
    """Columns of numbers by name; `record.name` is the column of a name."""

    columns: Mapping[str, A]

    def __getattr__(self, name: str) -> A:
        """The column of this name."""
        columns: Mapping[str, A] = self.__dict__.get("columns", {})
        if name not in columns:
            raise AttributeError(name)
        return columns[name]

    def map(self, function: Callable[[A], Any]) -> Record[Any]:
        """A function of every column."""
        return Record({name: function(column) for name, column in self.columns.items()})

    def changed(self, **columns: A) -> Record[A]:
        """The record with other columns of these names."""
        return Record({**self.columns, **columns})


# Of an action: its kind (or NOBODY), and of a stage's also the chunk of the device (or NOBODY).
# Then come the flags and the slots of its effects.
_STAGE, _SHARE = ("kind", "chunk", "stage", "microbatch"), ("kind", "microbatch", "is_source")
# What a permute brings: the slot that it writes, where `takes` is 1.  Elsewhere the slot keeps what
# it has: nothing is sent to the device and none of its slots is free, or the tick has no such
# permute.
ARRIVAL = ("slot", "takes")
# The residuals of a forward that go to the host's memory in a tick, and those that come back, by
# the numbers of their values (stage * M + microbatch).
MOVE = tuple(column for move in MOVES for column in move.columns)


def columns_of(kinds: Collection[Kind], *, slices: bool = True) -> tuple[str, ...]:
    """The columns of the record of these kinds, without slices of sequences those of other pools.

    >>> columns_of({Kind.E, Kind.H})
    ('kind', 'microbatch', 'is_source', 'out', 'stash')
    """
    head = _SHARE if set(kinds) <= set(SHARES) else _STAGE
    left_out = () if slices else OF_SLICES
    own = (e for e in EFFECTS if e.kind in kinds and e.place not in left_out)
    names = [name for e in own for name in (e.when, *e.unless, e.field)]
    absent = (None, "", "has_loss")
    return tuple(dict.fromkeys(n for n in (*head, *names) if n not in absent))


@dataclass(frozen=True)
class TickRecord(Generic[A]):
    """All that varies of a tick.

    `forward` is an F or an R, `backward` a B, I or W.
    """

    forward: Record[A]
    backward: Record[A]
    arrivals: tuple[Record[A], ...]  # by lane of the template
    # one where the table has such actions, else none
    collectives: tuple[Record[A], ...] = ()
    # one where anything waits on the host, else none
    moves: tuple[Record[A], ...] = ()

    def of(self, kind: Kind) -> Record[A]:
        """The record of what a kind does."""
        if kind in SHARES:
            return self.collectives[0]
        return self.forward if kind in RUNS_FORWARD else self.backward

    def map(self, function: Callable[[A], Any]) -> TickRecord[Any]:
        """A function of every column."""
        several = (self.arrivals, self.collectives, self.moves)
        one = self.forward.map(function), self.backward.map(function)
        return TickRecord(*one, *(tuple(r.map(function) for r in records) for records in several))

    @property
    def actions(self) -> tuple[tuple[str, Record[A]], ...]:
        """The records of actions, with their names."""
        shares = tuple(("collective action", record) for record in self.collectives)
        return (("forward", self.forward), ("backward", self.backward), *shares)

    @property
    def columns(self) -> list[A]:
        """All columns in their order."""
        records = [self.forward, self.backward]
        records += (*self.arrivals, *self.collectives, *self.moves)
        return [column for record in records for column in record.columns.values()]


# Backwards that executors may run as one block with a forward of their tick.
JOINT = (Kind.B,)


def distinct(ticks: TickRecord[Any]) -> Any:
    """Where the backward is not that very forward's, and needs it."""
    forward, backward = ticks.forward, ticks.backward
    return (forward.stage != backward.stage) | (forward.microbatch != backward.microbatch)


def pairs_of(ticks: TickRecord[Any], joint: Sequence[Kind] = JOINT) -> Any:
    """Where a device has a forward and a `joint` backward in one tick, which executors may run as
    one.

    So are overlapped pairs, and cells that lowering puts side by side.
    """
    kind = reduce(or_, [ticks.backward.kind == int(kind) for kind in joint])
    both = (ticks.forward.chunk != NOBODY) & (ticks.backward.chunk != NOBODY)
    return both & kind & distinct(ticks)


def empty_ticks(
    num_ticks: int,
    num_devices: int,
    lanes: int,
    *,
    collective: bool = False,
    moves: bool = False,
    slices: bool = False,
) -> TickRecord[IntTable]:
    """Ticks in which nobody does anything.  The passes of lowering fill them."""

    def record(names: Iterable[str], nobody: Collection[str] = ("kind", "chunk")) -> Any:
        """Columns of NOBODY under the names in `nobody`, and of 0 under the others."""
        shape = (num_ticks, num_devices)
        return Record({n: np.full(shape, NOBODY if n in nobody else 0, np.int32) for n in names})

    return TickRecord(
        record(columns_of(RUNS_FORWARD, slices=slices)),
        record(columns_of({Kind.B, Kind.I, Kind.W}, slices=slices)),
        tuple(record(ARRIVAL) for _ in range(lanes)),
        (record(columns_of(SHARES, slices=slices)),) if collective else (),
        (record(MOVE, MOVE),) if moves else (),
    )


# Where a transfer's payload arrives.
POOL_OF = {Payload.ACTIVATION: Place.X, Payload.COTANGENT: Place.COTANGENT}
# By the pool where a transfer arrives, the place that it is sent from.
SENT_TO = {Place.X: Place.SENT_X, Place.COTANGENT: Place.SENT_DX}


# The most forwards whose residuals are between the memories of a device and its host at a time: one
# leaves, and one comes.
UNDER_WAY = 2


class Slots(SimpleNamespace):
    """The number of entries of each pool, by the value of its `Place`: the most that any device
    holds at one time, at least one; 0 where the program has no such pool.
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
