"""Parameters, and trees like them, between the model's own (canonical) layout and where they are on
a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import Params, PyTree, shapes_of, zeros_of
from ..errors import PipelineError
from .follow import Follow, Followers, shardings
from .mesh import Mover, explicit_context, has
from .packed import Packed, is_missing, repacked
from .param_layout import State, owner_faults
from .partition import Partition
from .spread import cut_off, is_padded, pad_like


class Placer:
    """Rearranges whole trees; each way of doing so is compiled once."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._layout = partition, partition.layout
        self._mesh, self._axis = partition.mesh, partition.axis
        # has not what is compiled from it: without circles, a dropped placer is freed at once
        self._rules = copy(self)
        self._mover = Mover(partition.mesh)

    def place(self, params: Params) -> dict[str, PyTree]:
        """Canonical parameters to placed ones; shapes, where there are any, to shapes.

        Raises:
            PipelineError: dims that cannot be cut over the devices, or dtypes that the partition
                refuses.
        """
        PipelineError.refuse(
            "these parameters cannot be cut over the devices", self._partition.cuts.faults(params)
        )

        def to(like: dict[str, PyTree]) -> dict[str, PyTree]:
            faults = [*self._partition.frozen_faults(like), *self._partition.dtype_faults(like)]
            PipelineError.refuse("these parameters do not fit the pipeline", faults)
            return self._partition.shardings(like)

        traced = has(params, jax.core.Tracer) and not explicit_context(self._mesh)
        arrange = self._rules._arranged_where_traced if traced else self._rules._arranged
        placed: Params = self._mover.run(arrange.__name__, arrange, params, to)
        return placed

    def canonical(self, placed: Mapping[str, PyTree], *, spread: bool) -> dict[str, PyTree]:
        """Placed parameters to canonical ones; with `spread` they stay spread over the mesh, else
        they are wherever they are wanted.
        """
        tree = self.checked(placed)
        if not spread:
            return self.in_model_order(tree, None)
        followers = Followers(placed, self._partition)
        return self.in_model_order(tree, followers.of(tree))

    def in_model_order(
        self, tree: Params, follows: PyTree, *, layer_axis: bool = False
    ) -> dict[str, PyTree]:
        """A tree like the placed parameters to the canonical layout, stages over the pipe axis
        where they divide.

        Args:
            tree: arrays or shapes; what has no leaves may be left out of it.
            follows: a `Follow` for each; None: leaves follow, and may be anywhere afterwards.
            layer_axis: leaves of stages are [S, layers, ...] and become [S * layers, ...].
        """
        rules = self._rules
        arrange = partial(rules._rearranged, follows, layer_axis)
        to = None if follows is None else partial(rules._canonical_shardings, follows, layer_axis)
        key = ("canonical", layer_axis, *jax.tree.leaves(follows))
        found: dict[str, PyTree] = self._mover.run(key, arrange, tree, to)
        return found

    def placed_like(
        self, tree: Params, like: dict[str, PyTree], follows: PyTree, *, layer_axis: bool = False
    ) -> dict[str, PyTree]:
        """The inverse of `in_model_order`; `like` are the shapes of the result."""
        arrange = partial(self._rules._arranged_like, like, follows, layer_axis)
        to = shardings(self._partition, follows)
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(like))
        key = ("like", layer_axis, jax.tree.structure(like), shapes, *jax.tree.leaves(follows))
        found: dict[str, PyTree] = self._mover.run(key, arrange, tree, lambda _: to)
        return found

    def shapes(self, placed: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        """The shapes of placed parameters, and those that the canonical ones have without the axes
        of stages and layers.
        """
        like: dict[str, PyTree] = shapes_of(dict(placed))
        own = self.in_model_order(like, None)
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
        self._check_owners(placed["stages"], "these parameters", "place")
        return dict(placed)

    def init(
        self, begin: Callable[[PyTree], PyTree], trained: PyTree, params: Mapping[str, PyTree]
    ) -> PyTree:
        """The state that an optimizer's `init` makes of trained parameters, sharded as they are."""
        followers = Followers(params, self._partition)
        to = followers.shardings
        return Mover(self._mesh).run("init", begin, trained, to)

    def place_state(self, state: PyTree) -> PyTree:
        """The stages' own state, canonical to placed; shapes to shapes."""
        PipelineError.refuse("this state does not fit the pipeline", self._layout.faults(state))
        to = NamedSharding(self._mesh, PartitionSpec(self._axis))
        return self._mover.run(
            "place_state", self._layout.place_stages, state, partial(jax.tree.map, lambda _: to)
        )

    def place_zeros(self, trees: Sequence[PyTree], *, shapes: bool) -> PyTree:
        """Zeros of these shapes, a tree for each stage, where the stages' own state is; `shapes`:
        shapes with shardings instead.
        """

        def zeros(_: PyTree) -> PyTree:
            return self._layout.place_trees([zeros_of(tree) for tree in trees])

        to, form = NamedSharding(self._mesh, PartitionSpec(self._axis)), jax.tree.structure(trees)
        key = ("zeros", form, *((a.shape, a.dtype) for a in jax.tree.leaves(trees)))
        given = trees if shapes else ()
        return self._mover.run(key, zeros, given, partial(jax.tree.map, lambda _: to))

    def canonical_state(self, placed: State) -> PyTree:
        """The stages' own state, placed to canonical."""
        self._check_owners(placed, "state", "place_state")
        return self._mover.run("canonical_state", self._layout.canonical_stages, placed, None)

    def _check_owners(self, stages: PyTree, what: str, again: str) -> None:
        PipelineError.refuse("", owner_faults(stages, self._layout, what, again))

    # Canonical to placed

    def _arranged(self, tree: Params) -> dict[str, PyTree]:
        stages = self._layout.place_stages(tree["stages"], self._partition.packing)
        return {**self._padded_outer(tree), "stages": stages}

    def _arranged_where_traced(self, tree: Params) -> dict[str, PyTree]:
        """The same, of arrays that the program around it makes: each device makes a part of each.

        Stages in other than their order on the devices are picked out of the whole stack, which
        every device would make.  So the stack is split along another dim, where one divides: each
        device makes a part of every stage, and then they exchange these.  Leaves that share buffers
        come to their devices first, and are packed there.
        """
        layout, stages = self._layout, tree["stages"]
        in_order = (*range(layout.placement.num_stages),)
        if layout.unlike or any(layout.stage_at(v) != in_order for v in range(layout.num_owned)):
            stages = jax.tree.map(self._split_along_another_dim, stages)
        if not layout.unlike:
            return {**self._padded_outer(tree), "stages": layout.place_stages(stages)}
        like = jax.eval_shape(self._arranged, tree)["stages"]
        placed = jax.tree.map(
            lambda leaf: self._constrained(leaf, self._axis, *_free(leaf.ndim - 1)),
            layout.place_stages(stages, [Packed({}, chunk.layout.separate) for chunk in like]),
        )
        chunks = zip(placed, like, strict=True)
        return {
            **self._padded_outer(tree),
            "stages": placed.like(repacked(self._mesh, self._axis, a, b.layout) for a, b in chunks),
        }

    def _padded_outer(self, tree: Params) -> dict[str, PyTree]:
        return self._partition.cuts.pad(
            {key: value for key, value in tree.items() if key != "stages"}
        )

    def _split_along_another_dim(self, leaf: Any) -> Any:
        """Split a leaf over its longest dim that divides, other than the first (that of stages or
        layers).
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

    def _arranged_like(
        self, like: dict[str, PyTree], follows: dict[str, PyTree], layer_axis: bool, tree: Params
    ) -> dict[str, PyTree]:
        found = {
            key: jax.tree.map(pad_like, value, tree.get(key, value), is_leaf=is_padded)
            for key, value in like.items()
            if key != "stages"
        }
        stages = like["stages"]
        if is_missing(stages):
            return {**found, "stages": stages}
        if self._layout.unlike:
            return {**found, "stages": self._layout.place_stages(tree["stages"], stages)}
        cut = jax.tree.map(
            partial(self._cut, layer_axis), follows["stages"][0], stages[0], tree["stages"]
        )
        chunks = [
            jax.tree.map(lambda _, parts, v=v: parts[v], follows["stages"][0], cut)
            for v in range(len(stages))
        ]
        return {**found, "stages": stages.like(chunks)}

    def _cut(self, layer_axis: bool, rule: Follow, like: Any, leaf: Any) -> Sequence[Any]:
        """A leaf in model order -> that of every chunk."""
        if not rule.follows:
            return (leaf,) * self._layout.num_owned
        shape = (self._layout.placement.num_stages, *like.shape[rule.lead + 1 :])
        return tuple(
            _behind(
                rule.lead,
                lambda leaf: self._layout.place_stages(leaf.reshape(shape) if layer_axis else leaf),
            )(leaf)
        )

    # Placed to canonical

    def _rearranged(self, follows: PyTree, layer_axis: bool, tree: Params) -> dict[str, PyTree]:
        outer = {key: cut_off(value) for key, value in tree.items() if key != "stages"}
        stages = tree["stages"]
        if not stages:
            return {**outer, "stages": {}}
        if follows is None or self._layout.unlike:
            return {**outer, "stages": self._layout.canonical_stages(stages)}
        joined = jax.tree.map(partial(self._joined, layer_axis), follows["stages"][0], *stages)
        return {**outer, "stages": joined}

    def _joined(self, layer_axis: bool, rule: Follow, *group: Any) -> Any:
        """One leaf of every chunk -> the leaf in model order."""
        if not rule.follows:
            return group[0]

        def join(*group: Any) -> Any:
            whole = self._layout.canonical_stages(group)
            return whole.reshape(-1, *whole.shape[2:]) if layer_axis and whole.ndim > 1 else whole

        return _behind(rule.lead, join)(*group)

    def _canonical_shardings(
        self, follows: dict[str, PyTree], layer_axis: bool, like: dict[str, PyTree]
    ) -> dict[str, PyTree]:
        """Stages over the pipe axis where they divide; over other axes everything as it was, where
        stages are alike.  A dim of first, last or shared that was padded is whole on every device.
        """

        def outer(rule: Any) -> Any:
            if not is_padded(rule):
                return rule.sharding(self._mesh)
            if is_missing(rule.array):
                return rule.array
            spec = rule.array.spec
            whole = (None if dim == rule.dim else entry for dim, entry in enumerate(spec))
            return replace(rule.array, spec=tuple(whole)).sharding(self._mesh)

        def over_pipe(leaf: Any, *rules: Follow) -> NamedSharding:
            rule = rules[0] if rules else Follow()
            dims = leaf.shape[rule.lead :]
            divides = bool(dims) and dims[0] % self._mesh.shape[self._axis] == 0
            spec = (self._axis if divides else None, *rule.spec[1 if layer_axis else 0 :])
            return replace(rule, spec=spec).sharding(self._mesh)

        alike = () if self._layout.unlike else follows["stages"][:1]
        found = {
            key: jax.tree.map(outer, rules, is_leaf=is_padded)
            for key, rules in follows.items()
            if key != "stages"
        }
        return {**found, "stages": jax.tree.map(over_pipe, like["stages"], *alike)}


def _behind(lead: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on all entries of so many leading axes."""
    for _ in range(lead):
        function = jax.vmap(function)
    return function


def _free(count: int) -> list[Any]:
    return [PartitionSpec.UNCONSTRAINED] * count
