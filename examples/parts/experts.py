"""A model with a mixture of experts in every stage: what the examples of expert parallelism have in
common, and it without any.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

VOCAB, CONTEXT, WIDTH, HIDDEN, EXPERTS = 16, 8, 16, 32, 4


def first(params: Any, microbatch: Any) -> jax.Array:
    return params["table"][microbatch["tokens"]]


def mixed(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens of a row mixed causally; the router's gates, and its balance loss (Fedus et
    al. 2021).
    """
    h = h + jnp.einsum("qk,nkd->nqd", jnp.tril(params["mix"]), h)
    gate = jax.nn.softmax(h @ params["router"])  # [N, T, E]
    chosen = jax.nn.one_hot(jnp.argmax(gate, axis=-1), EXPERTS)
    balance = EXPERTS * jnp.sum(gate.mean(axis=1) * chosen.mean(axis=1), axis=-1)  # of each row
    return h, gate, 0.01 * balance.mean()


def dense_stage(params: Any, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(h, balance loss): every expert sees every token, and those that it was not chosen for weigh
    nothing.
    """
    h, gate, balance = mixed(params, h)
    up = jax.nn.gelu(jnp.einsum("ntd,edf->entf", h, params["up"]))
    weights = gate * jax.nn.one_hot(jnp.argmax(gate, axis=-1), EXPERTS)
    return h + jnp.einsum("entf,efd,nte->ntd", up, params["down"], weights), balance


def last(params: Any, h: jax.Array, microbatch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        h @ params["head"], microbatch["targets"]
    ).mean()


def initial(key: jax.Array, stages: int) -> dict[str, Any]:
    shapes = {
        "first": {"table": (1, VOCAB, WIDTH)},
        "stages": {
            "mix": (CONTEXT, stages, CONTEXT, CONTEXT),
            "router": (WIDTH, stages, WIDTH, EXPERTS),
            "up": (WIDTH, stages, EXPERTS, WIDTH, HIDDEN),
            "down": (HIDDEN, stages, EXPERTS, HIDDEN, WIDTH),
        },
        "last": {"head": (WIDTH, WIDTH, VOCAB)},
    }
    leaves, form = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        form,
        [
            jax.random.normal(k, shape) / fan_in**0.5
            for k, (fan_in, *shape) in zip(keys, leaves, strict=True)
        ],
    )


def sequences(step: int, *, rows: int) -> dict[str, jax.Array]:
    """Counting in steps of 1 to 4, modulo VOCAB: the next token follows from the two before it."""
    start, stride = jax.random.split(jax.random.key(step))
    begin = jax.random.randint(start, (rows, 1), 0, VOCAB)
    tokens = (begin + jax.random.randint(stride, (rows, 1), 1, 5) * jnp.arange(CONTEXT + 1)) % VOCAB
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def plain_loss(params: Any, batch: Any) -> jax.Array:
    """The same model without a pipeline."""
    h, balance = first(params["first"], batch), jnp.zeros(())
    for s in range(len(params["stages"]["mix"])):
        h, of_stage = dense_stage(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), h)
        balance += of_stage
    return last(params["last"], h, batch) + balance
