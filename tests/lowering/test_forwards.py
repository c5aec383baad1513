"""Forwards alone need no derivative: models that JAX cannot differentiate are evaluated, and their
loops run only where the table has an action.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64

M, WIDTH = 4, 3
draw = np.random.default_rng(0).standard_normal
BATCH = {"x": draw((2 * M, WIDTH))}


def until_large(params: Any, x: Any) -> Any:
    """Adaptive depth: it never ends on zeros, which a device without an action would have."""
    more = lambda x: jnp.mean(x**2) < 4.0  # noqa: E731
    return jax.lax.while_loop(more, lambda x: x + jnp.tanh(x @ params["w"]), x)


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(x**2)


def looped_first(params: Any, microbatch: Any) -> Any:
    return until_large(params, microbatch["x"])


def looped_last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(until_large(params, 0.1 * x) ** 2)


def params_of(stages: int) -> Any:
    own = lambda *shape: {"w": np.random.default_rng(1).standard_normal((*shape, WIDTH, WIDTH))}  # noqa: E731
    return {"first": own(), "stages": own(stages), "last": own()}


@pytest.mark.parametrize(
    ("name", "how", "executor"),
    [
        ("gpipe", {"forward_only": True}, None),
        ("gpipe", {"forward_only": True}, EagerExecutor()),
        ("1f1b", {}, None),
        ("zbv", {}, None),
    ],
)
def test_a_model_with_loops_of_any_length_is_evaluated(
    name: str, how: dict[str, Any], executor: Any
) -> None:
    schedule = jp.schedules.build(name, devices=2, microbatches=M, **how)
    model = jp.Model(until_large, first=looped_first, last=looped_last)
    pipe = jp.Pipeline(model, schedule, mesh_of(2), executor=executor)
    params = params_of(schedule.num_stages)
    placed, wanted = pipe.place(params), model.loss(params, BATCH, microbatches=M)
    assert abs(pipe.evaluate(placed, BATCH) - wanted) <= FLOAT64 * abs(wanted)
    assert abs(pipe.loss(placed, BATCH) - wanted) <= FLOAT64 * abs(wanted)
    rows = [looped_first(params["first"], {"x": BATCH["x"][2 * m : 2 * m + 2]}) for m in range(M)]
    for weights in params["stages"]["w"]:
        rows = [until_large({"w": weights}, x) for x in rows]
    outputs = jax.device_get(pipe.outputs(placed, BATCH))
    assert np.max(np.abs(outputs - np.concatenate(rows))) <= FLOAT64 * np.max(np.abs(outputs))


def test_a_loop_without_a_gradient_runs_in_steps_too() -> None:
    """Its trips are counted, and x does not depend on them by a gradient."""

    def stage(params: Any, x: Any) -> Any:
        held = jax.lax.stop_gradient((params, x))
        return jnp.tanh(x @ params["w"]) + until_large(*held)

    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    model = jp.Model(stage, first=lambda p, mb: mb["x"], last=last)
    pipe = jp.Pipeline(model, schedule, mesh_of(2))
    params = {**params_of(2), "first": {}, "last": {}}
    loss, grads = pipe.value_and_grad(pipe.place(params), BATCH)
    wanted = jax.value_and_grad(lambda p: model.loss(p, BATCH, microbatches=M))(params)
    found = loss, pipe.canonical(grads)["stages"]["w"]
    for one, other in zip(found, (wanted[0], wanted[1]["stages"]["w"]), strict=True):
        assert np.max(np.abs(one - other)) <= FLOAT64 * np.max(np.abs(other))
