"""Chunks of unlike stages, in arrays that the stages of all devices share, and what each device
does with its own stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import DictKey

from ..arrays import PyTree, zeros_of
from ..model.settings import jit_on_mesh
from .table import ChunkLayout, TreeForm, is_missing

ByName: TypeAlias = "dict[str, Any]"  # of a chunk, by name


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Packed:
    """One chunk of every device: arrays [P, ...] by name, and where each device's leaves are in
    them.

    It is a tree of its arrays, so optimizers, norms and casts work on it as on any other.
    """

    leaves: ByName
    layout: ChunkLayout

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, jax.Array]], ChunkLayout]:
        """ByName in the order of their names."""
        return [(DictKey(name), self.leaves[name]) for name in self.layout.names], self.layout

    @classmethod
    def tree_unflatten(cls, layout: ChunkLayout, children: Sequence[jax.Array]) -> Packed:
        """The inverse of `tree_flatten`."""
        return cls(dict(zip(layout.names, children, strict=True)), layout)

    @classmethod
    def of(cls, stages: Sequence[PyTree | None], layout: ChunkLayout) -> Packed:
        """The stages of one chunk, by device; a leaf may be missing, where it is so in all."""
        rows = list(map(layout.store, layout.forms, stages))
        return cls({name: _stack([row.get(name) for row in rows]) for name in layout.names}, layout)

    def stage(self, device: int) -> PyTree:
        """One device's own parameters."""
        own = jax.tree.map(lambda leaf: leaf[device], self.leaves)
        return self.layout.load(self.layout.forms[device], own)


def masked(leaf: jax.Array, there: Sequence[bool], axis: int = 0) -> jax.Array:
    """The leaf [P, ...] with zeros for devices that are not there; these are along `axis`."""
    if all(there):
        return leaf
    mask = np.array(there).reshape(-1, *(1,) * (leaf.ndim - 1 - axis))
    return jnp.where(mask, leaf, jnp.zeros_like(leaf))


def _stack(rows: Sequence[Any]) -> Any:
    """The array of all devices; those without a row get zeros."""
    have = [row for row in rows if not is_missing(row)]
    if not have:
        return next((row for row in rows if row is not None), None)
    zeros = jnp.zeros_like(have[0])
    return jnp.stack([zeros if is_missing(row) else jnp.asarray(row) for row in rows])


def on_own_stages(
    mesh: Mesh,
    axis: str,
    function: Callable[..., tuple[PyTree, ...]],
    chunks: Sequence[Packed],
    layouts: Sequence[ChunkLayout],
    more: object = None,
) -> list[Packed]:
    """What a function makes of the trees of each device's own stage: a tree for each of the
    layouts.  Its first argument is `more`, alike on all devices.

    Devices do unlike things inside.  So buffers are split in the partitioner's way before and
    after, and moving leaves exchanges nothing.
    """
    before = [chunk.layout for chunk in chunks]
    by_device = list(zip(*(layout.forms for layout in (*before, *layouts)), strict=True))
    kinds = list(dict.fromkeys(by_device))
    numbers = [kinds.index(forms) for forms in by_device]

    # traced once for each kind: its shapes are asked for before the switch
    @partial(jax.jit, static_argnums=0)
    def run(kind: tuple[TreeForm, ...], own: Sequence[ByName], more: object) -> list[ByName]:
        given = zip(before, kind, own, strict=False)
        trees = (layout.load(form, arrays, pinned=True) for layout, form, arrays in given)
        found = zip(layouts, kind[len(before) :], function(more, *trees), strict=True)
        return [layout.store(form, tree, pinned=True) for layout, form, tree in found]

    def one(leaves: list[ByName], more: object) -> list[ByName]:
        own = list(map(_split, jax.tree.map(lambda leaf: leaf[0], leaves), before))
        shapes = [jax.eval_shape(partial(run, kind), own, more) for kind in kinds]
        like = [{k: v for arrays in each for k, v in arrays.items()} for each in zip(*shapes)]

        def full(kind: tuple[TreeForm, ...], *given: jax.Array) -> list[ByName]:
            return [zeros_of(a) | b for a, b in zip(like, run(kind, *given), strict=True)]

        number = jnp.array(numbers)[lax.axis_index(axis)]
        found = lax.switch(number, [partial(full, kind) for kind in kinds], own, more)
        found = list(map(_split, found, layouts))
        stacked: list[ByName] = jax.tree.map(lambda leaf: leaf[None], found)
        return stacked

    spec, everywhere = PartitionSpec(axis), PartitionSpec()
    mapped = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(spec, everywhere),
        out_specs=spec,
        axis_names={axis},
        check_vma=False,
    )
    found = jit_on_mesh(mesh, mapped)([chunk.leaves for chunk in chunks], more)
    return list(map(Packed, found, layouts))


def _split(arrays: ByName, layout: ChunkLayout) -> ByName:
    """One device's arrays, with buffers split as they are stored."""
    there = [own for own in layout.buffers if not is_missing(arrays.get(own.name))]
    split = {b.name: lax.with_sharding_constraint(arrays[b.name], b.spec) for b in there}
    return arrays | split
