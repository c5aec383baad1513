"""A small GPT: an embedding by lookup, layers in a scan, a head that may share the loss with all
devices; and its plain functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp

VOCAB, WIDTH, TOKENS, ROWS, LAYERS = 64, 32, 16, 2, 8
NAMES = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
NAMES |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
Attend = Callable[[Any, Any, Any], Any]


def embed(params: Any, microbatch: Any) -> Any:
    return params["table"][microbatch["tokens"]]


def head(params: Any, x: Any, microbatch: Any) -> Any:
    logits = jax.nn.log_softmax(x @ params["table"].T)
    return -jnp.mean(jnp.take_along_axis(logits, microbatch["targets"][..., None], axis=-1))


def mixed(q: Any, k: Any, v: Any, offset: Any = 0) -> Any:
    """Causal attention of queries from this position on."""
    at = offset + jnp.arange(q.shape[1])
    seen = at[:, None] >= jnp.arange(k.shape[1])
    scores = jnp.einsum("rtd,rsd->rts", q, k) / WIDTH**0.5
    return jnp.einsum("rts,rsd->rtd", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)


def layer(p: Any, x: Any, attend: Attend = mixed) -> Any:
    x = x + attend(x @ p["q"], x @ p["k"], x @ p["v"]) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def block(params: Any, x: Any) -> Any:
    """A stage."""
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def sliced_block(params: Any, x: Any, *, ctx: Any) -> Any:
    """A stage of one layer that is given a slice of its sequences at a time."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return mixed(q, ctx.append("keys", k), ctx.append("values", v), ctx.offset)

    return layer(jax.tree.map(lambda leaf: leaf[0], params), x, attend)


PLAIN: dict[str, Any] = {"first": embed, "stage": block, "last": head, "microbatches": 1}


def model(*, spread: bool = False, sliced: bool = False) -> jp.Model:
    """The pipeline's model."""
    if spread:
        return jp.Model(block, first=jp.VocabEmbedding(), last=jp.VocabHead())
    if sliced:
        return jp.Model(sliced_block, first=embed, last=head, time=("tokens", "targets"))
    return jp.Model(block, first=embed, last=head)


def weights(stages: int, layers: int = LAYERS) -> dict[str, Any]:
    """Canonical parameters: the same numbers for every number of stages."""
    draw = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return draw.standard_normal(shape) / shape[-1] ** 0.5

    stacks = {name: numbers(layers, *shape) for name, shape in NAMES.items()}
    return {
        "first": {"table": numbers(VOCAB, WIDTH)},
        "stages": {k: v.reshape(stages, -1, *v.shape[1:]) for k, v in stacks.items()},
        "last": {"table": numbers(VOCAB, WIDTH)},
    }


def batch(rows: int, seed: int) -> dict[str, Any]:
    """Words, and those that follow them; words occur more than once."""
    words = np.random.default_rng(seed).integers(0, VOCAB, (rows, TOKENS + 1), np.int32)
    return {"tokens": words[:, :-1], "targets": words[:, 1:]}
