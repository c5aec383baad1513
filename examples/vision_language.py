"""A vision tower before a language model (LLaVA, Liu et al. 2023) in one pipeline, against the same
model without one.

The tower is narrower than the decoder and its rows are patches; one layer, p, brings them to the
decoder's width and puts the text after them.

python examples/vision_language.py        four GPUs, or four virtual devices of the CPU
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
    attend_to_itself,
    causal,
    drawn,
    feed,
    norm,
    plain_loss,
)
from parts.training import compare_and_train

PIXELS, PATCH, TOWER, VOCAB, TEXT, ROWS, STEPS = 8, 4, 8, 12, 5, 16, 60
PATCHES = (PIXELS // PATCH) ** 2
LAYOUT = "Evvvvv|vvvpt|tt|ttL"


def embed_patches(params: Any, microbatch: Any, *, shared: Any) -> jax.Array:
    """Images [N, pixels, pixels] -> [N, patches, tower]."""
    cut = microbatch["image"].reshape(-1, PIXELS // PATCH, PATCH, PIXELS // PATCH, PATCH)
    return cut.swapaxes(2, 3).reshape(-1, PATCHES, PATCH**2) @ params["patch"] + params["place"]


def tower_layer(params: Any, x: jax.Array, *, microbatch: Any, shared: Any) -> jax.Array:
    return feed(params["feed"], attend_to_itself(params["attention"], x))


def project(params: Any, x: jax.Array, *, microbatch: Any, shared: Any) -> jax.Array:
    """[N, patches, tower] -> [N, patches + text, width]: other rows of another width go on from
    here.
    """
    seen = jax.nn.gelu(norm(params["norm"], x) @ params["up"]) @ params["down"]
    return jnp.concatenate([seen, params["table"][microbatch["text"]]], axis=1) + params["place"]


def decoder_layer(params: Any, x: jax.Array, *, microbatch: Any, shared: Any) -> jax.Array:
    """The text sees the image and the text before it; the image sees itself."""
    mask = causal(PATCHES + TEXT).at[:PATCHES, :PATCHES].set(0.0)
    return feed(params["feed"], attend_to_itself(params["attention"], x, bias=mask))


def loss(params: Any, x: jax.Array, microbatch: Any, *, shared: Any) -> jax.Array:
    logits = norm(params["norm"], x[:, PATCHES:]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["targets"]).mean()


LAYERS = {"E": embed_patches, "v": tower_layer, "p": project, "t": decoder_layer, "L": loss}
SMALL = {
    "attention": {"scale": (TOWER,), **dict.fromkeys(("q", "k", "v", "out"), (TOWER, TOWER))},
    "feed": {"scale": (TOWER,), "up": (TOWER, 2 * TOWER), "down": (2 * TOWER, TOWER)},
}
PROJECTOR = {
    "norm": {"scale": (TOWER,)},
    "up": (TOWER, WIDTH),
    "down": (WIDTH, WIDTH),
    "table": (VOCAB, WIDTH),
    "place": (PATCHES + TEXT, WIDTH),
}


def initial(key: jax.Array, letters: str) -> dict[str, Any]:
    keys = jax.random.split(key, 5)
    return {
        "first": drawn(keys[0], {"patch": (PATCH**2, TOWER), "place": (PATCHES, TOWER)}),
        "stages": {
            "v": drawn(keys[1], SMALL, letters.count("v")),
            "p": drawn(keys[2], PROJECTOR, 1),
            "t": drawn(keys[3], {"attention": ATTENTION, "feed": FEED}, letters.count("t")),
        },
        "last": drawn(keys[4], {"norm": {"scale": (WIDTH,)}, "head": (WIDTH, VOCAB)}),
        "shared": {},
    }


def rows(step: int) -> dict[str, jax.Array]:
    """An image with one bright patch; the text counts upwards from that patch's number."""
    place = jax.random.randint(jax.random.key(step), (ROWS,), 0, PATCHES)
    noise = 0.1 * jax.random.normal(jax.random.key(step + 10_000), (ROWS, PIXELS, PIXELS))
    bright = jax.nn.one_hot(place, PATCHES).reshape(ROWS, PIXELS // PATCH, PIXELS // PATCH)
    text = place[:, None] + jnp.arange(TEXT + 1)
    return {
        "image": noise + jnp.repeat(jnp.repeat(bright, PATCH, axis=1), PATCH, axis=2),
        "text": jnp.where(jnp.arange(TEXT) == 0, 0, text[:, :-1]),  # the first token tells nothing
        "targets": text[:, 1:],
    }


def main() -> None:
    assert TOWER % HEADS == 0
    devices = find(4)
    jax.config.update("jax_enable_x64", True)  # for the comparison
    schedule = jp.schedules.build("zb_h1", devices=4, microbatches=8)
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
    assert losses[-1] < 0.5 * losses[0], "nothing was learned"


if __name__ == "__main__":
    main()
