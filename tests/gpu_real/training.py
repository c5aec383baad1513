"""Three steps of training, a checkpoint, and one more under another schedule, beside plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import optax

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.spmd.xla import Options
from tests.oracle import oracle_value_and_grad

from .cases import Case
from .model import PLAIN, batch, weights

STEPS = 3
BEFORE, AFTER = Case(schedule="1f1b"), Case(schedule="zbv")


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def update(step: Any, state: Any, rows: Any) -> tuple[Any, Any]:
    """The state after a step, and its loss."""
    loss, grads = step(state["params"], rows)
    updates, opt_state = optimizer().update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def started(pipe: jp.Pipeline) -> dict[str, Any]:
    params = pipe.place(weights(pipe.schedule.num_stages))
    return {"params": params, "opt_state": pipe.init(optimizer(), params)}


def pipelined(folder: str, options: Options | None) -> list[float]:
    """The losses of the steps, with the loss of `evaluate` behind them."""
    pipe, losses = BEFORE.pipeline(), []
    state = started(pipe)
    step = pipe.jit(
        lambda state, rows: update(pipe.value_and_grad, state, rows), compiler_options=options
    )
    for number in range(STEPS):
        state, loss = step(state, batch(BEFORE.rows, number))
        losses.append(float(loss))
    with Checkpoints(folder, pipe, layer_axis=True) as checkpoints:
        checkpoints.save(STEPS, state)
    other = AFTER.pipeline()
    with Checkpoints(folder, other, layer_axis=True) as checkpoints:
        _, state = checkpoints.restore(started(other))
    step = other.jit(
        lambda state, rows: update(other.value_and_grad, state, rows), compiler_options=options
    )
    state, loss = step(state, batch(AFTER.rows, STEPS))
    evaluate = other.jit(other.evaluate, compiler_options=options)
    return [*losses, float(loss), float(evaluate(state["params"], batch(AFTER.rows, STEPS + 1)))]


def plain() -> list[float]:
    """The same without a pipeline."""
    params, losses = weights(1), []
    state = {"params": params, "opt_state": optimizer().init(params)}
    for number in range(STEPS + 1):
        rows = batch(BEFORE.rows, number)
        state, loss = update(lambda p, b: oracle_value_and_grad(p, b, **PLAIN), state, rows)
        losses.append(float(loss))
    last, _ = oracle_value_and_grad(state["params"], batch(BEFORE.rows, STEPS + 1), **PLAIN)
    return [*losses, float(last)]


def training(folder: str, options: Options | None) -> dict[str, Any]:
    """How far the losses are from those of plain training."""
    with jax.default_device(jax.local_devices()[0]):
        wanted = plain()
    pairs = list(zip(pipelined(folder, options), wanted, strict=True))
    return {"loss": max(abs(a - b) / abs(b) for a, b in pairs)}
