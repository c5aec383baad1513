"""Parameters that lie in buffers, each in an array of its own for a while: as they are drawn, or as
a rule for one is given them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..arrays import PyTree
from .forms import TreeForm, told_apart, unlike_paths
from .mesh import jit_on_mesh
from .packed import Packed, buffer_row


def apart(mesh: Mesh, axis: str, chunk: PyTree) -> PyTree:
    """The chunk with a leaf [P, ...] for each parameter, zeros on devices that do not have it; each
    device takes its own out of buffers.

    Parameters of one name but of unlike shapes, which lie raveled in one array, have names of their
    own.
    """
    if not isinstance(chunk, Packed) or not (
        chunk.buffers or unlike_paths([form for form in chunk.forms if form is not None])
    ):
        return chunk
    forms = told_apart(chunk.forms, [() if form is None else form.shapes for form in chunk.forms])
    named = dict(zip(chunk.forms, forms, strict=True))
    lies = {
        name: (shape, leaf)
        for old, new in named.items()
        if old is not None and new is not None
        for name, shape, leaf in zip(new.paths, new.shapes, chunk.of_form(old), strict=True)
    }

    def taken(form: TreeForm | None, own: dict[str, Any]) -> dict[str, Any]:
        new = named[form]
        have = (
            {}
            if form is None or new is None
            else dict(zip(new.paths, chunk.take(form, own, pinned=True), strict=True))
        )
        return {
            p: have[p] if p in have else None if leaf is None else jnp.zeros(shape, leaf.dtype)
            for p, (shape, leaf) in lies.items()
        }

    return Packed(
        _on_each(mesh, axis, chunk.forms, taken, chunk.leaves, _splits(chunk, forms)), forms
    )


def together(mesh: Mesh, axis: str, chunk: PyTree, like: PyTree) -> PyTree:
    """The inverse: what `like` has in buffers, or raveled in one array, is brought there."""
    if not isinstance(chunk, Packed) or (not like.buffers and like.forms == chunk.forms):
        return chunk
    named = dict(zip(like.forms, chunk.forms, strict=True))
    pairs = [
        pair
        for old, new in named.items()
        if old is not None and new is not None
        for pair in zip(old.paths, new.paths, strict=True)
    ]
    dtypes = {old: chunk.leaves[new].dtype for old, new in pairs if chunk.leaves[new] is not None}
    buffers = {buffer.name: buffer for buffer in like.buffers}
    raveled = unlike_paths([form for form in like.forms if form is not None]) - {
        path for buffer in like.buffers for path in buffer.paths
    }

    def joined(form: TreeForm | None, own: dict[str, Any]) -> dict[str, Any]:
        new = named[form]
        values = (
            {}
            if form is None or new is None
            else dict(zip(form.paths, chunk.take(new, own), strict=True))
        )

        def row(name: str, to: Any) -> Any:
            found = values.get(name)
            if name in buffers and form is not None:
                found = buffer_row(
                    buffers[name],
                    form,
                    {path: values[path] for path in buffers[name].starts(form)},
                    pinned=True,
                )
            elif name in raveled and found is not None:
                found = jnp.pad(jnp.ravel(found), (0, to.shape[1] - found.size))
            elif name not in buffers and name not in raveled:
                found = own[name]
            if found is None and to is not None:
                return jnp.zeros(
                    to.shape[1:], dtypes[buffers[name].paths[0] if name in buffers else name]
                )
            return found

        return {name: row(name, to) for name, to in like.leaves.items()}

    return Packed(
        _on_each(mesh, axis, like.forms, joined, chunk.leaves, _splits(like, chunk.forms)),
        like.forms,
        like.buffers,
    )


def _splits(chunk: Packed, forms: Sequence[TreeForm | None]) -> dict[str, PartitionSpec]:
    """How the partitioner splits buffers, and what lies in them, by its names in `forms`, on one
    device of the pipe axis.
    """
    found = {}
    for buffer in chunk.buffers:
        if buffer.pinned:
            found[buffer.name] = buffer.spec
            for old, new in zip(chunk.forms, forms, strict=True):
                if old is not None and new is not None:
                    entries, names = (
                        buffer.entries(old),
                        dict(zip(old.paths, new.paths, strict=True)),
                    )
                    found |= {names[path]: entry.spec for path, entry in entries.items()}
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

    What the partitioner splits is split as it says before and after: nothing is exchanged inside,
    where devices do unlike things.
    """
    kinds = list(dict.fromkeys(forms))
    number = jnp.array([kinds.index(form) for form in forms])

    def split(leaves: dict[str, Any]) -> dict[str, Any]:
        return {
            name: lax.with_sharding_constraint(leaf, splits[name])
            if name in splits and leaf is not None
            else leaf
            for name, leaf in leaves.items()
        }

    def one(leaves: PyTree) -> PyTree:
        own = split(jax.tree.map(lambda leaf: leaf[0], leaves))
        found = split(
            lax.switch(
                number[lax.axis_index(axis)], [partial(function, kind) for kind in kinds], own
            )
        )
        return jax.tree.map(lambda leaf: leaf[None], found)

    spec = PartitionSpec(axis)
    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis}, check_vma=False
    )
    found: dict[str, Any] = jit_on_mesh(mesh, mapped)(leaves)
    return found
