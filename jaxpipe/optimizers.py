"""Optimizers on placed parameters: state on the devices of its parameters, and rules that act on
a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import PyTree, by_path, path_text, shapes_of
from .errors import PipelineError
from .model.mesh import explicit_context
from .model.own_rules import inputs_of, is_probed, rules_of
from .model.packed import Packed
from .model.param_layout import OUTER, Chunks
from .model.spread import cut_off, padded_like
from .model.stacks import Stack, StackedStages
from .pipeline import Pipeline


class Optimizer(Protocol):
    """What optax calls a GradientTransformation."""

    @property
    def init(self) -> Callable[..., Any]:
        """Parameters -> state."""

    @property
    def update(self) -> Callable[..., Any]:
        """Gradients, state, parameters -> updates, new state."""


class PerLayer(NamedTuple):
    """An optimizer by optax's protocol."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def per_layer(pipe: Pipeline, optimizer: Optimizer, *, layer_axis: bool | None = None) -> PerLayer:
    """The optimizer with one array for each layer, as in the model without a pipeline.

    Placed leaves are stacks [P, ...] of stages.  A rule that depends on the rank, shape or norm of
    an array would take a vector of scales for a matrix, and a norm over stages.  Under this wrapper
    Muon, Shampoo, LAMB, LARS, Adafactor, and decay masks by rank act as in a plain loop.

    A rule that spans all parameters, such as clipping by the global norm, goes outside of it:

        optimizer = optax.chain(optax.clip_by_global_norm(1.0), jp.per_layer(pipe,
        optax.lamb(1e-3)))

    Masks and labels are functions of the parameters: their argument is {"stages": one layer's
    tree}, or {"first": ...} and so on.  The state is laid out like parameters, one for each layer.
    `jaxpipe.checkpoint` converts it to other schedules.

    Args:
        pipe: the pipeline.
        optimizer: any optax transformation whose rule for an array needs that array alone.
        layer_axis: leaves of stages are [S, layers, ...]: a rule acts on each layer.  None is True
            for stages that `jaxpipe.flax` made, and else False.  Where the model has `layers=`, a
            rule always acts on each layer.

    Raises:
        PipelineError: the update of a parameter depends on the gradient of another; or the
            rule differs by the number of a stage in a list.
    """
    if pipe.sharding.local and pipe.layout.unlike:
        raise PipelineError(
            "per_layer takes arrays of unlike stages apart, and cannot where devices of a data "
            f"axis have their own parts (local={pipe.sharding.local}); give all stages the same "
            "layers, or use a rule that acts on each number alone, without per_layer"
        )
    layer_axis = pipe.layout.stacks if layer_axis is None else layer_axis
    stages = StackedStages(pipe.partition, layer_axis)
    rule = _PerLayer(pipe, optimizer, stages)
    return PerLayer(rule.init, rule.update)


class _Part(NamedTuple):
    """A part of the model whose rules run together: an outer key, or a chunk of stages."""

    key: str
    chunk: int
    tree: PyTree

    @classmethod
    def all(cls, params: Mapping[str, PyTree]) -> list[_Part]:
        """The parts of a tree like the placed parameters."""
        outer = [cls(key, 0, params[key]) for key in OUTER if key in params]
        return [*outer, *(cls("stages", v, chunk) for v, chunk in enumerate(params["stages"]))]

    @staticmethod
    def joined(parts: Sequence[_Part], trees: Sequence[PyTree], like: Chunks) -> dict[str, PyTree]:
        """The inverse, of other trees in the places of the parts."""
        outer = len(parts) - len(like)
        found = {part.key: tree for part, tree in zip(parts[:outer], trees, strict=False)}
        return {**found, "stages": like.like(trees[outer:])}


@dataclass(frozen=True)
class _PerLayer:
    pipe: Pipeline
    optimizer: Optimizer
    stages: StackedStages
    checked: set[Any] = field(default_factory=set)

    def init(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        if is_probed():
            return {}
        if self.pipe.layout.unlike and self.pipe.layout.layers is None:
            self._check_stages(params["stages"])

        def start(part: _Part) -> PyTree:
            stacks = self._stacks(part)
            states = {
                n: stack.apply(self.optimizer.init, stack.tree) for n, stack in stacks.items()
            }
            return self._kept(part, states)

        parts = _Part.all(params)
        return _Part.joined(parts, [start(part) for part in parts], params["stages"])

    def update(
        self,
        grads: Mapping[str, PyTree],
        state: Mapping[str, PyTree],
        params: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        if is_probed():
            return dict(grads), state

        def one(part: _Part, states: PyTree, weights: _Part | None) -> tuple[PyTree, PyTree]:
            stacks = self._stacks(part)
            before = self._taken(states, stacks)
            own = dict.fromkeys(stacks) if weights is None else self._stacks(weights)
            updates, after = {}, {}
            for name, stack in stacks.items():
                weight = own[name]
                updates[name], after[name] = stack.apply(
                    lambda g, s, p: self._update(g, s, p, extra),
                    stack.tree,
                    before[name],
                    None if weight is None else weight.tree,
                )
            kept = self._kept(part, after)
            if part.key != "stages":
                return padded_like(updates[""][part.key], part.tree), kept
            return self.stages.joined(part.tree, part.chunk, updates), self._spread(kept)

        parts, states = _Part.all(grads), _Part.all(state)
        weights = [None] * len(parts) if params is None else _Part.all(params)
        both = [
            one(part, own.tree, weight)
            for part, own, weight in zip(parts, states, weights, strict=True)
        ]
        updates, after = zip(*both, strict=True)
        like = grads["stages"]
        return _Part.joined(parts, updates, like), _Part.joined(parts, after, like)

    def _stacks(self, part: _Part) -> dict[str, Stack]:
        """What a rule acts on, by name."""
        if part.key == "stages":
            return self.stages.of(part.tree)
        return {"": Stack({part.key: cut_off(part.tree)}, 0)}

    def _kept(self, part: _Part, states: dict[str, PyTree]) -> PyTree:
        """The states of a part: each device's own, where the others are of other kinds; cut over
        the devices as the part is.
        """
        if isinstance(part.tree, Packed):
            return self.stages.pack_state(part.tree, part.chunk, states, self.optimizer.init)
        own = tuple(states.values())
        return own if part.key == "stages" else padded_like(own, {part.key: part.tree})

    def _taken(self, states: PyTree, stacks: Mapping[str, Stack]) -> dict[str, PyTree]:
        """The inverse."""
        if isinstance(states, Packed):
            return self.stages.unpack_state(states, stacks, self.optimizer.init)
        return dict(zip(stacks, cut_off(states), strict=True))

    def _spread(self, state: PyTree) -> PyTree:
        """The state of a chunk's stages stays with them; left to itself XLA brings constants in it
        to every device.
        """
        pipe, layout = self.pipe, state.layout if isinstance(state, Packed) else None
        if explicit_context(pipe.mesh):
            return state

        def constrain(path: Any, leaf: Any) -> Any:
            buffer = None if layout is None else layout.of(path_text(path))
            spec = PartitionSpec(pipe.axis, *(PartitionSpec.UNCONSTRAINED,) * (leaf.ndim - 1))
            spec = spec if buffer is None else pipe.partition.buffer_spec(buffer, leaf.shape)
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(pipe.mesh, spec))

        return jax.tree_util.tree_map_with_path(constrain, state)

    def _check_stages(self, stages: Chunks) -> None:
        """PipelineError where a rule differs by the number of a stage in a list: the stages of a
        chunk go through it together.
        """
        own = {"stages": jax.eval_shape(self.pipe.layout.canonical_stages, stages)}
        faults = []
        for chunk, numbers in stages.numbered():
            for name, stack in self.stages.of(chunk).items():
                shapes = [
                    jax.ShapeDtypeStruct(leaf.shape[stack.axes :], leaf.dtype)
                    for leaf in jax.tree.leaves(stack.tree)
                ]
                tree = jax.tree.unflatten(jax.tree.structure(stack.tree), shapes)
                rules = rules_of(self.optimizer, own, tree)
                if rules is None:
                    continue
                faults += [
                    f"{one.path!r}, which it gives as {path!r}"
                    for path, owns in self.stages.parameters(chunk, numbers, name).items()
                    for one in owns
                    if path in rules[1] and rules[0][one.path] != rules[1][path]
                ]
        PipelineError.refuse(
            "per_layer gives a rule the tree of a stage, without its number in the list, since "
            "stages of several devices go through it "
            "together; this optimizer does something else by the whole path, so write its "
            "masks and labels for paths without numbers",
            faults,
        )

    def _update(self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> Any:
        """One layer's update; PipelineError where the update of a parameter depends on others."""
        shapes = shapes_of((grads, state, params))
        key = (
            jax.tree.structure(shapes),
            tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)),
        )
        if key not in self.checked:
            _check_independent(lambda *given: self.optimizer.update(*given, **extra)[0], shapes)
            self.checked.add(key)
        return self.optimizer.update(grads, state, params, **extra)


def _check_independent(
    update: Callable[..., PyTree], shapes: tuple[PyTree, PyTree, PyTree]
) -> None:
    """PipelineError where the update of one array depends on the gradient of another: the rule
    spans more than a layer.
    """
    paths = list(by_path(shapes[0]))
    reads = inputs_of(jax.make_jaxpr(update)(*shapes))
    if len(reads) != len(paths):
        return  # updates that are left out, as of a mask
    for i, mine in enumerate(reads):
        others = [path for j, path in enumerate(paths) if mine >> j & 1 and j != i]
        if others:
            raise PipelineError(
                f"under per_layer the update of {paths[i]!r} depends on the gradient of "
                f"{others[0]!r}: a rule that spans parameters, as "
                "clipping by the global norm, goes outside, as in "
                "optax.chain(optax.clip_by_global_norm(1.0), jp.per_layer(pipe, ...))"
            )
