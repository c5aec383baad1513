"""Every stage's forward and backward as a computation of its own, one after the other: what the
kernels cost without a pipeline.
"""

from __future__ import annotations

from typing import Any

import jax

from .model import Model, PyTree, Step, microbatches_of


def alone(model: Model, *, microbatches: int) -> Step:
    """A step (canonical parameters, batch) -> (loss, gradients) of the last microbatch; nothing is
    accumulated.
    """
    first, stage = (
        jax.jit(lambda *args, f=f: jax.vjp(f, *args)) for f in (model.first, model.stage)
    )
    last = jax.jit(jax.value_and_grad(model.last, argnums=(0, 1)))
    pull = jax.jit(lambda vjp, cotangent: vjp(cotangent))

    def step(params: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        parts = microbatches_of(batch, microbatches)
        own = [
            jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]) for s in range(model.stages)
        ]
        for m in range(microbatches):
            part = jax.tree.map(lambda leaf, m=m: leaf[m], parts)
            x, vjp = first(params["first"], part)
            vjps = [vjp]
            for weights in own:
                x, vjp = stage(weights, x)
                vjps.append(vjp)
            loss, (of_last, dx) = last(params["last"], x, part)
            found = []
            for vjp in reversed(vjps[1:]):
                dweights, dx = pull(vjp, dx)
                found.append(dweights)
            of_first = pull(vjps[0], dx)[0]
        return loss, {"first": of_first, "stages": found, "last": of_last}

    return step
