"""Every effect of every kind of action, declared once: values, places and conditions.

The access list of `verify`, the printed program, the interpreter, the slots and the state that
passes through a block's loop are derived from `EFFECTS`.  No effect is stated anywhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .encoded import BoolArray, Encoded, IntArray
from .kinds import RECOMPUTE, SPREAD_FIRST, By, Kind, Sharded, users


class Place(enum.Enum):
    """The place of a value.  Those with a letter are pools of slots; the others exist once a
    device.
    """

    X = "x"  # inputs of stages
    RESIDUAL_INPUT = "residual_input"  # values that a forward keeps for I (or B) alone
    RESIDUAL_WEIGHT = "residual_weight"  # values that a forward keeps for W (or B)
    COTANGENT = "cotangent"  # gradients of outputs of stages
    STASH = "stash"  # values that I keeps for W
    FIRST = "first"  # values that the gradient of `first` reads
    LAST = "last"  # outputs of the last stage that wait for L
    SHARE = "share"  # values that L keeps for H, on every device
    # residuals of both kinds that are held long, in the host's memory (`Offload.RESIDUALS`)
    HOST = "host"
    # passed from a slice of a sequence to the next one in the same stage
    CARRY = "carry"
    CARRY_GRADIENT = "carry_gradient"  # the gradients of carries
    BUFFER = "buffer"  # the rows that the slices of a sequence append in a stage
    BUFFER_GRADIENT = "buffer_gradient"  # the gradients of these rows
    LOSSES = "losses"
    STAGE_STATE = "stage_state"  # passed from microbatch to microbatch in a stage
    AUX = "aux"  # the further results of `last`
    # of a stage, where they are gathered during the step
    PARAMETERS = "parameters"
    # accumulated gradients of parameters
    STAGE_GRADIENTS = "stage_gradients"
    REDUCED = "reduced"  # those of a stage over the fsdp axis, where this is done during the step
    FIRST_GRADIENTS = "first_gradients"
    LAST_GRADIENTS = "last_gradients"
    SHARED_GRADIENTS = "shared_gradients"
    SENT_X = "sent_x"  # the last output of a stage, which the tick's transfers send
    SENT_DX = "sent_dx"  # the last gradient of a stage's input
    ORDER = "order"  # of executors: the token of the blocks of a tick that are over

    def __lt__(self, other: Place) -> bool:
        """Places in a pytree have an order."""
        return self.value < other.value

    @property
    def letter(self) -> str:
        """The name of a pool in a printed program."""
        return _LETTERS.get(self, "")

    @property
    def is_pool(self) -> bool:
        """Whether it has slots."""
        return self in _LETTERS


_LETTERS = dict(zip(Place, "xiwcsfylhkdbg", strict=False))
# The pools of what passes between slices of a sequence.
OF_SLICES = (Place.CARRY, Place.CARRY_GRADIENT, Place.BUFFER, Place.BUFFER_GRADIENT)
# The pools of what an action of a stage leaves for its backwards: large values, and many.
TOGETHER = (Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT, Place.STASH)
# The pools that a program has even where nothing is in them.
ALWAYS = tuple(_LETTERS)[:6]


class Access(enum.IntEnum):
    """The accesses of a block, in their order."""

    # written before the block reads: the output of `first` inside of a forward
    PREPARE = 0
    READ = 1
    WRITE = 2


class Of(enum.Enum):
    """The stage to which a value belongs."""

    OWN = "own"  # the action's
    NEXT = "next"
    BEFORE = "before"
    FIRST = "first"  # the model's first
    LAST = "last"  # the model's last
    DEVICE = "device"  # no stage: every device has a value of its own
    NEXT_SLICE = "next slice"  # the action's, of the next slice of its sequence
    SEQUENCE = "sequence"  # the action's, of all slices of its sequence

    def value_in(
        self, table: Encoded, stage: IntArray, microbatch: IntArray, device: IntArray
    ) -> IntArray:
        """The number (stage * M + microbatch) of the value, for actions of these numbers."""
        step = table.num_microbatches
        own = stage * step + microbatch
        return {
            Of.OWN: own,
            Of.NEXT: own + step,
            Of.BEFORE: own - step,
            Of.FIRST: microbatch,
            Of.LAST: (table.num_stages - 1) * step + microbatch,
            Of.DEVICE: device * step + microbatch,
            Of.NEXT_SLICE: own + 1,
            Of.SEQUENCE: own - microbatch % table.slices,
        }[self]


class LastUse(enum.IntEnum):
    """The last action of a stage and microbatch that reads a value."""

    NONE = -1  # there is no such value
    FORWARD = 0
    INPUT_GRAD = 1
    WEIGHT_GRAD = 2


@dataclass(frozen=True)
class Liveness:
    """The last reader of each input of a stage's code; read off the stage's jaxprs."""

    x: LastUse = LastUse.WEIGHT_GRAD
    cotangent: LastUse = LastUse.INPUT_GRAD
    # of slices of sequences
    carry: LastUse = LastUse.NONE
    carry_gradient: LastUse = LastUse.NONE
    buffer: LastUse = LastUse.NONE
    buffer_gradient: LastUse = LastUse.NONE

    @classmethod
    def of_slices(cls) -> Liveness:
        """The longest that slices of sequences can need."""
        return cls(*[LastUse.WEIGHT_GRAD] * len(fields(cls)))


def longest(needs: Sequence[Liveness]) -> Liveness:
    """The last reader of each input, of several kinds of stages."""
    return Liveness(*(max(getattr(n, f.name) for n in needs) for f in fields(Liveness)))


@dataclass(frozen=True)
class Effect:
    """One thing that the actions of a kind do.

    Attributes:
        kind: the kind.
        access: prepare, read or write.
        place: where the value is.
        of: the stage to which the value belongs.
        when: the flag of the record that must be set; None where it always happens.
        by: the function whose code reads or makes it.
        unless: flags of the record; it does not happen in code where one of them is always set.
        present: kinds of which the table must have one, where there are any.
        absent: kinds of which the table must have none.
        until: the field of `Liveness` for the place must be at least this, where there is one.
    """

    kind: Kind
    access: Access
    place: Place
    of: Of = Of.OWN
    when: str | None = None
    by: By = By.STAGE
    unless: tuple[str, ...] = ()
    present: tuple[Kind, ...] = ()
    absent: tuple[Kind, ...] = ()
    until: LastUse = LastUse.FORWARD

    @property
    def field(self) -> str:
        """The column of the kind's record with the slot; "" where the place is no pool."""
        return f"{self.place.value}{_OTHER.get(self.of, '')}" if self.place.is_pool else ""

    @property
    def result(self) -> Place:
        """What is written, by the name that the code has for it."""
        if self.place is Place.FIRST and self.by is By.STAGE:
            return Place.SENT_DX
        return _RESULTS.get(self.place, self.place)


# The columns of values that belong to another stage, or to another slice.
_OTHER = {Of.NEXT: "_next", Of.BEFORE: "_before", Of.NEXT_SLICE: "_next"}
_RESULTS = {
    Place.X: Place.SENT_X,
    Place.LAST: Place.SENT_X,
    Place.COTANGENT: Place.SENT_DX,
    Place.SHARE: Place.STASH,
}
PREPARE, READ, WRITE = Access
_F, _B, _I, _W, _R = Kind.F, Kind.B, Kind.I, Kind.W, Kind.R
_L, _E, _G, _H = Kind.L, Kind.E, Kind.G, Kind.H
_BI, _EG = (_B, _I), SPREAD_FIRST
_SENT_X, _SENT_DX = ("is_last", "is_local"), ("is_first", "is_local")
_EARLY, _LATE, _STASH = Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT, Place.STASH
_SHARED, _HOST = Place.SHARED_GRADIENTS, Place.HOST
_OWN_GRADIENTS = (Place.STAGE_GRADIENTS, _SHARED)
_DCARRY, _DBUFFER = Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT
_BY_I, _BY_W = LastUse.INPUT_GRAD, LastUse.WEIGHT_GRAD

# The functions of an action run in the order in which their effects are listed.
EFFECTS = (
    # [first,] stage[, last and its gradient]
    Effect(_F, PREPARE, Place.X, when="is_first", by=By.FIRST, absent=_EG),
    Effect(_F, PREPARE, Place.FIRST, when="is_first", by=By.FIRST, present=_BI, absent=_EG),
    Effect(_F, READ, Place.X),
    Effect(_F, READ, Place.STAGE_STATE),
    Effect(_F, WRITE, _EARLY, when="keeps", present=_BI),
    Effect(_F, WRITE, _LATE, when="keeps", present=_BI),
    Effect(_F, WRITE, Place.LOSSES, when="has_loss"),  # of the stage itself
    Effect(_F, WRITE, Place.STAGE_STATE),
    # slices of sequences: values of the slices before, and values for the next slice
    Effect(_F, READ, Place.CARRY, when="continues"),
    Effect(_F, READ, Place.BUFFER, Of.SEQUENCE, "continues"),
    Effect(_F, WRITE, Place.CARRY, Of.NEXT_SLICE, "is_followed"),
    Effect(_F, WRITE, Place.BUFFER, Of.SEQUENCE),
    Effect(_F, WRITE, Place.SENT_X, Of.NEXT, unless=_SENT_X),
    Effect(_F, WRITE, Place.X, Of.NEXT, "is_local"),
    Effect(_F, WRITE, Place.LAST, when="is_last", present=(_L,)),
    *(
        Effect(_F, WRITE, place, when="is_last", by=By.LAST, present=present, absent=(_L,))
        for place, present in (
            (Place.LAST_GRADIENTS, _BI),
            (_SHARED, _BI),
            (Place.LOSSES, ()),
            (Place.AUX, ()),
            (Place.COTANGENT, _BI),
        )
    ),
    # the residuals of a forward that kept none
    Effect(_R, READ, Place.X),
    Effect(_R, READ, Place.CARRY, when="continues"),
    Effect(_R, READ, Place.BUFFER, Of.SEQUENCE),
    Effect(_R, WRITE, _EARLY),
    Effect(_R, WRITE, _LATE),
    # both gradients of a stage, or the input's and later the parameters'; gradients of slices come
    # from the next slice and go to the one before
    *(
        effect
        for kind in _BI
        for effect in (
            Effect(kind, READ, Place.X, until=_BY_I),
            Effect(kind, READ, _EARLY),
            Effect(kind, READ, _LATE),
            Effect(kind, READ, Place.COTANGENT),
            Effect(kind, READ, Place.CARRY, when="continues", until=_BY_I),
            Effect(kind, READ, Place.BUFFER, Of.SEQUENCE, until=_BY_I),
            Effect(kind, READ, _DCARRY, Of.NEXT_SLICE, "is_followed"),
            Effect(kind, READ, _DBUFFER, Of.SEQUENCE, "is_followed"),
            *((Effect(kind, WRITE, _STASH),) if kind is _I else ()),
            Effect(kind, WRITE, _DCARRY, when="continues"),
            Effect(kind, WRITE, _DBUFFER, Of.SEQUENCE),
            *((Effect(kind, WRITE, p) for p in _OWN_GRADIENTS) if kind is _B else ()),
            Effect(kind, WRITE, Place.SENT_DX, Of.BEFORE, unless=_SENT_DX),
            Effect(kind, WRITE, Place.COTANGENT, Of.BEFORE, "is_local"),
            Effect(kind, WRITE, Place.FIRST, when="is_first", present=_EG),
            Effect(kind, READ, Place.FIRST, when="is_first", by=By.FIRST, absent=_EG),
            *(
                Effect(kind, WRITE, place, when="is_first", by=By.FIRST, absent=_EG)
                for place in (Place.FIRST_GRADIENTS, _SHARED)
            ),
        )
    ),
    Effect(_W, READ, Place.X, until=_BY_W),
    Effect(_W, READ, _LATE),
    Effect(_W, READ, Place.COTANGENT, until=_BY_W),
    Effect(_W, READ, _STASH),
    Effect(_W, READ, Place.CARRY, when="continues", until=_BY_W),
    Effect(_W, READ, Place.BUFFER, Of.SEQUENCE, until=_BY_W),
    Effect(_W, READ, _DCARRY, Of.NEXT_SLICE, "is_followed", until=_BY_W),
    *(Effect(_W, WRITE, place) for place in _OWN_GRADIENTS),
    # the collective actions
    Effect(_E, WRITE, Place.X, Of.FIRST, "is_source", By.FIRST),
    Effect(_G, READ, Place.FIRST, Of.FIRST, "is_source", By.FIRST),
    Effect(_G, WRITE, Place.FIRST_GRADIENTS, by=By.FIRST),
    Effect(_G, WRITE, _SHARED, by=By.FIRST),
    Effect(_L, READ, Place.LAST, Of.LAST, "is_source", By.LAST),
    Effect(_L, WRITE, Place.LAST_GRADIENTS, by=By.LAST, present=_BI, absent=(_H,)),
    Effect(_L, WRITE, _SHARED, by=By.LAST, present=_BI, absent=(_H,)),
    Effect(_L, WRITE, Place.LOSSES, when="is_source", by=By.LAST),
    Effect(_L, WRITE, Place.AUX, when="is_source", by=By.LAST),
    Effect(_L, WRITE, Place.COTANGENT, Of.LAST, "is_source", By.LAST, present=_BI),
    Effect(_L, WRITE, Place.SHARE, Of.DEVICE, by=By.LAST, present=(_H,)),
    Effect(_H, READ, Place.SHARE, Of.DEVICE, by=By.LAST),
    Effect(_H, WRITE, Place.LAST_GRADIENTS, by=By.LAST),
    Effect(_H, WRITE, _SHARED, by=By.LAST),
    # of what the devices of an fsdp axis split
    Effect(Kind.U, WRITE, Place.PARAMETERS),
    *(Effect(kind, READ, Place.PARAMETERS) for kind in users(Sharded.PARAMETERS)),
    Effect(Kind.X, WRITE, Place.STAGE_GRADIENTS),
    Effect(Kind.X, WRITE, Place.REDUCED),
)


@lru_cache(maxsize=256)
def effects_of(kind: Kind, kinds: frozenset[Kind], liveness: Liveness) -> tuple[Effect, ...]:
    """The effects of a kind in a table that has actions of these kinds.

    >>> from jaxpipe import Kind
    >>> [e.place.name for e in effects_of(Kind.H, frozenset({Kind.L, Kind.H}), Liveness())]
    ['SHARE', 'LAST_GRADIENTS', 'SHARED_GRADIENTS']
    """
    return tuple(
        effect
        for effect in EFFECTS
        if effect.kind is kind
        and not (effect.present and kinds.isdisjoint(effect.present))
        and kinds.isdisjoint(effect.absent)
        and getattr(liveness, effect.place.value, LastUse.WEIGHT_GRAD) >= effect.until
    )


def by_function(effects: Sequence[Effect]) -> list[tuple[By, tuple[Effect, ...]]]:
    """The functions that an action runs, in order, with the effects of each."""
    order = dict.fromkeys(effect.by for effect in effects)
    return [(by, tuple(e for e in effects if e.by is by)) for by in order]


def flags_of(table: Encoded) -> dict[str, BoolArray]:
    """Per action, the flags of the records, which the conditions of effects name."""
    hands_on = ~(table.of_kinds(RECOMPUTE) | table.shares)
    user, source = table.consumer, np.zeros(table.num_actions, bool)
    for number, collective in table.collectives.items():
        source[number] = table.device[number] == table.device[collective.partner]
    return {
        "is_first": hands_on & (table.stage == 0),
        "is_last": hands_on & (table.stage == table.num_stages - 1),
        "is_local": (user >= 0) & (table.device[user] == table.device),
        "keeps": ~table.recomputed & (not table.forward_only),
        "is_source": source,
        "continues": table.slice > 0,
        "is_followed": table.slice < table.slices - 1,
    }


class Move(NamedTuple):
    """One way between the memories of a device and its host: the column of the records with the
    value that moves, and by the columns of its slots its places.
    """

    value: str
    reads: Mapping[str, Place]
    writes: Mapping[str, Place]


# What is stored is read before the tick's blocks, and is in the host's slot when they are over.
# What is fetched is read then too, and is in the device's slots when the tick is over.
MOVES = (
    Move("stores", {"from_input": _EARLY, "from_weight": _LATE}, {"to_host": _HOST}),
    Move("fetches", {"from_host": _HOST}, {"to_input": _EARLY, "to_weight": _LATE}),
)
