"""A run's state, placed <-> in the model's canonical layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..arrays import LeafPath, Params, PyTree, is_key, path_text, shapes_of, words_of
from ..errors import CheckpointError
from ..model.settings import explicit_context, has, jit_on_mesh
from ..storage.chunks import Chunks, owner_faults, padding_of
from ..storage.follow import Follow, Followers, is_params
from ..storage.packed import Packed
from ..storage.partition import Partition
from ..storage.placer import Placer

OWN_STATE = "state"
# What a run keeps: parameters under "params", and trees of arrays and numbers by any other name.
RunState: TypeAlias = "dict[str, PyTree]"


@dataclass(frozen=True)
class PortableState:
    """Placed <-> canonical, for a state that holds parameters under "params" and, anywhere, trees
    laid out like them.

    Under "state" is the stages' own state (`Pipeline.place_state`).  It is brought in model order
    too, as {"stages": ...}.

    Canonical: leaves of stages are [S, ...] in model order; with `layer_axis` those of [S, layers,
    ...] become [S * layers, ...], so that another number of stages fits too.  Without a partition
    the state is in model order already. Leaves are arrays, or ShapeDtypeStructs, which give
    ShapeDtypeStructs with shardings.
    """

    partition: Partition | None
    layer_axis: bool = False

    def of(self, state: RunState) -> RunState:
        """The canonical layout; stages are spread over the pipe axis, parts without parameters left
        out, the rest on the host.

        Raises:
            CheckpointError: leaves belong to a parameter but cannot be laid out; all are listed.
        """
        state = _wrapped(state)

        def outside(path: LeafPath, node: PyTree, follows: PyTree) -> PyTree:
            if not is_params(node):
                return _on_host(node)
            kept = [key for key in node if key == "stages" or jax.tree.leaves(node[key])]
            node, follows = ({key: tree[key] for key in kept} for tree in (node, follows))
            if self._placer is None:
                if not self.layer_axis:
                    return node
                pairs = node["stages"], follows["stages"]
                merge = jax.tree.map(lambda a, rule: _reshaped(a, rule.merged(a.shape)), *pairs)
                return node | {"stages": merge}
            _check_single_values(path, node["stages"], follows["stages"])
            return self._placer.in_model_order(node, follows, padding, merges=self.layer_axis)

        follows = self._follows(state)
        padding = padding_of(state["params"])
        found = jax.tree_util.tree_map_with_path(outside, state, follows, is_leaf=is_params)
        return dict(found)

    def placed(self, canonical: RunState, like: RunState) -> RunState:
        """The inverse: a state with the structure of `like`, parameters and what follows them
        spread as parameters are.
        """
        like = _wrapped(like)

        def inside(node: PyTree, follows: PyTree, found: PyTree) -> PyTree:
            if not is_params(node):
                return self._from_host(found, node)
            if self._placer is None:
                return jax.tree.map(
                    lambda leaf, to: _reshaped(leaf, to.shape), {**node, **found}, node
                )
            return self._placer.placed_like(found, shapes_of(node), follows)

        tree: Any = jax.tree.structure(like, is_leaf=is_params)
        values = tree.unflatten(jax.tree.leaves(dict(canonical), is_leaf=is_params))
        state = jax.tree.map(inside, like, self._follows(like), values, is_leaf=is_params)
        return {key: value["stages"] if key == OWN_STATE else value for key, value in state.items()}

    def _follows(self, state: RunState) -> RunState:
        """The state with a `Follow` for each leaf of trees laid out like parameters; None for
        others.

        Raises:
            CheckpointError: trees that are not the pipeline's, leaves that cannot be laid out; all
                are listed.
        """
        if not is_params(state.get("params")):
            raise CheckpointError(
                'a state must hold parameters under "params", as `Pipeline.place` gives them'
            )
        params = state["params"]
        CheckpointError.refuse(
            "this state is not the pipeline's", self._owner_faults(params, "params")
        )
        followers = Followers(params, self.partition, layer_axis=self.layer_axis)
        alike = self.partition is not None and not self.partition.layout.unlike
        faults: list[str] = []

        def of_node(path: LeafPath, node: PyTree) -> PyTree:
            if not is_params(node):
                return None
            name = path_text(path)
            if elsewhere := self._owner_faults(node, name or "parameters"):
                faults.extend(elsewhere)
                return None
            if alike and len(set(map(jax.tree.structure, node["stages"]))) > 1:
                faults.append(
                    f"{name}: chunks of stages have unlike structures; a mask must treat every "
                    "stage the same"
                )
            of_stages = path == (jax.tree_util.DictKey(OWN_STATE),)
            found = jax.tree.map(lambda _: Follow(), node) if of_stages else followers.of(node)
            leaves = jax.tree_util.tree_leaves_with_path(node)
            for (p, leaf), rule in zip(leaves, jax.tree.leaves(found), strict=True):
                if not rule.fits:
                    faults.append(
                        f"{path_text((*path, *p))} of shape {leaf.shape} fits no axis of its "
                        "parameter to the stages; unlike ones take leaves of its shape alone"
                    )
            return found

        found = jax.tree_util.tree_map_with_path(of_node, dict(state), is_leaf=is_params)
        CheckpointError.refuse("this state has no canonical layout", faults)
        return dict(found)

    def _owner_faults(self, node: Params, name: str) -> list[str]:
        if self.partition is None or not (name == "params" or isinstance(node["stages"], Chunks)):
            return []
        return owner_faults(node["stages"], self.partition.layout, name, "place")

    @cached_property
    def _placer(self) -> Placer | None:
        return None if self.partition is None else Placer(self.partition)

    def _from_host(self, value: Any, like: object) -> object:
        """The inverse of `_on_host`: a number as it was, an array on the whole mesh."""
        if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
            return type(like)(value) if isinstance(like, int | float) else value
        if is_key(like):
            dtype: Any = like.dtype
            value = jax.random.wrap_key_data(value, impl=str(dtype._impl.name))
        if self.partition is None:
            return jax.device_put(value, _plain_sharding(like))
        to = NamedSharding(self.partition.mesh, PartitionSpec())
        if explicit_context(self.partition.mesh):  # as placed parameters are then
            return jit_on_mesh(self.partition.mesh, lambda leaf: leaf, to)(value)
        return jax.device_put(value, to)


def _wrapped(state: RunState) -> RunState:
    """The stages' own state in the form of parameters."""
    return {key: {"stages": value} if key == OWN_STATE else value for key, value in state.items()}


def _check_single_values(path: LeafPath, stages: PyTree, follows: PyTree) -> None:
    """One value a chunk, where it does not follow stages, has no place in model order unless all
    are equal.
    """
    if not isinstance(stages, Chunks) or isinstance(stages[0], Packed):
        return
    for rule, *group in zip(*map(jax.tree.leaves, (follows[0], *stages)), strict=True):
        if rule.follows or has(group, jax.ShapeDtypeStruct):
            continue
        values = [np.asarray(leaf) for leaf in group]
        if any(not np.array_equal(values[0], v) for v in values[1:]):
            raise CheckpointError(
                f"{path_text(path)} holds one number for all stages of a chunk, "
                f"{[v.item() for v in values]}: it belongs to this schedule's chunks and not to "
                "the model; use a transformation that keeps one for each parameter or for all"
            )


def _plain_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> Sharding:
    """Where a plain program's array is."""
    return getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])


def _reshaped(leaf: jax.Array | jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> Any:
    """A plain program's array with another shape: on its device, or whole on its mesh."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if leaf.shape == shape else leaf.reshape(shape)
    to = _plain_sharding(leaf)
    if isinstance(to, NamedSharding) and leaf.shape != shape:
        to = NamedSharding(to.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=to)


def _on_host(leaf: object) -> np.ndarray:
    """As numpy; a key as its words."""
    shape, words = isinstance(leaf, jax.ShapeDtypeStruct), words_of(leaf)
    return np.zeros(words.shape, words.dtype) if shape else np.asarray(words)
