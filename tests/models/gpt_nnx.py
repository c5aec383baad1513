"""The GPT with flax.nnx modules: a block is split once into graph and state, and merged again for
every layer.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights

from .base import Twin
from .gpt import assembled, sizes
from .mlp import merged


class Attention(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, u):
        rows, tokens, width = u.shape
        q, k, v = (
            t.reshape(rows, tokens, self.heads, -1) for t in jnp.split(self.qkv(u), 3, axis=-1)
        )
        # nnx.dot_product_attention would take jax.nn's, whose softmax is in float32 whatever the
        # precision of its input.
        weights = dot_product_attention_weights(q, k, mask=nnx.make_causal_mask(u[..., 0]))
        mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, v)
        return self.out(mixed.reshape(rows, tokens, width))


class Perceptron(nnx.Module):
    def __init__(self, width: int, ratio: int, gelu_tanh: bool, rngs: nnx.Rngs):
        self.gelu_tanh = gelu_tanh
        self.up = nnx.Linear(width, ratio * width, rngs=rngs)
        self.down = nnx.Linear(ratio * width, width, rngs=rngs)

    def __call__(self, u):
        return self.down(nnx.gelu(self.up(u), approximate=self.gelu_tanh))


class Block(nnx.Module):
    def __init__(self, model: Any, rngs: nnx.Rngs):
        self.ln1, self.ln2 = norm(model, rngs), norm(model, rngs)
        self.attn = Attention(model.width, model.heads, rngs)
        self.mlp = Perceptron(model.width, model.mlp_ratio, model.gelu_tanh, rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


def norm(model: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(model.width, epsilon=model.eps, use_fast_variance=False, rngs=rngs)


def gpt_nnx(stages: int, **flags: Any) -> Twin:
    """The GPT."""
    model = sizes(stages, **flags)
    block = nnx.split(nnx.eval_shape(lambda: Block(model, nnx.Rngs(0))))
    final = nnx.split(nnx.eval_shape(lambda: norm(model, nnx.Rngs(0))))
    return assembled(
        "gpt_nnx",
        model,
        lambda params, x: merged(block, params)(x),
        lambda params, x: merged(final, params)(x),
    )
