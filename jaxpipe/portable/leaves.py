"""One leaf of a state: how it is spread, on which devices, what it is on the host, and with or
without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..model.spread import is_padded

Path: TypeAlias = Any


def text(path: Path) -> str:
    """A path as people write it: params/stages/w."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(leaf: Any) -> tuple[Any, ...]:
    """How an array is spread, an entry a dim."""
    spec = (
        tuple(leaf.sharding.spec)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
        else ()
    )
    return (*spec, *(None for _ in range(len(leaf.shape) - len(spec))))


def with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """What the leaf would be, spread like this."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def unplaced(leaf: Any, like: Any) -> Any:
    """Where a plain program's array of another shape lies: on its device, or whole on its mesh."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return (
        NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, NamedSharding) and leaf.shape != like.shape
        else sharding
    )


def from_elsewhere(leaf: Any, mesh: Mesh) -> Any:
    """A leaf that one program can take: one that lies on other devices than the mesh's goes over
    the host.
    """
    here = (
        not isinstance(leaf, jax.Array)
        or not leaf.committed
        or leaf.sharding.device_set == set(mesh.devices.flat)
    )
    if here or not leaf.is_fully_addressable:
        return leaf
    return np.asarray(leaf)


def on_host(leaf: Any) -> Any:
    """As numpy; a key as its words."""
    if _is_key(leaf):
        leaf = (
            jax.eval_shape(jax.random.key_data, leaf)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else jax.random.key_data(leaf)
        )
    return (
        np.zeros(leaf.shape, leaf.dtype)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else np.asarray(leaf)
    )


def from_host(value: Any, like: Any, mesh: Mesh | None) -> Any:
    """The inverse, for a leaf that belongs to no parameter: a number as it was, an array on the
    whole mesh.
    """
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return type(like)(value) if isinstance(like, int | float) else value
    if _is_key(like):
        impl: list[Any] = []
        # a ShapeDtypeStruct does not tell it by itself
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)
        value = jax.random.wrap_key_data(value, impl=impl[0])
    return jax.device_put(
        value, unplaced(like, like) if mesh is None else NamedSharding(mesh, PartitionSpec())
    )


def without_padding(leaf: Any, mesh: Mesh | None) -> Any:
    """A leaf of its parameter's own size, for those that are padded to be cut over the devices: it
    is on every device.
    """
    if not is_padded(leaf):
        return leaf
    array, dim, size = leaf.array, leaf.dim, leaf.size
    if array is None:
        return None  # frozen
    if len(array.shape) <= dim or mesh is None:
        return array
    shape = (*array.shape[:dim], min(size, array.shape[dim]), *array.shape[dim + 1 :])
    to = NamedSharding(mesh, PartitionSpec())
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=to)
    return jax.jit(lambda a: jax.lax.slice(a, (0,) * a.ndim, shape), out_shardings=to)(array)


def padded(like: Any, value: Any) -> Any:
    """The inverse, for leaves laid out like `like`."""
    if not is_padded(like):
        return value
    if like.array is None:
        return like
    shape, sharding = like.array.shape, like.array.sharding
    if isinstance(value, jax.ShapeDtypeStruct):
        return replace(like, array=jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding))
    widths = [(0, new - old) for new, old in zip(shape, value.shape, strict=True)]
    return replace(like, array=jax.device_put(jnp.pad(value, widths), sharding))


def behind(lead: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on all entries of so many leading axes."""
    for _ in range(lead):
        function = jax.vmap(function)
    return function


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and bool(
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )
