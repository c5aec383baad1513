"""The GPT in plain functions of plain trees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .base import Twin
from .gpt import assembled, sizes
from .mlp import dense


def gpt_plain(stages: int, **flags: Any) -> Twin:
    """Every formula of torch_ref's GPT, written out."""
    model = sizes(stages, **flags)

    def final_norm(params, x):
        return layer_norm(params, x, model.eps)

    def block(params, x):
        x = x + attention(params["attn"], layer_norm(params["ln1"], x, model.eps), model.heads)
        up = dense(params["mlp"]["up"], layer_norm(params["ln2"], x, model.eps))
        return x + dense(params["mlp"]["down"], jax.nn.gelu(up, approximate=model.gelu_tanh))

    return assembled("gpt_plain", model, block, final_norm)


def layer_norm(params, x, eps):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * (jax.lax.rsqrt(variance + eps) * params["scale"]) + params["bias"]


def attention(params, u, heads):
    rows, tokens, width = u.shape
    q, k, v = (
        t.reshape(rows, tokens, heads, -1) for t in jnp.split(dense(params["qkv"], u), 3, axis=-1)
    )
    scores = jnp.einsum("nqhd,nkhd->nhqk", q / jnp.sqrt(q.shape[-1]).astype(q.dtype), k)
    seen = jnp.tril(jnp.ones((tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min))
    mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, v)
    return dense(params["out"], mixed.reshape(rows, tokens, width))
