"""What several examples do with their pipeline: compare it with the same model without one, then
train.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

import jaxpipe as jp
from parts.blocks import Tree, farthest


def compare_and_train(
    pipe: jp.Pipeline,
    plain_loss: Callable[[Tree, Tree], jax.Array],
    canonical: Tree,
    rows: Callable[[int], Tree],
    *,
    steps: int,
) -> list[float]:
    """Assert that loss and gradients are those of one device, then train: the loss of each step.

    `plain_loss(canonical, batch)` is the model without a pipeline; `rows(i)` is the batch of step
    i.
    """
    params, batch = pipe.place(canonical), rows(0)

    step = pipe.jit(pipe.value_and_grad)
    value, grads = step(params, batch)
    plain, plain_grads = jax.jit(jax.value_and_grad(plain_loss))(canonical, batch)
    worst = farthest(pipe.canonical(grads), plain_grads)
    print(
        f"against one device: loss {abs(float(value - plain)):.1e} apart, gradients {worst:.1e} "
        "of their largest entry"
    )
    assert abs(value - plain) < 1e-12
    assert worst < 1e-12  # float64, summed in another order

    optimizer = optax.adam(1e-2)
    opt_state = pipe.init(optimizer, params)
    update = jax.jit(optimizer.update)
    losses = []
    for i in range(steps):
        value, grads = step(params, rows(i))
        updates, opt_state = update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {steps}")
    return losses
