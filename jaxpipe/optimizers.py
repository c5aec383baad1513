"""Optimizers on placed parameters: state on the devices of its parameters, and rules that act on
a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .arrays import ByPart, Params, PyTree, by_path, followed, shapes_of
from .errors import PipelineError
from .jaxprs.dataflow import inputs_of
from .model.layers import OUTER
from .model.settings import on_mesh
from .pipeline import Pipeline
from .storage.chunks import Chunks
from .storage.follow import Followers
from .storage.packed import Packed, masked, on_own_stages
from .storage.padding import Padding, by_parameter
from .storage.rules import PROBE, Optimizer, init_as_updated, rules_of
from .storage.table import BufferKey, ChunkLayout, Group, Parameter, chunk_layouts


class PerLayer(NamedTuple):
    """An optimizer by optax's protocol."""

    init: Callable[[Params], ByPart]
    update: Callable[..., tuple[Params, ByPart]]


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
    rule = _PerLayer(pipe, optimizer, pipe.layout.stacks if layer_axis is None else layer_axis)
    return PerLayer(rule.init, rule.update)


@dataclass(frozen=True)
class _PerLayer:
    """The rule of `per_layer`."""

    pipe: Pipeline
    optimizer: Optimizer
    layer_axis: bool

    def init(self, params: Params) -> ByPart:
        if PROBE in params:
            return {}
        layout = self.pipe.layout
        if layout.unlike and not layout.is_layered:
            self._check_stages(params["stages"])
        if self.layer_axis and not layout.unlike:
            head = "layer_axis=True wants leaves of stages [S, layers, ...]"
            PipelineError.refuse(
                head, [f for chunk in params["stages"] for f in _layer_faults(chunk)]
            )

        def of_chunk(v: int, chunk: PyTree) -> PyTree:
            if isinstance(chunk, Packed):
                state = self._state_layout(v, chunk)
                return self._on_devices(lambda _, own: (self._begin(own),), [chunk], [state])[0]
            return (jax.vmap(self._begin)(chunk),) if jax.tree.leaves(chunk) else ()

        stages = params["stages"]
        padding = stages.layout.padding
        own = by_parameter(Padding.cut_off, params, padding)
        found = {key: (self._init({key: own[key]}),) for key in OUTER if key in own}
        found["stages"] = stages.like(map(of_chunk, range(len(stages)), stages))
        return by_parameter(Padding.pad, found, padding)

    def update(
        self, grads: Params, state: ByPart, params: Params | None = None, **extra: object
    ) -> tuple[Params, ByPart]:
        if PROBE in grads:
            return dict(grads), state

        to = tuple(map(Followers(grads, self.pipe.partition).shardings, (grads, state)))
        run = on_mesh(self.pipe.mesh, partial(self._updated, to[1]), to)
        return run(grads, state, params, extra)

    def _updated(
        self,
        to: ByPart,
        grads: Params,
        state: ByPart,
        params: Params | None,
        extra: dict[str, object],
    ) -> tuple[Params, ByPart]:
        padding = grads["stages"].layout.padding
        cut = partial(by_parameter, Padding.cut_off, padding=padding)
        grads, state, params = cut(grads), cut(state), params and cut(params)
        updates: Params = {}
        after: ByPart = {}
        for key in filter(grads.__contains__, OUTER):
            weights = params and {key: params[key]}
            changes, own = self._update(extra, {key: grads[key]}, state[key][0], weights)
            updates[key], after[key] = changes[key], (own,)
        stages = grads["stages"]
        values = params["stages"] if params else [None] * len(stages)
        chunks = zip(range(len(stages)), stages, state["stages"], values, strict=True)
        found = zip(*(self._update_chunk(extra, *chunk) for chunk in chunks), strict=True)
        updates["stages"], after["stages"] = map(stages.like, found)
        pad = partial(by_parameter, Padding.pad, padding=padding)
        # left to itself XLA brings constants in the state to every device
        return pad(updates), jax.lax.with_sharding_constraint(pad(after), to)

    def _update_chunk(
        self, extra: dict[str, object], v: int, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The updates of a chunk, and its state after it."""
        if isinstance(grads, Packed):
            given = [grads, state, *([] if params is None else [params])]
            updates, after = self._on_devices(
                self._update_stage, given, [grads.layout, state.layout], extra
            )
            return updates, after
        if not jax.tree.leaves(grads):
            return grads, state
        update = jax.vmap(partial(self._update_stage, extra))
        updates, after = update(grads, state[0], params)
        # What a device does not have stays zero, whatever a rule makes of zeros.
        there = [stage >= 0 for stage in self.pipe.layout.stage_at(v)]
        return jax.tree.map(lambda leaf: masked(leaf, there), updates), (after,)

    def _on_devices(self, *arguments: Any) -> list[Packed]:
        return on_own_stages(self.pipe.mesh, self.pipe.axis, *arguments)

    # Of one stage

    def _begin(self, stage: PyTree) -> PyTree:
        """The state of a stage: of its tree, or of each of its stacks, {letter: (state, ...)}."""
        if not self.pipe.layout.is_layered:
            init = jax.vmap(self._init) if self.layer_axis else self._init
            return init({"stages": stage}) if jax.tree.leaves(stage) else {}
        return {
            letter: tuple(jax.vmap(self._init)({"stages": {letter: own}}) for own in stacks)
            for letter, stacks in (stage or {}).items()
            if jax.tree.leaves(stacks)
        }

    def _update_stage(
        self, extra: dict[str, object], grads: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """The updates of a stage, and its state after them."""
        update = partial(self._update, extra)
        if not self.pipe.layout.is_layered:
            if not jax.tree.leaves(grads):
                return grads, state
            weights = None if params is None else {"stages": params}
            update = jax.vmap(update) if self.layer_axis else update
            changes, after = update({"stages": grads}, state, weights)
            return changes["stages"], after
        updates, states = dict(grads or {}), dict[str, PyTree]()
        for letter, before in state.items():
            stacks = [
                [
                    None if tree is None else {"stages": {letter: tree[letter][n]}}
                    for n in range(len(before))
                ]
                for tree in (grads, params)
            ]
            found = map(jax.vmap(update), stacks[0], before, stacks[1])
            each, states[letter] = zip(*found, strict=True)
            updates[letter] = tuple(change["stages"][letter] for change in each)
        return (updates if grads else grads), states

    @cached_property
    def _init(self) -> Callable[[Params], PyTree]:
        """The state of a rule, with the dtypes that updates give it."""
        return init_as_updated(self.optimizer, self.pipe.memory.accumulate)

    def _update(
        self, extra: dict[str, object], grads: Params, state: PyTree, params: Params | None
    ) -> tuple[Params, PyTree]:
        """One layer's update; PipelineError where the update of a parameter depends on others."""
        shapes = shapes_of((grads, state, params))
        _check_independent(lambda *trees: self.optimizer.update(*trees, **extra)[0], shapes)
        return self.optimizer.update(grads, state, params, **extra)

    def _state_layout(self, v: int, chunk: Packed) -> ChunkLayout:
        """The layout of the states of a chunk of unlike stages, with room for those of the device
        that has most.
        """
        layered, numbers = self.pipe.layout.is_layered, self.pipe.layout.stage_at(v)
        partition, forms = self.pipe.partition, chunk.layout.forms
        trees = jax.eval_shape(lambda chunk: [chunk.stage(d) for d in range(len(forms))], chunk)
        own = list(map(partial(jax.eval_shape, jax.jit(self._begin)), trees))

        def kept(state: Parameter, dtype: jax.typing.DTypeLike) -> BufferKey:
            """All of one dtype share a buffer, those that follow a parameter split as it is."""
            if jnp.issubdtype(dtype, jax.dtypes.extended):
                return BufferKey()
            device = int(state.path.split("/")[1])
            bare, own = (
                forms[device].parameters(stage, layered=layered)
                for stage in (None, numbers[device])
            )
            known = {name.path: (name.shape, each) for name, each in zip(bare, own, strict=True)}
            found = followed(state.path, state.shape[int(layered) :], known)
            parts = () if found is None else partition.kept(found[1], dtype).parts
            return BufferKey(Group.TRAINED, parts)

        return chunk_layouts([own], [range(len(own))], partition.storing(kept))[0]

    # Rules that cannot act on a layer

    def _check_stages(self, stages: Chunks) -> None:
        """PipelineError where a rule differs by the number of a stage in a list: the stages of a
        chunk go through it together.
        """
        trees = jax.eval_shape(self.pipe.layout.canonical_stages, stages)
        own = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[int(self.layer_axis) :], a.dtype), trees
        )
        rules = rules_of(self.optimizer, {"stages": own}, *({"stages": tree} for tree in own))
        if rules is None:
            return
        whole, *alone = rules
        faults = [
            f"{name!r}, which it gives as {path!r}"
            for number, of_stage in enumerate(alone)
            for path, rule in of_stage.items()
            if path != PROBE
            and whole[name := path.replace("stages", f"stages/{number}", 1)] != rule
        ]
        PipelineError.refuse(
            "per_layer gives a rule the tree of a stage, without its number in the list, since "
            "stages of several devices go through it "
            "together; this optimizer does something else by the whole path, so write its "
            "masks and labels for paths without numbers",
            faults,
        )


def _check_independent(
    update: Callable[..., Params], shapes: tuple[Params, PyTree, Params | None]
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


def _layer_faults(chunk: PyTree) -> list[str]:
    """Leaves that do not have as many layers as the others."""
    leaves = by_path(chunk)
    counts = {leaf.shape[1:2] for leaf in leaves.values()}
    if len(counts) <= 1 and () not in counts:
        return []
    return [f"{path} is [P, ...] of {leaf.shape}" for path, leaf in leaves.items()]
