"""The pipeline's own mesh, whose axes are automatic; arrays of a mesh with explicit axes; what
PartitionSpecs name; and trees that move to where they belong on a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree

T = TypeVar("T")
P = ParamSpec("P")


def is_spec(value: Any) -> bool:
    """A leaf of a tree of specs."""
    return value is None or isinstance(value, PartitionSpec)


def holds(prefix: str, name: str) -> bool:
    """Whether a spec at the path `prefix` applies to the parameter `name`."""
    return prefix in ("", name) or name.startswith(prefix + "/")


def names_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def axes_of(specs: Any) -> set[Any]:
    """The mesh axes that any of these specs names."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    own = [entry for spec in leaves if isinstance(spec, PartitionSpec) for entry in spec]
    return {name for entry in own for name in names_of(entry)}


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
            inputs = jax.tree.map(_automatic, arguments)
            results = function(*inputs)
        if not explicit:
            return results

        def back(sharding: NamedSharding, tree: PyTree) -> PyTree:
            spec = _explicit(context, sharding.spec)
            return jax.tree.map(lambda leaf: jax.reshard(leaf, spec), tree)

        shardings = NamedSharding(mesh, PartitionSpec()) if to is None else to(*inputs)
        returned: T = jax.tree.map(back, shardings, results)
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


def outside_contexts(function: Callable[P, T]) -> Callable[P, T]:
    """A function of a pipeline and of its arguments, run as outside of `jax.set_mesh`: arrays and
    shapes are on the pipeline's own mesh there.
    """

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if jax.sharding.get_abstract_mesh().empty:
            return function(*arguments, **keywords)
        pipe: Any = arguments[0]
        own = partial(_on_own_mesh, pipe.mesh)
        with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
            return function(*jax.tree.map(own, arguments), **jax.tree.map(own, keywords))

    return call


def _on_own_mesh(mesh: Mesh, leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return leaf
    to = NamedSharding(mesh, sharding.spec)
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return with_sharding(leaf, to) if is_shape else jax.device_put(leaf, to)


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
    kinds = dict(zip(context.axis_names, context.axis_types, strict=True))

    def kept(entry: Any) -> Any:
        names = tuple(n for n in names_of(entry) if kinds.get(n) is AxisType.Explicit)
        return names[0] if len(names) == 1 else names or None

    return PartitionSpec(*map(kept, spec))


class Mover:
    """Runs functions that rearrange trees, each compiled once."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._compiled: dict[Any, Callable[[PyTree], PyTree]] = {}

    def run(
        self,
        arrange: Callable[..., PyTree],
        tree: PyTree,
        to: Callable[[PyTree], PyTree] | None,
        *static: PyTree,
    ) -> PyTree:
        """Rearrange a tree; with shapes in it the result is shapes with shardings.

        Args:
            arrange: traced; of the static arguments and the tree.  Its name says which it is.
            tree: arrays on any devices, or shapes.
            to: shardings of the result, given its shapes; None for anywhere.
            static: trees of leaves that can be compared, as part of the function.
        """
        name, arrange = arrange.__name__, partial(arrange, *static)
        like = jax.eval_shape(arrange, jax.tree.map(_shape, tree))
        shardings = None if to is None else to(like)
        if has(tree, jax.ShapeDtypeStruct):
            return like if shardings is None else jax.tree.map(with_sharding, like, shardings)
        leaves, form = jax.tree.flatten((static, shardings))
        key = (name, jax.tree.structure(tree), form, *leaves, explicit_context(self._mesh))
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
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of the leaf, spread like this."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
