"""Times of blocks while a step runs: each block calls the host at its begin and its end."""

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
from .pools import State


def clocked(
    block: Block,
    what: tuple[Scalar, ...],
    clock: Clock,
    axis: str,
    data_axes: tuple[str, ...],
) -> Block:
    """The same block, with a call of the host at its begin and one at its end.

    `what` is the kind, the number before it in the table, and the microbatch.
    """

    def run(state: State) -> State:
        shard = lax.axis_index(data_axes) if data_axes else jnp.int32(0)
        numbers = (shard, lax.axis_index(axis), *what)
        zero = _call_host(clock, jnp.int32(0), *numbers)
        # The block is in a loop whose predicate is the answer of the first call.  A block whose
        # pools have one slot each needs no number of its record, so XLA would run it before its
        # begin is noted.  The second call depends on the values that the block wrote.
        after = run_where(Presence.SOMETIMES, zero == 0, block, state)
        _call_host(
            clock, jnp.int32(1), *numbers, wrote=_touched(jax.tree.leaves(block.part(after)))
        )
        return after

    return Block(block.changes, run)


def _call_host(clock: Clock, *numbers: Scalar, wrote: Scalar | None = None) -> Scalar:
    """Call the host from each device and return its answer.  The host also gets the device's place
    along the axes that are left to the partitioner.

    JAX cannot call the host where an axis is left to the partitioner.  Nothing is computed here, so
    the call is mapped over those axes too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    left = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Auto
    )

    def call(*after: Scalar) -> Scalar:
        partner = lax.axis_index(left) if left else jnp.int32(0)
        # One array, because each array takes the host tens of microseconds.
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
    """A number that depends on all leaves: the sum of one number of each."""
    corners = [
        leaf[(0,) * leaf.ndim]
        for leaf in leaves
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    return sum((jnp.real(corner).astype(jnp.float32) for corner in corners), start=jnp.float32(0))
