"""An nnx model as it is, with dropout and batch norm, trained through a pipeline of four devices,
and used whole afterwards.

python examples/flax_nnx.py        four virtual devices of the CPU
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpipe as jp
from jaxpipe.flax import End, from_nnx

WIDTH, LAYERS, CLASSES, ROWS, MICROBATCHES, STEPS = 32, 8, 3, 96, 8, 60

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(
            2 * WIDTH, WIDTH, kernel_init=nnx.initializers.normal(0.05), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.dropout(jax.nn.gelu(self.up(self.norm(x)))))


class Classifier(nnx.Module):
    """Nothing in it knows of pipelines."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(2, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        x = self.inner(points)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def spirals(step: int) -> dict[str, Any]:
    """Points on three arms."""
    rng = np.random.default_rng(step)
    labels, radius = rng.integers(0, CLASSES, ROWS), rng.uniform(0.1, 1, ROWS)
    angle = 4 * radius + 2 * np.pi * labels / CLASSES
    points = np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1) + 0.02 * rng.normal(
        size=(ROWS, 2)
    )
    return {"points": points.astype(np.float32), "labels": labels}


def main() -> None:
    net = Classifier(nnx.Rngs(0))
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=MICROBATCHES)
    converted = from_nnx(
        net.blocks,
        num_stages=schedule.num_stages,
        first=End(net.inner, lambda inner, microbatch: inner(microbatch["points"])),
        last=End(
            net.head, lambda head, x, microbatch: cross_entropy(head(x), microbatch["labels"])
        ),
    )
    mesh = jax.make_mesh((4,), ("pipe",), devices=jax.devices()[:4])
    pipe = jp.Pipeline(converted.model, schedule, mesh)
    optimizer = optax.adam(3e-3)
    params, state = pipe.place(converted.params), pipe.place_state(converted.state)
    opt_state = pipe.init(optimizer, params)

    @pipe.jit
    def train(params: Any, state: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
        (loss, state), grads = pipe.value_and_grad(params, batch, rng=key, state=state)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), state, opt_state, loss

    losses = []
    for step in range(STEPS):
        params, state, opt_state, loss = train(
            params, state, opt_state, spirals(step), jax.random.fold_in(jax.random.key(1), step)
        )
        losses.append(float(loss))
    print(f"loss: {losses[0]:.3f} at first, {np.mean(losses[-10:]):.3f} over the last ten steps")

    held_out = spirals(-1 % 2**31)
    through_pipe = float(pipe.evaluate(params, held_out, state=state))
    converted.to_nnx(pipe.canonical(params), pipe.canonical_state(state))
    net.eval()
    logits = nnx.jit(lambda net, points: net(points))(net, held_out["points"])
    whole = float(cross_entropy(logits, held_out["labels"]))
    right = float(jnp.mean(jnp.argmax(logits, axis=-1) == held_out["labels"]))
    print(
        f"held out: loss {through_pipe:.6f} by the pipeline, {whole:.6f} by the nnx model "
        f"itself; {right:.0%} right"
    )
    assert abs(through_pipe - whole) < 1e-5 * (1 + whole)  # float32
    assert np.mean(losses[-10:]) < 0.5 * losses[0]
    assert right > 0.8


if __name__ == "__main__":
    main()
