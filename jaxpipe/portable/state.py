"""A whole training state (parameters, optimizer state, averages) placed <-> canonical."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree
from ..model.mesh import trimmed
from ..model.spread import is_padded
from ..pipeline import Pipeline
from .alike import AlikeStages
from .leaves import Path, from_host, on_host, padded, unplaced, with_sharding, without_padding
from .moving import Mover
from .rules import OWN_STATE, Rule, Rules, is_own, is_params
from .unlike import UnlikeStages


@dataclass(frozen=True)
class PortableState:
    """Placed <-> canonical, for a state that holds parameters under "params" and, anywhere, trees
    laid out like them.

    What stands under "state" is the stages' own (`Pipeline.place_state`), which is in model order
    too, as {"stages": ...}.

    Canonical: leaves of stages are [S, ...] in model order; with `layer_axis` those of [S, layers,
    ...] become [S * layers, ...], so that another number of stages fits too.  With `pipe` None the
    state lies in model order already. Leaves are arrays, or ShapeDtypeStructs, which give
    ShapeDtypeStructs with shardings.
    """

    pipe: Pipeline | None
    layer_axis: bool = False

    def of(self, state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The canonical layout; stages are spread over the pipe axis, parts without parameters left
        out, the rest on the host.

        Raises:
            CheckpointError: leaves belong to a parameter but cannot be laid out; all are listed.
        """
        state = _wrapped(state)
        rules = self._rules.of(state)

        def outside(path: Path, node: PyTree) -> PyTree:
            if not is_params(node):
                return on_host(node)
            found = {
                key: node[key] for key in node if key != "stages" and jax.tree.leaves(node[key])
            }
            found = jax.tree_util.tree_map_with_path(
                lambda p, leaf: self._spread(leaf, rules[(*path, *p)]), found
            )
            found = jax.tree.map(
                lambda leaf: without_padding(leaf, self._mesh), found, is_leaf=is_padded
            )
            return {
                **found,
                "stages": self._merged(path, node["stages"], rules, _whole(state, path, node)),
            }

        return dict(jax.tree_util.tree_map_with_path(outside, dict(state), is_leaf=is_params))

    def placed(
        self, canonical: Mapping[str, PyTree], like: Mapping[str, PyTree]
    ) -> dict[str, PyTree]:
        """The inverse: a state with the structure of `like`, parameters and what follows them
        spread as parameters are.
        """
        like = _wrapped(like)
        rules = self._rules.of(like)

        def inside(path: Path, node: PyTree, found: PyTree) -> PyTree:
            if not is_params(node):
                return from_host(found, node, self._mesh)
            outer = {key: tree for key, tree in node.items() if key != "stages"}
            outer |= {
                key: jax.tree.map(padded, tree, found[key], is_leaf=is_padded)
                for key, tree in outer.items()
                if key in found
            }
            if not jax.tree.leaves(node["stages"]):
                return {**outer, "stages": node["stages"]}
            return {
                **outer,
                "stages": self._divided(
                    path, found["stages"], node["stages"], rules, _whole(like, path, node)
                ),
            }

        nodes, tree = jax.tree_util.tree_flatten_with_path(dict(like), is_leaf=is_params)
        values = jax.tree.leaves(dict(canonical), is_leaf=is_params)
        found = dict(
            jax.tree.unflatten(
                tree, [inside(path, node, v) for (path, node), v in zip(nodes, values, strict=True)]
            )
        )
        return {key: value["stages"] if key == OWN_STATE else value for key, value in found.items()}

    @cached_property
    def _rules(self) -> Rules:
        return Rules(self.pipe, self.layer_axis)

    @cached_property
    def _mover(self) -> Mover:
        return Mover(self.pipe)

    @property
    def _mesh(self) -> Mesh | None:
        return None if self.pipe is None else self.pipe.mesh

    def _merged(
        self, path: Path, stages: PyTree, rules: Mapping[Path, Rule], whole: PyTree
    ) -> PyTree:
        if self.pipe is not None and self._rules.unlike:
            return UnlikeStages(self.pipe, self._mover).merged(path, stages, rules, whole)
        return AlikeStages(self.pipe, self.layer_axis, self._mover).merged(path, stages, rules)

    def _divided(
        self, path: Path, stages: PyTree, like: PyTree, rules: Mapping[Path, Rule], whole: PyTree
    ) -> PyTree:
        if self.pipe is not None and self._rules.unlike:
            return UnlikeStages(self.pipe, self._mover).divided(stages, like, whole)
        return AlikeStages(self.pipe, self.layer_axis, self._mover).divided(
            path, stages, like, rules
        )

    def _spread(self, leaf: Any, rule: Rule) -> Any:
        """A leaf of first, last or shared, or of what follows them, where its parameter lies."""
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        if self.pipe is None:
            return with_sharding(leaf, unplaced(leaf, leaf)) if abstract else leaf
        to = NamedSharding(
            self.pipe.mesh,
            trimmed(*(None,) * rule.lead, *rule.spec) if rule.follows else PartitionSpec(),
        )
        return with_sharding(leaf, to) if abstract else jax.device_put(leaf, to)


def _whole(state: Mapping[str, PyTree], path: Path, node: Mapping[str, PyTree]) -> PyTree:
    """The shapes of all leaves that stages have: the parameters', or those of the stages' own
    state, or of an optimizer's.
    """
    stages = node["stages"] if is_own(state, path, node) else state["params"]["stages"]
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), stages)


def _wrapped(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The stages' own state in the form of parameters."""
    return {key: {"stages": value} if key == OWN_STATE else value for key, value in state.items()}
