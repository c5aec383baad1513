"""`first` and `last` written for a share of their parameters: which are cut over the pipe axis,
where, and what the function is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..arrays import PyTree, by_path, followed, path_text
from .mesh import holds

# By path of a parameter: the dim that is cut, or None.
Dims: TypeAlias = "Mapping[str, int | None]"


@dataclass(frozen=True)
class Spread:
    """A function that runs on all devices of the pipe axis at once (`spread` makes one)."""

    call: Callable[..., Any]
    dims: Any = 0
    shared: Any = 0


def spread(function: Callable[..., Any], *, dims: PyTree = 0, shared: PyTree = 0) -> Spread:
    """Run `last`, or `first`, on all devices of the pipe axis at once, each with its share of the
    parameters.

    `function(last_params, x, microbatch, *, ctx) -> loss`, or `function(first_params, microbatch,
    *, ctx) -> x`, is given, on each of P devices, the parameters cut into P parts along one dim
    (padded with zeros to a multiple of P), the whole x and the whole microbatch. It may use any
    collective over `ctx.axis`, the name of the pipe axis, and must return the same loss (x) on
    every device; `jax.lax.axis_index(ctx.axis)` says which part a device has, and `ctx.sizes`, a
    tree like the parameters, how long each cut dim is without padding (0 for a parameter that is
    whole).  Its gradient is that of the loss, so nothing of it is summed twice. Parameters,
    gradients and optimizer state are never gathered.

    Args:
        function: as above; it may also take `shared` and `training`, as any `first` or `last`.
        dims: the dim along which a parameter is cut, or None for one that is whole on every device:
            one for all, or a tree like the parameters, in which one entry may stand for a whole
            subtree (a missing one is cut along dim 0).
        shared: the same for the parameters under "shared", which are cut only where every function
            that takes them is spread; `first` and `last` must be given the same.

    Source: Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary Parallelism, arXiv
    2411.05288.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> def head(params, x, microbatch, *, ctx):
        ...     part = x @ params["w"].T  # a device's share of the outputs: rows of w
        ...     return jax.lax.psum(jnp.sum(part**2), ctx.axis)
        >>> s = jp.schedules.build("gpipe", devices=1, microbatches=2)
        >>> model = jp.Model(lambda p, x: x @ p, last=jp.spread(head))
        >>> pipe = jp.Pipeline(model, s, jax.make_mesh((1,), ("pipe",)))
        >>> params = pipe.place({"stages": jnp.ones((1, 3, 3)), "last": {"w": jnp.ones((5, 3))}})
        >>> float(pipe.evaluate(params, {"x": jnp.ones((2, 3))}))
        405.0

        A scaled embedding: `jp.spread(lambda p, microbatch, *, ctx: 16.0 * jp.VocabEmbedding()(p,
        microbatch, ctx=ctx))`, as `first`.
    """
    return Spread(function, dims, shared)


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["dim", "size"])
@dataclass(frozen=True)
class Padded:
    """A parameter whose cut dim does not divide: the array with zeros after `size` entries of
    `dim`.
    """

    array: Any
    dim: int
    size: int


def is_padded(node: Any) -> bool:
    """True for a `Padded`."""
    return isinstance(node, Padded)


def unpadded(tree: PyTree) -> PyTree:
    """The tree with the padded arrays themselves."""
    return jax.tree.map(
        lambda leaf: leaf.array if is_padded(leaf) else leaf, tree, is_leaf=is_padded
    )


def cut_off(tree: PyTree) -> PyTree:
    """The tree with arrays of their own size, without padding."""

    def own(leaf: Any) -> Any:
        if not is_padded(leaf):
            return leaf
        if not jax.tree.leaves(leaf) or leaf.array.ndim <= leaf.dim:
            return leaf.array
        size = min(leaf.size, leaf.array.shape[leaf.dim])
        return jax.lax.slice_in_dim(leaf.array, 0, size, axis=leaf.dim)

    return jax.tree.map(own, tree, is_leaf=is_padded)


def pad_like(like: Any, leaf: Any) -> Any:
    """A leaf with the zeros that `like` has at its end."""
    if not is_padded(like) or not jax.tree.leaves(like):
        return like if is_padded(like) else leaf
    widths = [(0, new - old) for new, old in zip(jnp.shape(like.array), leaf.shape, strict=True)]
    return replace(like, array=jnp.pad(leaf, widths))


def own_shape(leaf: Any) -> tuple[int, ...] | None:
    """The shape of a parameter, without padding; None for a frozen one."""
    array = unpadded(leaf)
    if array is None or not is_padded(leaf):
        return None if array is None else jnp.shape(array)
    return tuple(leaf.size if d == leaf.dim else n for d, n in enumerate(jnp.shape(array)))


def padded_like(tree: PyTree, like: PyTree) -> PyTree:
    """The inverse of `cut_off`: arrays of the tree that belong to a padded one of `like`, by path
    and shape, with as much padding.

    A path may have more before that of `like`, as that of an optimizer's moment has.
    """
    wide = {
        path: (own_shape(leaf), leaf)
        for path, leaf in by_path(like, is_padded).items()
        if is_padded(leaf)
    }

    def pad(path: Any, leaf: Any) -> Any:
        found = followed(path_text(path), own_shape(leaf), wide)
        return leaf if found is None else pad_like(found[1], leaf)

    return jax.tree_util.tree_map_with_path(pad, tree, is_leaf=lambda node: node is None)


@dataclass(frozen=True)
class Cuts:
    """Which parameters are cut into as many parts as there are devices."""

    parts: int
    # "first" and "last" (and "shared") -> what `spread` was given
    dims: Mapping[str, Any] = field(default_factory=dict)

    def dim(self, key: str, path: tuple[Any, ...]) -> int | None:
        """The dim along which the parameter at a path is cut; None where it is whole."""
        if key not in self.dims:
            return None
        name = path_text(path)
        dims = by_path(self.dims[key], lambda node: node is None)
        return next((dim for prefix, dim in dims.items() if holds(prefix, name)), 0)

    def faults(self, params: Mapping[str, PyTree]) -> list[str]:
        """Canonical parameters that cannot be cut."""
        found = []
        for key, dims in self.dims.items():
            wrong = [d for d in jax.tree.leaves(dims) if type(d) is not int]
            if wrong:
                found.append(
                    f"jaxpipe.spread was given {wrong[0]!r} for {key}; a dim is a whole number, "
                    "or None"
                )
            for path, leaf in jax.tree_util.tree_leaves_with_path(params.get(key, {})):
                dim, shape = self.dim(key, path), jnp.shape(leaf)
                if type(dim) is int and not 0 <= dim < len(shape):
                    where = f"{key}{jax.tree_util.keystr(path)}"
                    found.append(
                        f"{where} of shape {shape} has no dim {dim} to cut over {self.parts} "
                        "devices; give jaxpipe.spread(..., dims=) "
                        "the dim of each parameter, None for those that are whole on every device"
                    )
        return found

    def pad(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Parameters whose cut dims all divide."""

        def padded(key: str, path: Any, leaf: Any) -> Any:
            dim = self.dim(key, path)
            if dim is None or leaf.shape[dim] % self.parts == 0:
                return leaf
            size = leaf.shape[dim]
            widths = [(0, -size % self.parts if d == dim else 0) for d in range(leaf.ndim)]
            return Padded(jnp.pad(leaf, widths), dim, size)

        return {
            key: jax.tree_util.tree_map_with_path(lambda p, a, k=key: padded(k, p, a), tree)
            for key, tree in params.items()
        }

    def shares(self, key: str, placed: PyTree) -> PyTree:
        """The parts of whole placed parameters, leaves [parts, ...]; those that are not cut are the
        same for all.
        """

        def share(path: Any, leaf: Any) -> Any:
            dim = self.dim(key, path)
            array = leaf.array if is_padded(leaf) else leaf
            if dim is None:
                return jnp.broadcast_to(array, (self.parts, *array.shape))
            return jnp.stack(jnp.split(array, self.parts, dim))

        return jax.tree_util.tree_map_with_path(share, placed, is_leaf=is_padded)

    def both_shares(self, key: str, own: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        """Those of the parameters of `first` or `last`, and of the shared ones."""
        return self.shares(key, own), self.shares("shared", shared)

    def sizes(self, key: str, placed: PyTree, *, parts: int | None = None) -> PyTree:
        """For each parameter, given one of `parts` parts of it, the whole length of the dim that is
        cut; 0 where none is.
        """
        count = self.parts if parts is None else parts

        def size(path: Any, leaf: Any) -> int:
            if is_padded(leaf):
                return int(leaf.size)
            dim = self.dim(key, path)
            return 0 if dim is None else int(leaf.shape[dim]) * count

        return jax.tree_util.tree_map_with_path(size, placed, is_leaf=is_padded)
