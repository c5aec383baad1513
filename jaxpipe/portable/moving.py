"""Arrays to where they belong, in one program for all of a tree, compiled once for each form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import PyTree
from ..model.mesh import explicit_context, jit_on_mesh
from ..pipeline import Pipeline
from .leaves import from_elsewhere, unplaced, with_sharding


@dataclass(frozen=True)
class Mover:
    """Runs what arranges the leaves of a tree."""

    pipe: Pipeline | None
    # moments move as parameters do: compiled once
    _programs: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def run(
        self,
        key: Any,
        arrange: Callable[[PyTree], PyTree],
        leaves: PyTree,
        specs: Callable[[PyTree], PyTree],
    ) -> PyTree:
        """Move arrays to where `specs` wants them, in one program for each `key`; ShapeDtypeStructs
        give ShapeDtypeStructs.
        """
        like = jax.eval_shape(
            arrange, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), leaves)
        )
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(leaves))
        if self.pipe is None:
            if not abstract:
                return arrange(leaves)
            new, tree = jax.tree.flatten(like)  # one chunk, so as many leaves as before
            old = jax.tree.leaves(leaves)
            return jax.tree.unflatten(
                tree, [with_sharding(a, unplaced(b, a)) for a, b in zip(new, old, strict=True)]
            )
        mesh = self.pipe.mesh
        to = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs(like),
            is_leaf=lambda s: isinstance(s, PartitionSpec),
        )
        if abstract:
            return jax.tree.map(with_sharding, like, to)
        key = (*key, *(leaf.shape for leaf in jax.tree.leaves(leaves)), explicit_context(mesh))
        if key not in self._programs:
            self._programs[key] = jit_on_mesh(mesh, arrange, to)
        return self._programs[key](jax.tree.map(lambda leaf: from_elsewhere(leaf, mesh), leaves))
