"""Every effect of every kind of action, declared once: values, places and conditions.

The access list of `verify`, the printed program, the interpreter, the slots and the state that
passes through a block's loop are derived from `EFFECTS`.  No effect is stated anywhere else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .encoded import BoolArray, Encoded
from .kinds import RECOMPUTE, SPREAD_FIRST, Kind


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
    # accumulated gradients of parameters
    STAGE_GRADIENTS = "stage_gradients"
    FIRST_GRADIENTS = "first_gradients"
    LAST_GRADIENTS = "last_gradients"
    SHARED_GRADIENTS = "shared_gradients"
    SENT_X = "sent_x"  # the last output of a stage, which the tick's transfers send
    SENT_DX = "sent_dx"  # the last gradient of a stage's input

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


class Offload(enum.Enum):
    """The values that are kept in the host's memory."""

    NOTHING = "nothing"
    # what forwards keep for their backwards, where these are some ticks away
    RESIDUALS = "residuals"


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

    def value_in(self, table: Encoded, stage: Any, microbatch: Any, device: Any) -> Any:
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
        field: of the kind's record, the field that holds the slot; "" where the place is no pool.
        of: the stage to which the value belongs.
        when: the flag of the record that must be set; None where it always happens.
        unless: flags of the record; it does not happen in code where one of them is always set.
        present: kinds of which the table must have one, where there are any.
        absent: kinds of which the table must have none.
        until: the field of `Liveness` for the place must be at least this, where there is one.
    """

    kind: Kind
    access: Access
    place: Place
    field: str = ""
    of: Of = Of.OWN
    when: str | None = None
    unless: tuple[str, ...] = ()
    present: tuple[Kind, ...] = ()
    absent: tuple[Kind, ...] = ()
    until: LastUse = LastUse.FORWARD


PREPARE, READ, WRITE = Access
_F, _B, _I, _W, _R = Kind.F, Kind.B, Kind.I, Kind.W, Kind.R
_L, _E, _G, _H = Kind.L, Kind.E, Kind.G, Kind.H
_BI, _EG = (_B, _I), SPREAD_FIRST
_SENT_X, _SENT_DX = ("is_last", "is_local"), ("is_first", "is_local")
_EARLY, _LATE, _STASH = Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT, Place.STASH
_SHARED, _HOST = Place.SHARED_GRADIENTS, Place.HOST
_DCARRY, _DBUFFER = Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT
_BY_I, _BY_W = LastUse.INPUT_GRAD, LastUse.WEIGHT_GRAD

EFFECTS = (
    # [first,] stage[, last and its gradient]
    Effect(_F, PREPARE, Place.X, "x", when="is_first", absent=_EG),
    Effect(_F, PREPARE, Place.FIRST, "first", when="is_first", present=_BI, absent=_EG),
    Effect(_F, READ, Place.X, "x"),
    Effect(_F, WRITE, _EARLY, "residual_input", when="keeps", present=_BI),
    Effect(_F, WRITE, _LATE, "residual_weight", when="keeps", present=_BI),
    Effect(_F, WRITE, Place.X, "out", Of.NEXT, when="is_local"),
    Effect(_F, WRITE, Place.SENT_X, of=Of.NEXT, unless=_SENT_X),
    Effect(_F, WRITE, Place.STAGE_STATE),
    Effect(_F, WRITE, Place.LOSSES, when="has_loss"),  # of the stage itself
    Effect(_F, WRITE, Place.LAST, "out", when="is_last", present=(_L,)),
    Effect(_F, WRITE, Place.COTANGENT, "out", when="is_last", present=_BI, absent=(_L,)),
    Effect(_F, WRITE, Place.LOSSES, when="is_last", absent=(_L,)),
    Effect(_F, WRITE, Place.AUX, when="is_last", absent=(_L,)),
    Effect(_F, WRITE, Place.LAST_GRADIENTS, when="is_last", present=_BI, absent=(_L,)),
    Effect(_F, WRITE, _SHARED, when="is_last", present=_BI, absent=(_L,)),
    # slices of sequences: values of the slices before, and values for the next slice
    Effect(_F, READ, Place.CARRY, "carry", when="continues"),
    Effect(_F, READ, Place.BUFFER, "buffer", Of.SEQUENCE, "continues"),
    Effect(_R, READ, Place.CARRY, "carry", when="continues"),
    Effect(_R, READ, Place.BUFFER, "buffer", Of.SEQUENCE),
    Effect(_F, WRITE, Place.CARRY, "carry_out", Of.NEXT_SLICE, "is_followed"),
    Effect(_F, WRITE, Place.BUFFER, "buffer", Of.SEQUENCE),
    # the residuals of a forward that kept none
    Effect(_R, READ, Place.X, "x"),
    Effect(_R, WRITE, _EARLY, "residual_input"),
    Effect(_R, WRITE, _LATE, "residual_weight"),
    # both gradients of a stage, or the input's and later the parameters'
    *(
        effect
        for kind in _BI
        for effect in (
            Effect(kind, READ, Place.X, "x", until=_BY_I),
            Effect(kind, READ, _EARLY, "residual_input"),
            Effect(kind, READ, _LATE, "residual_weight"),
            Effect(kind, READ, Place.COTANGENT, "cotangent"),
            Effect(kind, READ, Place.FIRST, "first", when="is_first", absent=_EG),
            *((Effect(kind, WRITE, _STASH, "stash"),) if kind is _I else ()),
            Effect(kind, WRITE, Place.COTANGENT, "out", Of.BEFORE, when="is_local"),
            Effect(kind, WRITE, Place.SENT_DX, of=Of.BEFORE, unless=_SENT_DX),
            Effect(kind, WRITE, Place.FIRST, "out", when="is_first", present=_EG),
            Effect(kind, WRITE, Place.FIRST_GRADIENTS, when="is_first", absent=_EG),
            Effect(kind, WRITE, _SHARED, when="is_first", absent=_EG),
            # slices of sequences: gradients come from the next slice and go to the one before
            Effect(kind, READ, Place.CARRY, "carry", when="continues", until=_BY_I),
            Effect(kind, READ, Place.BUFFER, "buffer", Of.SEQUENCE, until=_BY_I),
            Effect(kind, READ, _DCARRY, "carry_gradient", Of.NEXT_SLICE, "is_followed"),
            Effect(kind, WRITE, _DCARRY, "carry_gradient_out", Of.OWN, "continues"),
            Effect(kind, READ, _DBUFFER, "buffer_gradient", Of.SEQUENCE, "is_followed"),
            Effect(kind, WRITE, _DBUFFER, "buffer_gradient", Of.SEQUENCE),
        )
    ),
    Effect(_W, READ, Place.X, "x", until=_BY_W),
    Effect(_W, READ, _LATE, "residual_weight"),
    Effect(_W, READ, Place.COTANGENT, "cotangent", until=_BY_W),
    Effect(_W, READ, _STASH, "stash"),
    Effect(_W, READ, Place.CARRY, "carry", when="continues", until=_BY_W),
    Effect(_W, READ, Place.BUFFER, "buffer", Of.SEQUENCE, until=_BY_W),
    Effect(_W, READ, _DCARRY, "carry_gradient", Of.NEXT_SLICE, "is_followed", until=_BY_W),
    *(
        Effect(kind, WRITE, place)
        for kind in (_B, _W)
        for place in (Place.STAGE_GRADIENTS, _SHARED)
    ),
    # the collective actions
    Effect(_E, WRITE, Place.X, "out", Of.FIRST, when="is_source"),
    Effect(_G, READ, Place.FIRST, "y", Of.FIRST, when="is_source"),
    Effect(_G, WRITE, Place.FIRST_GRADIENTS),
    Effect(_G, WRITE, _SHARED),
    Effect(_L, READ, Place.LAST, "y", Of.LAST, when="is_source"),
    Effect(_L, WRITE, Place.COTANGENT, "out", Of.LAST, when="is_source", present=_BI),
    Effect(_L, WRITE, Place.LOSSES),
    Effect(_L, WRITE, Place.AUX),
    Effect(_L, WRITE, Place.LAST_GRADIENTS, present=_BI, absent=(_H,)),
    Effect(_L, WRITE, _SHARED, present=_BI, absent=(_H,)),
    Effect(_L, WRITE, Place.SHARE, "stash", Of.DEVICE, present=(_H,)),
    Effect(_H, READ, Place.SHARE, "stash", Of.DEVICE),
    Effect(_H, WRITE, Place.LAST_GRADIENTS),
    Effect(_H, WRITE, _SHARED),
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

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns in their order."""
        return (self.value, *self.reads, *self.writes)


# What is stored is read before the tick's blocks, and is in the host's slot when they are over.
# What is fetched is read then too, and is in the device's slots when the tick is over.
MOVES = (
    Move("stores", {"from_input": _EARLY, "from_weight": _LATE}, {"to_host": _HOST}),
    Move("fetches", {"from_host": _HOST}, {"to_input": _EARLY, "to_weight": _LATE}),
)
