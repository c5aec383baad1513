"""An encoder and a decoder in one pipeline (T5, Raffel et al. 2020), against the same model without
one.

The encoder's layers come first. One layer, D, is the seam: from there on, what the encoder said
travels along with the decoder's tokens. The token embedding is tied three ways, and the relative
position biases are shared by all layers of a kind.

python examples/encoder_decoder.py        four GPUs, or four virtual devices of the CPU
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
    HEADS,
    WIDTH,
    attend,
    attend_to_itself,
    causal,
    drawn,
    feed,
    norm,
    plain_loss,
)
from parts.training import compare_and_train

VOCAB, SOURCE, TARGET, REACH, ROWS, STEPS = 12, 6, 6, 4, 16, 60
LAYOUT = "Eeee|eeeD|dd|ddL"  # the decoder's layers do more each


def embed_source(params: Any, microbatch: Any, *, shared: Any) -> jax.Array:
    return shared["table"][microbatch["source"]]


def encoder_layer(params: Any, x: jax.Array, *, microbatch: Any, shared: Any) -> jax.Array:
    x = attend_to_itself(params["attention"], x, bias=nearness(shared["encoder_bias"], SOURCE))
    return feed(params["feed"], x)


def seam(params: Any, x: jax.Array, *, microbatch: Any, shared: Any) -> dict[str, jax.Array]:
    """The encoder's end and the decoder's beginning: one array comes in, two go on."""
    begun = jnp.pad(microbatch["target"], ((0, 0), (1, 0)))[:, :-1]  # 0 starts a row
    return {"source": norm(params["norm"], x), "target": shared["table"][begun]}


def decoder_layer(
    params: Any, x: dict[str, jax.Array], *, microbatch: Any, shared: Any
) -> dict[str, jax.Array]:
    h = attend_to_itself(
        params["attention"],
        x["target"],
        bias=nearness(shared["decoder_bias"], TARGET) + causal(TARGET),
    )
    h = attend(params["cross"], h, x["source"])
    return {"source": x["source"], "target": feed(params["feed"], h)}


def loss(params: Any, x: dict[str, jax.Array], microbatch: Any, *, shared: Any) -> jax.Array:
    logits = norm(params["norm"], x["target"]) @ shared["table"].T / WIDTH**0.5
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["target"]).mean()


def nearness(table: jax.Array, tokens: int) -> jax.Array:
    """The bias of how far apart two tokens are, [heads, T, T]; far ones share one."""
    place = jnp.arange(tokens)
    return table[:, jnp.clip(place[:, None] - place, -REACH, REACH) + REACH]


LAYERS = {"E": embed_source, "e": encoder_layer, "D": seam, "d": decoder_layer, "L": loss}
SCALE = {"norm": {"scale": (WIDTH,)}}


def initial(key: jax.Array, letters: str) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    biases = dict.fromkeys(("encoder_bias", "decoder_bias"), (HEADS, 2 * REACH + 1))
    return {
        "first": {},
        "stages": {
            "e": drawn(keys[0], {"attention": ATTENTION, "feed": FEED}, letters.count("e")),
            "D": drawn(keys[1], SCALE, 1),
            "d": drawn(
                keys[2],
                {"attention": ATTENTION, "cross": ATTENTION, "feed": FEED},
                letters.count("d"),
            ),
        },
        "last": drawn(key, SCALE),
        "shared": drawn(keys[3], {"table": (VOCAB, WIDTH), **biases}),
    }


def rows(step: int) -> dict[str, jax.Array]:
    """The target counts up from the token that the source has most of."""
    most, other, where = jax.random.split(jax.random.key(step), 3)
    start = jax.random.randint(most, (ROWS, 1), 1, VOCAB)
    noise = jax.random.randint(other, (ROWS, SOURCE), 1, VOCAB)
    source = jnp.where(jax.random.uniform(where, (ROWS, SOURCE)) < 0.7, start, noise)
    return {"source": source, "target": 1 + (start - 1 + jnp.arange(TARGET)) % (VOCAB - 1)}


def main() -> None:
    devices = find(4)
    jax.config.update("jax_enable_x64", True)  # for the comparison
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    pipe = jp.Pipeline(
        jp.Model(LAYERS, layers=LAYOUT),
        schedule,
        jax.make_mesh((4,), ("pipe",), devices=devices),
        layout=LAYOUT,
    )
    letters = LAYOUT.replace("|", "")[1:-1]
    canonical = initial(jax.random.key(0), letters)
    losses = compare_and_train(
        pipe, partial(plain_loss, LAYERS, letters), canonical, rows, steps=STEPS
    )
    assert losses[-1] < 0.6 * losses[0], "nothing was learned"


if __name__ == "__main__":
    main()
