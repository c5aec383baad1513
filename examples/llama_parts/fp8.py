"""Matmuls in FP8 with scales of past steps, by flax: inputs and kernels in e4m3, gradients in e5m2.

Beside each kernel are a scale and a history of greatest values for the input, the kernel and the
result's gradient.  Their "gradient" is their next value (`jaxpipe.Replaced`).
"""

from __future__ import annotations

from typing import Any

import jax

import jaxpipe as jp

HISTORY = 1024  # steps, as flax has
RULES = {"/fp8/": jp.Replaced.MAX}  # of all these leaves
_KINDS = {"lhs": "input", "rhs": "kernel", "grad": "gradient"}


def with_scales(kernels: Any) -> Any:
    """The shapes of kernels by name, and of the scales and histories of each."""
    own = {f"{kind}_scale": (1,) for kind in _KINDS.values()}
    own |= {f"{kind}_history": (HISTORY,) for kind in _KINDS.values()}
    return {name: {**kernel, "fp8": own} for name, kernel in kernels.items()}


def matmul(x: jax.Array, kernel: jax.Array, own: Any) -> jax.Array:
    """x [..., in] @ kernel [in, out], in the dtype of the kernel; or x [experts, rows, in] @ kernel
    [experts, in, out], with one scale for all experts.
    """
    from flax.linen.fp8_ops import fp8_scaled_dot_general  # nothing else here needs flax

    scales = {f"{name}_scale": own[f"{kind}_scale"] for name, kind in _KINDS.items()}
    past = {f"{name}_amax_history": own[f"{kind}_history"] for name, kind in _KINDS.items()}
    experts = tuple(range(kernel.ndim - 2))
    dims = ((x.ndim - 1,), (len(experts),)), (experts, experts)
    found: jax.Array = fp8_scaled_dot_general(
        *(x, kernel, dims),
        preferred_element_type=kernel.dtype,
        quantize_compute_type=kernel.dtype,
        **scales,
        **past,
    )
    return found
