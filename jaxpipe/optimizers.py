"""Optimizers on placed parameters: state that lies where it belongs, and rules that act on a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import PyTree
from .errors import PipelineError
from .jaxprs import drop_dead, flatten
from .model.apart import apart, together
from .model.forms import unlike_paths
from .model.mesh import explicit_context
from .model.packed import Packed
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


def per_layer(pipe: Pipeline, optimizer: Optimizer, *, layer_axis: bool = False) -> PerLayer:
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
        layer_axis: leaves of stages are [S, layers, ...], as `jaxpipe.flax` makes them: a rule acts on each layer.  Where the
            pipeline is given by `layers=`, it does so anyway.

    Raises:
        PipelineError: the update of a parameter depends on the gradient of another; or unlike stages have parameters of one path but of
            different shapes.
    """
    checked: set[Any] = set()

    def view(key: str, tree: PyTree) -> list[_Stack]:
        return _stacks(pipe, tree, layer_axis=layer_axis) if key == "stages" else [_Stack({key: tree}, 0)]

    def init(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        def start(key: str, tree: PyTree) -> tuple[PyTree, ...]:
            return tuple(stack.apply(optimizer.init, stack.tree) for stack in view(key, apart(pipe.mesh, pipe.axis, tree)))

        found: dict[str, PyTree] = {key: start(key, params[key]) for key in OUTER if key in params}
        return {**found, "stages": params["stages"].map(lambda chunk: start("stages", chunk))}

    def update(grads: Mapping[str, PyTree], state: Mapping[str, PyTree], params: Any = None, **extra: Any) -> tuple[PyTree, PyTree]:
        def one(key: str, chunk: PyTree, states: PyTree, own: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
            like, chunk, own = chunk, apart(pipe.mesh, pipe.axis, chunk), apart(pipe.mesh, pipe.axis, own)
            stacks = view(key, chunk)
            weights = [None] * len(stacks) if own is None else [stack.tree for stack in view(key, own)]
            updates, after = [], []
            for stack, before, weight in zip(stacks, states, weights, strict=True):
                found, new = stack.apply(lambda g, s, p: _update(optimizer, g, s, p, extra, checked), stack.tree, before, weight)
                updates.append(found)
                after.append(new)
            return together(pipe.mesh, pipe.axis, _joined(key, chunk, updates, layered=pipe.layout.layers is not None), like), tuple(after)

        both = {key: one(key, grads[key], state[key], None if params is None else params[key]) for key in OUTER if key in grads}
        chunks = [
            one("stages", chunk, states, None if params is None else params["stages"][v])
            for v, (chunk, states) in enumerate(zip(grads["stages"], state["stages"], strict=True))
        ]
        like = grads["stages"].like
        updates = {key: found[0] for key, found in both.items()} | {"stages": like(_there(pipe, v, u) for v, (u, _) in enumerate(chunks))}
        return updates, {key: found[1] for key, found in both.items()} | {"stages": like(_spread(pipe, s) for _, s in chunks)}

    return PerLayer(init, update)


class _Stack(NamedTuple):
    """Trees stacked along `axes` leading axes: of devices, and of layers."""

    tree: PyTree
    axes: int

    def apply(self, function: Callable[..., Any], *arguments: PyTree) -> Any:
        """A function of one layer, on all of them."""
        for _ in range(self.axes):
            function = jax.vmap(function)
        return function(*arguments)


def _stacks(pipe: Pipeline, chunk: PyTree, *, layer_axis: bool) -> list[_Stack]:
    """A chunk's leaves, those together that stack as many layers."""
    if not isinstance(chunk, Packed):
        faults = _layer_faults(chunk) if layer_axis else []
        if faults:
            raise PipelineError.listing("layer_axis=True wants leaves of stages [S, layers, ...]", faults)
        return [_Stack({"stages": chunk}, 2 if layer_axis else 1)]
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
    return [_Stack({"stages": _nested(groups[name], layered=layered)}, 2 if layered or layer_axis else 1) for name in sorted(groups)]


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


def _joined(key: str, like: PyTree, updates: list[PyTree], *, layered: bool) -> PyTree:
    """The inverse of `_stacks`."""
    if not isinstance(like, Packed):
        return updates[0][key]
    groups = dict(zip(sorted({_group(path, layered=layered) for path in like.leaves}), updates, strict=True))

    def leaf(path: str) -> Any:
        node = groups[_group(path, layered=layered)][key]
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

    def constrain(leaf: Any) -> Any:
        spec = PartitionSpec(pipe.axis, *(PartitionSpec.UNCONSTRAINED,) * (leaf.ndim - 1))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(pipe.mesh, spec))

    return jax.tree.map(constrain, state)


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
