"""Which leaf of a state follows which parameter: the rule by which it moves between placed and
canonical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ..arrays import PyTree
from ..errors import CheckpointError
from ..model.packed import Packed
from ..model.param_layout import OUTER
from ..model.placed import Chunks, home_faults
from ..pipeline import Pipeline
from .leaves import Path, spec_of, text

OWN_STATE = "state"


class Reference(NamedTuple):
    """What a leaf that belongs to a parameter is measured by: the parameter's shape and how it is
    spread over the mesh.
    """

    shape: tuple[int, ...]
    spec: tuple[Any, ...]


class Rule(NamedTuple):
    """How a leaf of a stage follows its parameter: after how many axes of its own, or not at all (a
    placeholder).
    """

    lead: int
    follows: bool
    spec: tuple[Any, ...]  # of the dims after the stage axis


def is_params(node: PyTree) -> bool:
    """True for a tree laid out like parameters: they themselves, a moment of an optimizer, an
    average, gradients.
    """
    return isinstance(node, dict) and "stages" in node and set(node) <= {"stages", *OUTER}


def has_own_forms(state: Mapping[str, PyTree], node: Mapping[str, PyTree]) -> bool:
    """Whether stages of unlike forms hold other trees than parameters: the state of an optimizer
    that has one for each layer.
    """
    if not isinstance(node["stages"], Chunks) or not isinstance(state["params"]["stages"], Chunks):
        return False
    chunks = zip(node["stages"], state["params"]["stages"], strict=False)
    return any(
        isinstance(one, Packed) and isinstance(other, Packed) and one.layout.forms != other.layout.forms
        for one, other in chunks
    )


def is_own(state: Mapping[str, PyTree], path: Path, node: Mapping[str, PyTree]) -> bool:
    """Whether the stages of a tree have leaves that parameters have not: their own state, or an
    optimizer's.
    """
    return path == (jax.tree_util.DictKey(OWN_STATE),) or has_own_forms(state, node)


@dataclass(frozen=True)
class Rules:
    """Gives every leaf of a state that belongs to a parameter its rule."""

    pipe: Pipeline | None
    layer_axis: bool

    @property
    def unlike(self) -> bool:
        """Whether each stage has parameters of its own form, which move all together."""
        return self.pipe is not None and self.pipe.layout.unlike

    def of(self, state: Mapping[str, PyTree]) -> dict[Path, Rule]:
        """The rule of every leaf that belongs to a parameter, by path.

        Raises:
            CheckpointError: trees that are not the pipeline's, leaves that cannot be laid out; all
                are listed.
        """
        known = self._known(state)
        rules: dict[Path, Rule] = {}
        faults: list[str] = []
        for path, node in jax.tree_util.tree_leaves_with_path(dict(state), is_leaf=is_params):
            if not is_params(node):
                continue
            if isinstance(node["stages"], Chunks) and self.pipe is not None:
                home = home_faults(
                    node["stages"], self.pipe.layout.home, text(path) or "parameters", "place"
                )
                if home:
                    faults += home
                    continue
            if (
                self.pipe is not None
                and not self.unlike
                and len({jax.tree.structure(chunk) for chunk in node["stages"]}) > 1
            ):
                faults.append(
                    f"{text(path)}: chunks of stages have unlike structures; a mask must treat "
                    "every stage the same"
                )
            for p, leaf, rule in self._of_tree(state, path, node, known):
                rules[(*path, *p)] = rule or Rule(0, False, ())
                if rule is None:
                    faults.append(
                        f"{text((*path, *p))} of shape {leaf.shape} fits no axis of its "
                        "parameter to the stages"
                    )
        if faults:
            raise CheckpointError.listing("this state has no canonical layout", faults)
        return rules

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
            self._parameter(path): Reference(leaf.shape, spec_of(leaf)) for path, leaf in params
        }

    def _of_tree(
        self,
        state: Mapping[str, PyTree],
        path: Path,
        node: Mapping[str, PyTree],
        known: Mapping[tuple[str, ...], Reference],
    ) -> Iterator[tuple[Path, Any, Rule | None]]:
        """Each leaf of a tree laid out like parameters: its path in the tree, itself, and its rule,
        if there is one.
        """
        own_state = path == (jax.tree_util.DictKey(OWN_STATE),)
        by_layer = has_own_forms(state, node)
        for p, leaf in jax.tree_util.tree_leaves_with_path(node):
            stage = self._parameter(p)[0] == "stages"
            own = own_state or (by_layer and stage)
            yield (
                p,
                leaf,
                Rule(0, True, ())
                if own
                else self._rule(leaf, known.get(self._parameter(p)), stage=stage),
            )

    def _rule(self, leaf: Any, parameter: Reference | None, *, stage: bool) -> Rule | None:
        """None where it cannot be told which axis of the leaf is that of stages."""
        if parameter is None and stage and self._one_a_stage(leaf):
            return Rule(0, True, spec_of(leaf)[1:])
        if parameter is None:
            return None if stage else Rule(0, False, ())
        shape, spec = parameter
        lead = len(leaf.shape) - len(shape)
        if lead >= 0 and leaf.shape[lead:] == shape:
            return Rule(lead, True, spec[1:] if stage else spec)
        if not stage or np.prod(leaf.shape) == 1:
            return Rule(0, False, ())
        # a factored moment lacks some of the parameter's last axes
        axes = 2 if self.layer_axis else 1
        return Rule(0, True, ()) if lead < 0 and leaf.shape[:axes] == shape[:axes] else None

    def _one_a_stage(self, leaf: Any) -> bool:
        """Whether it can be of an optimizer that has a state for each stage (`per_layer`)."""
        return (
            self.pipe is not None
            and not self.unlike
            and leaf.shape[:1] == (self.pipe.schedule.num_devices,)
        )

    def _parameter(self, path: Path) -> tuple[str, ...]:
        """The parameter's name within its tree, the same for every chunk of alike stages:
        ("stages", "w").
        """
        names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        if self.unlike:
            return names
        return (names[0], *names[2:]) if self.pipe is not None and names[0] == "stages" else names
