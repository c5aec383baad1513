"""The circular pipeline of praxis and MaxText: all stages in one vmap, a buffer sharded over
devices that is rotated each iteration.

The partitioner turns the rotation into a collective permute.  A device holds V stages, P apart, and
a microbatch goes round V times; forward and backward are two scans of M V + P - 1 iterations, with
every iteration's residuals kept in between.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .model import Model, PyTree, Step, microbatches_of


def place_circular(params: PyTree, *, mesh: Mesh, axis: str = "pipe") -> PyTree:
    """Canonical parameters with stages' leaves as [V, P, ...], spread over the devices."""
    laps = jax.NamedSharding(mesh, PartitionSpec(None, axis))
    everywhere = jax.NamedSharding(mesh, PartitionSpec())
    devices = mesh.shape[axis]
    stages = jax.tree.map(lambda leaf: leaf.reshape(-1, devices, *leaf.shape[1:]), params["stages"])
    return {**jax.device_put(params, everywhere), "stages": jax.device_put(stages, laps)}


def circular(model: Model, *, mesh: Mesh, microbatches: int, axis: str = "pipe") -> Step:
    """A step (placed parameters, batch) -> (mean loss, gradients laid out like them); at least as
    many microbatches as devices.
    """
    devices = mesh.shape[axis]
    rounds = model.stages // devices
    assert microbatches >= devices, "a microbatch must be back before its next round begins"
    spread = jax.NamedSharding(mesh, PartitionSpec(axis))
    places = jnp.arange(devices)

    def weights_at(stages: PyTree, t: Any) -> PyTree:
        """[V, P, ...] -> [P, ...]: each device's stage of the round that its microbatch is in."""
        if rounds == 1:
            return jax.tree.map(lambda leaf: leaf[0], stages)
        which = jnp.clip((t - places) // microbatches, 0, rounds - 1)
        return jax.tree.map(
            lambda leaf: jax.vmap(lambda own, v: own[v], in_axes=(1, 0))(leaf, which), stages
        )

    def iterate(stages: PyTree, xs: Any) -> Any:
        """xs [M, ...] -> the last stage's outputs [M, ...]."""

        def iteration(carry: tuple[Any, Any], t: Any) -> tuple[tuple[Any, Any], None]:
            buffer, done = carry
            m = t % microbatches
            entering = jnp.where(t < microbatches, xs[m], done[m])
            buffer = lax.with_sharding_constraint(buffer.at[0].set(entering), spread)
            ys = lax.with_sharding_constraint(
                jax.vmap(model.stage)(weights_at(stages, t), buffer), spread
            )
            done = done.at[(t - devices + 1) % microbatches].set(ys[-1])
            return (jnp.roll(ys, 1, axis=0), done), None

        buffer = lax.with_sharding_constraint(jnp.zeros((devices, *xs.shape[1:]), xs.dtype), spread)
        (_, done), _ = lax.scan(
            iteration, (buffer, jnp.zeros_like(xs)), jnp.arange(microbatches * rounds + devices - 1)
        )
        return done

    def loss(params: PyTree, batch: PyTree) -> Any:
        parts = lax.with_sharding_constraint(microbatches_of(batch, microbatches), spread)
        xs = jax.vmap(model.first, in_axes=(None, 0))(params["first"], parts)
        ys = lax.with_sharding_constraint(iterate(params["stages"], xs), spread)
        return jnp.mean(jax.vmap(model.last, in_axes=(None, 0, 0))(params["last"], ys, parts))

    return jax.value_and_grad(loss)
