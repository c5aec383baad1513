"""Which leaf of a state follows which parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..arrays import PyTree
from ..errors import CheckpointError
from ..model.packed import Packed
from ..model.param_layout import OUTER
from ..model.placed import Chunks, home_faults
from ..model.placer import Follow
from ..model.specs import path_text
from ..pipeline import Pipeline

Path: TypeAlias = Any
OWN_STATE = "state"


class Reference(NamedTuple):
    """What a leaf that belongs to a parameter is measured by: the parameter's shape and how it is
    spread over the mesh.
    """

    shape: tuple[int, ...]
    spec: tuple[Any, ...]


def is_params(node: PyTree) -> bool:
    """True for a tree laid out like parameters: they themselves, a moment of an optimizer, an
    average, gradients.
    """
    return isinstance(node, dict) and "stages" in node and set(node) <= {"stages", *OUTER}


@dataclass(frozen=True)
class Following:
    """Gives every leaf of a state that belongs to a parameter its `Follow`."""

    pipe: Pipeline | None
    layer_axis: bool

    def of(self, state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The state with a `Follow` for each leaf of trees laid out like parameters; None for
        others.

        Raises:
            CheckpointError: trees that are not the pipeline's, leaves that cannot be laid out; all
                are listed.
        """
        known = self._known(state)
        faults: list[str] = []
        unlike: list[str] = []

        def of_node(path: Path, node: PyTree) -> PyTree:
            if not is_params(node):
                return None
            home = self._home_faults(node, path_text(path) or "parameters")
            faults.extend(home)
            if home:
                return None
            alike = self.pipe is not None and not self._unlike
            if alike and len(set(map(jax.tree.structure, node["stages"]))) > 1:
                faults.append(
                    f"{path_text(path)}: chunks of stages have unlike structures; a mask must "
                    "treat every stage the same"
                )
            own = path == (jax.tree_util.DictKey(OWN_STATE),)
            by_layer = own or self._has_own_forms(state, node)

            def of_leaf(p: Path, leaf: Any) -> Follow:
                name, where = self._parameter(p), path_text((*path, *p))
                stage = name[0] == "stages"
                if own or (by_layer and stage):
                    return Follow(spec=_spec_of(leaf)[1:])
                found = self._follow(leaf, known.get(name), stage=stage)
                if found is None:
                    faults.append(
                        f"{where} of shape {leaf.shape} fits no axis of its parameter to the stages"
                    )
                elif stage and self._unlike and (found.lead or not found.follows):
                    unlike.append(f"{where} does not have its parameter's shape")
                return found or Follow(follows=False)

            return jax.tree_util.tree_map_with_path(of_leaf, node)

        found = jax.tree_util.tree_map_with_path(of_node, dict(state), is_leaf=is_params)
        if faults:
            raise CheckpointError.listing("this state has no canonical layout", faults)
        if unlike:
            raise CheckpointError.listing(
                "with unlike stages every leaf must be as its parameter is, but", unlike
            )
        return dict(found)

    @property
    def _unlike(self) -> bool:
        """Whether each stage has parameters of its own form, which move all together."""
        return self.pipe is not None and self.pipe.layout.unlike

    def _home_faults(self, node: Mapping[str, PyTree], name: str) -> list[str]:
        if self.pipe is None or not isinstance(node["stages"], Chunks):
            return []
        return home_faults(node["stages"], self.pipe.layout.home, name, "place")

    def _known(self, state: Mapping[str, PyTree]) -> dict[tuple[str, ...], Reference]:
        """The parameters, by name."""
        if not is_params(state.get("params")):
            raise CheckpointError(
                'a state must hold parameters under "params", as `Pipeline.place` gives them'
            )
        if self.pipe is not None:
            home = home_faults(state["params"]["stages"], self.pipe.layout.home, "params", "place")
            if home:
                raise CheckpointError.listing("this state is not the pipeline's", home)
        params = jax.tree_util.tree_leaves_with_path(state["params"])
        return {
            self._parameter(path): Reference(leaf.shape, _spec_of(leaf)) for path, leaf in params
        }

    def _follow(self, leaf: Any, parameter: Reference | None, *, stage: bool) -> Follow | None:
        """None where it cannot be told which axis of the leaf is that of stages."""
        if parameter is None and stage and self._one_a_stage(leaf):
            return Follow(spec=_spec_of(leaf)[1:])
        if parameter is None:
            return None if stage else Follow(follows=False)
        shape, spec = parameter
        lead = len(leaf.shape) - len(shape)
        if lead >= 0 and leaf.shape[lead:] == shape:
            return Follow(lead, spec=spec[1:] if stage else spec)
        if not stage or np.prod(leaf.shape) == 1:
            return Follow(follows=False)
        # a factored moment lacks some of the parameter's last axes
        axes = 2 if self.layer_axis else 1
        return Follow() if lead < 0 and leaf.shape[:axes] == shape[:axes] else None

    def _one_a_stage(self, leaf: Any) -> bool:
        """Whether it can be of an optimizer that has a state for each stage (`per_layer`)."""
        return (
            self.pipe is not None
            and not self._unlike
            and leaf.shape[:1] == (self.pipe.schedule.num_devices,)
        )

    def _parameter(self, path: Path) -> tuple[str, ...]:
        """The parameter's name within its tree, the same for every chunk of alike stages:
        ("stages", "w").
        """
        names = tuple(path_text((key,)) for key in path)
        alike = self.pipe is not None and not self._unlike and names[0] == "stages"
        return (names[0], *names[2:]) if alike else names

    def _has_own_forms(self, state: Mapping[str, PyTree], node: Mapping[str, PyTree]) -> bool:
        """Whether unlike stages hold other trees than parameters: the state of an optimizer that
        has one for each layer.
        """
        return self._unlike and any(
            isinstance(one, Packed) and one.layout.forms != other.layout.forms
            for one, other in zip(node["stages"], state["params"]["stages"], strict=False)
        )


def _spec_of(leaf: Any) -> tuple[Any, ...]:
    """How an array is spread, an entry a dim."""
    sharding = getattr(leaf, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return (*spec, *(None for _ in range(len(leaf.shape) - len(spec))))
