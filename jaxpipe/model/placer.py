"""Parameters, and trees like them, between the model's own (canonical) layout and where they are on
a mesh.  Moments and averages are spread as the parameters that they follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
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
from .calls import cut_off, is_padded, pad_like, unpadded
from .packed import Packed, is_missing, repacked
from .param_layout import OUTER, State, owner_faults
from .partition import Partition, leaf_plans
from .settings import Mover, explicit_context, has, names_of, trimmed, with_sharding


@dataclass(frozen=True)
class Follow:
    """How a leaf of a tree like the placed parameters belongs to its parameter."""

    lead: int = 0  # axes of its own, before the parameter's
    follows: bool = True  # False: one value for all stages
    spec: tuple[Any, ...] = ()  # of the parameter's dims, without the axis of devices
    fits: bool = True  # False: no axis is known to be that of stages
    stage: bool = True  # False: of first, last or shared


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
        self._partition, self._stage_axes = partition, 2 if layer_axis else 1
        self._layout = None if partition is None else partition.layout
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

    @property
    def unlike(self) -> bool:
        """Whether each stage has parameters of its own form."""
        return self._layout is not None and self._layout.unlike

    def of(self, node: PyTree, *, own: bool = False) -> PyTree:
        """The node with a `Follow` for each leaf; `own`: it is the stages' own state."""
        # as the state of an optimizer that has one for each layer
        other_forms = self.unlike and any(
            isinstance(one, Packed) and one.layout.forms != other.layout.forms
            for one, other in zip(node["stages"], self._stages, strict=False)
        )

        def of_leaf(path: Any, leaf: Any) -> Follow:
            stage = path[0].key == "stages"
            if not stage or not (own or other_forms):
                return replace(self._follow(*self._named(path), leaf.shape), stage=stage)
            chunk = node["stages"][path[1].idx]
            packed = isinstance(chunk, Packed) and not own
            buffer = chunk.layout.of(path[2].key) if packed else None
            if buffer is None or self._partition is None:
                return Follow()
            return Follow(spec=tuple(self._partition.buffer_spec(buffer, leaf.shape)[1:]))

        return jax.tree_util.tree_map_with_path(of_leaf, node)

    def shardings(self, state: PyTree) -> PyTree:
        """A sharding for each leaf of an optimizer's state (shapes)."""
        partition = self._partition
        assert partition is not None

        def of_node(node: PyTree) -> PyTree:
            if is_params(node):
                return shardings(partition, self.of(node), node)
            return NamedSharding(partition.mesh, PartitionSpec())

        return jax.tree.map(of_node, state, is_leaf=is_params)

    def _follow(self, part: str, name: str, shape: tuple[int, ...]) -> Follow:
        stage, known = part.startswith("stages"), self._known.get(part, {})
        one_a_device = (
            stage and self._layout is not None and shape[:1] == (len(self._layout.owned),)
        )
        found = known.get(name) or followed(name, shape, known)
        if found is None:
            # an optimizer may have a state for each stage (`per_layer`)
            fits = not stage or (one_a_device and not self.unlike)
            return Follow(follows=one_a_device, fits=fits)
        parameter, spec = found
        lead = len(shape) - len(parameter)
        if lead >= 0 and shape[lead:] == parameter:
            return Follow(lead, spec=spec)
        if not stage or np.prod(shape) == 1:
            return Follow(follows=False)
        # a factored moment lacks some of the parameter's last axes
        axes = self._stage_axes
        fits = lead < 0 and shape[:axes] == parameter[:axes]
        return Follow(follows=fits or one_a_device, fits=fits)

    def _named(self, path: Any) -> tuple[str, str]:
        """The part of the model that a leaf is in, and its path there.  The chunks of alike stages
        are one part, and each chunk of unlike ones.
        """
        names = [path_text((key,)) for key in path]
        if names[0] != "stages" or self._layout is None:
            return names[0], "/".join(names[1:])
        return "/".join(names[: 1 + self.unlike]), "/".join(names[2:])


def shardings(
    partition: Partition, follows: Mapping[str, PyTree], like: Params, *, layer_axis: bool = False
) -> dict[str, PyTree]:
    """The shardings of a tree of these shapes, like the placed parameters or canonical ones (of
    which leaves are [S * layers, ...] with `layer_axis`).  A dim that does not divide is whole.
    """
    mesh = partition.mesh

    def of(leaf: Any, rule: Follow) -> NamedSharding:
        if not rule.follows:
            return NamedSharding(mesh, PartitionSpec())
        spec = rule.spec
        if rule.stage:
            spec = (partition.axis, *(spec[1:] if layer_axis else spec))
        spec = (*(None,) * rule.lead, *spec)
        sizes = (math.prod(mesh.shape[name] for name in names_of(entry)) for entry in spec)
        own = zip(spec, sizes, leaf.shape, strict=False)
        return NamedSharding(
            mesh, trimmed(*(None if length % size else entry for entry, size, length in own))
        )

    return dict(jax.tree.map(of, like, follows))


class Placer:
    """Rearranges whole trees; each way of doing so is compiled once."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._layout = partition, partition.layout
        self._mesh, self._axis = partition.mesh, partition.axis
        # Compiled functions hold this copy, which does not hold them: without circles, a dropped
        # placer is freed at once.
        self._rules = copy(self)
        self._mover = Mover(partition.mesh)

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
            plans = partition.plans(like, params)
            faults = [*partition.frozen_faults(plans), *partition.dtype_faults(like, plans)]
            PipelineError.refuse("these parameters do not fit the pipeline", faults)
            return partition.shardings(plans)

        traced = has(params, jax.core.Tracer) and not explicit_context(self._mesh)
        arrange = self._rules._arranged_where_traced if traced else self._rules._arranged
        return dict(self._mover.run(arrange, params, to))

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
        static = follows, layer_axis
        to = None if follows is None else partial(self._canonical_shardings, *static)
        return dict(self._mover.run(self._rules._rearranged, tree, to, *static))

    def placed_like(
        self, tree: Params, like: dict[str, PyTree], follows: PyTree, *, layer_axis: bool = False
    ) -> dict[str, PyTree]:
        """The inverse of `in_model_order`; `like` are the shapes of the result."""
        to, static = shardings(self._partition, follows, like), (like, follows, layer_axis)
        return dict(self._mover.run(self._rules._arranged_like, tree, lambda _: to, *static))

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
        to = Followers(params, self._partition).shardings
        return Mover(self._mesh).run(begin, trained, to)

    def place_state(self, state: PyTree) -> PyTree:
        """The stages' own state, canonical to placed; shapes to shapes."""
        PipelineError.refuse("this state does not fit the pipeline", self._layout.faults(state))
        to = NamedSharding(self._mesh, PartitionSpec(self._axis))
        return self._mover.run(
            self._layout.place_stages, state, partial(jax.tree.map, lambda _: to)
        )

    def place_zeros(self, trees: Sequence[PyTree], *, shapes: bool) -> PyTree:
        """Zeros of these shapes, a tree for each stage, where the stages' own state is; `shapes`:
        shapes with shardings instead.
        """
        to = NamedSharding(self._mesh, PartitionSpec(self._axis))
        like = jax.eval_shape(self._layout.place_trees, trees)
        if shapes:
            return jax.tree.map(lambda leaf: with_sharding(leaf, to), like)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=to), like)

    def canonical_state(self, placed: State) -> PyTree:
        """The stages' own state, placed to canonical."""
        self._check_owners(placed, "state", "place_state")
        return self._mover.run(self._layout.canonical_stages, placed, None)

    def _check_owners(self, stages: PyTree, what: str, again: str) -> None:
        PipelineError.refuse("", owner_faults(stages, self._layout, what, again))

    # Canonical to placed

    def _arranged(self, tree: Params) -> dict[str, PyTree]:
        stages = self._layout.place_stages(tree["stages"], self._partition.kept)
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
        separate = [Packed({}, chunk.layout.separate) for chunk in like]
        placed = jax.tree.map(
            lambda leaf: self._constrained(leaf, self._axis, *_free(leaf.ndim - 1)),
            layout.place_stages(stages, separate),
        )
        chunks = [
            repacked(self._mesh, self._axis, chunk, to.layout)
            for chunk, to in zip(placed, like, strict=True)
        ]
        return {**self._padded_outer(tree), "stages": placed.like(chunks)}

    def _padded_outer(self, tree: Params) -> dict[str, PyTree]:
        return self._partition.cuts.pad(_outer(tree))

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
            for key, value in _outer(like).items()
        }
        stages = like["stages"]
        if is_missing(stages):
            return {**found, "stages": stages}
        if self._layout.unlike:
            return {**found, "stages": self._layout.place_stages(tree["stages"], stages)}

        def placed(v: int, rule: Follow, like: Any, leaf: Any) -> Any:
            """A leaf in model order -> that of a chunk."""
            if not rule.follows:
                return leaf
            shape = (self._layout.placement.num_stages, *like.shape[rule.lead + 1 :])

            def place(leaf: Any) -> Any:
                return self._layout.place_stages(leaf.reshape(shape) if layer_axis else leaf)[v]

            return _behind(rule.lead, place)(leaf)

        trees = follows["stages"][0], stages[0], tree["stages"]
        chunks = [jax.tree.map(partial(placed, v), *trees) for v in range(len(stages))]
        return {**found, "stages": stages.like(chunks)}

    # Placed to canonical

    def _rearranged(self, follows: PyTree, layer_axis: bool, tree: Params) -> dict[str, PyTree]:
        outer = cut_off(_outer(tree))
        stages = tree["stages"]
        if not stages:
            return {**outer, "stages": {}}
        if follows is None or self._layout.unlike:
            return {**outer, "stages": self._layout.canonical_stages(stages)}

        def join(*chunks: Any) -> Any:
            whole = self._layout.canonical_stages(chunks)
            return whole.reshape(-1, *whole.shape[2:]) if layer_axis and whole.ndim > 1 else whole

        def joined(rule: Follow, *chunks: Any) -> Any:
            """One leaf of every chunk -> the leaf in model order."""
            return _behind(rule.lead, join)(*chunks) if rule.follows else chunks[0]

        return {**outer, "stages": jax.tree.map(joined, follows["stages"][0], *stages)}

    def _canonical_shardings(
        self, follows: dict[str, PyTree], layer_axis: bool, like: dict[str, PyTree]
    ) -> dict[str, PyTree]:
        """Stages over the pipe axis; over other axes everything as it was, where stages are alike.
        A dim that does not divide is whole on every device: of stages, or one that was padded.
        """

        stages = like["stages"]
        alike = follows["stages"] and not self._layout.unlike
        rules = follows["stages"][0] if alike else jax.tree.map(lambda _: Follow(), stages)
        own = {**unpadded(_outer(follows)), "stages": rules}
        return shardings(self._partition, own, like, layer_axis=layer_axis)


def _outer(tree: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The parts of the model without the stages."""
    return {key: value for key, value in tree.items() if key != "stages"}


def _behind(lead: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on all entries of so many leading axes."""
    for _ in range(lead):
        function = jax.vmap(function)
    return function


def _free(count: int) -> list[Any]:
    return [PartitionSpec.UNCONSTRAINED] * count
