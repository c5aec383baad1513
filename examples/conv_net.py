"""A residual conv net in a pipeline: images of stripes, told apart by their direction, under ZB-H1.

python examples/conv_net.py        two GPUs, or two virtual devices of the CPU
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpipe as jp
from gpt.devices import find

DEVICES, MICROBATCHES, ROWS, STEPS = 2, 4, 32, 30
SIDE, CHANNELS, CLASSES = 12, 8, 4


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[N, H, W, C] with a kernel [3, 3, C, D]."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Each image by itself, so that it does not matter how the batch is cut into microbatches."""
    centred = x - x.mean(axis=(1, 2, 3), keepdims=True)
    return (
        centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=(1, 2, 3), keepdims=True) + 1e-5) * scale
    )


def first(params: Any, microbatch: Any) -> jax.Array:
    return conv(microbatch["image"], params["stem"])


def stage(params: Any, x: jax.Array) -> jax.Array:
    """A residual block: the output has the shape of the input, since it is the next
    stage's input.
    """
    y = jax.nn.relu(norm(conv(x, params["conv1"]), params["scale1"]))
    return x + norm(conv(y, params["conv2"]), params["scale2"])


def last(params: Any, x: jax.Array, microbatch: Any) -> tuple[jax.Array, jax.Array]:
    logits = jnp.mean(jax.nn.relu(x) ** 2, axis=(1, 2)) @ params["head"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["label"]).mean()
    return loss, jnp.mean(jnp.argmax(logits, axis=1) == microbatch["label"])


def stripes(key: jax.Array) -> dict[str, jax.Array]:
    """Noisy images of stripes: horizontal, falling, vertical or rising, of any wavelength and
    phase.
    """
    keys = jax.random.split(key, 4)
    label = jax.random.randint(keys[0], (ROWS,), 0, CLASSES)
    angle = label[:, None, None] * jnp.pi / CLASSES
    wave = jax.random.uniform(keys[1], (ROWS, 1, 1), minval=1.0, maxval=1.8)
    phase = jax.random.uniform(keys[2], (ROWS, 1, 1), maxval=2 * jnp.pi)
    i, j = jnp.meshgrid(jnp.arange(SIDE), jnp.arange(SIDE), indexing="ij")
    image = jnp.sin(wave * (i * jnp.cos(angle) + j * jnp.sin(angle)) + phase)
    image = image + 0.3 * jax.random.normal(keys[3], image.shape)
    return {"image": image[..., None], "label": label}


def initial(key: jax.Array, stages: int) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    block = (stages, 3, 3, CHANNELS, CHANNELS)
    return {
        "first": {"stem": jax.random.normal(keys[0], (3, 3, 1, CHANNELS)) / 3},
        "stages": {
            "conv1": jax.random.normal(keys[1], block) * (2 / (9 * CHANNELS)) ** 0.5,
            "conv2": jax.random.normal(keys[2], block) * (2 / (9 * CHANNELS)) ** 0.5,
            "scale1": jnp.ones((stages, CHANNELS)),
            "scale2": jnp.full((stages, CHANNELS), 0.5),
        },
        "last": {"head": jax.random.normal(keys[3], (CHANNELS, CLASSES)) / CHANNELS**0.5},
    }


def main() -> None:
    schedule = jp.schedules.build("zb_h1", devices=DEVICES, microbatches=MICROBATCHES)
    print(schedule)
    mesh = jax.make_mesh((DEVICES,), ("pipe",), devices=find(DEVICES))
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last, has_metrics=True), schedule, mesh)

    params = pipe.place(initial(jax.random.key(0), schedule.num_stages))
    optimizer = optax.adam(1e-2)
    opt_state = pipe.init(optimizer, params)

    @pipe.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (loss, accuracy), grads = pipe.value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss, accuracy

    draw = jax.jit(stripes)
    for i in range(STEPS):
        params, opt_state, loss, accuracy = step(params, opt_state, draw(jax.random.key(i)))
        if i % 10 == 0 or i == STEPS - 1:
            print(f"step {i + 1:4d}   loss {float(loss):.4f}   accuracy {float(accuracy):.3f}")

    seen = [pipe.evaluate(params, draw(jax.random.key(STEPS + i)))[1] for i in range(4)]
    print(f"accuracy on new images: {float(sum(seen) / len(seen)):.3f}")
    assert sum(seen) / len(seen) > 0.9, "the directions were not learned"


if __name__ == "__main__":
    main()
