"""Optimizers on placed parameters: state that lies where it belongs, and rules that act on a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import PyTree
from .errors import PipelineError
from .jaxprs import drop_dead, flatten
from .model.apart import apart, together
from .model.by_path import is_renamed
from .model.forms import Sharing, TreeForm, unlike_paths
from .model.mesh import explicit_context
from .model.packed import Packed
from .model.packed_state import pack_state, state_sharing, unpack_state
from .model.param_layout import OUTER
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
    """The optimizer on the model's own view: each array that it sees is one layer's, as in the model without a pipeline.

    Placed leaves are stacks [P, ...] of stages, so a rule that looks at rank, shape or the norm of an array would take a vector of
    scales for a matrix, and a norm over stages.  Under this wrapper Muon, Shampoo, LAMB, LARS, Adafactor, and decay masks by rank do
    what they do in a plain loop.  What spans all parameters, as clipping by the global norm does, stands outside of it:

        optimizer = optax.chain(optax.clip_by_global_norm(1.0), jp.per_layer(pipe, optax.lamb(1e-3)))

    Masks and labels are functions of the parameters: they are given {"stages": one layer's tree}, or {"first": ...} and so on.
    The state is laid out like parameters, one for each layer, and `jaxpipe.checkpoint` brings it to other schedules.

    Args:
        pipe: the pipeline.
        optimizer: any optax transformation whose rule for an array needs that array alone.
        layer_axis: leaves of stages are [S, layers, ...]: a rule acts on each layer.  None is True for stages that `jaxpipe.flax` made,
            which are so, and else False; where the pipeline is given by `layers=`, a rule acts on each layer anyway.

    Raises:
        PipelineError: the update of a parameter depends on the gradient of another; or unlike stages have parameters of one path but of
            different shapes.
    """
    checked: set[Any] = set()
    layer_axis = pipe.layout.stacks if layer_axis is None else layer_axis

    def view(key: str, tree: PyTree) -> dict[str, _Stack]:
        return _stacks(pipe, tree, layer_axis=layer_axis) if key == "stages" else {"": _Stack({key: tree}, 0)}

    def kept(chunk: PyTree, states: dict[str, PyTree]) -> PyTree:
        """The states of a chunk: each device's own, where the others are of other kinds."""
        if not isinstance(chunk, Packed):
            return tuple(states.values())
        known = {form: _own_states(pipe, chunk, form, optimizer, layer_axis=layer_axis) for form in chunk.forms if form is not None}
        own = [None if form is None else known[form] for form in chunk.forms]
        found = pack_state(pipe.mesh, pipe.axis, states, own, _state_sharing(pipe, chunk))
        return tuple(states.values()) if found is None else found

    def taken(states: PyTree, stacks: Mapping[str, _Stack]) -> dict[str, PyTree]:
        """The inverse."""
        if not isinstance(states, Packed):
            return dict(zip(stacks, states, strict=True))
        likes = {name: jax.eval_shape(partial(stack.apply, optimizer.init), stack.tree) for name, stack in stacks.items()}
        return unpack_state(pipe.mesh, pipe.axis, states, likes)

    def init(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        if is_renamed(params["stages"]):
            return {}

        def start(key: str, tree: PyTree) -> PyTree:
            stacks = view(key, apart(pipe.mesh, pipe.axis, tree))
            return kept(tree, {name: stack.apply(optimizer.init, stack.tree) for name, stack in stacks.items()})

        found: dict[str, PyTree] = {key: start(key, params[key]) for key in OUTER if key in params}
        return {**found, "stages": params["stages"].map(lambda chunk: start("stages", chunk))}

    def update(grads: Mapping[str, PyTree], state: Mapping[str, PyTree], params: Any = None, **extra: Any) -> tuple[PyTree, PyTree]:
        if is_renamed(grads["stages"]):
            return dict(grads), state

        def one(key: str, chunk: PyTree, states: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
            like, chunk, own = chunk, apart(pipe.mesh, pipe.axis, chunk), apart(pipe.mesh, pipe.axis, own)
            stacks = view(key, chunk)
            weights = dict.fromkeys(stacks) if own is None else {name: stack.tree for name, stack in view(key, own).items()}
            before = taken(states, stacks)
            updates, after = {}, {}
            for name, stack in stacks.items():
                updates[name], after[name] = stack.apply(
                    lambda g, s, p: _update(optimizer, g, s, p, extra, checked), stack.tree, before[name], weights[name]
                )
            joined = _joined(key, chunk, updates, layered=pipe.layout.layers is not None)
            return together(pipe.mesh, pipe.axis, joined, like), kept(like, after)

        both = {key: one(key, grads[key], state[key], None if params is None else params[key]) for key in OUTER if key in grads}
        chunks = [
            one("stages", chunk, states, None if params is None else params["stages"][v])
            for v, (chunk, states) in enumerate(zip(grads["stages"], state["stages"], strict=True))
        ]
        like = grads["stages"].like
        updates = {key: found[0] for key, found in both.items()} | {"stages": like(_there(pipe, v, u) for v, (u, _) in enumerate(chunks))}
        return updates, {key: found[1] for key, found in both.items()} | {"stages": like(_spread(pipe, s) for _, s in chunks)}

    return PerLayer(init, update)


def _own_states(pipe: Pipeline, chunk: Packed, form: TreeForm, optimizer: Optimizer, *, layer_axis: bool) -> dict[str, PyTree]:
    """The states (shapes) of those layers that one device has, by stack."""
    lies = zip(form.paths, form.shapes, chunk.of_form(form), strict=True)
    own = {path: None if leaf is None else jax.ShapeDtypeStruct((1, *shape), leaf.dtype) for path, shape, leaf in lies}
    stacks = _stacks(pipe, Packed(own, (form,)), layer_axis=layer_axis)
    states = {name: jax.eval_shape(partial(stack.apply, optimizer.init), stack.tree) for name, stack in stacks.items()}
    found: dict[str, PyTree] = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states)
    return found


def _state_sharing(pipe: Pipeline, chunk: Packed) -> Sharing:
    """Which leaves of such states may lie in one buffer: what follows a parameter, as it is split."""
    layered = pipe.layout.layers is not None
    known = {path: shape for form in chunk.forms if form is not None for path, shape in zip(form.paths, form.shapes, strict=True)}
    ends = {path: (_group(path, layered=layered), "/".join(["", "stages", *_names(path, layered=layered)])) for path in known}

    def parameter_of(path: str, shape: tuple[int, ...]) -> str | None:
        below = {p: end for p, (group, end) in ends.items() if not group or path.startswith(f"{group}/")}
        return next((p for p, end in below.items() if f"/{path}".endswith(end) and known[p] == shape), None)

    return state_sharing(pipe.partition.sharing, parameter_of)


class _Stack(NamedTuple):
    """Trees stacked along `axes` leading axes: of devices, and of layers."""

    tree: PyTree
    axes: int

    def apply(self, function: Callable[..., Any], *arguments: PyTree) -> Any:
        """A function of one layer, on all of them."""
        for _ in range(self.axes):
            function = jax.vmap(function)
        return function(*arguments)


def _stacks(pipe: Pipeline, chunk: PyTree, *, layer_axis: bool) -> dict[str, _Stack]:
    """A chunk's leaves, those together that stack as many layers, by the name of the stack."""
    if not isinstance(chunk, Packed):
        faults = _layer_faults(chunk) if layer_axis else []
        if faults:
            raise PipelineError.listing("layer_axis=True wants leaves of stages [S, layers, ...]", faults)
        return {"": _Stack({"stages": chunk}, 2 if layer_axis else 1)}
    odd = sorted(unlike_paths([form for form in chunk.forms if form is not None]))
    if odd:
        raise PipelineError.listing(
            "per_layer wants one shape for the parameters of a path, but stages that share a chunk give them several; rename them",
            odd,
        )
    layered = pipe.layout.layers is not None
    groups: dict[str, dict[str, Any]] = {}
    for path, leaf in chunk.leaves.items():
        groups.setdefault(_group(path, layered=layered), {})[path] = leaf
    axes = 2 if layered or layer_axis else 1
    return {name: _Stack({"stages": _nested(groups[name], layered=layered)}, axes) for name in sorted(groups)}


def _layer_faults(chunk: PyTree) -> list[str]:
    """Leaves that do not have as many layers as the others."""
    leaves = jax.tree_util.tree_leaves_with_path(chunk)
    counts = {np.shape(leaf)[1:2] for _, leaf in leaves}
    if len(counts) <= 1 and () not in counts:
        return []
    return [f"{jax.tree_util.keystr(path, simple=True, separator='/')} is [P, ...] of {np.shape(leaf)}" for path, leaf in leaves]


def _group(path: str, *, layered: bool) -> str:
    """Leaves of one group stack as many layers: those of a letter's stack, "t/0"."""
    return "/".join(path.split("/")[:2]) if layered else ""


def _names(path: str, *, layered: bool) -> list[str]:
    """Where a leaf stands in its layer: under its letter, without the number of the stack."""
    names = path.split("/")
    return [names[0], *names[2:]] if layered else names


def _nested(leaves: Mapping[str, Any], *, layered: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *names, last = _names(path, layered=layered)
        node = found
        for name in names:
            node = node.setdefault(name, {})
        node[last] = leaf
    return found


def _joined(key: str, like: PyTree, updates: Mapping[str, PyTree], *, layered: bool) -> PyTree:
    """The inverse of `_stacks`."""
    if not isinstance(like, Packed):
        return updates[""][key]

    def leaf(path: str) -> Any:
        node = updates[_group(path, layered=layered)][key]
        for name in _names(path, layered=layered):
            node = node[name]
        return node

    return Packed({path: leaf(path) for path in like.leaves}, like.forms)


def _there(pipe: Pipeline, chunk: int, updates: PyTree) -> PyTree:
    """Updates of stages that a device does not have stay zero, whatever a rule makes of zeros."""

    def masked(leaf: Any, there: list[bool]) -> Any:
        if all(there):
            return leaf
        return jnp.where(np.array(there).reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))

    if isinstance(updates, Packed):
        inside = frozenset(buffer.name for buffer in updates.buffers)  # which hold a device's own and zeros
        have = [inside if form is None else inside.union(form.paths) for form in updates.forms]
        leaves = {path: masked(leaf, [path in paths for paths in have]) for path, leaf in updates.leaves.items()}
        return Packed(leaves, updates.forms, updates.buffers)
    return jax.tree.map(lambda leaf: masked(leaf, [stage >= 0 for stage in pipe.layout.stage_at(chunk)]), updates)


def _spread(pipe: Pipeline, state: PyTree) -> PyTree:
    """The state of a chunk's stages stays with them; left to itself XLA brings constants in it to every device."""
    if explicit_context(pipe.mesh):
        return state
    buffers = {buffer.name: buffer for buffer in state.buffers} if isinstance(state, Packed) else {}

    def constrain(path: Any, leaf: Any) -> Any:
        buffer = buffers.get(jax.tree_util.keystr(path, simple=True))
        spec = PartitionSpec(pipe.axis, *(PartitionSpec.UNCONSTRAINED,) * (leaf.ndim - 1))
        spec = spec if buffer is None else pipe.partition.buffer_spec(buffer, leaf.shape)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(pipe.mesh, spec))

    return jax.tree_util.tree_map_with_path(constrain, state)


def _update(optimizer: Optimizer, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any], checked: set[Any]) -> Any:
    """One layer's update; PipelineError where parameters do not go apart."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (grads, state, params))
    key = (jax.tree.structure(shapes), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)))
    if key not in checked:
        _check_apart(lambda *given: optimizer.update(*given, **extra)[0], shapes)
        checked.add(key)
    return optimizer.update(grads, state, params, **extra)


def _check_apart(update: Callable[..., PyTree], shapes: tuple[PyTree, PyTree, PyTree]) -> None:
    """PipelineError where the update of one array depends on the gradient of another: the rule spans more than a layer."""
    flat = flatten(jax.make_jaxpr(update)(*shapes)).jaxpr
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(shapes[0])]
    if len(flat.outvars) != len(paths):
        return  # updates that are left out, as of a mask
    start = len(flat.constvars)
    jaxpr = flat.replace(constvars=[], invars=[*flat.constvars, *flat.invars])
    for i, out in enumerate(jaxpr.outvars):
        reads = drop_dead(jaxpr.replace(outvars=[out]))[1][start : start + len(paths)]
        others = [path for j, path in enumerate(paths) if reads[j] and j != i]
        if others:
            raise PipelineError(
                f"under per_layer the update of {paths[i]!r} depends on the gradient of {others[0]!r}: a rule that spans parameters, as "
                "clipping by the global norm, stands outside, as in optax.chain(optax.clip_by_global_norm(1.0), jp.per_layer(pipe, ...))"
            )
