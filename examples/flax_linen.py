"""A linen language model with a tied embedding and blocks stacked by nn.scan, trained through a
pipeline with ZB-V.

python examples/flax_linen.py        four virtual devices of the CPU
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxpipe as jp
from jaxpipe.flax import End, from_linen, submodule

WIDTH, HEADS, LAYERS, VOCAB, TIME, ROWS, MICROBATCHES, STEPS = 32, 2, 8, 12, 16, 16, 8, 60

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))), None


class Ends(nn.Module):
    """Tokens in, logits out, with one table for both."""

    def setup(self) -> None:
        self.table = nn.Embed(VOCAB, WIDTH)
        self.places = nn.Embed(TIME, WIDTH)
        self.norm = nn.LayerNorm()

    def begin(self, tokens: jax.Array) -> jax.Array:
        return self.table(tokens) + self.places(jnp.arange(tokens.shape[-1]))

    def end(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.norm(x))


class LanguageModel(nn.Module):
    """Nothing in it knows of pipelines."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        ends = Ends(name="ends")
        blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = blocks(name="blocks")(ends.begin(tokens), None)
        return ends.end(x)


def loss_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def rows(step: int) -> dict[str, Any]:
    """Counting in steps of one to four, modulo VOCAB: the first two tokens tell the rest."""
    rng = np.random.default_rng(step)
    start, stride = rng.integers(0, VOCAB, (ROWS, 1)), rng.integers(1, 5, (ROWS, 1))
    text = (start + stride * np.arange(TIME + 1)) % VOCAB
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def main() -> None:
    net = LanguageModel()
    variables = jax.jit(net.init)(jax.random.key(0), rows(0)["tokens"])
    schedule = jp.schedules.build("zbv", devices=4, microbatches=MICROBATCHES)
    converted = from_linen(
        Block(),
        submodule(variables, "blocks"),
        num_stages=schedule.num_stages,
        call=lambda block, x: block(x)[0],
        shared=(Ends(), submodule(variables, "ends")),
        first=End(None, lambda _, microbatch, *, shared: shared.begin(microbatch["tokens"])),
        last=End(
            None, lambda _, x, microbatch, *, shared: loss_of(shared.end(x), microbatch["targets"])
        ),
        rngs=(),
    )
    mesh = jax.make_mesh((4,), ("pipe",), devices=jax.devices()[:4])
    pipe = jp.Pipeline(converted.model, schedule, mesh)
    optimizer = optax.adam(3e-3)
    params = pipe.place(converted.params)
    opt_state = pipe.init(optimizer, params)

    @pipe.jit
    def train(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for step in range(STEPS):
        params, opt_state, loss = train(params, opt_state, rows(step))
        losses.append(float(loss))
    print(f"loss: {losses[0]:.3f} at first, {np.mean(losses[-10:]):.3f} over the last ten steps")

    batch, canonical = rows(STEPS), jax.device_get(pipe.canonical(params))
    trained = {
        "params": {"blocks": converted.to_linen(canonical)["params"], "ends": canonical["shared"]}
    }
    whole = float(loss_of(jax.jit(net.apply)(trained, batch["tokens"]), batch["targets"]))
    through_pipe = float(pipe.evaluate(params, batch))
    print(f"next batch: {through_pipe:.6f} by the pipeline, {whole:.6f} by the linen model itself")
    assert abs(through_pipe - whole) < 1e-5 * (1 + whole)  # float32
    assert np.mean(losses[-10:]) < 0.5 * losses[0]


if __name__ == "__main__":
    main()
