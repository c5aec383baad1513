"""The convolutional net with flax.linen convolutions and group norms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from torch_ref.models import ConvNet

from .base import Twin
from .mlp import dense


class Block(nn.Module):
    channels: int
    groups: int
    eps: float

    @nn.compact
    def __call__(self, x):
        u = x
        for half in ("1", "2"):
            u = nn.GroupNorm(
                self.groups, epsilon=self.eps, use_fast_variance=False, name=f"gn{half}"
            )(u)
            u = nn.Conv(self.channels, (3, 3), name=f"conv{half}")(nn.silu(u))
        return x + u


def conv(stages: int, **flags: Any) -> Twin:
    """The convolutional net."""
    model = ConvNet(stages, **{"channels": 4, "channels_in": 2, "classes": 3, **flags})
    stem, block = nn.Conv(model.channels, (3, 3)), Block(model.channels, model.groups, model.eps)

    def first(params, microbatch):
        return stem.apply({"params": params["conv"]}, microbatch["images"])

    def stage(params, x):
        return block.apply({"params": params}, x)

    def last(params, x, microbatch):
        logits = dense(params["head"], jnp.mean(x, axis=(1, 2)))
        nll = (
            jax.nn.logsumexp(logits, axis=-1)
            - jnp.take_along_axis(logits, microbatch["labels"][:, None], -1)[:, 0]
        )
        return (
            (jnp.sum(nll), jnp.asarray(nll.size, nll.dtype)) if model.sum_count else jnp.mean(nll)
        )

    def rows(rng, count):
        return {
            "images": rng.standard_normal((count, 5, 4, model.channels_in)),
            "labels": rng.integers(0, model.classes, count),
        }

    return Twin("conv", model, first, stage, last, rows)
