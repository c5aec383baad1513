"""Models whose layers are pytrees with functions and settings among their leaves: equinox's
modules, and dataclasses that are registered with JAX.

A pipeline takes trees of arrays.  `split` and `stack` take the arrays out of such a module, and
give the function that puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import PyTree, by_path
from .errors import PipelineError

Rebuild: TypeAlias = Callable[[PyTree], Any]


def split(module: Any) -> tuple[PyTree, Rebuild]:
    """Cut a module into its arrays, and a function that makes the module of such arrays.

    Other leaves (functions, numbers, strings) are None in the tree of arrays, and part of the
    function.  The source of the idea is equinox's `partition` and `combine`.

    Args:
        module: a pytree.

    Returns:
        The arrays, a tree like the module; and (arrays) -> module.

    Example:
        >>> import jax.numpy as jnp
        >>> arrays, rebuild = split({"w": jnp.ones(3), "act": jnp.tanh, "scale": 2})
        >>> arrays["act"] is None, rebuild(arrays)["scale"]
        (True, 2)
    """
    rest = jax.tree.map(lambda leaf: None if _is_array(leaf) else leaf, module)

    def rebuild(arrays: PyTree) -> Any:
        return jax.tree.map(
            lambda other, array: other if array is None else array,
            rest,
            arrays,
            is_leaf=lambda leaf: leaf is None,
        )

    return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, module), rebuild


def stack(modules: Sequence[Any]) -> tuple[PyTree, Rebuild]:
    """Stack modules that differ in their arrays alone: the layers of a model.

    Args:
        modules: at least one, of one structure, with arrays of the same shapes and dtypes, and
            equal other leaves.

    Returns:
        Arrays with leaves [layers, ...], as `Model` takes them; and (arrays of a layer) -> module.

    Raises:
        PipelineError: modules differ in more than their arrays; every difference is listed.

    Example:
        >>> import jax.numpy as jnp
        >>> arrays, rebuild = stack([{"w": jnp.ones(3), "act": jnp.tanh}] * 4)
        >>> arrays["w"].shape
        (4, 3)
    """
    if not modules:
        raise PipelineError("stack: give at least one module")
    faults = [
        f"module {n} {fault}" for n, one in enumerate(modules) for fault in _faults(modules[0], one)
    ]
    if faults:
        raise PipelineError.listing("stack: modules differ in more than their arrays", faults)
    every, rebuilds = zip(*map(split, modules), strict=True)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *every), rebuilds[0]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _faults(first: Any, other: Any) -> list[str]:
    """How a module differs from the first one."""
    wanted, found = by_path(first), by_path(other)
    if wanted.keys() != found.keys():
        return [f"has the leaves {list(found)}, module 0 has {list(wanted)}"]
    if len({jax.tree.structure(first), jax.tree.structure(other)}) > 1:
        return ["has other static fields than module 0"]
    return [
        f"has {_described(found[path])} at {path}, module 0 has {_described(leaf)}"
        for path, leaf in wanted.items()
        if not _alike(leaf, found[path])
    ]


def _alike(one: Any, other: Any) -> bool:
    if _is_array(one) and _is_array(other):
        return bool(one.shape == other.shape and one.dtype == other.dtype)
    return not _is_array(one) and not _is_array(other) and bool(one == other)


def _described(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else repr(leaf)
