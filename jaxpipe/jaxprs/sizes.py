"""Bytes of values, and which equations only change layout."""

from __future__ import annotations

from typing import Any

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
    """True for operations that compute nothing: XLA turns them into addressing, or gathers what
    lies on other devices.
    """
    return eqn.primitive.name in _LAYOUT or is_gather(eqn)


def is_gather(eqn: core.JaxprEqn) -> bool:
    """True for a sharding constraint that leaves nothing split: what goes in may be split over
    other axes, and takes less room then.
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


def stacked(aval: Any, length: int) -> Any:
    """The aval of `length` of these, one from each trip of a scan."""
    return jax_core.ShapedArray((length, *aval.shape), aval.dtype)
