"""Times of blocks while a step runs: the host is called at the begin and the end of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, PartitionSpec

from ..arrays import Leaves, Scalar
from ..program.templates import Presence
from ..stage.job import Clock
from .block import Block, run_where
from .share import RunDeferred, RunFirstGradient, RunFirstShare, RunShare
from .stage_block import StageBlock
from .state import State


@dataclass(frozen=True)
class Clocked(Block):
    """A block that tells the host when it begins and when it is over; slower for two calls, and
    else the same.

    `stage` is the number that the table gives the action: of its stage, or of the device where that
    does a share of its own.
    """

    block: StageBlock[Any] | RunShare | RunFirstShare | RunFirstGradient | RunDeferred
    kind: int
    stage: Scalar
    clock: Clock
    axis: str
    data_axes: tuple[str, ...]

    def writes(self, state: State) -> State:
        """What the block writes."""
        return self.block.writes(state)

    def run(self, state: State) -> State:
        """Run it between two calls of the host."""
        row: Any = self.block.row
        shard = lax.axis_index(self.data_axes) if self.data_axes else jnp.int32(0)
        what = (shard, lax.axis_index(self.axis), jnp.int32(self.kind), self.stage, row.microbatch)
        zero = _told(self.clock, jnp.int32(0), *what)
        # In a loop whose predicate is what the first call answers: of a block that finds everything
        # in pools of one slot, XLA knows that it needs no number of its record, and would run it
        # before its begin is noted.  The second call depends on what the block wrote.
        after = run_where(Presence.SOMETIMES, zero == 0, self.block, state)
        _told(
            self.clock,
            jnp.int32(1),
            *what,
            wrote=_touched(jax.tree.leaves(after.like(self.block.writes(state)))),
        )
        return after


def _told(clock: Clock, *numbers: Scalar, wrote: Scalar | None = None) -> Scalar:
    """What the host answers each device, which is told besides its place among the axes that are
    left to the partitioner.

    JAX calls the host where no axis is left to the partitioner, so that here, where nothing is
    computed, none is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    left = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Auto
    )

    def call(*after: Scalar) -> Scalar:
        partner = lax.axis_index(left) if left else jnp.int32(0)
        # One array, since each that is handed over takes the host tens of microseconds.
        zero: Scalar = io_callback(
            clock,
            jax.ShapeDtypeStruct((), jnp.int32),
            jnp.stack([partner, *after[: len(numbers)]]),
            after[len(numbers) :],
        )
        return zero

    given = (*numbers, *(() if wrote is None else (wrote,)))
    if not left:
        return call(*given)
    whole = PartitionSpec()
    answered: Scalar = jax.shard_map(
        call, in_specs=whole, out_specs=whole, axis_names={*left}, check_vma=False
    )(*given)
    return answered


def _touched(leaves: Leaves) -> Scalar:
    """A number that depends on all of them: the sum of one of each."""
    corners = [
        leaf[(0,) * leaf.ndim]
        for leaf in leaves
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    return sum((jnp.real(corner).astype(jnp.float32) for corner in corners), start=jnp.float32(0))
