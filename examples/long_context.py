"""Trains on sequences that are too long for a device: slices of them are the microbatches, and
keys and values of earlier slices stay on the devices.  Run: python examples/long_context.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpipe as jp
from gpt.devices import find

DEVICES, SEQUENCES, SLICES, TIME, WIDTH, VOCAB, STEPS = 4, 2, 8, 512, 32, 61, 4
LIMIT = 4_000_000  # bytes of a device


def embed(params: Any, microbatch: Any) -> Any:
    return params[microbatch["tokens"]]


def block(params: Any, x: Any, *, ctx: Any) -> Any:
    """Causal attention to the keys and values of all slices so far, and an MLP."""
    keys = ctx.append("keys", x @ params["k"])
    values = ctx.append("values", x @ params["v"])
    at = ctx.offset + jnp.arange(x.shape[1])
    scores = jnp.einsum("rtd,rsd->rts", x @ params["q"], keys) / WIDTH**0.5
    seen = at[:, None] >= jnp.arange(keys.shape[1])
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    x = x + jnp.einsum("rts,rsd->rtd", weights, values) @ params["o"]
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def loss(params: Any, x: Any, microbatch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ params, microbatch["targets"]).mean()


def main() -> None:
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    model = jp.Model(block, first=embed, last=loss, time=("tokens", "targets"))
    keys = jax.random.split(jax.random.key(0), 9)
    shapes = dict.fromkeys(("q", "k", "v", "o", "up", "down"), (DEVICES, WIDTH, WIDTH))
    canonical = {
        "first": jax.random.normal(keys[6], (VOCAB, WIDTH)),
        "stages": {
            name: jax.random.normal(key, shape) / WIDTH**0.5
            for (name, shape), key in zip(shapes.items(), keys, strict=False)
        },
        "last": jax.random.normal(keys[7], (WIDTH, VOCAB)) / WIDTH**0.5,
    }
    text = jax.random.randint(keys[8], (SEQUENCES, TIME + 1), 0, VOCAB)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}

    def pipeline(slices: int) -> jp.Pipeline:
        schedule = jp.schedules.build(
            "1f1b", devices=DEVICES, microbatches=SEQUENCES * slices, slices=slices
        )
        return jp.Pipeline(model, schedule, mesh)

    needs = {}
    for slices in (1, SLICES):
        pipe = pipeline(slices)
        found = jp.inspect.memory(pipe, pipe.place(canonical), batch)
        needs[slices] = found["total"]
        print(f"{slices} slices a sequence: {found['total']:,} bytes of a device")
    assert needs[SLICES] <= LIMIT < needs[1], needs

    pipe, optimizer = pipeline(SLICES), optax.adam(1e-2)
    params = pipe.place(canonical)
    state = pipe.init(optimizer, params)

    @pipe.jit
    def step(params: Any, state: Any) -> tuple[Any, Any, Any]:
        value, grads = pipe.value_and_grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def whole(params: Any, state: Any) -> tuple[Any, Any, Any]:
        """The same step on whole sequences, by plain JAX."""
        value, grads = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=SEQUENCES))(
            params
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    plain, plain_state = canonical, optimizer.init(canonical)
    for i in range(STEPS):
        params, state, value = step(params, state)
        plain, plain_state, wanted = whole(plain, plain_state)
        print(f"step {i + 1}: loss {value:.4f}, of whole sequences {wanted:.4f}")
        assert abs(value - wanted) < 1e-3 * wanted
    print("the losses of whole sequences, in a memory that these exceed")


if __name__ == "__main__":
    main()
