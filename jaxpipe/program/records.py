"""The varying part of a lowered program: what each device does in each tick, as typed records of
int arrays [ticks, devices].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..table.effects import EFFECTS, OF_SLICES
from ..table.kinds import COLLECTIVE, RUNS_FORWARD, Kind

IntTable: TypeAlias = NDArray[np.int32]
# An array of the executor's own, of the same meaning: [ticks, devices] here, a scalar inside a tick
# of one device.
A = TypeVar("A")

NOBODY = -1


@dataclass(frozen=True)
class _WithSlots(Generic[A]):
    """A record with further fields, which not every program has."""

    slots: dict[str, A] = field(default_factory=dict, kw_only=True)

    def __getattr__(self, name: str) -> A:
        """A further field."""
        slots: dict[str, A] = self.__dict__.get("slots", {})
        if name not in slots:
            raise AttributeError(name)
        return slots[name]


@dataclass(frozen=True)
class Forward(_WithSlots[A]):
    """A forward (F, or R: a forward run once more for its residuals) and its slots.

    With slices of sequences, `slots` has what `EFFECTS` says of carries and appended rows.
    """

    kind: A  # Kind.F or Kind.R, or NOBODY
    chunk: A  # of the device, or NOBODY where it runs no forward
    stage: A
    microbatch: A
    keeps: A  # 1 where residuals are kept; 0 where an R will make them, and in an evaluation
    is_first: A  # 1 where the stage is the model's first
    is_last: A  # 1 where the stage is the model's last
    is_local: A  # 1 where the output is consumed on this device
    x: A  # slot of the stage's input
    residual_input: A  # slot of the residuals that only I (and B) reads
    residual_weight: A  # slot of the residuals that W reads
    first: A  # slot of the residuals of `first`
    out: A  # slot of what it leaves on this device


@dataclass(frozen=True)
class Backward(_WithSlots[A]):
    """A backward (B, I or W) and its slots; `slots` is that of `Forward`."""

    kind: A  # Kind.B, Kind.I or Kind.W, or NOBODY
    chunk: A  # of the device, or NOBODY where it runs no backward
    stage: A
    microbatch: A
    is_first: A  # 1 where the stage is the model's first
    is_local: A  # 1 where the input gradient is consumed on this device
    x: A  # slot of the stage's input
    residual_input: A
    residual_weight: A
    cotangent: A  # slot of the gradient of the stage's output
    stash: A  # slot of what I leaves for W
    first: A  # slot of the residuals of `first`
    out: A  # slot of the input gradient that it leaves on this device


@dataclass(frozen=True)
class Collective(_WithSlots[A]):
    """A device's share of a collective action, and its slots: the fields that `EFFECTS` names for
    such actions.
    """

    kind: A  # or NOBODY
    microbatch: A
    # 1 on the device that gives all others what they read, and takes what they make
    is_source: A


# The slots of what the source gives, of what it takes, of what stays on every device.
_SLOTS = tuple(dict.fromkeys(e.field for e in EFFECTS if e.kind in COLLECTIVE and e.field))


def _of_slices(forward: bool) -> tuple[str, ...]:
    """The fields that forwards, or backwards, have besides where microbatches are slices."""
    own = [e for e in EFFECTS if e.place in OF_SLICES and (e.kind in RUNS_FORWARD) is forward]
    return tuple(dict.fromkeys(("continues", "is_followed", *(e.field for e in own))))


@dataclass(frozen=True)
class Arrival(Generic[A]):
    """What a permute brings to a device: the slot that it writes, where `takes` is 1.

    Elsewhere the slot keeps what it has: nothing is meant for the device and none of its slots is
    free, or the tick has no such permute.
    """

    slot: A
    takes: A


@dataclass(frozen=True)
class Move(Generic[A]):
    """The residuals of a forward that go to the host's memory in a tick, and those that come back;
    NOBODY where none do.

    What is stored is read before the tick's blocks, and is in the host's slot when they are over.
    What is fetched is read then too, and is in the device's slots when the tick is over.  `stores`
    and `fetches` say which value it is (stage * M + microbatch).
    """

    stores: A
    from_input: A  # slot of the residuals that only I (and B) reads
    from_weight: A  # slot of the residuals that W reads
    to_host: A
    fetches: A
    from_host: A
    to_input: A
    to_weight: A


@dataclass(frozen=True)
class TickRecord(Generic[A]):
    """All that varies of a tick."""

    forward: Forward[A]
    backward: Backward[A]
    arrivals: tuple[Arrival[A], ...]  # by lane of the template
    collectives: tuple[Collective[A], ...] = ()  # one where the table has such actions, else none
    moves: tuple[Move[A], ...] = ()  # one where anything waits on the host, else none

    def of(self, kind: Kind) -> Forward[A] | Backward[A] | Collective[A]:
        """The record of what a kind does."""
        if kind in COLLECTIVE:
            return self.collectives[0]
        return self.forward if kind in RUNS_FORWARD else self.backward


R = TypeVar("R")


def map_fields(function: Callable[[Any], Any], record: R) -> R:
    """The record with a function of every array in it."""
    if isinstance(record, tuple):
        return tuple(map_fields(function, item) for item in record)  # type: ignore[return-value]
    if isinstance(record, dict):
        return {name: function(item) for name, item in record.items()}  # type: ignore[return-value]
    if is_dataclass(record) and not isinstance(record, type):
        return replace(
            record,
            **{f.name: map_fields(function, getattr(record, f.name)) for f in fields(record)},
        )
    found: R = function(record)
    return found


def arrays(record: object) -> Iterator[IntTable]:
    """Every array of a record."""
    if isinstance(record, tuple):
        for item in record:
            yield from arrays(item)
    elif isinstance(record, dict):
        yield from record.values()
    elif isinstance(record, np.ndarray):
        yield record
    else:
        for f in fields(record):  # type: ignore[arg-type]
            yield from arrays(getattr(record, f.name))


# Backwards that executors may run as one block with a forward of their tick.
JOINT = (Kind.B,)


def pairs_of(
    forward: Forward[IntTable], backward: Backward[IntTable], joint: Sequence[Kind] = JOINT
) -> NDArray[np.bool_]:
    """`[tick, device]`: a forward and a `joint` backward in one tick, which executors may run as
    one.

    So are overlapped pairs, and cells that lowering puts side by side; but not where the backward
    is that very forward's, and needs it.
    """
    both = (forward.chunk != NOBODY) & (backward.chunk != NOBODY) & np.isin(backward.kind, joint)
    distinct: NDArray[np.bool_] = both & (
        (forward.stage != backward.stage) | (forward.microbatch != backward.microbatch)
    )
    return distinct


def empty_ticks(
    num_ticks: int,
    num_devices: int,
    lanes: int,
    *,
    collective: bool = False,
    moves: bool = False,
    slices: bool = False,
) -> TickRecord[IntTable]:
    """Ticks in which nobody does anything; whoever makes a program fills them."""

    def filled(value: int) -> IntTable:
        return np.full((num_ticks, num_devices), value, np.int32)

    def empty(record: Any, nobody: Sequence[str] = ("kind", "chunk")) -> Any:
        names = [f.name for f in fields(record) if f.name != "slots"]
        found = record(**{name: filled(NOBODY if name in nobody else 0) for name in names})
        more = _SLOTS if record is Collective else ()
        if slices and record in (Forward, Backward):
            more = _of_slices(record is Forward)
        return replace(found, slots={name: filled(0) for name in more}) if more else found

    return TickRecord(
        empty(Forward),
        empty(Backward),
        tuple(empty(Arrival) for _ in range(lanes)),
        (empty(Collective),) if collective else (),
        (empty(Move, [f.name for f in fields(Move)]),) if moves else (),
    )
