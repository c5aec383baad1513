"""The code, buffers and operands that the blocks of a step share; and `first` and `last` with their
gradients, inside a stage's block or as a device's share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..arrays import Leaves, PyTree, Scalar
from ..jaxprs.eval_in_slots import run_in_slots
from ..jaxprs.slots import InSlots, Piece, Total, TotalPiece
from ..model.calls import OUTER_WANTS
from ..model.functions import make_extra
from ..model.packed import Places
from ..stage.code import LastCode, StageCode, run
from ..stage.model_code import ModelCode
from ..table.effects import Effect
from ..table.kinds import Kind
from .block import State, add, add_at, write
from .shared_buffers import Buffers


@dataclass(frozen=True)
class StageOperand:
    """The places of one kind of stage's parameters and state in its chunk."""

    leaves: Leaves  # of the chunk, as its accumulators are
    places: Places
    shared: Leaves
    once: Leaves  # what was hoisted
    state_places: Places
    gradient_places: Places  # of the leaves that have a gradient, among the accumulators
    splits: tuple[PartitionSpec | None, ...]  # of the chunk's accumulators, see `Total`

    def params(self) -> Leaves:
        """The stage's parameters, then the shared ones.  A parameter inside a longer array is a
        `Piece` of it.

        Call it inside a block.  Outside, every device would hold copies of the parameters of every
        kind.
        """
        own = [
            Piece(self.leaves[p.at], p.start, p.entry) if p.flat else self.leaves[p.at]
            for p in self.places
        ]
        return [*own, *self.shared]

    def totals(self, chunk: Leaves) -> list[Total | TotalPiece]:
        """The accumulators of the stage's own gradients, among those of its chunk."""
        return [
            TotalPiece(chunk[p.at], p.start, p.entry)
            if p.flat
            else Total(chunk[p.at], self.splits[p.at])
            for p in self.gradient_places
        ]

    def with_totals(self, chunk: Leaves, new: Leaves) -> Leaves:
        """The chunk's accumulators with the new totals of the stage's own parameters."""
        found = list(chunk)
        for place, total in zip(self.gradient_places, new, strict=True):
            found[place.at] = total
        return found

    def read_state(self, state: Leaves) -> Leaves:
        """The stage's state, from its chunk's."""
        return [p.take(state[p.at]) for p in self.state_places]

    def write_state(self, state: Leaves, new: Leaves) -> Leaves:
        """The chunk's state with that of the stage replaced."""
        found = list(state)
        for place, value in zip(self.state_places, new, strict=True):
            found[place.at] = place.put(found[place.at], value)
        return found


@dataclass(frozen=True)
class Operands:
    """The read-only inputs of the ticks (leaves, on this device)."""

    stages: Mapping[tuple[int, int], StageOperand]  # by chunk and kind of stage
    first: Leaves
    first_once: Leaves
    last: Leaves
    last_once: Leaves
    batch: PyTree  # leaves [M, ...]
    rng: Any  # the step's key, or None
    seed: Any  # cotangent of one microbatch's loss


@dataclass(frozen=True)
class SharedCode:
    """The code and operands of a step, on one device."""

    code: ModelCode
    buffers: Buffers
    operands: Operands
    axis: str  # of the pipeline
    everywhere: bool  # blocks permute, so all devices run each: see `permutes`
    blocking: bool  # a permute holds its device's thread until it is over (CPU): see `permuted`

    @property
    def training(self) -> bool:
        """False in an evaluation: forwards keep nothing and `last` has no gradient."""
        return not self.code.program.schedule.forward_only

    @property
    def spreads_first(self) -> bool:
        """Whether `first` and its gradient are shares on every device, and blocks of their own."""
        return self.code.program.schedule.encoded.spreads_first

    @property
    def spreads_last(self) -> bool:
        """Whether `last` is a share on every device, and a block of its own."""
        return self.code.program.schedule.encoded.spreads_last

    @property
    def last_code(self) -> LastCode:
        """That of a model that has a `last`."""
        assert self.code.last is not None
        return self.code.last

    @property
    def last_stage(self) -> StageCode:
        """The code of the last stage."""
        return self.code.kinds[self.code.kind_of[-1]]

    def effects(self, kind: Kind) -> tuple[Effect, ...]:
        """What actions of a kind read and write."""
        return self.code.program.effects(kind)

    def outer_extra(self, stage: Scalar, microbatch: Scalar) -> Leaves:
        """Leaves of the arguments of `first` and `last` besides parameters and x."""
        return self._extra(stage, microbatch, OUTER_WANTS)

    def stage_extra(
        self, kind: int, operand: StageOperand, stage: Scalar, microbatch: Scalar, state: Leaves
    ) -> Leaves:
        """Leaves of a stage's arguments besides parameters and x: "ctx", "microbatch", "state"."""
        own = operand.read_state(state) if "state" in self.code.wants[kind] else []
        return [*self._extra(stage, microbatch, self.code.wants[kind]), *own]

    def fits_last(self, code: StageCode) -> bool:
        """Whether the last stage may be of this kind: `last` takes its output."""
        return self.last_stage.y_avals == code.y_avals

    def fits_first(self, code: StageCode) -> bool:
        """Whether the first stage may be of this kind: it takes the output of `first`."""
        return self.code.kinds[self.code.kind_of[0]].x_avals == code.x_avals

    def _extra(self, stage: Scalar, microbatch: Scalar, wants: frozenset[str]) -> Leaves:
        return jax.tree.leaves(
            make_extra(
                self.operands.batch,
                self.operands.rng,
                stage,
                microbatch,
                wants,
                self.code.program.schedule.slices,
            )
        )


def first_inputs(shared: SharedCode, microbatch: Scalar) -> Leaves:
    """(consts, parameters, extra, once) of `first`."""
    operands = shared.operands
    extra = shared.outer_extra(jnp.zeros_like(microbatch), microbatch)
    return [*shared.code.first.consts, *operands.first, *extra, *operands.first_once]


def accumulate(name: str, jaxpr: Any, arguments: Leaves, state: State) -> State:
    """Run code that adds gradients of `first` or `last` and of the shared parameters in place."""
    own, common = state[name], state["shared_gradients"]
    totals = {i: Total(leaf) for i, leaf in enumerate([*own, *common])}
    (found,) = run_in_slots(InSlots(jaxpr, arguments, writes=totals))
    return state | {name: found[: len(own)], "shared_gradients": found[len(own) :]}


def last_inputs(shared: SharedCode, y: Leaves, microbatch: Scalar) -> Leaves:
    """(consts, parameters, once, y, extra) of `last`."""
    code, operands = shared.last_code, shared.operands
    stage = jnp.full_like(microbatch, len(shared.code.kind_of) - 1)
    extra = shared.outer_extra(stage, microbatch)
    return [*code.consts, *operands.last, *operands.last_once, *y, *extra]


def run_last(shared: SharedCode, jaxpr: Any, arguments: Leaves) -> tuple[Any, Leaves, Leaves]:
    """The loss, its auxiliary outputs, and all other outputs."""
    loss, *rest = run(jaxpr, *arguments)
    count = len(shared.last_code.aux_avals)
    return loss, rest[:count], rest[count:]


def with_last_gradients(found: Leaves, state: State) -> tuple[State, Leaves]:
    """Add the gradients of the parameters of `last`; return the state and the rest, the gradient of
    y.
    """
    own, common = state["last_gradients"], state["shared_gradients"]
    last, rest = found[: len(own)], found[len(own) :]
    return state | {
        "last_gradients": add(own, last),
        "shared_gradients": add(common, rest[: len(common)]),
    }, rest[len(common) :]


def noted(loss: Any, aux: Leaves, microbatch: Scalar, state: State) -> State:
    """The state with the loss of a microbatch and its auxiliary outputs."""
    return state | {
        "losses": add_at(state["losses"], microbatch, loss),
        "aux": write(state["aux"], microbatch, aux),
    }
