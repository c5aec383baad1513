"""Parameters, and trees like them, between the model's own (canonical) layout and where they are on
a mesh.  Moments and averages are spread as the parameters that they follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import Params, PyTree, followed, path_text, shapes_of
from ..errors import PipelineError
from ..model.calls import cut_off, is_padded, pad_like, unpadded
from ..model.layers import OUTER
from ..model.settings import (
    explicit_context,
    has,
    jit_on_mesh,
    names_of,
    own_context,
    trimmed,
    with_sharding,
)
from .chunks import ChunkState, owner_faults
from .packed import Packed, is_missing, repacked
from .partition import Partition, leaf_plans


@dataclass(frozen=True)
class Follow:
    """How a leaf of a tree like the placed parameters belongs to its parameter."""

    lead: int = 0  # axes of its own, before the parameter's
    follows: bool = True  # False: one value for all stages
    spec: tuple[Any, ...] = ()  # of the parameter's dims, without the axis of devices
    fits: bool = True  # False: no axis is known to be that of stages
    stage: bool = True  # False: of first, last or shared
    merges: bool = False  # in model order its axes of stages and of layers are one

    def merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in model order, of that with an axis of stages."""
        lead, own = shape[: self.lead], shape[self.lead :]
        if self.merges and self.follows and len(own) > 1:
            own = (own[0] * own[1], *own[2:])
        return (*lead, *own)


def is_params(node: PyTree) -> bool:
    """True for a tree laid out like parameters: they themselves, a moment of an optimizer, an
    average, gradients.
    """
    return isinstance(node, dict) and "stages" in node and set(node) <= {"stages", *OUTER}


class Followers:
    """Finds the parameter of each leaf of trees like the placed parameters.

    Args:
        params: the placed parameters (arrays or shapes), or canonical ones of a plain program.
        partition: the pipeline's; None for a plain program.
        layer_axis: leaves of stages are [S, layers, ...].
    """

    def __init__(
        self,
        params: Mapping[str, PyTree],
        partition: Partition | None,
        *,
        layer_axis: bool = False,
    ) -> None:
        self._partition, self._merges = partition, layer_axis
        self._layout = None if partition is None else partition.layout
        self._unlike = self._layout is not None and self._layout.unlike
        self._stages = params["stages"]
        leaves = jax.tree_util.tree_leaves_with_path(dict(params))
        specs: list[tuple[Any, ...]] = [()] * len(leaves)
        if partition is not None:
            plans = leaf_plans(partition.plans(params))
            specs = [tuple(plan.spec(partition.axis)[int(plan.stage) :]) for plan in plans]
        # by part of the model and path there
        self._known: dict[str, dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]] = {}
        for (path, leaf), spec in zip(leaves, specs, strict=True):
            part, name = self._named(path)
            self._known.setdefault(part, {})[name] = tuple(leaf.shape), spec

    def of(self, node: PyTree) -> PyTree:
        """The node with a `Follow` for each leaf."""

        def of_leaf(path: Any, leaf: Any) -> Follow:
            stage = path[0].key == "stages"
            chunk = node["stages"][path[1].idx] if stage and self._unlike else None
            own: Any = self._stages[path[1].idx] if chunk is not None else None
            if isinstance(chunk, Packed) and chunk.layout.forms != own.layout.forms:
                # the state of an optimizer that has one for each layer
                buffer = chunk.layout.of(path[2].key)
                if buffer is None or self._partition is None:
                    return Follow()
                return Follow(spec=tuple(self._partition.buffer_spec(buffer, leaf)[1:]))
            found = self._follow(*self._named(path), leaf.shape)
            odd = chunk is not None and (found.lead or not found.follows)
            fits, merges = found.fits and not odd, stage and self._merges
            return replace(found, stage=stage, fits=fits, merges=merges)

        return jax.tree_util.tree_map_with_path(of_leaf, node)

    def shardings(self, node: PyTree) -> dict[str, PyTree]:
        """The sharding of each leaf of a node of placed shapes."""
        assert self._partition is not None, "a plain program places nothing"
        return shardings(self._partition, self.of(node), node)

    def _follow(self, part: str, name: str, shape: tuple[int, ...]) -> Follow:
        stage, known = part.startswith("stages"), self._known.get(part, {})
        one_a_device = (
            stage and self._layout is not None and shape[:1] == (len(self._layout.owned),)
        )
        found = known.get(name) or followed(name, shape, known)
        if found is None:
            # an optimizer may have a state for each stage (`per_layer`)
            fits = not stage or (one_a_device and not self._unlike)
            return Follow(follows=one_a_device, fits=fits)
        parameter, spec = found
        lead = len(shape) - len(parameter)
        if lead >= 0 and shape[lead:] == parameter:
            return Follow(lead, spec=spec)
        if not stage or np.prod(shape) == 1:
            return Follow(follows=False)
        # a factored moment lacks some of the parameter's last axes
        axes = 1 + self._merges
        fits = lead < 0 and shape[:axes] == parameter[:axes]
        return Follow(follows=fits or one_a_device, fits=fits)

    def _named(self, path: Any) -> tuple[str, str]:
        """The part of the model that a leaf is in, and its path there.  The chunks of alike stages
        are one part, and each chunk of unlike ones.
        """
        names = [path_text((key,)) for key in path]
        if names[0] != "stages" or self._layout is None:
            return names[0], "/".join(names[1:])
        return "/".join(names[: 1 + self._unlike]), "/".join(names[2:])


def shardings(
    partition: Partition, follows: Mapping[str, PyTree], like: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """The shardings of a tree of these shapes, like the placed parameters or canonical ones.  A dim
    that does not divide is whole.
    """
    mesh = partition.mesh

    def of(leaf: Any, rule: Follow) -> NamedSharding:
        spec = (*[None] * rule.lead, *[partition.axis] * rule.stage, *rule.spec)
        entries = (
            None if length % math.prod(mesh.shape[name] for name in names_of(entry)) else entry
            for entry, length in zip(spec if rule.follows else (), leaf.shape, strict=False)
        )
        return NamedSharding(mesh, trimmed(*entries))

    return dict(jax.tree.map(of, like, follows))


class Placer:
    """Rearranges whole trees; each way of doing so is compiled once."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._layout = partition, partition.layout
        self._mesh, self._axis = partition.mesh, partition.axis
        self._compiled: dict[Any, Callable[[PyTree], PyTree]] = {}

    def place(self, params: Params) -> dict[str, PyTree]:
        """Canonical parameters to placed ones; shapes, where there are any, to shapes.

        Raises:
            PipelineError: dims that cannot be cut over the devices, or dtypes that the partition
                refuses.
        """
        partition = self._partition
        PipelineError.refuse(
            "these parameters cannot be cut over the devices", partition.cuts.faults(params)
        )

        def to(like: dict[str, PyTree]) -> dict[str, PyTree]:
            return partition.shardings(partition.plans(like, params))

        traced = has(params, jax.core.Tracer) and not explicit_context(self._mesh)
        return dict(self._run(_laid_out, params, to, traced))

    def canonical(self, placed: Mapping[str, PyTree], *, spread: bool) -> dict[str, PyTree]:
        """Placed parameters to canonical ones; with `spread` they stay spread over the mesh, else
        they are wherever they are wanted.
        """
        tree = self.checked(placed)
        follows = Followers(placed, self._partition).of(tree) if spread else None
        return self.in_model_order(tree, follows)

    def in_model_order(self, tree: Params, follows: PyTree) -> dict[str, PyTree]:
        """A tree like the placed parameters to the canonical layout, stages over the pipe axis
        where they divide.

        Args:
            tree: arrays or shapes; what has no leaves may be left out of it.
            follows: a `Follow` for each; None: leaves follow, and may be anywhere afterwards.
        """

        def to(like: dict[str, PyTree]) -> dict[str, PyTree]:
            """Stages over the pipe axis; over other axes everything as it was, where stages are
            alike.
            """
            stages = like["stages"]
            alike = follows["stages"] and not self._layout.unlike
            rules = follows["stages"][0] if alike else jax.tree.map(lambda _: Follow(), stages)
            rules = jax.tree.map(lambda rule: replace(rule, spec=rule.spec[rule.merges :]), rules)
            own = {**unpadded(_outer(follows)), "stages": rules}
            return shardings(self._partition, own, like)

        return dict(self._run(_in_model_order, tree, None if follows is None else to, follows))

    def placed_like(
        self, tree: Params, like: dict[str, PyTree], follows: PyTree
    ) -> dict[str, PyTree]:
        """The inverse of `in_model_order`; `like` are the shapes of the result."""
        to = shardings(self._partition, follows, like)
        return dict(self._run(_placed, tree, lambda _: to, like, follows))

    def shapes(self, placed: Mapping[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        """The shapes of placed parameters, and those that the canonical ones have without the axes
        of stages and layers.
        """
        like: dict[str, PyTree] = shapes_of(dict(placed))
        own, layout = self.in_model_order(like, None), self._layout
        lead = int(not layout.unlike or layout.is_layered) + layout.stacks
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
        followers, whole = Followers(params, self._partition), self._sharding()

        def to(state: PyTree) -> PyTree:
            def of_node(node: PyTree) -> PyTree:
                return followers.shardings(node) if is_params(node) else whole

            return jax.tree.map(of_node, state, is_leaf=is_params)

        # what is compiled for one optimizer is of no use to another
        return Placer(self._partition)._run(lambda _, tree: begin(tree), trained, to)

    def place_state(self, state: PyTree) -> PyTree:
        """The stages' own state, canonical to placed; shapes to shapes."""
        PipelineError.refuse("this state does not fit the pipeline", self._layout.faults(state))
        to = self._sharding(self._axis)
        return self._run(_placed_state, state, partial(jax.tree.map, lambda _: to))

    def place_zeros(self, trees: Sequence[PyTree], *, shapes: bool) -> PyTree:
        """Zeros of these shapes, a tree for each stage, where the stages' own state is; `shapes`:
        shapes with shardings instead.
        """
        to = self._sharding(self._axis)
        like = self._shapes_of(self._layout.place_trees, trees)
        if shapes:
            return jax.tree.map(lambda leaf: with_sharding(leaf, to), like)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=to), like)

    def canonical_state(self, placed: ChunkState) -> PyTree:
        """The stages' own state, placed to canonical."""
        self._check_owners(placed, "state", "place_state")
        return self.in_model_order({"stages": placed}, None)["stages"]

    def _shapes_of(self, function: Callable[..., PyTree], tree: PyTree) -> PyTree:
        """The shapes of what a function makes of a tree, whatever axes the context has."""
        with own_context(self._mesh):
            return jax.eval_shape(function, jax.tree.map(_shape, tree))

    def _sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*spec))

    def _check_owners(self, stages: PyTree, what: str, again: str) -> None:
        PipelineError.refuse("", owner_faults(stages, self._layout, what, again))

    def _run(
        self,
        arrange: Callable[..., PyTree],
        tree: PyTree,
        to: Callable[[PyTree], PyTree] | None,
        *static: PyTree,
    ) -> PyTree:
        """Rearrange a tree; with shapes in it the result is shapes with shardings.

        Args:
            arrange: traced; of the partition, the static arguments and the tree.
            tree: arrays on any devices, or shapes.
            to: shardings of the result, given its shapes; None for anywhere.
            static: trees of leaves that can be compared, as part of the function.
        """
        # Compiled functions do not hold the placer: a dropped one is freed at once.
        function = partial(arrange, self._partition, *static)
        like = self._shapes_of(function, tree)
        shardings = None if to is None else to(like)
        if has(tree, jax.ShapeDtypeStruct):
            return like if shardings is None else jax.tree.map(with_sharding, like, shardings)
        leaves, form = jax.tree.flatten((static, shardings))
        key = (arrange, jax.tree.structure(tree), form, *leaves, explicit_context(self._mesh))
        if key not in self._compiled:
            self._compiled[key] = jit_on_mesh(self._mesh, function, shardings)
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


# Canonical to placed


def _laid_out(partition: Partition, traced: bool, tree: Params) -> dict[str, PyTree]:
    """Parameters in the layout that the partition gives them; `traced`: the program around it makes
    them, and each device a part of each.

    Stages in other than their order on the devices are picked out of the whole stack, which every
    device would make.  So the stack is split along another dim, where one divides: each device
    makes a part of every stage, and then they exchange these.  Leaves that share buffers come to
    their devices first, and are packed there.
    """
    layout, mesh, axis = partition.layout, partition.mesh, partition.axis

    def constrained(leaf: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    def split(leaf: Any) -> Any:
        """Split over the longest dim that divides, other than the first (of stages or layers)."""
        size = mesh.shape[axis]
        fits = [d for d in range(1, leaf.ndim) if leaf.shape[d] % size == 0 and leaf.shape[d] > 0]
        if not fits:
            return leaf
        rest = _free(leaf.ndim - 1)
        rest[max(fits, key=lambda dim: leaf.shape[dim]) - 1] = axis
        return constrained(leaf, None, *rest)

    stages, in_order = tree["stages"], (*range(layout.placement.num_stages),)
    moves = layout.unlike or any(layout.stage_at(v) != in_order for v in range(layout.num_owned))
    if traced and moves:
        stages = jax.tree.map(split, stages)
    placed = layout.place_stages(stages, partition.kept)
    if traced and layout.unlike:
        alone = layout.place_stages(stages, [Packed({}, each.layout.separate) for each in placed])
        alone = jax.tree.map(lambda leaf: constrained(leaf, axis, *_free(leaf.ndim - 1)), alone)
        pairs = zip(alone, placed, strict=True)
        placed = placed.like(repacked(mesh, axis, chunk, to.layout) for chunk, to in pairs)
    return {**partition.cuts.pad(_outer(tree)), "stages": placed}


def _placed_state(partition: Partition, state: PyTree) -> PyTree:
    return partition.layout.place_stages(state)


def _placed(
    partition: Partition,
    like: dict[str, PyTree],
    follows: dict[str, PyTree],
    tree: Params,
) -> dict[str, PyTree]:
    """A tree in model order, or with axes of stages and layers as one, laid out like another."""
    layout, stages = partition.layout, like["stages"]
    found = {
        key: jax.tree.map(pad_like, value, tree.get(key, value), is_leaf=is_padded)
        for key, value in _outer(like).items()
    }
    if is_missing(stages):
        return {**found, "stages": stages}
    if layout.unlike:
        return {**found, "stages": layout.place_stages(tree["stages"], stages)}

    def placed(rule: Follow, like: Any, leaf: Any) -> PyTree:
        """A leaf in model order -> that of each chunk."""
        if not rule.follows:
            return stages.like([leaf] * len(stages))
        lead, own = like.shape[: rule.lead], like.shape[rule.lead + 1 :]
        whole = leaf.reshape(*lead, layout.placement.num_stages, *own)
        return layout.place_stages(whole, axis=rule.lead)

    by_leaf = jax.tree.map(placed, follows["stages"][0], stages[0], tree["stages"])
    own, chunks = map(jax.tree.structure, (stages[0], stages.like(range(len(stages)))))
    return {**found, "stages": jax.tree.transpose(own, chunks, by_leaf)}


# Placed to canonical


def _in_model_order(partition: Partition, follows: PyTree, tree: Params) -> dict[str, PyTree]:
    layout, outer, stages = partition.layout, cut_off(_outer(tree)), tree["stages"]
    if not stages:
        return {**outer, "stages": {}}
    if follows is None or layout.unlike:
        return {**outer, "stages": layout.canonical_stages(stages)}

    def joined(rule: Follow, *chunks: Any) -> Any:
        """One leaf of every chunk -> the leaf in model order."""
        if not rule.follows:
            return chunks[0]
        whole = layout.canonical_stages(chunks, axis=rule.lead)
        return whole.reshape(rule.merged(whole.shape))

    return {**outer, "stages": jax.tree.map(joined, follows["stages"][0], *stages)}


def _outer(tree: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The parts of the model without the stages."""
    return {key: value for key, value in tree.items() if key != "stages"}


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _free(count: int) -> list[Any]:
    return [PartitionSpec.UNCONSTRAINED] * count
