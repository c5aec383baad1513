"""Parameters that lie in buffers, each in an array of its own for a while: as they are drawn, or as a rule for one is given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..arrays import PyTree
from .forms import TreeForm, unlike_paths
from .mesh import jit_on_mesh
from .packed import Packed, buffer_row


def apart(mesh: Mesh, axis: str, chunk: PyTree) -> PyTree:
    """The chunk with a leaf [P, ...] for each parameter, zeros on devices that do not have it; each device takes its own out of buffers."""
    if not isinstance(chunk, Packed) or not chunk.buffers:
        return chunk
    known = [form for form in chunk.forms if form is not None]
    lies = {path: (shape, leaf) for form in known for path, shape, leaf in zip(form.paths, form.shapes, chunk.of_form(form), strict=True)}
    if unlike_paths(known):
        return Packed(dict.fromkeys(lies), chunk.forms)  # has no shape of its own

    def taken(form: TreeForm | None, own: dict[str, Any]) -> dict[str, Any]:
        have = {} if form is None else dict(zip(form.paths, chunk.take(form, own, pinned=True), strict=True))
        return {p: have[p] if p in have or leaf is None else jnp.zeros(shape, leaf.dtype) for p, (shape, leaf) in lies.items()}

    return Packed(_on_each(mesh, axis, chunk.forms, taken, chunk.leaves, _splits(chunk)), chunk.forms)


def together(mesh: Mesh, axis: str, chunk: PyTree, like: PyTree) -> PyTree:
    """The inverse: what `like` has in buffers is brought into such."""
    if not isinstance(chunk, Packed) or not like.buffers:
        return chunk

    def joined(form: TreeForm | None, own: dict[str, Any]) -> dict[str, Any]:
        found = {name: own[name] for name in like.leaves if name in own}
        values = {} if form is None else dict(zip(form.paths, chunk.take(form, own), strict=True))
        for buffer in like.buffers:
            row = None if form is None else buffer_row(buffer, form, {path: values[path] for path in buffer.starts(form)}, pinned=True)
            like_leaf = like.leaves[buffer.name]
            if like_leaf is not None and row is None:
                row = jnp.zeros(like_leaf.shape[1:], own[buffer.paths[0]].dtype)
            found[buffer.name] = None if like_leaf is None else row
        return found

    return Packed(_on_each(mesh, axis, like.forms, joined, chunk.leaves, _splits(like)), like.forms, like.buffers)


def _splits(chunk: Packed) -> dict[str, PartitionSpec]:
    """How the partitioner splits buffers, and what lies in them, on one device of the pipe axis."""
    found = {}
    for buffer in chunk.buffers:
        if buffer.pinned:
            found[buffer.name] = buffer.spec
            for form in chunk.forms:
                found |= {} if form is None else {path: entry.spec for path, entry in buffer.entries(form).items()}
    return found


def _on_each(
    mesh: Mesh,
    axis: str,
    forms: tuple[TreeForm | None, ...],
    function: Callable[..., Any],
    leaves: PyTree,
    splits: Mapping[str, PartitionSpec],
) -> dict[str, Any]:
    """A function of a device's form and of its part of the leaves, each device's on that device.

    What the partitioner splits is split as it says before and after: nothing is exchanged inside, where devices do unlike things.
    """
    kinds = list(dict.fromkeys(forms))
    number = jnp.array([kinds.index(form) for form in forms])

    def split(leaves: dict[str, Any]) -> dict[str, Any]:
        return {
            name: lax.with_sharding_constraint(leaf, splits[name]) if name in splits and leaf is not None else leaf
            for name, leaf in leaves.items()
        }

    def one(leaves: PyTree) -> PyTree:
        own = split(jax.tree.map(lambda leaf: leaf[0], leaves))
        found = split(lax.switch(number[lax.axis_index(axis)], [partial(function, kind) for kind in kinds], own))
        return jax.tree.map(lambda leaf: leaf[None], found)

    spec = PartitionSpec(axis)
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis}, check_vma=False)
    found: dict[str, Any] = jit_on_mesh(mesh, mapped)(leaves)
    return found
