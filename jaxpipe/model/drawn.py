"""Placed parameters that are drawn in the same program: each device draws a part of every array,
and none the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree
from .apart import together
from .forms import Sharing
from .param_layout import ParamLayout
from .placed import Chunks


def place_drawn(
    layout: ParamLayout, mesh: Mesh, axis: str, stages: PyTree, sharing: Sharing
) -> Chunks:
    """`ParamLayout.place_stages`, of arrays that the partitioner may split as they are made.

    Stages in other than their order on the devices are picked out of the whole stack, which every
    device would draw.  So the stack is split along another dim, where one divides: each device
    draws a part of every stage, and then they exchange these.  Leaves that share buffers come to
    their devices first, and are put together there.
    """
    like = jax.eval_shape(lambda stages: layout.place_stages(stages, sharing), stages)
    spread = _over(mesh, lambda leaf: _split_along_another_dim(leaf, axis, mesh.shape[axis]))
    if layout.unlike or any(
        layout.stage_at(v) != tuple(range(layout.placement.num_stages))
        for v in range(layout.num_owned)
    ):
        stages = jax.tree.map(spread, stages)
    placed = layout.place_stages(stages, replace(sharing, apart=True))
    if not layout.unlike:
        return placed
    placed = jax.tree.map(
        _over(mesh, lambda leaf: PartitionSpec(axis, *_free(leaf.ndim - 1))), placed
    )
    return Chunks(
        (together(mesh, axis, chunk, wanted) for chunk, wanted in zip(placed, like, strict=True)),
        layout.home,
    )


def _over(mesh: Mesh, spec: Callable[[Any], PartitionSpec | None]) -> Callable[[Any], Any]:
    def constrain(leaf: Any) -> Any:
        found = spec(leaf)
        return (
            leaf
            if found is None
            else lax.with_sharding_constraint(leaf, NamedSharding(mesh, found))
        )

    return constrain


def _split_along_another_dim(leaf: Any, axis: str, size: int) -> PartitionSpec | None:
    """Over the longest dim that divides, the first apart, which is that of stages or layers; None
    where there is none.
    """
    fits = [
        dim for dim in range(1, leaf.ndim) if leaf.shape[dim] % size == 0 and leaf.shape[dim] > 0
    ]
    if not fits:
        return None
    chosen = max(fits, key=lambda dim: leaf.shape[dim])
    return PartitionSpec(
        None,
        *(axis if dim == chosen else PartitionSpec.UNCONSTRAINED for dim in range(1, leaf.ndim)),
    )


def _free(count: int) -> tuple[Any, ...]:
    return (PartitionSpec.UNCONSTRAINED,) * count
