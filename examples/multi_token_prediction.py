"""Multi-token prediction (DeepSeek-V3, section 2.2) in a pipeline, against the same model without
one.

A layer m stands before the loss: from what the last layer says of a token, and from the next token,
it predicts the one after that. Its loss is returned beside x (`stage_loss`), and embedding and head
are the main model's own (`shared`).

python examples/multi_token_prediction.py        two GPUs, or two virtual devices of the CPU
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpipe as jp
from gpt.devices import find
from parts.blocks import (
    ATTENTION,
    FEED,
    WIDTH,
    attend_to_itself,
    causal,
    drawn,
    feed,
    norm,
    plain_loss,
)
from parts.training import compare_and_train

VOCAB, CONTEXT, ROWS, STEPS = 12, 8, 16, 40
LAYOUT = "Ettt|tmL"  # m costs more than a layer, and the loss something too
WEIGHT = 0.3  # of m's loss


def embed(params: Any, microbatch: Any, *, shared: Any) -> jax.Array:
    return shared["table"][microbatch["tokens"]]


def layer(
    params: Any, x: jax.Array, *, microbatch: Any, shared: Any
) -> tuple[jax.Array, jax.Array]:
    return transformer(params, x), jnp.zeros((), x.dtype)


def next_but_one(
    params: Any, x: jax.Array, *, microbatch: Any, shared: Any
) -> tuple[jax.Array, jax.Array]:
    """x goes on unchanged; the loss is that of the targets' own successors."""
    known = shared["table"][microbatch["targets"]]  # the next token, which is known here
    h = (
        jnp.concatenate([norm(params["norm_x"], x), norm(params["norm_known"], known)], axis=-1)
        @ params["join"]
    )
    logits = head(shared, transformer(params["layer"], h))[:, :-1]
    return x, WEIGHT * cross_entropy(logits, microbatch["targets"][:, 1:])


def loss(params: Any, x: jax.Array, microbatch: Any, *, shared: Any) -> jax.Array:
    return cross_entropy(head(shared, x), microbatch["targets"])


def transformer(params: Any, x: jax.Array) -> jax.Array:
    return feed(params["feed"], attend_to_itself(params["attention"], x, bias=causal(x.shape[1])))


def head(shared: Any, x: jax.Array) -> jax.Array:
    return norm(shared["norm"], x) @ shared["head"]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


LAYERS = {"E": embed, "t": layer, "m": next_but_one, "L": loss}
LAYER, SCALE = {"attention": ATTENTION, "feed": FEED}, {"scale": (WIDTH,)}


def initial(key: jax.Array, letters: str) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    module = {"layer": LAYER, "norm_x": SCALE, "norm_known": SCALE, "join": (2 * WIDTH, WIDTH)}
    return {
        "first": {},
        "stages": {"t": drawn(keys[0], LAYER, letters.count("t")), "m": drawn(keys[1], module, 1)},
        "last": {},
        "shared": drawn(keys[2], {"table": (VOCAB, WIDTH), "norm": SCALE, "head": (WIDTH, VOCAB)}),
    }


def rows(step: int) -> dict[str, jax.Array]:
    """Counting in steps of 1 to 4, modulo VOCAB."""
    start, stride = jax.random.split(jax.random.key(step))
    begin = jax.random.randint(start, (ROWS, 1), 0, VOCAB)
    tokens = (begin + jax.random.randint(stride, (ROWS, 1), 1, 5) * jnp.arange(CONTEXT + 1)) % VOCAB
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def main() -> None:
    devices = find(2)
    jax.config.update("jax_enable_x64", True)  # for the comparison
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=4)
    mesh = jax.make_mesh((2,), ("pipe",), devices=devices)
    pipe = jp.Pipeline(
        jp.Model(LAYERS, layers=LAYOUT, stage_loss=True),
        schedule,
        mesh,
        layout=LAYOUT,
    )
    letters = LAYOUT.replace("|", "")[1:-1]
    canonical = initial(jax.random.key(0), letters)
    losses = compare_and_train(
        pipe, partial(plain_loss, LAYERS, letters), canonical, rows, steps=STEPS
    )
    assert losses[-1] < 0.7 * losses[0], "nothing was learned"


if __name__ == "__main__":
    main()
