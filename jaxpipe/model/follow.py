"""The parameter that each leaf of a training state follows: moments are sharded as their
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree, path_text, wider
from .leaf_plan import leaf_plans
from .mesh import trimmed
from .packed import Packed
from .param_layout import OUTER
from .partition import Partition


@dataclass(frozen=True)
class Follow:
    """How a leaf of a tree like the placed parameters belongs to its parameter."""

    lead: int = 0  # axes of its own, before the parameter's
    follows: bool = True  # False: one value for all stages
    spec: tuple[Any, ...] = ()  # of the parameter's dims, without the axis of devices
    fits: bool = True  # False: no axis is known to be that of stages

    def sharding(self, mesh: Mesh, *axis: str) -> NamedSharding:
        """The sharding of the placed leaf; `axis`: that of devices, if it has one."""
        spec = trimmed(*(None,) * self.lead, *axis, *self.spec) if self.follows else PartitionSpec()
        return NamedSharding(mesh, spec)


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
        self._partition, self._layer_axis = partition, layer_axis
        self._layout = None if partition is None else partition.layout
        self._stages = params["stages"]
        leaves = jax.tree_util.tree_leaves_with_path(dict(params))
        specs: list[tuple[Any, ...]] = [()] * len(leaves)
        if partition is not None:
            plans = leaf_plans(partition.plans(params))
            specs = [tuple(plan.spec(partition.axis)[int(plan.stage) :]) for plan in plans]
        self._known = {
            self._names(path): (tuple(leaf.shape), spec)
            for (path, leaf), spec in zip(leaves, specs, strict=True)
        }

    @property
    def unlike(self) -> bool:
        """Whether each stage has parameters of its own form."""
        return self._layout is not None and self._layout.unlike

    def of(self, node: PyTree, *, own: bool = False) -> PyTree:
        """The node with a `Follow` for each leaf; `own`: it is the stages' own state."""
        other = own or self._has_own_forms(node["stages"])

        def of_leaf(path: Any, leaf: Any) -> Follow:
            if not other or path[0].key != "stages":
                return self._follow(self._names(path), leaf.shape)
            chunk = node["stages"][path[1].idx]
            packed = isinstance(chunk, Packed) and not own
            buffer = chunk.layout.of(path[2].key) if packed else None
            if buffer is None or self._partition is None or leaf.shape[1:] != buffer.shape:
                return Follow()
            return Follow(spec=tuple(self._partition.buffer_spec(buffer, leaf.shape)[1:]))

        return jax.tree_util.tree_map_with_path(of_leaf, node)

    def shardings(self, state: PyTree) -> PyTree:
        """A sharding for each leaf of an optimizer's state (shapes)."""
        partition = self._partition
        assert partition is not None

        def of_node(node: PyTree) -> PyTree:
            if is_params(node):
                return shardings(partition, self.of(node))
            return NamedSharding(partition.mesh, PartitionSpec())

        return jax.tree.map(of_node, state, is_leaf=is_params)

    def _follow(self, names: tuple[str, ...], shape: tuple[int, ...]) -> Follow:
        stage = names[0] == "stages"
        found = self._known.get(names) or self._with_more_between(names, shape)
        if found is None:
            one = stage and self._one_a_device(shape)
            return Follow(follows=one, fits=not stage or (one and not self.unlike))
        parameter, spec = found
        lead = len(shape) - len(parameter)
        if lead >= 0 and shape[lead:] == parameter:
            return Follow(lead, spec=spec)
        if not stage or np.prod(shape) == 1:
            return Follow(follows=False)
        # a factored moment lacks some of the parameter's last axes
        axes = 2 if self._layer_axis else 1
        fits = lead < 0 and shape[:axes] == parameter[:axes]
        return Follow(follows=fits or self._one_a_device(shape), fits=fits)

    def _with_more_between(
        self, names: tuple[str, ...], shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]] | None:
        """The parameter of this shape that has more between the part of the model and its own path,
        as with a state for each layer.
        """
        for tail in range(1, len(names)):
            for middle in range(1, min(2, tail) + 1):
                found = self._known.get((*names[:middle], *names[tail:]))
                if found is not None and found[0] == shape:
                    return found
        return None

    def _one_a_device(self, shape: tuple[int, ...]) -> bool:
        """Whether a leaf of this shape can be state of an optimizer that has one for each stage
        (`per_layer`).
        """
        return self._layout is not None and shape[:1] == (len(self._layout.owned),)

    def _names(self, path: Any) -> tuple[str, ...]:
        """The name of a leaf within its tree, the same for every chunk of alike stages: ("stages",
        "w").
        """
        names = tuple(path_text((key,)) for key in path)
        alike = self._layout is not None and not self.unlike and names[0] == "stages"
        return (names[0], *names[2:]) if alike else names

    def _has_own_forms(self, stages: PyTree) -> bool:
        """Whether unlike stages hold other trees than parameters: the state of an optimizer that
        has one for each layer.
        """
        return self.unlike and any(
            isinstance(one, Packed) and one.layout.forms != other.layout.forms
            for one, other in zip(stages, self._stages, strict=False)
        )


def shardings(partition: Partition, follows: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The shardings of a tree like the placed parameters."""

    def of(key: str, rule: Follow) -> NamedSharding:
        return rule.sharding(partition.mesh, *([partition.axis] if key == "stages" else []))

    return {
        key: jax.tree.map(lambda rule, key=key: of(key, rule), rules)
        for key, rules in follows.items()
    }


def init_as_updated(optimizer: Any, accumulate: Any) -> Callable[[PyTree], PyTree]:
    """`optimizer.init`, with the dtypes that an update leaves: moments of bfloat16 parameters have
    those of the gradients, for instance.

    `accumulate` is the least dtype of gradients; None: they have the parameters' own.
    """

    def gradient(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype if accumulate is None else wider(leaf.dtype, accumulate)
        )

    def init(params: PyTree) -> PyTree:
        state = optimizer.init(params)
        try:
            after = jax.eval_shape(optimizer.update, jax.tree.map(gradient, params), state, params)[
                1
            ]
        except TypeError:  # it wants more than gradients (the loss, for instance)
            return state
        found: Any = jax.tree.structure(after)
        if found != jax.tree.structure(state):
            return state
        return jax.tree.map(
            lambda leaf, new: leaf if leaf.dtype == new.dtype else leaf.astype(new.dtype),
            state,
            after,
        )

    return init
