"""AdamW with linear warm-up, clipping by global norm, and weight decay on kernels only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

BETAS, EPS = (0.9, 0.95), 1e-8


def adamw(*, rate: float, warmup: int, decay: float, clip: float) -> optax.GradientTransformation:
    """The optimizer; it works on placed parameters as on canonical ones, since every parameter is
    there exactly once.
    """

    def warmed_up(step: Any) -> jax.Array:
        # The step is an int32, which divides in float32 even under x64: that alone would be a
        # difference of 1e-8.
        return rate * jnp.minimum(1.0, (jnp.asarray(step, float) + 1) / warmup)

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(warmed_up, b1=BETAS[0], b2=BETAS[1], eps=EPS, weight_decay=decay, mask=decayed),
    )


def decayed(params: Any) -> Any:
    """True for kernels; biases, scales and embeddings do not decay."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: str(getattr(path[-1], "key", "")) == "kernel", params
    )
