"""Every kind of action, declared once, and the cells of a table.

A declaration has the values that a kind needs, makes and releases, its cost, and its colours.  The
parser, the checker, the simulator, the count of activations and the pictures read it.  They name a
kind themselves only where a rule or a message is about that kind alone.

The text of a cell is torch.distributed.pipelining's (`_Action.__str__`):
`[stage][kind][microbatch]`, e.g. `2F0`.  Actions are named tuples, not dataclasses: the table of a
large job holds half a million of them, and a tuple is built five times faster than a frozen
dataclass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

# The colours of a kind's first and last chunk.
Shades: TypeAlias = tuple[str, str]


class Kind(enum.IntEnum):
    """The work of an action; the numbers are only for compact storage."""

    F = 0  # forward
    B = 1  # full backward (input and weight gradient)
    I = 2  # input gradient (the zero-bubble papers call it "B")  # noqa: E741
    W = 3  # weight gradient
    SEND_F = 4  # send the stage's output to the next stage
    RECV_F = 5  # receive the stage's input from the stage before
    SEND_B = 6  # send the gradient of the stage's input to the stage before
    RECV_B = 7  # receive the gradient of the stage's output from the next stage
    R = 8  # recompute the stage's forward, for its B or I
    # one device's share of `last` spread over all devices; the number before it is the device's,
    # not a stage's
    L = 9
    E = 10  # the same of a spread `first`
    G = 11  # the same of the gradient of a spread `first`
    # one device's share of the gradient of the parameters of a spread `last`, where its L leaves it
    # for later
    H = 12
    # of a stage's parameters and gradients, where devices of the fsdp axis split them; the number
    # behind it is that of the first action of its run, see `gathered.py`
    U = 13  # gather ("unshard") the parameters
    D = 14  # drop the gathered parameters
    X = 15  # reduce the gradient into the split one, and drop the whole one

    @property
    def is_compute(self) -> bool:
        """False for SEND and RECV, and for U, D and X: they hold no device up."""
        return KINDS[self].is_compute


class Pass(enum.Enum):
    """The pass that an action belongs to; the value is the step from a stage to the stage that
    needs its result.
    """

    FORWARD = 1
    BACKWARD = -1


class Value(enum.Enum):
    """The values that actions make and need, of one stage and microbatch each; only the first two
    travel from stage to stage.
    """

    OUTPUT = "output"  # the next stage's input
    INPUT_GRAD = "input gradient"  # the stage before needs it
    WEIGHT_GRAD = "weight gradient"  # added to that of the other microbatches
    INPUT = "input"  # the stage's own, kept by F for R
    ACTIVATIONS = "activations"  # residuals of a forward, which its backward reads
    STASH = "stash"  # values that W reads of its I
    # values that H reads of its L; of a device, where the others are of a stage
    SHARE_STASH = "stash of a share"


class Sharded(enum.Enum):
    """What the devices of an fsdp axis split, of a stage; one device has it whole while actions
    need it.
    """

    PARAMETERS = "parameters"
    GRADIENT = "gradient"


class ModelEnd(NamedTuple):
    """The place of a collective action in the model: at a stage, between two of its actions."""

    stage: int  # 0 for the first, -1 for the last
    needs: Value | None  # the value of that stage that it reads
    feeds: Value | None  # the value of that stage that is made from its result


class Offload(enum.Enum):
    """The values that are kept in the host's memory."""

    NOTHING = "nothing"
    # what forwards keep for their backwards, where these are some ticks away
    RESIDUALS = "residuals"


class By(enum.IntEnum):
    """The function of the model whose code reads or makes a value.  The numbers are folded into
    keys (see `model.keys`).
    """

    FIRST = 0
    STAGE = 1
    LAST = 2


class Release(enum.Enum):
    """When a stage's activations of a microbatch may be freed, where the backward is split (a full
    backward B always frees them).
    """

    INPUT_GRAD = "input_grad"  # at the end of I: W works from something smaller
    WEIGHT_GRAD = "weight_grad"  # at the end of W: W reads the same activations as I


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """The declaration of a kind.

    Attributes:
        kind: the kind that is declared.
        direction: the pass that it belongs to.
        description: its name in pictures.
        needs: the value that it reads of the stage before it in its pass, where there is one.
        reads: the values that it reads of its own stage and microbatch, on the same device.
        makes: the values that it makes, of its own stage and microbatch.
        releases: the rules of `Release` under which activations may be freed at its end.
        overlaps: whether it may be half of an overlapped pair.
        sends: of a SEND, the value that it sends.
        receives: of a RECV, its SEND.
        end: of a collective action, its place in the model.  Each device does its share, once for
            each microbatch, and the number before the kind is the device's.
        part_of: of a share that a device does alone and later, the collective action that does it
            otherwise.
        cost: the field of `Costs` that holds its time; None where it takes no time of its own.
        shades: its colours on a light and on a dark page; None where it is drawn as a transfer.
        uses: what it needs whole of its stage.
        gathers: what it makes whole.
        drops: what is no longer whole at its end.
        in_csv: its name in torch's CSV, where that is another one; no number follows it there.
    """

    kind: Kind
    direction: Pass
    description: str = "transfer"
    needs: Value | None = None
    reads: tuple[Value, ...] = ()
    makes: tuple[Value, ...] = ()
    releases: tuple[Release, ...] = ()
    overlaps: bool = False
    sends: Value | None = None
    receives: Kind | None = None
    end: ModelEnd | None = None
    part_of: Kind | None = None
    cost: str | None = None
    shades: tuple[Shades, Shades] | None = None
    uses: tuple[Sharded, ...] = ()
    gathers: Sharded | None = None
    drops: Sharded | None = None
    in_csv: str = ""

    @property
    def is_transfer(self) -> bool:
        """True for SEND and RECV."""
        return self.sends is not None or self.receives is not None

    @property
    def is_beside(self) -> bool:
        """Whether it runs beside its device's other actions: U, D and X."""
        return self.gathers is not None or self.drops is not None

    @property
    def is_compute(self) -> bool:
        """Whether it takes time of its device."""
        return not self.is_transfer and not self.is_beside

    @property
    def is_collective(self) -> bool:
        """Whether all devices do it at the same time."""
        return self.end is not None

    @property
    def is_share(self) -> bool:
        """Whether it is a collective action or a share of one: the number before it is the
        device's, not a stage's.
        """
        return self.is_collective or self.part_of is not None

    @property
    def came_from(self) -> int:
        """The step to the neighbour stage that its pass comes from."""
        return -self.direction.value


# Hues that colour-blind readers can tell apart; the chunks of a hue differ in lightness only.
KINDS = (
    KindSpec(
        kind=Kind.F,
        description="forward",
        direction=Pass.FORWARD,
        needs=Value.OUTPUT,
        makes=(Value.OUTPUT, Value.INPUT, Value.ACTIVATIONS),
        overlaps=True,
        cost="forward",
        uses=(Sharded.PARAMETERS,),
        shades=(("#2563c9", "#a8caf7"), ("#2f6fdb", "#a3c6f5")),
    ),
    KindSpec(
        kind=Kind.B,
        description="backward",
        direction=Pass.BACKWARD,
        needs=Value.INPUT_GRAD,
        reads=(Value.ACTIVATIONS,),
        makes=(Value.INPUT_GRAD, Value.WEIGHT_GRAD),
        releases=(Release.INPUT_GRAD, Release.WEIGHT_GRAD),
        overlaps=True,
        cost="backward",
        uses=(Sharded.PARAMETERS, Sharded.GRADIENT),
        shades=(("#1f8a4c", "#a3ddb6"), ("#23924f", "#9ad8b0")),
    ),
    KindSpec(
        kind=Kind.I,
        description="input gradient",
        direction=Pass.BACKWARD,
        needs=Value.INPUT_GRAD,
        reads=(Value.ACTIVATIONS,),
        makes=(Value.INPUT_GRAD, Value.STASH),
        releases=(Release.INPUT_GRAD,),
        overlaps=True,
        cost="input_grad",
        uses=(Sharded.PARAMETERS,),
        shades=(("#c96a0c", "#fbd09a"), ("#cf7217", "#f6cc96")),
    ),
    KindSpec(
        kind=Kind.W,
        description="weight gradient",
        direction=Pass.BACKWARD,
        reads=(Value.STASH,),
        makes=(Value.WEIGHT_GRAD,),
        releases=(Release.WEIGHT_GRAD,),
        cost="weight_grad",
        uses=(Sharded.PARAMETERS, Sharded.GRADIENT),
        shades=(("#7a4cb8", "#d8c5f0"), ("#8654c4", "#d0baee")),
    ),
    KindSpec(kind=Kind.SEND_F, direction=Pass.FORWARD, sends=Value.OUTPUT),
    KindSpec(kind=Kind.RECV_F, direction=Pass.FORWARD, receives=Kind.SEND_F),
    KindSpec(kind=Kind.SEND_B, direction=Pass.BACKWARD, sends=Value.INPUT_GRAD),
    KindSpec(kind=Kind.RECV_B, direction=Pass.BACKWARD, receives=Kind.SEND_B),
    KindSpec(
        kind=Kind.R,
        description="recompute",
        direction=Pass.BACKWARD,
        reads=(Value.INPUT,),
        makes=(Value.ACTIVATIONS,),
        cost="recompute",
        uses=(Sharded.PARAMETERS,),
        shades=(("#c9a800", "#efe27a"), ("#c4a60c", "#e8da78")),
    ),
    KindSpec(
        kind=Kind.L,
        description="last, spread",
        direction=Pass.FORWARD,
        makes=(Value.SHARE_STASH,),
        end=ModelEnd(-1, Value.OUTPUT, Value.INPUT_GRAD),
        cost="last",
        shades=(("#b8326e", "#f0b4cd"), ("#c23f7a", "#ecaec8")),
    ),
    KindSpec(
        kind=Kind.E,
        description="first, spread",
        direction=Pass.FORWARD,
        end=ModelEnd(0, None, Value.OUTPUT),
        cost="first",
        shades=(("#0f7f8c", "#9ddde4"), ("#15899a", "#96d4db")),
    ),
    KindSpec(
        kind=Kind.G,
        description="gradient of first, spread",
        direction=Pass.BACKWARD,
        end=ModelEnd(0, Value.INPUT_GRAD, None),
        cost="first_grad",
        shades=(("#7a6a58", "#d9cfc3"), ("#86755f", "#d0c5b7")),
    ),
    KindSpec(
        kind=Kind.H,
        description="weight gradient of last, spread",
        direction=Pass.BACKWARD,
        reads=(Value.SHARE_STASH,),
        part_of=Kind.L,
        cost="last_weight_grad",
        shades=(("#6b1f47", "#d690b3"), ("#8f3a66", "#d58fb2")),
    ),
    KindSpec(
        kind=Kind.U,
        description="gather of parameters",
        direction=Pass.FORWARD,
        gathers=Sharded.PARAMETERS,
        in_csv="UNSHARD",
        cost="gather",
        shades=(("#3a4a8c", "#b4bee6"), ("#5668b4", "#aab6e2")),
    ),
    KindSpec(
        kind=Kind.D,
        description="drop of gathered parameters",
        direction=Pass.FORWARD,
        drops=Sharded.PARAMETERS,
        in_csv="RESHARD",
    ),
    KindSpec(
        kind=Kind.X,
        description="reduction of gradients",
        direction=Pass.BACKWARD,
        drops=Sharded.GRADIENT,
        in_csv="REDUCE_GRAD",
        cost="reduce",
        shades=(("#4a5a2a", "#c6d3a4"), ("#66793c", "#bdcb98")),
    ),
)


def kinds_where(test: Callable[[KindSpec], object]) -> tuple[Kind, ...]:
    """The kinds whose declaration passes a test, in the order of their numbers.

    >>> [kind.name for kind in kinds_where(lambda spec: spec.overlaps)]
    ['F', 'B', 'I']
    """
    return tuple(spec.kind for spec in KINDS if test(spec))


def makers(value: Value) -> tuple[Kind, ...]:
    """The kinds that make a value.

    >>> [kind.name for kind in makers(Value.INPUT_GRAD)]
    ['B', 'I']
    """
    return kinds_where(lambda spec: value in spec.makes)


def readers(value: Value) -> tuple[Kind, ...]:
    """The kinds that read a value of their own stage and microbatch."""
    return kinds_where(lambda spec: value in spec.reads)


def gatherers(what: Sharded) -> tuple[Kind, ...]:
    """The kinds that make it whole; none for a gradient, which is whole from its first use on."""
    return kinds_where(lambda spec: spec.gathers is what)


def users(what: Sharded) -> tuple[Kind, ...]:
    """The kinds that need it whole."""
    return kinds_where(lambda spec: what in spec.uses)


def droppers(what: Sharded) -> tuple[Kind, ...]:
    """The kinds after which it is split again."""
    return kinds_where(lambda spec: spec.drops is what)


class Message(NamedTuple):
    """The way of a value to the neighbour stage: the kinds that need it there, and the SEND and
    RECV between devices.
    """

    value: Value
    users: tuple[Kind, ...]
    send: Kind
    receive: Kind


def _message(value: Value) -> Message:
    (send,) = kinds_where(lambda spec: spec.sends is value)
    (receive,) = kinds_where(lambda spec: spec.receives is send)
    return Message(value, kinds_where(lambda spec: spec.needs is value), send, receive)


KIND_NAMES = tuple(kind.name for kind in Kind)
COMPUTE = kinds_where(lambda spec: spec.is_compute)
TRANSFERS = kinds_where(lambda spec: spec.is_transfer)
# What runs beside the other actions of its device.
BESIDE = kinds_where(lambda spec: spec.is_beside)
# Of those, what takes time on its device's link along the fsdp axis.
LINKED = kinds_where(lambda spec: spec.is_beside and spec.cost)
# What only a table with a backward pass computes.
BACKWARDS = kinds_where(lambda s: s.is_compute and s.direction is Pass.BACKWARD)
RECOMPUTE = readers(Value.INPUT)
# Kinds that run the code of a stage's forward, in either pass.
RUNS_FORWARD = makers(Value.ACTIVATIONS)
# The values that stay on their device for a later action of the same stage and microbatch.
KEPT = tuple(value for value in Value if readers(value))
# Collective actions, which all devices execute at the same time.
COLLECTIVES = kinds_where(lambda spec: spec.is_collective)
# The collective actions and their late parts: the number before the kind is the device's.
SHARES = kinds_where(lambda spec: spec.is_share)
# Those that are a spread `first` and its gradient, and those that are a spread `last`.
SPREAD_FIRST = kinds_where(lambda spec: spec.end is not None and spec.end.stage == 0)
SPREAD_LAST = kinds_where(lambda spec: spec.end is not None and spec.end.stage != 0)
# The kinds of the forward half of an overlapped pair, and of its backward half.
FORWARD_HALVES = kinds_where(lambda s: s.overlaps and s.direction is Pass.FORWARD)
BACKWARD_HALVES = kinds_where(lambda s: s.overlaps and s.direction is Pass.BACKWARD)
SENDS = kinds_where(lambda spec: spec.sends)
RECEIVES = kinds_where(lambda spec: spec.receives is not None)
MESSAGES = tuple(_message(spec.sends) for spec in KINDS if spec.sends is not None)


class Action(NamedTuple):
    """One action of one device: `Action(2, Kind.F, 0)` prints as `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{KIND_NAMES[self.kind]}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward (B or I) of different microbatches that run as one step:
    `(0F7;7B3)OVERLAP_F_B`.

    Source: DualPipe (DeepSeek-V3, section 3.2.1), where the communication of one half overlaps the
    compute of the other.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Cell: TypeAlias = Action | Overlap | None
Row: TypeAlias = tuple[Cell, ...]


def parts(cell: Cell) -> tuple[Action, ...]:
    """The actions in a cell: none, one, or the two of an overlapped pair."""
    if cell is None:
        return ()
    if isinstance(cell, Overlap):
        return tuple(cell)
    return (cell,)
