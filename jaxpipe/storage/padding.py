"""Parameters that are cut over the pipe axis, padded where their dim does not divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..arrays import ByPart, LeafPath, Params, path_text
from ..model.calls import Cuts


class Padding(NamedTuple):
    """The zeros of a parameter: they follow its own `size` entries along a dim."""

    path: str  # canonical, "last/w"
    dim: int
    size: int
    shape: tuple[int, ...]  # with the zeros

    @classmethod
    def of(cls, cuts: Cuts, params: Params) -> tuple[Padding, ...]:
        """Those of canonical parameters."""
        found, cut = [], {key: params[key] for key in cuts.dims if key in params}
        for path, leaf in jax.tree_util.tree_leaves_with_path(cut):
            dim = cuts.dim(path[0].key, path[1:])
            shape = cuts.padded(leaf.shape, dim)
            if dim is not None and shape != leaf.shape:
                found.append(cls(path_text(path), dim, leaf.shape[dim], shape))
        return tuple(found)

    @property
    def own(self) -> tuple[int, ...]:
        """The shape without the zeros."""
        return tuple(self.size if d == self.dim else n for d, n in enumerate(self.shape))

    def cut_off(self, leaf: Array) -> Array:
        """The parameter, or what follows it (with further axes before its own, or fewer), without
        the zeros.
        """
        dim = self.dim + max(0, leaf.ndim - len(self.shape))
        if leaf.ndim <= dim or leaf.shape[dim] != self.shape[self.dim]:
            return leaf
        return lax.slice_in_dim(leaf, 0, self.size, axis=dim)

    def pad(self, leaf: Array) -> Array:
        """The inverse, of what has the parameter's shape."""
        return padded_to(leaf, self.shape) if jnp.shape(leaf) == self.own else leaf


def padded_to(leaf: Array, shape: Sequence[int]) -> Array:
    """A leaf with zeros at its end, up to this shape."""
    widths = [(0, new - old) for new, old in zip(shape, jnp.shape(leaf), strict=True)]
    return jnp.pad(leaf, widths) if any(width for _, width in widths) else leaf


def by_parameter(
    change: Callable[[Padding, Array], Array],
    parts: ByPart,
    padding: Sequence[Padding],
) -> ByPart:
    """By part of the model trees whose paths end with those of parameters, with what the padding
    of these makes of a leaf: `Padding.cut_off` or `Padding.pad`.
    """

    def changed(path: LeafPath, leaf: Array) -> Array:
        name = f"/{path_text(path)}"
        own = (each for each in padding if each.path.split("/")[0] == path[0].key)
        found = next((each for each in own if name.endswith(f"/{each.path}")), None)
        return leaf if found is None else change(found, leaf)

    return dict(jax.tree_util.tree_map_with_path(changed, dict(parts)))
