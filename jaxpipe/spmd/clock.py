"""Times of blocks while a step runs: the host is called at the begin and the end of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, PartitionSpec

from ..arrays import Leaves, Scalar
from ..program.templates import Presence
from ..stage.job import Clock
from .block import Block, run_where
from .state import State


def clocked(
    block: Block,
    what: tuple[Scalar, ...],
    clock: Clock,
    axis: str,
    data_axes: tuple[str, ...],
) -> Block:
    """A block that tells the host when it begins and when it is over; slower for two calls, and
    else the same.

    `what`: the kind, the number before it in the table, and the microbatch.
    """

    def run(state: State) -> State:
        shard = lax.axis_index(data_axes) if data_axes else jnp.int32(0)
        numbers = (shard, lax.axis_index(axis), *what)
        zero = _call_host(clock, jnp.int32(0), *numbers)
        # In a loop whose predicate is what the first call answers: of a block that finds everything
        # in pools of one slot, XLA knows that it needs no number of its record, and would run it
        # before its begin is noted.  The second call depends on what the block wrote.
        after = run_where(Presence.SOMETIMES, zero == 0, block, state)
        _call_host(
            clock, jnp.int32(1), *numbers, wrote=_touched(jax.tree.leaves(block.part(after)))
        )
        return after

    return Block(block.changes, run)


def _call_host(clock: Clock, *numbers: Scalar, wrote: Scalar | None = None) -> Scalar:
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

    operands = (*numbers, *(() if wrote is None else (wrote,)))
    if not left:
        return call(*operands)
    whole = PartitionSpec()
    answered: Scalar = jax.shard_map(
        call, in_specs=whole, out_specs=whole, axis_names={*left}, check_vma=False
    )(*operands)
    return answered


def _touched(leaves: Leaves) -> Scalar:
    """A number that depends on all of them: the sum of one of each."""
    corners = [
        leaf[(0,) * leaf.ndim]
        for leaf in leaves
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    return sum((jnp.real(corner).astype(jnp.float32) for corner in corners), start=jnp.float32(0))
