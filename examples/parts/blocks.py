"""Small pieces of transformers, and a model of layers without a pipeline: what the examples of
unlike layers are made of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any  # a pytree of arrays
WIDTH, HEADS = 16, 2


def norm(params: Tree, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params["scale"]


def attend(params: Tree, x: jax.Array, source: jax.Array, *, bias: Any = 0.0) -> jax.Array:
    """x [N, T, d] looks at source [N, S, d]; `bias` [heads or 1, T, S] is added to the scores, -inf
    for what is not to be seen.
    """
    q, k, v = (
        (u @ params[name]).reshape(*u.shape[:2], HEADS, -1)
        for u, name in ((norm(params, x), "q"), (source, "k"), (source, "v"))
    )
    scores = jnp.einsum("nqhf,nkhf->nhqk", q, k) / math.sqrt(q.shape[-1]) + bias
    return (
        x
        + jnp.einsum("nhqk,nkhf->nqhf", jax.nn.softmax(scores), v).reshape(*x.shape[:2], -1)
        @ params["out"]
    )


def attend_to_itself(params: Tree, x: jax.Array, *, bias: Any = 0.0) -> jax.Array:
    return attend(params, x, norm(params, x), bias=bias)


def feed(params: Tree, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(norm(params, x) @ params["up"]) @ params["down"]


def causal(tokens: int) -> jax.Array:
    """The bias under which no token sees a later one."""
    return jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), 0.0, -jnp.inf)


ATTENTION = {"scale": (WIDTH,), **dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))}
FEED = {"scale": (WIDTH,), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}


def drawn(key: jax.Array, shapes: Tree, *lead: int) -> Tree:
    """Parameters of these shapes with leading axes before them: scales 1, the others normal with
    deviation 1/sqrt(fan in).
    """
    leaves, form = jax.tree_util.tree_flatten_with_path(
        shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
    keys = jax.random.split(key, max(1, len(leaves)))

    def draw(path: Any, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.ones((*lead, *shape))
        return jax.random.normal(key, (*lead, *shape)) / math.sqrt(
            shape[-2] if len(shape) > 1 else 1
        )

    return jax.tree.unflatten(
        form, [draw(path, shape, k) for (path, shape), k in zip(leaves, keys, strict=True)]
    )


def plain_loss(
    layers: Mapping[str, Callable[..., Any]], letters: str, params: Tree, batch: Tree
) -> jax.Array:
    """The model of these layers, one after the other on the whole batch: no pipeline, no
    microbatches.
    """
    shared, seen, losses = params["shared"], Counter[str](), jnp.zeros(())
    x = layers["E"](params["first"], batch, shared=shared)
    for letter in letters:
        own = jax.tree.map(lambda leaf, i=seen[letter]: leaf[i], params["stages"][letter])
        x = layers[letter](own, x, microbatch=batch, shared=shared)
        seen[letter] += 1
        if isinstance(x, tuple):
            x, more = x
            losses += more
    return layers["L"](params["last"], x, batch, shared=shared) + losses


def farthest(found: Tree, wanted: Tree) -> float:
    """The largest difference of any two leaves, relative to the largest entry of the wanted one."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.max(jnp.abs(f - w)) / jnp.max(jnp.abs(w))) for f, w in pairs)
