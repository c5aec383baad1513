"""The smallest whole program: an MLP of eight layers on four devices learns to tell two spirals
apart.

python examples/mlp.py            four GPUs, or four virtual devices of the CPU
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpipe as jp
from gpt.devices import find

DEVICES, LAYERS, WIDTH, MICROBATCHES, ROWS, STEPS = 4, 2, 32, 8, 256, 120  # LAYERS: of a stage


def first(params: Any, microbatch: Any) -> jax.Array:
    """Before the first stage: points [N, 2] -> [N, WIDTH]."""
    return microbatch["x"] @ params["w"]


def stage(params: Any, x: jax.Array) -> jax.Array:
    """One stage, two residual layers.  It is the same function for every stage; the parameters
    differ.
    """
    for i in range(LAYERS):
        x = x + jnp.tanh(x @ params["w"][i] + params["b"][i]) @ params["out"][i]
    return x


def last(params: Any, x: jax.Array, microbatch: Any) -> tuple[jax.Array, jax.Array]:
    """Behind the last stage: (loss, metric), each averaged over microbatches."""
    logits = (x @ params["w"])[:, 0]
    loss = optax.sigmoid_binary_cross_entropy(logits, microbatch["y"]).mean()
    return loss, jnp.mean((logits > 0) == (microbatch["y"] > 0.5))


def spirals(key: jax.Array) -> dict[str, jax.Array]:
    """A batch: points on two arms, and which arm each is on."""
    turn, arm = jax.random.split(key)
    t = jax.random.uniform(turn, (ROWS,), minval=0.5, maxval=3.0)
    y = jax.random.bernoulli(arm, 0.5, (ROWS,)).astype(jnp.float32)
    angle = 2.5 * t + jnp.pi * y
    return {"x": jnp.stack([t * jnp.cos(angle), t * jnp.sin(angle)], axis=1), "y": y}


def main() -> None:
    schedule = jp.schedules.build("1f1b", devices=DEVICES, microbatches=MICROBATCHES)
    print(schedule)
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last, has_metrics=True), schedule, mesh)

    keys = jax.random.split(jax.random.key(0), 4)
    params = pipe.place(
        {
            "first": {"w": jax.random.normal(keys[0], (2, WIDTH))},
            # Leaves of "stages" have a leading axis of stages, in model order.
            "stages": {
                "w": jax.random.normal(keys[1], (DEVICES, LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
                "b": jnp.zeros((DEVICES, LAYERS, WIDTH)),
                "out": jax.random.normal(keys[2], (DEVICES, LAYERS, WIDTH, WIDTH))
                * 0.5
                / WIDTH**0.5,
            },
            "last": {"w": jax.random.normal(keys[3], (WIDTH, 1)) / WIDTH**0.5},
        }
    )
    optimizer = optax.adam(3e-3)
    opt_state = pipe.init(optimizer, params)

    @pipe.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (loss, accuracy), grads = pipe.value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)  # grads are laid out like params
        return optax.apply_updates(params, updates), opt_state, loss, accuracy

    for i in range(STEPS):
        params, opt_state, loss, accuracy = step(params, opt_state, spirals(jax.random.key(i)))
        if i % 20 == 0 or i == STEPS - 1:
            print(f"step {i + 1:4d}   loss {float(loss):.4f}   accuracy {float(accuracy):.3f}")

    loss, accuracy = pipe.evaluate(params, spirals(jax.random.key(STEPS)))
    print(f"on new points: loss {float(loss):.4f}, accuracy {float(accuracy):.3f}")
    assert accuracy > 0.95, "the two spirals were not learned"


if __name__ == "__main__":
    main()
