"""How each placed leaf is split over the mesh besides its stage (tensor, fsdp, and outer parameters
over the pipe axis), how a step gathers it, and how its gradient is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..arrays import Leaves, PyTree
from ..jaxprs.entry import on_parts
from ..model.replaced import ADDED, Replacement
from ..model.settings import SpecEntry, trimmed
from .table import BufferKey, Parameter

# An accumulator, or those of the layers of a stack.
Stored: TypeAlias = "Array | tuple[Array, ...]"


@dataclass(frozen=True)
class LeafPlan:
    """How one placed leaf is stored.

    Dims that are split over manual axes are gathered once a step, and gradients are scattered back.
    Other dims may be split by the partitioner.  Dims count from the stage's own first one, without
    the leading axis of devices.
    """

    stage: bool
    gathers: tuple[tuple[str, int], ...]  # (mesh axis, dim)
    auto: tuple[SpecEntry, ...]  # per dim, the axes that the partitioner splits it over, or None
    frozen: bool = False  # no gradient, no accumulator
    replaced: Replacement | None = None  # its gradient is its next value, by this rule
    # (mesh axis, dim) of a share that functions work on, never gathered: the pipe axis for spread
    # functions, and data axes that specs name
    held: tuple[tuple[str, int], ...] = ()
    # (dim, length without padding) that is cut over the pipe axis, for functions that are spread
    cut: tuple[int, int] | None = None
    pinned: bool = False  # the partitioner shall not split what `auto` does not say
    # the parameters that are in the leaf, and how, where it is a buffer
    parameters: tuple[tuple[Parameter, BufferKey | None], ...] = ()

    @property
    def trained(self) -> bool:
        """Whether an optimizer is for it."""
        return not self.frozen and self.replaced is None

    @property
    def rule(self) -> Replacement:
        """How an accumulator takes the values of microbatches."""
        return self.replaced or ADDED

    def spec(self, axis: str, *, manual: bool = False) -> PartitionSpec:
        """The whole sharding of the placed leaf, as JAX writes that of a step's results: else the
        second step would be compiled again.  `manual`: the part of it that `shard_map` is given.
        """
        entries: list[SpecEntry] = [None] * len(self.auto) if manual else list(self.auto)
        for name, dim in (*self.gathers, *self.held):
            entries[dim] = name
        return trimmed(*([axis] if self.stage else []), *entries)

    def local(self, axes: Sequence[str]) -> PartitionSpec:
        """How the whole parameter is split over those of the axes along which functions work on
        their share.
        """
        found = {dim: name for name, dim in self.held if name in axes}
        return trimmed(*(found.get(dim) for dim in range(len(self.auto))))

    def gather(self, leaf: Array, *, apart: bool = False) -> Any:
        """The whole parameter of this device's stage; of a stack, the layers apart, each of which
        a collective leaves where matmuls read it.
        """
        if not self.gathers:
            return leaf
        if apart and all(dim for _, dim in self.gathers):
            return tuple(map(self.of_layer.gather, leaf))

        def gathered(part: Array) -> Array:
            for name, dim in self.gathers:
                part = lax.all_gather(part, name, axis=dim, tiled=True)
            return part

        return on_parts(gathered, leaf, PartitionSpec(*self.auto))

    def scatter(self, grad: Stored, reduced: Sequence[str]) -> Array:
        """Sum a gradient over the mesh axes `reduced`, leaving each device its part along those
        that the parameter is split over.

        The layers of a stack may be apart.  They are summed so, as a whole stack would be a copy.
        """
        held = {name: dim for name, dim in self.gathers if name in reduced}
        if isinstance(grad, tuple) and held and 0 not in held.values():
            return jnp.stack([self.of_layer.scatter(layer, reduced) for layer in grad])
        whole = stored(grad)
        if not held:
            return whole

        def scattered(part: Array) -> Array:
            for name, dim in held.items():
                part = lax.psum_scatter(part, name, scatter_dimension=dim, tiled=True)
            return part

        return on_parts(scattered, whole, PartitionSpec(*self.auto))

    @property
    def of_layer(self) -> LeafPlan:
        """The plan of one layer of a stack, of which every device has all layers."""
        gathers, held = (
            tuple((name, dim - 1) for name, dim in dims) for dims in (self.gathers, self.held)
        )
        return replace(self, auto=self.auto[1:], gathers=gathers, held=held)

    def whole_axes(self, reduced: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes over which the gradient is summed without being split."""
        held = {name for name, _ in (*self.gathers, *self.held)}
        return tuple(n for n in reduced if n not in held)

    def cleared(self, grad: Array | None, axis: str | None = None) -> Array | None:
        """A gradient with zeros as padding, as a function may have one where its parameters are
        zeros.  `axis`: each device along it has its share.
        """
        if self.cut is None or grad is None:
            return grad
        (dim, size), length = self.cut, grad.shape[self.cut[0]]
        parts, device = (1, 0) if axis is None else (lax.axis_size(axis), lax.axis_index(axis))
        if length * parts == size:
            return grad
        place = device * length + lax.broadcasted_iota(jnp.int32, grad.shape, dim)
        return jnp.where(place < size, grad, jnp.zeros_like(grad))

    def constrain(self, leaf: Array) -> Array:
        """Tell the partitioner how a buffer of the parameter's shape is split."""
        if all(a is None for a in self.auto) and not self.pinned:
            return leaf
        pinned: Array = lax.with_sharding_constraint(leaf, PartitionSpec(*self.auto))
        return pinned


def stored(total: Stored) -> Array:
    """An accumulator, or those of the layers of a stack, as the parameter is stored."""
    return jnp.stack(total) if isinstance(total, tuple) else total


def trained[T](leaves: Sequence[T], plans: Sequence[LeafPlan]) -> list[T]:
    """The leaves that have a gradient."""
    return [leaf for leaf, plan in zip(leaves, plans, strict=True) if not plan.frozen]


def gather(tree: PyTree, plans: PyTree) -> PyTree:
    """Whole parameters from their parts."""
    return jax.tree.map(lambda leaf, plan: plan.gather(leaf), tree, plans)


def whole_shapes(parts: Leaves, plans: Sequence[LeafPlan]) -> Leaves:
    """The shapes of whole parameters."""
    return [jax.eval_shape(p.gather, part) for p, part in zip(plans, parts, strict=True)]


def leaf_plans(plans: PyTree) -> list[LeafPlan]:
    """The plans of a tree, in leaf order."""
    return jax.tree.leaves(plans)


def reduce_gradients(
    grads: Sequence[Stored],
    plans: Sequence[LeafPlan],
    axes: Sequence[str],
    *,
    by_parts: bool = False,
    scattered: bool = False,
) -> list[Array]:
    """Sum gradients over mesh axes, once: all that are whole over the same axes in one collective.
    Those of leaves that are replaced stay as they are, and what is `scattered` already.

    With `by_parts` large gradients are summed in place, part by part.  XLA for TPUs gives the
    result of a collective room of its own.
    """
    pairs = zip(grads, plans, strict=True)
    found: Leaves = list(grads) if scattered else [plan.scatter(grad, axes) for grad, plan in pairs]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, plan in enumerate(plans):
        names = () if plan.replaced else plan.whole_axes(axes)
        if names and by_parts and found[i].nbytes > PART:
            found[i] = _summed_by_parts(found[i], plan, names)
        elif names:
            groups.setdefault(names, []).append(i)
    for names, members in groups.items():
        sums = lax.psum([found[i] for i in members], names)
        for i, value in zip(members, sums, strict=True):
            found[i] = value
    return found


PART = 2**22  # bytes that are summed at a time


def _summed_by_parts(total: Array, plan: LeafPlan, names: tuple[str, ...]) -> Array:
    """The sum over mesh axes, in place: a loop over each dim that the partitioner does not split,
    until the rest of the array is one part.
    """

    def rest(total: Array, starts: tuple[Array, ...], sizes: tuple[int, ...]) -> Array:
        """The sum of all that has these first indices."""
        if (dim := len(starts)) == total.ndim:
            part = lax.psum(lax.dynamic_slice(total, starts, sizes), names)
            return plan.constrain(lax.dynamic_update_slice(total, part, starts))
        length, row = total.shape[dim], math.prod((*sizes, *total.shape[dim + 1 :]))
        count = PART // (row * total.dtype.itemsize)
        if plan.auto[dim] is not None or count >= length:
            return rest(total, (*starts, jnp.int32(0)), (*sizes, length))
        # whole tiles of a TPU's memory
        count = max(1, count - count % 8 if count > 8 else count)
        trips, left = divmod(length, count)

        def trip(k: Array, total: Array) -> Array:
            return rest(total, (*starts, k * count), (*sizes, count))

        total = lax.fori_loop(jnp.int32(0), jnp.int32(trips), trip, total)
        if not left:
            return total
        return rest(total, (*starts, jnp.int32(trips * count)), (*sizes, left))

    return rest(total, (), ())
