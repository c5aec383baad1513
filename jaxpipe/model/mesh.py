"""The pipeline's own mesh, whose axes are automatic, and arrays that come from, or go to, a mesh
with explicit axes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree

T = TypeVar("T")


def automatic(mesh: Mesh) -> Mesh:
    """The same devices and names with automatic axes.

    `jax.make_mesh` makes explicit ones.  Eager JAX cannot add, index or ravel their arrays together
    with arrays of other shardings.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def on_mesh(
    mesh: Mesh, function: Callable[..., T], to: Callable[..., Any] | None = None
) -> Callable[..., T]:
    """The function of trees of arrays, traced on a mesh of automatic axes, whatever mesh its
    arguments or the context have.

    Args:
        mesh: an automatic one.
        function: called with the arguments.
        to: where results are, a tree of shardings, one for a subtree or a leaf, of the same
            arguments.  Used only where `jax.set_mesh` gave the context explicit axes: there the
            results have them too, or nothing could be computed with them.
    """

    @wraps(function)
    def call(*arguments: Any) -> T:
        context, explicit = jax.sharding.get_abstract_mesh(), explicit_context(mesh)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            given = jax.tree.map(_automatic, arguments)
            found = function(*given)
        if not explicit:
            return found

        def back(sharding: NamedSharding, tree: PyTree) -> PyTree:
            return jax.tree.map(
                lambda leaf: jax.reshard(leaf, _explicit(context, sharding.spec)), tree
            )

        shardings = NamedSharding(mesh, PartitionSpec()) if to is None else to(*given)
        returned: T = jax.tree.map(
            back, shardings, found, is_leaf=lambda node: isinstance(node, NamedSharding)
        )
        return returned

    return call


def trimmed(*entries: Any) -> PartitionSpec:
    """A spec without its last Nones, as JAX writes results': it compiles again for an equal
    sharding that is written otherwise.
    """
    count = max((i + 1 for i, entry in enumerate(entries) if entry is not None), default=0)
    return PartitionSpec(*entries[:count])


def explicit_context(mesh: Mesh) -> bool:
    """Whether `jax.set_mesh` made the axes of this mesh explicit around the caller."""
    context = jax.sharding.get_abstract_mesh()
    return AxisType.Explicit in context.axis_types and context.axis_names == mesh.axis_names


def jit_on_mesh(mesh: Mesh, function: Callable[..., T], to: PyTree = None) -> Callable[..., T]:
    """`on_mesh`, compiled; results are at the shardings `to`, or anywhere where it is None."""
    if to is None or explicit_context(mesh):
        return jax.jit(on_mesh(mesh, function, None if to is None else lambda *_: to))
    return jax.jit(on_mesh(mesh, function), out_shardings=to)


def _automatic(leaf: Any) -> Any:
    """The same array, of which the types of mesh axes say no longer how it is spread; the
    partitioner still knows.
    """
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return leaf
    return jax.reshard(leaf, PartitionSpec())


def _explicit(context: Any, spec: PartitionSpec) -> PartitionSpec:
    """The spec as the context's explicit axes want it: automatic ones are not named."""
    automatic_axes = {
        name
        for name, kind in zip(context.axis_names, context.axis_types, strict=True)
        if kind is not AxisType.Explicit
    }

    def kept(entry: Any) -> Any:
        names = tuple(
            n
            for n in (entry if isinstance(entry, tuple) else (entry,))
            if n not in automatic_axes and n is not None
        )
        return names[0] if len(names) == 1 else names or None

    return PartitionSpec(*map(kept, spec))
