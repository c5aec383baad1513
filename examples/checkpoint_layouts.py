"""Save with 1F1B on four devices; go on with ZB-V on two, and without a pipeline at all, with the
same losses.

    python examples/checkpoint_layouts.py        four virtual devices of the CPU

Checkpoints hold the model's own layout: layers in model order, of parameters and of Adam's moments.
"""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints

LAYERS, WIDTH, ROWS, MICROBATCHES, SAVED, STEPS = 8, 16, 32, 8, 5, 10
Tree = Any

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)


def first(params: Tree, microbatch: Tree) -> jax.Array:
    return microbatch["x"] @ params["in"]


def stage(params: Tree, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]) @ p["v"], None), x, params)[0]


def last(params: Tree, x: jax.Array, microbatch: Tree) -> jax.Array:
    return jnp.mean((x @ params["out"] - microbatch["y"]) ** 2)


def weights(stages: int) -> Tree:
    """Leaves of stages are [S, layers of a stage, ...]; the numbers are the same for every S."""
    rng = np.random.default_rng(0)
    layers = {name: rng.normal(0, WIDTH**-0.5, (LAYERS, WIDTH, WIDTH)) for name in ("w", "v")}
    ends = {
        "first": {"in": rng.normal(0, 0.5, (4, WIDTH))},
        "last": {"out": rng.normal(0, WIDTH**-0.5, (WIDTH, 2))},
    }
    return {
        **ends,
        "stages": jax.tree.map(lambda leaf: leaf.reshape(stages, -1, WIDTH, WIDTH), layers),
    }


def rows(step: int) -> Tree:
    x = np.random.default_rng(step).normal(size=(ROWS, 4))
    return {"x": x, "y": np.stack([np.sin(x.sum(axis=1)), x[:, 0] * x[:, 1]], axis=1)}


def plain_value_and_grad(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """The same model without a pipeline, as one stage."""

    def loss(params: Tree) -> jax.Array:
        layers = jax.tree.map(lambda leaf: leaf[0], params["stages"])
        return last(params["last"], stage(layers, first(params["first"], batch)), batch)

    return jax.value_and_grad(loss)(params)


def pipeline(name: str, devices: int) -> jp.Pipeline:
    schedule = jp.schedules.build(name, devices=devices, microbatches=MICROBATCHES)
    mesh = jax.make_mesh((devices,), ("pipe",), devices=jax.devices()[:devices])
    return jp.Pipeline(jp.Model(stage, first=first, last=last), schedule, mesh)


def train(pipe: jp.Pipeline | None, folder: str, steps: int) -> list[float]:
    """Go on from the newest checkpoint in `folder`, or start; save at the end.  Returns the losses
    of the steps done.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params = (
        jax.tree.map(jnp.asarray, weights(1))
        if pipe is None
        else pipe.place(weights(pipe.schedule.num_stages))
    )
    state = {"params": params, "opt_state": optimizer.init(params)}

    jit = jax.jit if pipe is None else pipe.jit

    @jit
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value_and_grad = plain_value_and_grad if pipe is None else pipe.value_and_grad
        loss, grads = value_and_grad(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    losses, start = [], 0
    with Checkpoints(folder, pipe, layer_axis=True) as checkpoints:
        if checkpoints.latest is not None:
            start, state = checkpoints.restore(state)
        for number in range(start, steps):
            state, loss = step(state, rows(number))
            losses.append(float(loss))
        if start == 0:  # the later runs all go on from here
            checkpoints.save(steps, state)
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = train(pipeline("1f1b", 4), f"{folder}/whole", STEPS)
        begin = train(pipeline("1f1b", 4), f"{folder}/run", SAVED)
        assert begin == whole[:SAVED]
        print("losses of 1f1b on 4 devices:", " ".join(f"{loss:.6f}" for loss in whole))
        for name, pipe in [
            ("1f1b, 4 devices", pipeline("1f1b", 4)),
            ("zbv, 2 devices", pipeline("zbv", 2)),
            ("plain", None),
        ]:
            after = train(pipe, f"{folder}/run", STEPS)
            worst = max(abs(a - b) / b for a, b in zip(after, whole[SAVED:], strict=True))
            print(f"resumed after step {SAVED} by {name}: differs by {worst:.1e}, relative")
            # float64: ten steps of rounding, which Adam's division by small roots enlarges.
            assert worst <= (0 if name.startswith("1f1b") else 1e-11)


if __name__ == "__main__":
    main()
