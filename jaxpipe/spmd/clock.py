"""Times of blocks while a step runs: the host is called at the begin and the end of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback

from ..arrays import Scalar
from ..program.records import map_fields
from ..stage.job import Clock
from .block import Block
from .share import RunDeferred, RunFirstGradient, RunFirstShare, RunShare
from .stage_block import StageBlock
from .state import State


@dataclass(frozen=True)
class Clocked(Block):
    """A block that tells the host when it begins and when it is over; slower for two calls, and else the same.

    `stage` is the number that the table gives the action: of its stage, or of the device where that does a share of its own.
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
        zero = io_callback(self.clock, jax.ShapeDtypeStruct((), jnp.int32), jnp.int32(0), *what)
        # All that the block reads is found by its record, which depends on the first call, and the second call depends on what it wrote.
        after = replace(self.block, row=map_fields(lambda number: number + zero, row)).run(state)
        written = [_corner(leaf) for leaf in jax.tree.leaves(after.like(self.block.writes(state)))]
        io_callback(self.clock, jax.ShapeDtypeStruct((), jnp.int32), jnp.int32(1), *what, *[w for w in written if w is not None])
        return after


def _corner(leaf: Any) -> Any:
    """One number of an array; None where it has none."""
    if not leaf.size or not jnp.issubdtype(leaf.dtype, jnp.number):
        return None
    return leaf[(0,) * leaf.ndim]
