"""Seven layers on four devices: the ends have fewer layers, since they also hold the embedding and
the head.

python examples/uneven_layout.py            four GPUs, or four virtual devices of the CPU

The layout comes from what each layer costs.  Parameters are stacked by kind of layer, so what one
layout trained, another goes on with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpipe as jp
from gpt.devices import find

DEVICES, LAYERS, WIDTH, VOCAB, TIME, MICROBATCHES, ROWS, STEPS = 4, 7, 32, 16, 12, 8, 64, 60


def embed(params: Any, microbatch: Any) -> jax.Array:
    """E: tokens [rows, TIME] -> [rows, TIME, WIDTH]."""
    return params["table"][microbatch["tokens"]] + params["position"]


def layer(params: Any, x: jax.Array, *, ctx: jp.Context) -> jax.Array:
    """t: one residual layer that mixes over time; `ctx.layer` counts through the whole model,
    whatever the layout.
    """
    mixed = jnp.tril(params["mix"]) @ x
    scale = 1 / jnp.sqrt(1.0 + ctx.layer)
    return x + scale * jax.nn.gelu(mixed @ params["up"]) @ params["down"]


def loss(params: Any, x: jax.Array, microbatch: Any) -> jax.Array:
    """L: the mean cross-entropy of the token two places back, which has to be remembered."""
    logits = x @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, 2:], microbatch["tokens"][:, :-2]
    )
    return losses.mean()


def parameters() -> dict[str, Any]:
    """Canonical: the layers stacked in model order, under their letter."""
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / WIDTH**0.5

    layers = {
        "mix": 0.3 * normal(keys[0], LAYERS, TIME, TIME),
        "up": normal(keys[1], LAYERS, WIDTH, 2 * WIDTH),
        "down": normal(keys[2], LAYERS, 2 * WIDTH, WIDTH),
    }
    first = {
        "table": jax.random.normal(keys[3], (VOCAB, WIDTH)),
        "position": jnp.zeros((TIME, WIDTH)),
    }
    return {
        "first": first,
        "stages": {"t": layers},
        "last": {"head": normal(keys[4], WIDTH, VOCAB)},
    }


def main() -> None:
    # An embedding and a head that cost as much as a layer each: what a stage does is what counts,
    # not how many layers it has.
    layout = jp.layouts.balanced_layout(
        f"Et*{LAYERS},L", {"E": 0.8, "t": 1.0, "L": 1.2}, devices=DEVICES
    )
    print(layout.table())
    functions = {"E": embed, "t": layer, "L": loss}
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    schedule = jp.schedules.build("1f1b", devices=DEVICES, microbatches=MICROBATCHES)
    pipe = jp.Pipeline(jp.Model(functions, layers=layout), schedule, mesh, layout=layout)
    params = pipe.place(parameters())
    optimizer = optax.adam(3e-3)
    opt_state = pipe.init(optimizer, params)

    @pipe.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = pipe.value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    def batch(i: int) -> dict[str, jax.Array]:
        return {"tokens": jax.random.randint(jax.random.key(100 + i), (ROWS, TIME), 0, VOCAB)}

    for i in range(STEPS):
        params, opt_state, value = step(params, opt_state, batch(i))
        if i % 20 == 0 or i == STEPS - 1:
            print(f"step {i + 1:3d}   loss {float(value):.4f}")

    # The same model under another layout and schedule: the parameters know nothing of either.
    zbv = jp.schedules.build("zbv", devices=2, microbatches=MICROBATCHES)
    other = jp.Pipeline(
        jp.Model(functions, layers="EtttttttL"),
        zbv,
        jax.make_mesh((2,), ("pipe",), devices=mesh.devices[:2]),
        layout="Et|tt|ttt|tL",
    )
    trained = jax.device_get(pipe.canonical(params))
    here, there = (
        float(pipe.evaluate(params, batch(STEPS))),
        float(other.evaluate(other.place(trained), batch(STEPS))),
    )
    print(
        f"on new tokens: loss {here:.6f}; with ZB-V on two devices and another layout {there:.6f}"
    )
    assert here < 0.5 * jnp.log(VOCAB), "nothing was learned"
    assert abs(here - there) < 1e-5, "the layout changed the numbers"


if __name__ == "__main__":
    main()
