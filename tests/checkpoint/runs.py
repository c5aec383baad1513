"""Short runs of one small model, pipelined by any table or not at all, that can stop and go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpipe as jp
from tests.flat import flat_pipeline
from tests.oracle import oracle_value_and_grad

LAYERS, WIDTH, ROWS, MICROBATCHES = 8, 6, 2, 8
Step = Callable[[Any, int], tuple[Any, float]]


def first(params: Any, microbatch: Any, *, shared: Any) -> Any:
    return jnp.tanh(microbatch["x"] @ shared["table"] + params["bias"])


def stage(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None), x, params)[0]


def last(params: Any, x: Any, microbatch: Any, *, shared: Any) -> Any:
    return jnp.mean(jnp.square(x @ params["head"] @ shared["table"].T - microbatch["y"]))


def canonical(stages: int) -> dict[str, Any]:
    """The same numbers for every number of stages."""
    rng = np.random.default_rng(0)
    layers = LAYERS // stages
    return {
        "first": {"bias": rng.standard_normal(WIDTH)},
        "stages": {
            "w": rng.standard_normal((LAYERS, WIDTH, WIDTH)).reshape(stages, layers, WIDTH, WIDTH)
            / 3,
            "b": rng.standard_normal((LAYERS, WIDTH)).reshape(stages, layers, WIDTH),
        },
        "last": {"head": rng.standard_normal((WIDTH, WIDTH))},
        "shared": {"table": rng.standard_normal((WIDTH, WIDTH))},
    }


def batch(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(100 + step)
    rows = ROWS * MICROBATCHES
    return {"x": rng.standard_normal((rows, WIDTH)), "y": rng.standard_normal((rows, WIDTH))}


def matrices(params: Any) -> Any:
    """True for what weight decay is for."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) in ("w", "head"), params
    )


def optimizer() -> optax.GradientTransformation:
    """Two moments, a mask, and a clip that bites in some of the steps."""
    return optax.chain(
        optax.clip_by_global_norm(3.0), optax.adamw(0.02, weight_decay=0.1, mask=matrices)
    )


def pipeline(name: str, devices: int, *, chunks: int | None = None, **options: Any) -> jp.Pipeline:
    schedule = options.pop("schedule", None) or jp.schedules.build(
        name, devices=devices, microbatches=MICROBATCHES, chunks=chunks
    )
    mesh = options.pop("mesh", None) or Mesh(np.array(jax.devices()[:devices]), ("pipe",))
    return flat_pipeline(stage, schedule=schedule, mesh=mesh, first=first, last=last, **options)


def explicit_mesh(devices: int) -> Mesh:
    """A mesh of explicit axes, as `jax.make_mesh` makes them; those of `pipeline` are automatic."""
    return jax.make_mesh((devices,), ("pipe",), devices=jax.devices()[:devices])


@cache
def _plain_value_and_grad() -> Any:
    step = {"first": first, "stage": stage, "last": last, "microbatches": 1}
    return jax.jit(lambda p, b: oracle_value_and_grad(p, b, **step))


def start(
    pipe: jp.Pipeline | None, tx: optax.GradientTransformation, stages: int = 1
) -> dict[str, Any]:
    """The state before the first step; without a pipeline the model is one of `stages` stages."""
    tree = canonical(stages if pipe is None else pipe.schedule.num_stages)
    params = jax.tree.map(jnp.asarray, tree) if pipe is None else pipe.place(tree)
    return {"params": params, "opt_state": tx.init(params)}


def stepper(pipe: jp.Pipeline | None, tx: optax.GradientTransformation) -> Step:
    """(state, number of the step) -> (state, loss)."""
    value_and_grad = _plain_value_and_grad() if pipe is None else pipe.value_and_grad

    @jax.jit
    def update(state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    def step(state: Any, number: int) -> tuple[Any, float]:
        loss, grads = value_and_grad(state["params"], batch(number))
        return update(state, grads), float(loss)

    return step


def run(step: Step, state: Any, numbers: range) -> tuple[Any, list[float]]:
    losses = []
    for number in numbers:
        state, loss = step(state, number)
        losses.append(loss)
    return state, losses
