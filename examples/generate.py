"""Generates text through a pipeline for several groups of requests: prompts of different lengths in
chunks, then a token at a time, with the keys and values on the devices of their stages.

Both tables have forwards alone.  A group of requests is a sequence, and a chunk of its prompts is a
slice.  `ctx.append` writes the keys and values of a call into a cache, which the next call goes on
from.  The same tokens come from each request by itself, without a pipeline and without a cache.
Run: python examples/generate.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from gpt.devices import find

DEVICES, GROUPS, ROWS = 4, 6, 2  # ROWS requests in a group
CHUNK, CHUNKS, NEW = 4, 2, 5  # tokens of a chunk, chunks of the longest prompt, tokens to generate
VOCAB, WIDTH, HEADS = 17, 16, 2
PROMPT, LENGTH = CHUNK * CHUNKS, CHUNK * CHUNKS + NEW


def embed(params: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
    """Tokens [rows, time] -> x.  Prompts end together, so a request begins at its own `start`."""
    start, tokens = microbatch["start"], microbatch["tokens"]
    at = ctx.offset + jnp.arange(tokens.shape[1]) - start[:, None]
    h = params["tokens"][tokens] + params["positions"][jnp.maximum(at, 0)]
    return {"h": h, "start": start}


def layer(params: Any, x: Any, *, ctx: jp.Context) -> Any:
    """Attention to the tokens of a request up to now, and an MLP."""
    h = x["h"]

    def split(name: str) -> Any:
        return (h @ params[name]).reshape(*h.shape[:2], HEADS, -1)

    keys, values = ctx.append("keys", split("k")), ctx.append("values", split("v"))
    at, there = ctx.offset + jnp.arange(h.shape[1]), jnp.arange(keys.shape[1])
    seen = (there <= at[:, None]) & (there >= x["start"][:, None, None])
    scores = jnp.einsum("rthd,rshd->rhts", split("q"), keys) / (WIDTH // HEADS) ** 0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
    h = h + jnp.einsum("rhts,rshd->rthd", weights, values).reshape(h.shape) @ params["out"]
    return {**x, "h": h + jnp.tanh(h @ params["up"]) @ params["down"]}


@jax.jit
def next_token(params: Any, head: Any, tokens: Any, last: Any) -> Any:
    """The token after the one at `last` of tokens [LENGTH], by plain JAX."""
    ctx = jp.Context(jnp.int32(0), jnp.int32(0), offset=0)
    batch = {"tokens": tokens[None], "start": jnp.zeros(1, jnp.int32)}
    x = embed(params["first"], batch, ctx=ctx)
    for stage in range(DEVICES):
        x = layer(jax.tree.map(lambda leaf, s=stage: leaf[s], params["stages"]), x, ctx=ctx)
    return jnp.argmax(x["h"][0, last] @ head)


def by_itself(params: Any, head: Any, prompt: list[int]) -> list[int]:
    """The tokens of one request: all tokens from the start each time."""
    found = [*prompt]
    for last in range(len(prompt) - 1, len(prompt) + NEW - 1):
        tokens = jnp.array([*found, *[0] * (LENGTH - len(found))])
        found.append(int(next_token(params, head, tokens, last)))
    return found[len(prompt) :]


def main() -> None:
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    model = jp.Model(layer, first=embed, time=("tokens",))

    def forwards(slices: int) -> jp.Pipeline:
        """Groups go through the stages one after the other, and so fill them."""
        table = jp.schedules.build(
            "gpipe",
            devices=DEVICES,
            microbatches=GROUPS * slices,
            slices=slices,
            forward_only=True,
        )
        print(table)
        return jp.Pipeline(model, table, mesh)

    prefill, decode = forwards(CHUNKS), forwards(1)
    k = jax.random.split(jax.random.key(0), 9)
    stages = {
        name: jax.random.normal(key, (DEVICES, WIDTH, WIDTH)) / WIDTH**0.5
        for name, key in zip(("q", "k", "v", "out", "up", "down"), k, strict=False)
    }
    first = {
        "tokens": jax.random.normal(k[6], (VOCAB, WIDTH)),
        "positions": jax.random.normal(k[7], (LENGTH, WIDTH)) / 2,
    }
    canonical = {"first": first, "stages": stages}
    head = jax.random.normal(k[8], (WIDTH, VOCAB))
    params = prefill.place(canonical)

    rng = np.random.default_rng(0)
    lengths = rng.integers(1, PROMPT + 1, GROUPS * ROWS)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    start = PROMPT - lengths
    padded = np.array([[0] * (PROMPT - len(prompt)) + prompt for prompt in prompts])

    cache = prefill.empty_cache(params, {"tokens": padded, "start": start}, length=LENGTH)
    out, cache = prefill.outputs(params, {"tokens": padded, "start": start}, cache=cache)
    found = [jnp.argmax(out["h"][:, -1] @ head, axis=-1)]

    @decode.jit
    def step(cache: Any, tokens: Any, position: Any) -> tuple[Any, Any]:
        """The newest token of each request -> the next one."""
        batch = {"tokens": tokens[:, None], "start": start}
        out, cache = decode.outputs(params, batch, cache=cache, position=position)
        return jnp.argmax(out["h"][:, -1] @ head, axis=-1), cache

    for position in range(PROMPT, LENGTH - 1):
        token, cache = step(cache, found[-1], position)
        found.append(token)

    tokens = np.stack(found, axis=1).tolist()
    for prompt, new in zip(prompts, tokens, strict=True):
        print(*prompt, "->", *new)
        assert new == by_itself(canonical, head, prompt)
    print("the same tokens as of each request by itself, without a pipeline")


if __name__ == "__main__":
    main()
