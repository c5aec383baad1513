"""How far two right computations of the same numbers may lie apart.

float64: 1e-12 of an array's largest entry.  That is the claim of the project, and 10 to 100 times what `bound` below gives.

float32 and bfloat16, against the float64 truth: each rounding multiplies a value by 1 + d with |d| <= u, the unit roundoff
(2^-24 and 2^-8).  A chain of n roundings whose d are independent with mean zero ends within a factor 1 +- lambda sqrt(n) u with
probability at least 1 - 2 exp(-lambda^2 / 2) (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis",
theorem 2.4).  lambda = 5 leaves 7e-6.  n is the number of roundings on the longest path from a parameter or an input to an entry
of a gradient, counted in `roundings`: forward through all layers, back again, then the sums over rows and microbatches.
Sums of terms of random sign lose nothing by cancellation here: what cancels in the values cancels in their independent errors
too.  The rounding of the parameters and of the batch themselves is one more rounding for each.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from torch_ref.models import MLP

FLOAT64 = 1e-12
LAMBDA = 5.0
# Units in the last place that XLA's tanh may be off, counted as so many roundings.
TANH = 4


def unit_roundoff(dtype: Any) -> float:
    """u: half the distance from 1 to the next number."""
    return float(jnp.finfo(dtype).eps) / 2


def roundings(model: MLP, *, rows: int, microbatches: int, dtype: Any) -> int:
    """n for the MLP.  Products are summed in float32 at least, so a narrower dtype rounds a dot product once, not once a term."""
    narrow = jnp.finfo(dtype).bits < 32
    fan_in = 1 if narrow else max(model.features_in, model.width, model.features_out)
    # A layer reads a rounded kernel and a rounded bias: product and sum, plus bias, tanh.
    layer = 1 + fan_in + 1 + TANH
    # Back: the derivative 1 - h^2 (three roundings), its product with the cotangent, the product with the kernel.
    layer_back = 3 + 1 + fan_in
    loss = 3
    sums = (1 if narrow else rows) + (0 if narrow else microbatches)
    return (model.num_stages + 2) * (layer + layer_back) + loss + sums


def bound(model: MLP, *, rows: int, microbatches: int, dtype: Any) -> float:
    """lambda sqrt(n) u."""
    if np.dtype(dtype) == np.float64:
        return FLOAT64
    return LAMBDA * math.sqrt(roundings(model, rows=rows, microbatches=microbatches, dtype=dtype)) * unit_roundoff(dtype)
