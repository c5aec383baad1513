"""Plain gradient accumulation on one device: a scan over microbatches, no pipeline."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .model import Model, PyTree, Step, microbatches_of


def accumulate(model: Model, *, microbatches: int) -> Step:
    """A step (canonical parameters, batch) -> (mean loss, gradients); the stages follow each other
    without a loop.
    """

    def loss_of(params: PyTree, microbatch: PyTree) -> Any:
        x = model.first(params["first"], microbatch)
        for s in range(model.stages):
            x = model.stage(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), x)
        return model.last(params["last"], x, microbatch) / microbatches

    def step(params: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        def one(total: PyTree, microbatch: PyTree) -> tuple[PyTree, None]:
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(loss_of)(params, microbatch)
            ), None

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return lax.scan(one, nothing, microbatches_of(batch, microbatches))[0]

    return step
