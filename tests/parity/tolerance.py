"""What a step of the MLP may be off, in any precision; tests/tolerance.py has the reasoning.

float32 and bfloat16 are compared with the float64 truth: n is counted in `roundings`, on the
longest path from a parameter or an input to an entry of a gradient: forward through all layers,
back again, then the sums over rows and microbatches.  The rounding of the parameters and of the
batch themselves is one more rounding for each.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.tolerance import FLOAT64, TRANSCENDENTAL, rounding
from torch_ref.models import MLP

__all__ = ["FLOAT64", "bound", "roundings"]


def roundings(model: MLP, *, rows: int, microbatches: int, dtype: Any) -> int:
    """n for the MLP.  Products are summed in float32 at least, so a narrower dtype rounds a dot
    product once, not once a term.
    """
    narrow = jnp.finfo(dtype).bits < 32
    fan_in = 1 if narrow else max(model.features_in, model.width, model.features_out)
    # A layer reads a rounded kernel and a rounded bias: product and sum, plus bias, tanh.
    layer = 1 + fan_in + 1 + TRANSCENDENTAL
    # Back: the derivative 1 - h^2 (three roundings), its product with the cotangent, the product
    # with the kernel.
    layer_back = 3 + 1 + fan_in
    loss = 3
    sums = (1 if narrow else rows) + (0 if narrow else microbatches)
    return (model.num_stages + 2) * (layer + layer_back) + loss + sums


def bound(model: MLP, *, rows: int, microbatches: int, dtype: Any) -> float:
    """lambda sqrt(n) u; in float64 the claim of the project."""
    if np.dtype(dtype) == np.float64:
        return FLOAT64
    return rounding(roundings(model, rows=rows, microbatches=microbatches, dtype=dtype), dtype)
