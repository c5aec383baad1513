"""Small flax models, written as one would without a pipeline, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

WIDTH, LAYERS, ROWS, VOCAB = 4, 6, 3, 7
F64 = jnp.float64


def batch_norm(rngs: nnx.Rngs) -> nnx.BatchNorm:
    """With statistics in float64: flax makes them float32, and JAX warns of float64 written into
    them, which it will refuse.
    """
    norm = nnx.BatchNorm(WIDTH, momentum=0.5, param_dtype=F64, rngs=rngs)
    norm.mean, norm.var = nnx.BatchStat(jnp.zeros(WIDTH, F64)), nnx.BatchStat(jnp.ones(WIDTH, F64))
    return norm


class Block(nnx.Module):
    """A residual block; `scale` is a setting, in which blocks may differ."""

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        scale: float = 1.0,
        hidden: int = WIDTH,
        dropout: float = 0.0,
        norm: bool = False,
    ) -> None:
        self.up = nnx.Linear(WIDTH, hidden, param_dtype=F64, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, param_dtype=F64, rngs=rngs)
        self.scale = scale
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.norm = batch_norm(rngs) if norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        u = self.norm(x) if self.norm is not None else x
        u = self.scale * self.down(jnp.tanh(self.up(u)))
        return x + (self.dropout(u) if self.dropout is not None else u)


class Net(nnx.Module):
    """Embedding, blocks, head; nothing in it knows of pipelines."""

    def __init__(self, seed: int = 0, scales: tuple[float, ...] = (1.0,), **options: Any) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=F64, rngs=rngs)
        self.blocks = nnx.List(
            [Block(rngs=rngs, scale=scales[i % len(scales)], **options) for i in range(LAYERS)]
        )
        self.out = nnx.LayerNorm(WIDTH, param_dtype=F64, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, param_dtype=F64, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.out(x)), batch)


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)
    )


def rows(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, VOCAB, (count, 5)) for name in ("tokens", "targets")}


class LinenBlock(nn.Module):
    """The same in linen; `train` is an argument of the call, as is usual there."""

    scale: float = 1.0
    hidden: int = WIDTH
    dropout: float = 0.0
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        u = (
            nn.BatchNorm(momentum=0.5, use_running_average=not train, param_dtype=F64)(x)
            if self.norm
            else x
        )
        u = nn.Dense(WIDTH, param_dtype=F64, name="down")(
            jnp.tanh(nn.Dense(self.hidden, param_dtype=F64, name="up")(u))
        )
        return x + nn.Dropout(self.dropout, deterministic=not train)(self.scale * u)


class LinenNet(nn.Module):
    """Embedding, blocks named block_0, block_1, ..., head."""

    norm: bool = False

    @nn.compact
    def __call__(self, batch: Any, train: bool = True) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH, param_dtype=F64, name="embed")(batch["tokens"])
        for i in range(LAYERS):
            x = LinenBlock(norm=self.norm, name=f"block_{i}")(x, train)
        return cross_entropy(nn.Dense(VOCAB, param_dtype=F64, name="head")(x), batch)
