"""GPipe as tutorials write it: a scan over M + P - 1 ticks with a ppermute in each, differentiated
from outside by jax.grad.

Devices compute on zeros while they have nothing to do, and the scan keeps every tick's residuals.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .model import Model, PyTree, Step, microbatches_of


def place_stages(params: PyTree, *, mesh: Mesh, axis: str = "pipe") -> PyTree:
    """Canonical parameters, a stage on each device."""
    stages = jax.device_put(params["stages"], jax.NamedSharding(mesh, PartitionSpec(axis)))
    return {**jax.device_put(params, jax.NamedSharding(mesh, PartitionSpec())), "stages": stages}


def scan_permute(model: Model, *, mesh: Mesh, microbatches: int, axis: str = "pipe") -> Step:
    """A step (placed parameters, batch) -> (mean loss, gradients laid out like them); one stage a
    device.

    The embedding and the loss are outside the loop, spread over the devices by microbatch.
    """
    devices = mesh.shape[axis]
    spread = jax.NamedSharding(mesh, PartitionSpec(axis))

    def ticks(stages: PyTree, xs: Any) -> Any:
        """On each device: stages' leaves [1, ...], xs [M, ...] -> [1, M, ...], which is right on
        the last device.
        """
        mine = jax.tree.map(lambda leaf: leaf[0], stages)
        is_first = lax.axis_index(axis) == 0

        def tick(arrived: Any, t: Any) -> tuple[Any, Any]:
            own = lax.dynamic_index_in_dim(xs, jnp.minimum(t, microbatches - 1), keepdims=False)
            y = model.stage(mine, jnp.where(is_first, own, arrived))
            return lax.ppermute(y, axis, [(d, d + 1) for d in range(devices - 1)]), y

        _, ys = lax.scan(tick, jnp.zeros_like(xs[0]), jnp.arange(microbatches + devices - 1))
        return ys[devices - 1 :][None]

    def loss(params: PyTree, batch: PyTree) -> Any:
        parts = lax.with_sharding_constraint(microbatches_of(batch, microbatches), spread)
        xs = jax.vmap(model.first, in_axes=(None, 0))(params["first"], parts)
        specs = (PartitionSpec(axis), PartitionSpec())
        ys = jax.shard_map(
            ticks, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axis), check_vma=False
        )(params["stages"], xs)
        ys = lax.with_sharding_constraint(ys[-1], spread)
        return jnp.mean(jax.vmap(model.last, in_axes=(None, 0, 0))(params["last"], ys, parts))

    return jax.value_and_grad(loss)
