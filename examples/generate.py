"""Generates text through a pipeline with a cache of keys and values, a token at a time, and without
one: the same tokens.

A stage that takes `state` by keyword and returns it changed keeps it from step to step: here, the
keys and values of the tokens so far. Each microbatch has its own rows of the cache, which
`ctx.microbatch` finds. Run: python examples/generate.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jaxpipe as jp
from gpt.devices import find

DEVICES, MICROBATCHES, ROWS, VOCAB, WIDTH, HEADS, LENGTH, PROMPT = 4, 2, 4, 17, 16, 2, 12, 3


def first(params: Any, microbatch: Any) -> Any:
    """Tokens [rows, time] at positions [rows, time] -> their embeddings."""
    return {
        "h": params["tokens"][microbatch["tokens"]] + params["positions"][microbatch["at"]],
        "at": microbatch["at"],
    }


def attend(params: Any, h: Any, keys: Any, values: Any, visible: Any) -> Any:
    """Attention of h [rows, time, width] to keys and values [rows, seen, width]; visible [rows,
    time, seen].
    """

    def split(a: Any) -> Any:
        return a.reshape(*a.shape[:2], HEADS, -1)

    scores = (
        jnp.einsum("rthd,rshd->rhts", split(h @ params["q"]), split(keys)) / (WIDTH // HEADS) ** 0.5
    )
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30))
    return jnp.einsum("rhts,rshd->rthd", weights, split(values)).reshape(h.shape) @ params["out"]


def whole(params: Any, x: Any) -> Any:
    """A stage that is given all tokens: one layer."""
    h, at = x["h"], x["at"]
    h = h + attend(params, h, h @ params["k"], h @ params["v"], at[:, None, :] <= at[:, :, None])
    return {**x, "h": h + jnp.tanh(h @ params["up"]) @ params["down"]}


def cached(params: Any, x: Any, *, state: Any, ctx: Any) -> Any:
    """The same layer, given the newest token alone; state holds keys and values [microbatches,
    rows, LENGTH, width] of those before.
    """
    h, at = x["h"], x["at"]
    position = at[0, 0]
    new = {
        name: jax.lax.dynamic_update_slice(
            leaf, (h @ params[name])[None], (ctx.microbatch, 0, position, 0)
        )
        for name, leaf in state.items()
    }
    keys, values = (new[name][ctx.microbatch] for name in ("k", "v"))
    h = h + attend(params, h, keys, values, jnp.arange(LENGTH)[None, None, :] <= at[:, :, None])
    return {**x, "h": h + jnp.tanh(h @ params["up"]) @ params["down"]}, new


def main() -> None:
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    schedule = jp.schedules.build("1f1b", devices=DEVICES, microbatches=MICROBATCHES)
    plain, quick = (
        jp.Pipeline(jp.Model(stage, first=first), schedule, mesh) for stage in (whole, cached)
    )
    normal = jax.random.normal
    k = jax.random.split(jax.random.key(0), 9)
    shapes = {"q": 1, "k": 1, "v": 1, "out": 1, "up": 1, "down": 1}
    canonical = {
        "first": {
            "tokens": normal(k[0], (VOCAB, WIDTH)),
            "positions": normal(k[1], (LENGTH, WIDTH)) / 2,
        },
        "stages": {
            name: normal(k[2 + i], (DEVICES, WIDTH, WIDTH)) / WIDTH**0.5
            for i, name in enumerate(shapes)
        },
    }
    head = normal(k[8], (WIDTH, VOCAB))
    params = plain.place(canonical)
    cache = {
        name: jnp.zeros((DEVICES, MICROBATCHES, ROWS // MICROBATCHES, LENGTH, WIDTH))
        for name in ("k", "v")
    }
    state = quick.place_state(cache)
    prompt = jax.random.randint(jax.random.key(1), (ROWS, PROMPT), 0, VOCAB)

    @quick.jit
    def step(state: Any, tokens: Any, position: Any) -> tuple[Any, Any]:
        """The newest token of each row -> the next one, and what the stages keep of it."""
        at = jnp.full(tokens.shape, position)
        out, state = quick.outputs(params, {"tokens": tokens, "at": at}, state=state)
        return jnp.argmax(out["h"][:, -1] @ head, axis=-1), state

    found = [prompt[:, t] for t in range(PROMPT)]
    for t in range(LENGTH - 1):
        token, state = step(state, found[t][:, None], t)
        if t + 1 >= PROMPT:
            found.append(token)

    wanted = prompt
    # each time all tokens from the start; only the last one's output is new
    for _ in range(LENGTH - PROMPT):
        at = jnp.broadcast_to(jnp.arange(wanted.shape[1]), wanted.shape)
        out = plain.outputs(params, {"tokens": wanted, "at": at})
        wanted = jnp.concatenate(
            [wanted, jnp.argmax(out["h"][:, -1] @ head, axis=-1)[:, None]], axis=1
        )

    tokens = jnp.stack(found, axis=1)
    print(tokens)
    assert jnp.array_equal(tokens, wanted), wanted
    print("the same tokens with a cache as without")


if __name__ == "__main__":
    main()
