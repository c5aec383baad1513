"""Stages that are all alike: a leaf of every chunk, spread over the devices, <-> one leaf in model
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ..arrays import PyTree
from ..errors import CheckpointError
from ..model.mesh import trimmed
from ..model.placed import Chunks
from ..pipeline import Pipeline
from .leaves import Path, behind, text
from .moving import Mover
from .rules import Rule


@dataclass(frozen=True)
class AlikeStages:
    """Merges and divides the stages of one tree; with `pipe` None they lie in model
    order already.
    """

    pipe: Pipeline | None
    layer_axis: bool
    mover: Mover

    def merged(self, path: Path, stages: PyTree, rules: Mapping[Path, Rule]) -> PyTree:
        """Placed stages -> leaves in model order."""
        chunks = stages if self.pipe is not None else (stages,)
        mine = self._rules(path, chunks, rules)
        leaves = [jax.tree.leaves(chunk) for chunk in chunks]
        _check_placeholders(path, mine, leaves)

        def arrange(leaves: Sequence[Sequence[Any]]) -> list[Any]:
            return [
                self._join(rule, group)
                for rule, group in zip(mine, zip(*leaves, strict=True), strict=True)
            ]

        joined = self.mover.run(
            ("of", *mine), arrange, leaves, lambda like: list(map(self._canonical_spec, mine, like))
        )
        return jax.tree.unflatten(jax.tree.structure(chunks[0]), joined) if chunks else {}

    def divided(
        self, path: Path, stages: PyTree, like: PyTree, rules: Mapping[Path, Rule]
    ) -> PyTree:
        """Leaves in model order -> stages placed as `like`."""
        chunks = like if self.pipe is not None else (like,)
        mine = self._rules(path, chunks, rules)
        wanted = [leaf.shape for leaf in jax.tree.leaves(chunks[:1])]

        def arrange(leaves: Sequence[Any]) -> list[list[Any]]:
            parts = [
                self._cut(rule, leaf, shape, len(chunks))
                for rule, leaf, shape in zip(mine, leaves, wanted, strict=True)
            ]
            return [[part[v] for part in parts] for v in range(len(chunks))]

        def specs(_like: PyTree) -> list[list[PartitionSpec]]:
            return [[self._placed_spec(rule) for rule in mine] for _ in chunks]

        parts = self.mover.run(("placed", *mine), arrange, jax.tree.leaves(stages), specs)
        found = tuple(
            jax.tree.unflatten(jax.tree.structure(chunk), part)
            for chunk, part in zip(chunks, parts, strict=True)
        )
        if self.pipe is None:
            return found[0]
        return like.like(found) if isinstance(like, Chunks) else found

    def _rules(
        self, path: Path, chunks: Sequence[PyTree], rules: Mapping[Path, Rule]
    ) -> list[Rule]:
        """Of each leaf of a chunk: those of the first."""
        stages = jax.tree_util.DictKey("stages")
        chunk = () if self.pipe is None else (jax.tree_util.SequenceKey(0),)
        return (
            [
                rules[(*path, stages, *chunk, *p)]
                for p, _ in jax.tree_util.tree_leaves_with_path(chunks[0])
            ]
            if chunks
            else []
        )

    def _join(self, rule: Rule, group: Sequence[Any]) -> Any:
        """One leaf of every chunk -> the leaf in model order."""
        if not rule.follows:
            return group[0]

        def join(*group: Any) -> Any:
            whole = group[0] if self.pipe is None else self.pipe.layout.canonical_stages(group)
            return (
                whole.reshape(-1, *whole.shape[2:]) if self.layer_axis and whole.ndim > 1 else whole
            )

        return behind(rule.lead, join)(*group)

    def _cut(self, rule: Rule, leaf: Any, shape: tuple[int, ...], chunks: int) -> Sequence[Any]:
        """The inverse of `_join`; `shape` is what the leaf of a chunk has."""
        if not rule.follows:
            return (leaf,) * chunks

        def cut(leaf: Any) -> Any:
            own = shape[rule.lead :]
            if self.pipe is None:
                return (leaf.reshape(own),)  # what a list of stages has may be a scalar
            return self.pipe.layout.place_stages(
                leaf.reshape(self.pipe.schedule.num_stages, *own[1:]) if self.layer_axis else leaf
            )

        return tuple(behind(rule.lead, cut)(leaf))

    def _canonical_spec(self, rule: Rule, like: Any) -> PartitionSpec:
        """Stages, or layers, over the pipe axis where they divide; the other dims as the
        parameter's.
        """
        assert self.pipe is not None
        if not rule.follows:
            return PartitionSpec()
        rest = rule.spec[1:] if self.layer_axis else rule.spec
        divides = like.shape[rule.lead] % self.pipe.schedule.num_devices == 0
        return PartitionSpec(*(None,) * rule.lead, self.pipe.axis if divides else None, *rest)

    def _placed_spec(self, rule: Rule) -> PartitionSpec:
        assert self.pipe is not None
        return (
            trimmed(*(None,) * rule.lead, self.pipe.axis, *rule.spec)
            if rule.follows
            else PartitionSpec()
        )


def _check_placeholders(path: Path, rules: Sequence[Rule], leaves: Sequence[Sequence[Any]]) -> None:
    """One value a chunk, where it does not follow stages, has no place in model order unless all
    are equal.
    """
    for i, rule in enumerate(rules):
        group = [chunk[i] for chunk in leaves]
        if rule.follows or len(group) == 1 or isinstance(group[0], jax.ShapeDtypeStruct):
            continue
        values = [np.asarray(leaf) for leaf in group]
        if any(not np.array_equal(values[0], v) for v in values[1:]):
            raise CheckpointError(
                f"{text(path)} holds one number for all stages of a chunk, "
                f"{[v.item() for v in values]}: it belongs to this "
                "schedule's chunks and not to the model; use a transformation that keeps one for "
                "each parameter or for all"
            )
