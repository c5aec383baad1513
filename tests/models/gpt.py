"""The GPT with flax.linen blocks, scanned over the layers of a stage, and what its three versions
share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from torch_ref.models import GPT

from .base import Twin


class Attention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, u):
        rows, tokens, width = u.shape
        qkv = nn.Dense(3 * width, name="qkv")(u)
        q, k, v = (t.reshape(rows, tokens, self.heads, -1) for t in jnp.split(qkv, 3, axis=-1))
        mixed = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(u[..., 0]))
        return nn.Dense(width, name="out")(mixed.reshape(rows, tokens, width))


class Perceptron(nn.Module):
    ratio: int
    gelu_tanh: bool

    @nn.compact
    def __call__(self, u):
        width = u.shape[-1]
        return nn.Dense(width, name="down")(
            nn.gelu(nn.Dense(self.ratio * width, name="up")(u), approximate=self.gelu_tanh)
        )


class Block(nn.Module):
    heads: int
    ratio: int
    gelu_tanh: bool
    eps: float

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.heads, name="attn")(norm(self.eps, "ln1")(x))
        return x + Perceptron(self.ratio, self.gelu_tanh, name="mlp")(norm(self.eps, "ln2")(x))


def gpt(stages: int, **flags: Any) -> Twin:
    """The GPT."""
    model = sizes(stages, **flags)
    block = Block(model.heads, model.mlp_ratio, model.gelu_tanh, model.eps)
    final = norm(model.eps, None)
    return assembled(
        "gpt",
        model,
        lambda params, x: block.apply({"params": params}, x),
        lambda params, x: final.apply({"params": params}, x),
    )


def sizes(stages: int, **flags: Any) -> GPT:
    """The reference model, small."""
    return GPT(
        stages,
        **{
            "layers_per_stage": 2,
            "vocab": 11,
            "block": 8,
            "width": 8,
            "heads": 2,
            "mlp_ratio": 2,
            **flags,
        },
    )


def assembled(
    name: str, model: GPT, block: Callable[..., Any], final_norm: Callable[..., Any]
) -> Twin:
    """A GPT of `block(params of a layer, x)` and `final_norm(params, x)`; the embedding and the
    head are arrays in every version.
    """

    def embed(table, params, tokens):
        return table[tokens] + params["wpe"][: tokens.shape[-1]]

    def first(params, microbatch):
        return embed(params["wte"], params, microbatch["tokens"])

    def first_tied(params, microbatch, *, shared):
        return embed(shared["wte"], params, microbatch["tokens"])

    def stage(params, x):
        return jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params)[0]

    def last(params, x, microbatch):
        logits = final_norm(params["ln"], x) @ params["head"]["kernel"]
        return token_loss(logits, microbatch, sum_count=model.sum_count)

    def last_tied(params, x, microbatch, *, shared):
        logits = final_norm(params["ln"], x) @ shared["wte"].T
        return token_loss(logits, microbatch, sum_count=model.sum_count)

    def rows(rng, count):
        batch = {key: rng.integers(0, model.vocab, (count, 6)) for key in ("tokens", "targets")}
        # Some targets are padding, and not equally many in each microbatch.
        return batch | {"weights": (rng.random((count, 6)) < 0.7).astype(float) + 0.25}

    return Twin(
        name,
        model,
        first_tied if model.tied else first,
        stage,
        last_tied if model.tied else last,
        rows,
    )


def norm(eps: float, name: str | None) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=eps, use_fast_variance=False, name=name)


def token_loss(logits, microbatch, *, sum_count):
    """Cross entropy weighted by `weights`: its mean over the microbatch, or its sum and count."""
    nll = (
        jax.nn.logsumexp(logits, axis=-1)
        - jnp.take_along_axis(logits, microbatch["targets"][..., None], -1)[..., 0]
    )
    weights = (
        microbatch["weights"].astype(nll.dtype) if "weights" in microbatch else jnp.ones_like(nll)
    )
    total, count = jnp.sum(weights * nll), jnp.sum(weights)
    return (total, count) if sum_count else total / count
