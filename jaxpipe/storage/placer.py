"""Parameters, and trees like them, between the model's own (canonical) layout and where they are on
a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import ByPart, Leaf, Params, PyTree, shape_of, shapes_of
from ..errors import PipelineError
from ..model.settings import explicit_context, has, jit_on_mesh, own_context, with_sharding
from .chunks import Chunks, ChunkState, ParamLayout, owner_faults, padding_of
from .follow import Follow, Followers, is_params, shardings
from .packed import Packed, on_own_stages
from .padding import Padding, by_parameter, padded_to
from .partition import Partition
from .table import ChunkLayout, is_missing, rows_of


class Placer:
    """Rearranges whole trees; each way of doing so is compiled once."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._layout = partition, partition.layout
        self._mesh, self._axis = partition.mesh, partition.axis
        self._lay_out = partial(_laid_out, partition)
        self._compiled: dict[object, Callable[..., Any]] = {}

    def place(self, params: Params) -> Params:
        """Canonical parameters to placed ones; shapes, where there are any, to shapes.

        Raises:
            PipelineError: those of `Partition.plans`.
        """
        partition = self._partition

        def to(like: Params) -> ByPart:
            return partition.shardings(partition.plans(like, params))

        traced = has(params, jax.core.Tracer) and not explicit_context(self._mesh)
        return self._run(self._lay_out, params, to, traced)

    def canonical(self, placed: Mapping[str, object], *, spread: bool) -> Params:
        """Placed parameters to canonical ones; with `spread` they stay spread over the mesh, else
        they are wherever they are wanted.
        """
        tree = self.checked(placed)
        follows = Followers(tree, self._partition).of(tree) if spread else None
        return self.in_model_order(tree, follows, padding_of(tree))

    def in_model_order(
        self,
        tree: Params,
        follows: ByPart | None,
        padding: tuple[Padding, ...] = (),
        *,
        merges: bool = False,
    ) -> Params:
        """A tree like the placed parameters to the canonical layout, stages over the pipe axis
        where they divide.

        Args:
            tree: arrays or shapes; what has no leaves may be left out of it.
            follows: a `Follow` for each; None: leaves follow, and may be anywhere afterwards.
            padding: that of the parameters.
            merges: axes of stages and of layers become one.
        """

        def to(follows: ByPart, like: Params) -> ByPart:
            """Stages over the pipe axis; over other axes everything as it was, where stages are
            alike.
            """
            over = Follow((self._axis,))
            rules = jax.tree.map(lambda _: over, like["stages"])
            if follows["stages"] and not self._layout.unlike:
                rules = follows["stages"][0]
                rules = jax.tree.map(Follow.of_merged, rules) if merges else rules
            return shardings(self._mesh, {**_outer(follows), "stages": rules}, like)

        spread = None if follows is None else partial(to, follows)
        return self._run(_in_model_order, tree, spread, self._layout, follows, padding, merges)

    def placed_like(self, tree: Params, like: Params, follows: ByPart) -> Params:
        """The inverse of `in_model_order`; `like` are the shapes of the result."""
        to = shardings(self._mesh, follows, like)
        return self._run(_placed, tree, lambda _: to, self._layout, like, follows)

    def shapes(self, placed: Params) -> tuple[Params, Params]:
        """The shapes of placed parameters, and those that the canonical ones have without the axes
        of stages and layers.
        """
        like: Params = shapes_of(dict(placed))
        own = self.in_model_order(like, None, padding_of(placed))
        layout = self._layout
        lead = int(not layout.unlike or layout.is_layered) + layout.stacks
        stages = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[lead:], a.dtype), own["stages"]
        )
        return like, {**own, "stages": stages}

    def checked(self, placed: Mapping[str, object]) -> Params:
        """The tree; PipelineError where it is not placed for this pipeline's schedule."""
        if not isinstance(placed, Mapping) or "stages" not in placed:
            raise PipelineError(
                "`canonical` takes parameters, or gradients, as the pipeline returns them: a "
                'dict with "stages"'
            )
        self._check_owners(placed["stages"], "these parameters", "place")
        return dict(placed)

    def init[S](self, begin: Callable[[Params], S], trained: Params, params: Params) -> S:
        """The state that an optimizer's `init` makes of trained parameters, sharded as they are."""
        followers = Followers(params, self._partition)
        whole = NamedSharding(self._mesh, PartitionSpec())

        def to(state: S) -> PyTree:
            def of_node(node: object) -> ByPart | NamedSharding:
                return followers.shardings(node) if is_params(node) else whole

            return jax.tree.map(of_node, state, is_leaf=is_params)

        # what is compiled for one optimizer is of no use to another
        return Placer(self._partition)._run(begin, trained, to)

    def place_state(self, state: PyTree) -> Chunks:
        """The stages' own state, canonical to placed; shapes to shapes."""
        PipelineError.refuse("this state does not fit the pipeline", self._layout.faults(state))
        return self._run(self._layout.place_stages, state, self._by_device)

    def place_zeros(self, trees: Sequence[PyTree], *, shapes: bool) -> Chunks:
        """Zeros of these shapes, a tree for each stage, where the stages' own state is; `shapes`:
        shapes with shardings instead.
        """
        like = self._run(self._layout.place_trees, trees, self._by_device)
        if shapes:
            return like
        zeros: Chunks = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), like)
        return zeros

    def canonical_state(self, placed: ChunkState) -> PyTree:
        """The stages' own state, placed to canonical."""
        self._check_owners(placed, "state", "place_state")
        return self.in_model_order({"stages": placed}, None)["stages"]

    def _by_device(self, like: Chunks) -> PyTree:
        """Leaves [P, ...] over the pipe axis."""
        over = NamedSharding(self._mesh, PartitionSpec(self._axis))
        return jax.tree.map(lambda _: over, like)

    def _check_owners(self, stages: object, what: str, again: str) -> None:
        PipelineError.refuse("", owner_faults(stages, self._layout, what, again))

    def _run[T](
        self,
        arrange: Callable[..., T],
        tree: PyTree,
        to: Callable[[T], PyTree] | None,
        *static: object,
    ) -> T:
        """Rearrange a tree; with shapes in it the result is shapes with shardings.

        Args:
            arrange: traced; of the static arguments and the tree.
            tree: arrays on any devices, or shapes.
            to: shardings of the result, given its shapes; None for anywhere.
            static: trees of leaves that can be compared, as part of the function.
        """
        # Compiled functions do not hold the placer: a dropped one is freed at once.
        function = partial(arrange, *static)
        with own_context(self._mesh):
            like: T = jax.eval_shape(function, jax.tree.map(shape_of, tree))
        shardings = None if to is None else to(like)
        if has(tree, jax.ShapeDtypeStruct):
            if shardings is not None:
                like = jax.tree.map(with_sharding, like, shardings)
            return like
        leaves, form = jax.tree.flatten((static, shardings))
        key = (arrange, jax.tree.structure(tree), form, *leaves, explicit_context(self._mesh))
        if key not in self._compiled:
            self._compiled[key] = jit_on_mesh(self._mesh, function, shardings)
        found: T = self._compiled[key](jax.tree.map(self._from_elsewhere, tree))
        return found

    def _from_elsewhere(self, leaf: Leaf) -> Leaf:
        """A leaf that one program can take: one on other devices than the mesh's goes over the
        host.
        """
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return leaf
        devices = set(self._mesh.devices.flat)
        here = not leaf.committed or leaf.sharding.device_set == devices
        return leaf if here or not leaf.is_fully_addressable else np.asarray(leaf)


# Canonical to placed


def _laid_out(partition: Partition, traced: bool, tree: Params) -> Params:
    """Parameters in the layout that the partition gives them; `traced`: the program around it makes
    them, and each device a part of each.

    Stages in other than their order on the devices are picked out of the whole stack, which every
    device would make.  So the stack is split along another dim, where one divides: each device
    makes a part of every stage, and then they exchange these.  Leaves that share buffers come to
    their devices first, and are packed there.
    """
    mesh, axis, padding = partition.mesh, partition.axis, Padding.of(partition.cuts, tree)
    layout = replace(partition.layout, padding=padding)

    def split(leaf: jax.Array) -> jax.Array:
        """Split over the longest dim that divides, other than the first (of stages or layers)."""
        size = mesh.shape[axis]
        fits = [d for d in range(1, leaf.ndim) if leaf.shape[d] % size == 0 and leaf.shape[d] > 0]
        if not fits:
            return leaf
        spec = [None, *_free(leaf.ndim - 1)]
        spec[max(fits, key=lambda dim: leaf.shape[dim])] = axis
        found: jax.Array = lax.with_sharding_constraint(leaf, PartitionSpec(*spec))
        return found

    stages, in_order = tree["stages"], (*range(layout.placement.num_stages),)
    moves = layout.unlike or any(layout.stage_at(v) != in_order for v in range(layout.num_owned))
    if traced and moves:
        stages = jax.tree.map(split, stages)
    placed = layout.place_stages(stages, partition.storing(partition.kept))
    if traced and layout.unlike:
        layouts = [chunk.layout for chunk in placed]
        apart = placed.like(Packed({}, each.separate) for each in layouts)

        def packed(alone: Packed, to: ChunkLayout) -> Packed:
            rows = zip(rows_of(alone.layout.forms), rows_of(to.forms), strict=True)
            specs = {one.name: other.entry.spec for one, other in rows if other.buffer}
            arrays = {
                name: lax.with_sharding_constraint(
                    leaf, PartitionSpec(axis, *specs.get(name, _free(leaf.ndim - 1)))
                )
                for name, leaf in alone.leaves.items()
            }
            alone = replace(alone, leaves=arrays)
            return on_own_stages(mesh, axis, lambda _, own: (own,), [alone], [to])[0]

        placed = placed.like(map(packed, layout.place_stages(stages, apart), layouts))
    return {**by_parameter(Padding.pad, _outer(tree), padding), "stages": placed}


def _placed(layout: ParamLayout, like: Params, follows: ByPart, tree: Params) -> Params:
    """A tree in model order, or with axes of stages and layers as one, laid out like another."""
    stages = like["stages"]
    found = {
        key: jax.tree.map(lambda a, leaf: padded_to(leaf, a.shape), value, tree.get(key, value))
        for key, value in _outer(like).items()
    }
    if is_missing(stages):
        return {**found, "stages": stages}
    if layout.unlike:
        return {**found, "stages": layout.place_stages(tree["stages"], stages)}

    def placed(chunk: int, rule: Follow, like: Leaf, leaf: jax.Array) -> jax.Array:
        """A leaf in model order -> that of a chunk."""
        if not rule.follows:
            return leaf
        lead, own = like.shape[: rule.lead], like.shape[rule.lead + 1 :]
        whole = leaf.reshape(*lead, layout.placement.num_stages, *own)
        return layout.in_chunk(chunk, whole, axis=rule.lead)

    chunks = (
        jax.tree.map(partial(placed, v), rules, like, tree["stages"])
        for v, (rules, like) in enumerate(zip(follows["stages"], stages, strict=True))
    )
    return {**found, "stages": stages.like(chunks)}


# Placed to canonical


def _in_model_order(
    layout: ParamLayout,
    follows: ByPart | None,
    padding: tuple[Padding, ...],
    merges: bool,
    tree: Params,
) -> Params:
    stages, outer = tree["stages"], by_parameter(Padding.cut_off, _outer(tree), padding)
    if not stages:
        return {**outer, "stages": {}}
    if follows is None or layout.unlike:
        return {**outer, "stages": layout.canonical_stages(stages)}

    def joined(rule: Follow, *chunks: jax.Array) -> Any:
        """One leaf of every chunk -> the leaf in model order."""
        if not rule.follows:
            return chunks[0]
        whole = layout.canonical_stages(chunks, axis=rule.lead)
        return whole.reshape(rule.merged(whole.shape)) if merges else whole

    return {**outer, "stages": jax.tree.map(joined, follows["stages"][0], *stages)}


def _outer(tree: Params) -> Params:
    """The parts of the model without the stages."""
    return {key: value for key, value in tree.items() if key != "stages"}


def _free(count: int) -> list[object]:
    return [PartitionSpec.UNCONSTRAINED] * count
