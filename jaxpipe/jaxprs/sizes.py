"""Costs of values and equations: bytes, flops, which equations only change layout, and which are
light.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import core as jax_core
from jax.extend import core

_LAYOUT = frozenset(
    {
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "rev",
        "copy",
        "copy_p",
        "slice",
        "dynamic_slice",
    }
)


def is_layout(eqn: core.JaxprEqn) -> bool:
    """True for operations that compute nothing: XLA turns them into addressing, or gathers parts
    from other devices.
    """
    return eqn.primitive.name in _LAYOUT or is_gather(eqn)


def grows(eqn: core.JaxprEqn) -> bool:
    """True for an equation whose result has more bytes than what it reads: a cast to more bits."""
    read = sum(nbytes(atom.aval) for atom in eqn.invars if isinstance(atom, core.Var))
    return read < nbytes(eqn.outvars[0].aval)


def is_inexact(eqn: core.JaxprEqn) -> bool:
    """True for an equation whose result has fractions: no index, and no mask."""
    aval: Any = eqn.outvars[0].aval
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def is_gather(eqn: core.JaxprEqn) -> bool:
    """True for a sharding constraint that leaves nothing split.  Its input may be split over other
    axes, and then has fewer bytes on a device.
    """
    if eqn.primitive.name != "sharding_constraint":
        return False
    spec = getattr(eqn.params["sharding"], "spec", None)
    return (
        spec is not None
        and all(entry is None for entry in spec)
        and not eqn.params.get("unconstrained_dims")
    )


def nbytes(aval: Any) -> int:
    """Bytes of an array with this aval (PRNG keys count as their words)."""
    size = int(np.prod(aval.shape, dtype=np.int64))
    try:
        return size * np.dtype(aval.dtype).itemsize
    except TypeError:
        return size * 8


def tiled_bytes(shape: Sequence[int], itemsize: int, tile: Sequence[int]) -> int:
    """Bytes of an array in memory of such tiles over the last two dims; () for memory of rows.

    A tile has fewer rows where the array has: a power of two.
    """
    if not (tile and shape):
        return math.prod(shape) * itemsize
    *outer, row = shape
    if outer:
        rows = min(tile[0], 2 ** (outer[-1] - 1).bit_length()) if outer[-1] else 1
        outer[-1] = -(-outer[-1] // rows) * rows
    return math.prod(outer) * -(-row // tile[1]) * tile[1] * itemsize


def stacked(aval: Any, length: int) -> Any:
    """The aval of `length` of these, one from each trip of a scan."""
    return jax_core.ShapedArray((length, *aval.shape), aval.dtype)


_MATMULS = frozenset({"dot_general", "conv_general_dilated"})
# What may be most of a backward's work.
_HEAVY = _MATMULS | {
    "ragged_dot",
    "ragged_dot_general",
    "pallas_call",
    "custom_call",
    "ffi_call",
    "cumsum",
    "sort",
}


class Work(NamedTuple):
    """Floating point operations, and bytes that matmuls read and write (operations between them are
    taken to be fused).
    """

    flops: float
    bytes: float


def count_work(jaxpr: core.Jaxpr) -> Work:
    """Of a jaxpr: two flops a multiplication of matmuls, one a number that anything else makes;
    loops as often as they run.

    XLA's own count takes the body of a loop once, however often it runs, and so cannot be used for
    stages that scan over layers.
    """
    flops = moved = 0.0
    for eqn in jaxpr.eqns:
        bodies = list(core.jaxprs_in_params(eqn.params))
        if bodies:
            times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            parts = [count_work(body) for body in bodies]
            # Of branches the most expensive one.
            part = (
                max(parts)
                if eqn.primitive.name == "cond"
                else Work(sum(p.flops for p in parts), sum(p.bytes for p in parts))
            )
            flops, moved = flops + times * part.flops, moved + times * part.bytes
        elif eqn.primitive.name in _MATMULS:
            flops += 2 * _multiplications(eqn)
            moved += sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        else:
            flops += sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    return Work(flops, moved)


def is_light(eqn: core.JaxprEqn) -> bool:
    """True for an equation that is no matmul and has none in its bodies."""
    inner = any(True for _ in core.jaxprs_in_params(eqn.params))
    return (
        eqn.primitive.name not in _HEAVY
        and eqn.primitive.name != "scan"
        and not eqn.effects
        and not inner
    )


def _multiplications(eqn: Any) -> int:
    """Of a matmul or a convolution."""
    made = math.prod(eqn.outvars[0].aval.shape)
    left, right = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return int(made * math.prod(left[d] for d in contracted))
    # Each number of the output sums over the kernel of one output feature.
    features = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return int(made * math.prod(right) // max(1, features))
