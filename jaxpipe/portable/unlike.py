"""Stages of unlike forms, packed in one array a dtype and chunk, <-> the canonical tree; masks may
have taken leaves out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..arrays import PyTree
from ..errors import CheckpointError
from ..pipeline import Pipeline
from .leaves import Path, spec_of, text
from .moving import Mover
from .rules import Rule


@dataclass(frozen=True)
class UnlikeStages:
    """Merges and divides the stages of one tree; `whole` are the shapes of all leaves, those that a
    mask took out too.
    """

    pipe: Pipeline
    mover: Mover

    def merged(
        self, path: Path, stages: PyTree, rules: Mapping[Path, Rule], whole: PyTree
    ) -> PyTree:
        """Placed stages -> the canonical tree."""
        layout, axis, count = self.pipe.layout, self.pipe.axis, self.pipe.schedule.num_devices
        _check_shapes(path, stages, rules)

        def spread(like: PyTree) -> PyTree:
            return jax.tree.map(
                lambda a: (
                    PartitionSpec(axis) if a.shape and a.shape[0] % count == 0 else PartitionSpec()
                ),
                like,
            )

        def arrange(stages: PyTree) -> PyTree:
            return layout.canonical_stages(_filled(stages, whole))

        found = self.mover.run(("of unlike", jax.tree.structure(stages)), arrange, stages, spread)
        masks = _masks(stages, whole)
        if not masks:
            return found
        kinds = [
            node for i, node in enumerate(masks.values()) if node not in list(masks.values())[:i]
        ]
        numbers = {path: 1 + kinds.index(node) for path, node in masks.items()}

        def marked() -> PyTree:
            marks = jax.tree_util.tree_map_with_path(
                lambda p, a: jnp.full(a.shape, numbers.get(p, 0)), whole
            )
            return jax.tree.map(
                lambda leaf: jnp.max(leaf, initial=0), layout.canonical_stages(marks)
            )

        return jax.tree.map(
            lambda leaf, number: kinds[number - 1] if number else leaf, found, jax.jit(marked)()
        )

    def divided(self, stages: PyTree, like: PyTree, whole: PyTree) -> PyTree:
        """The inverse: stages placed as `like`."""
        layout = self.pipe.layout
        canonical = jax.eval_shape(layout.canonical_stages, whole)

        def spread(_like: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: PartitionSpec(*spec_of(leaf)), like)

        def arrange(stages: PyTree) -> PyTree:
            return _like_leaves(layout.place_stages(_filled(stages, canonical), like=whole), like)

        return self.mover.run(("placed unlike", jax.tree.structure(like)), arrange, stages, spread)


def _check_shapes(path: Path, stages: PyTree, rules: Mapping[Path, Rule]) -> None:
    key = jax.tree_util.DictKey("stages")
    odd = [
        text((*path, key, *p))
        for p, _ in jax.tree_util.tree_leaves_with_path(stages)
        if rules[(*path, key, *p)][:2] != (0, True)
    ]
    if odd:
        faults = [f"{name} does not have its parameter's shape" for name in odd]
        raise CheckpointError.listing(
            "with unlike stages every leaf must be as its parameter is, but", faults
        )


def _filled(tree: PyTree, whole: PyTree) -> PyTree:
    """The tree with zeros where a mask took leaves out of it."""
    have = dict(jax.tree_util.tree_leaves_with_path(tree))
    return jax.tree_util.tree_map_with_path(
        lambda p, a: have[p] if p in have else jnp.zeros(a.shape, a.dtype), whole
    )


def _like_leaves(tree: PyTree, wanted: PyTree) -> PyTree:
    """The tree without the leaves that a mask took out of `wanted`."""
    have = dict(jax.tree_util.tree_leaves_with_path(tree))
    return jax.tree_util.tree_map_with_path(lambda path, _: have[path], wanted)


def _masks(stages: PyTree, whole: PyTree) -> dict[Path, Any]:
    """What stands where a mask took leaves out, by path: `optax.MaskedNode`, or None for what is
    frozen.
    """
    have = {path for path, _ in jax.tree_util.tree_leaves_with_path(stages)}
    nodes = dict(jax.tree_util.tree_leaves_with_path(stages, is_leaf=_is_mask))
    return {
        path: nodes.get(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(whole)
        if path not in have
    }


def _is_mask(node: PyTree) -> bool:
    return node is None or (isinstance(node, tuple) and not node)
