"""From canonical parameters to where they lie on a mesh, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree
from ..errors import PipelineError
from .mesh import explicit_context, jit_on_mesh, trimmed
from .packed import Packed, repacked
from .param_layout import ParamLayout
from .partition import Partition
from .placed import Chunks, home_faults
from .spread import Cuts, cut_off, cut_shardings


class Placer:
    """Rearranges whole trees; each way of doing so is compiled once."""

    def __init__(
        self, *, mesh: Mesh, axis: str, layout: ParamLayout, partition: Partition, cuts: Cuts
    ) -> None:
        self._mesh = mesh
        self._axis = axis
        self._layout = layout
        self._partition = partition
        self._cuts = cuts
        # has not what is compiled from it: without circles, a dropped placer is freed at once
        self._rules = copy(self)
        self._compiled: dict[Any, Callable[[PyTree], PyTree]] = {}

    def place(self, params: dict[str, PyTree]) -> dict[str, PyTree]:
        """Canonical parameters to placed ones; shapes, where there are any, to shapes.

        Raises:
            PipelineError: dims that cannot be cut over the devices, or dtypes that the partition
                refuses.
        """
        if faults := self._cuts.faults(params):
            raise PipelineError.listing("these parameters cannot be cut over the devices", faults)
        like = jax.eval_shape(self._arranged, params)
        if faults := [*self._partition.frozen_faults(like), *self._partition.dtype_faults(like)]:
            raise PipelineError.listing("these parameters do not fit the pipeline", faults)
        to = self._partition.shardings(self._mesh, like)
        if _has(params, jax.ShapeDtypeStruct):
            shapes: dict[str, PyTree] = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, to
            )
            return shapes
        traced, rules = _has(params, jax.core.Tracer), self._rules
        placed: dict[str, PyTree] = self._jitted(
            rules._arranged_where_traced if traced else rules._arranged, params, to
        )(params)
        return placed

    def canonical(self, placed: Mapping[str, PyTree], *, spread: bool) -> dict[str, PyTree]:
        """Placed parameters to canonical ones; with `spread` they stay spread over the mesh, else
        they are wherever they are wanted.
        """
        tree = self.checked(placed)
        to = (
            self._canonical_shardings(jax.eval_shape(self._rearranged, tree), placed)
            if spread
            else None
        )
        params: dict[str, PyTree] = self._jitted(self._rules._rearranged, tree, to)(tree)
        return params

    def shapes(self, placed: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        """The shapes of placed parameters, and those that the canonical ones have without the axes
        of stages and layers.
        """
        like: dict[str, PyTree] = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), dict(placed)
        )
        own = jax.eval_shape(self._rearranged, like)
        lead = self._layout.num_leading
        stages = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[lead:], a.dtype), own["stages"]
        )
        return like, {**own, "stages": stages}

    def checked(self, placed: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The tree; PipelineError where it is not placed for this pipeline's schedule."""
        if not isinstance(placed, Mapping) or "stages" not in placed:
            raise PipelineError(
                "`canonical` takes parameters, or gradients, as the pipeline returns them: a "
                'dict with "stages"'
            )
        if faults := home_faults(placed["stages"], self._layout.home, "these parameters", "place"):
            raise PipelineError("\n".join(faults), tuple(faults))
        return dict(placed)

    def place_state(self, state: PyTree) -> PyTree:
        """The stages' own state, canonical to placed; shapes to shapes."""
        if faults := self._layout.faults(state):
            raise PipelineError.listing("this state does not fit the pipeline", faults)
        like = jax.eval_shape(self._layout.place_stages, state)
        to = NamedSharding(self._mesh, PartitionSpec(self._axis))
        if _has(state, jax.ShapeDtypeStruct):
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to), like)
        return self._jitted(self._layout.place_stages, state, jax.tree.map(lambda _: to, like))(
            state
        )

    def canonical_state(self, placed: Chunks | tuple[()]) -> PyTree:
        """The stages' own state, placed to canonical."""
        if faults := home_faults(placed, self._layout.home, "state", "place_state"):
            raise PipelineError("\n".join(faults), tuple(faults))
        return self._jitted(self._layout.canonical_stages, placed, None)(placed)

    def _arranged(self, tree: dict[str, PyTree]) -> dict[str, PyTree]:
        return {
            **self._padded_outer(tree),
            "stages": self._layout.place_stages(tree["stages"], self._partition.sharing),
        }

    def _arranged_where_traced(self, tree: dict[str, PyTree]) -> dict[str, PyTree]:
        """The same, of arrays that the program around it makes: each device makes a part of each.

        Stages in other than their order on the devices are picked out of the whole stack, which
        every device would make.  So the stack is split along another dim, where one divides: each
        device makes a part of every stage, and then they exchange these.  Leaves that share buffers
        come to their devices first, and are packed there.
        """
        if explicit_context(self._mesh):
            return self._arranged(tree)
        layout, axis, stages = self._layout, self._axis, tree["stages"]
        in_order = (*range(layout.placement.num_stages),)
        if layout.unlike or any(layout.stage_at(v) != in_order for v in range(layout.num_owned)):
            stages = jax.tree.map(self._split_along_another_dim, stages)
        if not layout.unlike:
            return {**self._padded_outer(tree), "stages": layout.place_stages(stages)}
        like = jax.eval_shape(self._arranged, tree)["stages"]
        separate = [Packed({}, chunk.layout.separate) for chunk in like]
        placed = jax.tree.map(
            lambda leaf: self._constrained(leaf, axis, *_free(leaf.ndim - 1)),
            layout.place_stages(stages, like=separate),
        )
        chunks = zip(placed, like, strict=True)
        return {
            **self._padded_outer(tree),
            "stages": placed.like(repacked(self._mesh, axis, a, b.layout) for a, b in chunks),
        }

    def _split_along_another_dim(self, leaf: Any) -> Any:
        """Over the longest dim that divides, other than the first, which is that of stages or
        layers.
        """
        size = self._mesh.shape[self._axis]
        fits = [d for d in range(1, leaf.ndim) if leaf.shape[d] % size == 0 and leaf.shape[d] > 0]
        if not fits:
            return leaf
        rest = _free(leaf.ndim - 1)
        rest[max(fits, key=lambda dim: leaf.shape[dim]) - 1] = self._axis
        return self._constrained(leaf, None, *rest)

    def _constrained(self, leaf: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(leaf, NamedSharding(self._mesh, PartitionSpec(*spec)))

    def _padded_outer(self, tree: dict[str, PyTree]) -> dict[str, PyTree]:
        return self._cuts.pad({key: value for key, value in tree.items() if key != "stages"})

    def _rearranged(self, tree: dict[str, PyTree]) -> dict[str, PyTree]:
        return {
            **{key: cut_off(value) for key, value in tree.items()},
            "stages": self._layout.canonical_stages(tree["stages"]),
        }

    def _jitted(
        self, arrange: Callable[[PyTree], PyTree], tree: PyTree, to: PyTree
    ) -> Callable[[PyTree], PyTree]:
        """The compiled function that rearranges such a tree; results lie at `to`, or anywhere where
        it is None.
        """
        leaves, form = jax.tree.flatten(to)
        key = (
            arrange.__name__,
            jax.tree.structure(tree),
            form,
            tuple(leaves),
            explicit_context(self._mesh),
        )
        if key not in self._compiled:
            self._compiled[key] = jit_on_mesh(self._mesh, arrange, to)
        return self._compiled[key]

    def _canonical_shardings(
        self, like: dict[str, PyTree], placed: Mapping[str, PyTree]
    ) -> dict[str, PyTree]:
        """Stages over the pipe axis where they divide; over other axes everything as it was, where
        stages are alike.
        """
        to = self._partition.shardings(self._mesh, placed)
        found: dict[str, PyTree] = {key: cut_shardings(to[key]) for key in like if key != "stages"}

        def over_pipe(leaf: Any, *was: Any) -> NamedSharding:
            divides = bool(leaf.shape) and leaf.shape[0] % self._mesh.shape[self._axis] == 0
            rest = was[0].spec[1:] if was else ()
            return NamedSharding(self._mesh, trimmed(self._axis if divides else None, *rest))

        alike = () if self._layout.unlike else (to["stages"][0],)
        return {**found, "stages": jax.tree.map(over_pipe, like["stages"], *alike)}


def _free(count: int) -> list[Any]:
    return [PartitionSpec.UNCONSTRAINED] * count


def _has(tree: PyTree, kind: type) -> bool:
    return any(isinstance(leaf, kind) for leaf in jax.tree.leaves(tree))
