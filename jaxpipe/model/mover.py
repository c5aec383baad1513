"""Trees of arrays to where they belong on a mesh, each in one program that is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..arrays import PyTree
from .mesh import explicit_context, jit_on_mesh


class Mover:
    """Runs functions that rearrange trees, and keeps what is compiled of them."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._compiled: dict[Any, Callable[[PyTree], PyTree]] = {}

    def run(
        self,
        key: Any,
        arrange: Callable[[PyTree], PyTree],
        tree: PyTree,
        to: Callable[[PyTree], PyTree] | None,
    ) -> PyTree:
        """Rearrange a tree; with shapes in it the result is shapes with shardings.

        Args:
            key: says which function `arrange` is.
            arrange: traced; of the tree alone.
            tree: arrays on any devices, or shapes.
            to: shardings of the result, given its shapes; None for anywhere.
        """
        like = jax.eval_shape(arrange, jax.tree.map(_shape, tree))
        shardings = None if to is None else to(like)
        if has(tree, jax.ShapeDtypeStruct):
            return like if shardings is None else jax.tree.map(with_sharding, like, shardings)
        leaves, form = jax.tree.flatten(shardings)
        key = (key, jax.tree.structure(tree), form, tuple(leaves), explicit_context(self._mesh))
        if key not in self._compiled:
            self._compiled[key] = jit_on_mesh(self._mesh, arrange, shardings)
        return self._compiled[key](jax.tree.map(self._from_elsewhere, tree))

    def _from_elsewhere(self, leaf: Any) -> Any:
        """A leaf that one program can take: one on other devices than the mesh's goes over the
        host.
        """
        here = (
            not isinstance(leaf, jax.Array)
            or isinstance(leaf, jax.core.Tracer)
            or not leaf.committed
            or leaf.sharding.device_set == set(self._mesh.devices.flat)
        )
        return leaf if here or not leaf.is_fully_addressable else np.asarray(leaf)


def has(tree: PyTree, kind: type) -> bool:
    """Whether a leaf is of this type."""
    return any(isinstance(leaf, kind) for leaf in jax.tree.leaves(tree))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf).dtype
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of the leaf, spread like this."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
