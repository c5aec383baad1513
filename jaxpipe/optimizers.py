"""Optimizers on placed parameters: state that lies where it belongs, and rules that act on a layer
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import PyTree
from .errors import PipelineError
from .model.mesh import explicit_context
from .model.own_rules import inputs_of, is_probed, rules_of
from .model.packed import ChunkLayout, Packed, Parameter, TreeForm, repacked
from .model.packed_state import pack_state, state_sharing, unpack_state
from .model.param_layout import OUTER
from .model.placed import Chunks
from .model.sharing import Sharing, by_name
from .model.specs import path_text
from .model.spread import cut_off, padded_like
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
    """The optimizer on the model's own view: each array that it sees is one layer's, as in the
    model without a pipeline.

    Placed leaves are stacks [P, ...] of stages, so a rule that looks at rank, shape or the norm of
    an array would take a vector of scales for a matrix, and a norm over stages.  Under this wrapper
    Muon, Shampoo, LAMB, LARS, Adafactor, and decay masks by rank do what they do in a plain loop.
    What spans all parameters, as clipping by the global norm does, stands outside of it:

        optimizer = optax.chain(optax.clip_by_global_norm(1.0), jp.per_layer(pipe,
        optax.lamb(1e-3)))

    Masks and labels are functions of the parameters: they are given {"stages": one layer's tree},
    or {"first": ...} and so on. The state is laid out like parameters, one for each layer, and
    `jaxpipe.checkpoint` brings it to other schedules.

    Args:
        pipe: the pipeline.
        optimizer: any optax transformation whose rule for an array needs that array alone.
        layer_axis: leaves of stages are [S, layers, ...]: a rule acts on each layer.  None is True
            for stages that `jaxpipe.flax` made, which are so, and else False; where the pipeline is
            given by `layers=`, a rule acts on each layer anyway.

    Raises:
        PipelineError: the update of a parameter depends on the gradient of another; or the rule
            tells stages of a list apart by number.
    """
    checked: set[Any] = set()
    layer_axis = pipe.layout.stacks if layer_axis is None else layer_axis

    def view(key: str, tree: PyTree) -> dict[str, _Stack]:
        return (
            _stacks(pipe, tree, layer_axis=layer_axis)
            if key == "stages"
            else {"": _Stack({key: cut_off(tree)}, 0)}
        )

    def kept(key: str, v: int, tree: PyTree, states: dict[str, PyTree]) -> PyTree:
        """The states of a tree, of chunk `v`: each device's own, where the others are of other
        kinds; cut over the devices as it is.
        """
        if not isinstance(tree, Packed):
            return (
                tuple(states.values())
                if key == "stages"
                else padded_like(tuple(states.values()), {key: tree})
            )
        known = {
            form: _own_states(pipe, tree, form, optimizer, layer_axis=layer_axis)
            for form in tree.layout.forms
            if form is not None
        }
        own = [None if form is None else known[form] for form in tree.layout.forms]
        found = pack_state(pipe.mesh, pipe.axis, states, own, _state_sharing(pipe, tree, v))
        return tuple(states.values()) if found is None else found

    def taken(states: PyTree, stacks: Mapping[str, _Stack]) -> dict[str, PyTree]:
        """The inverse."""
        if not isinstance(states, Packed):
            return dict(zip(stacks, cut_off(states), strict=True))
        likes = {
            name: jax.eval_shape(partial(stack.apply, optimizer.init), stack.tree)
            for name, stack in stacks.items()
        }
        return unpack_state(pipe.mesh, pipe.axis, states, likes)

    def init(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        if is_probed():
            return {}
        if pipe.layout.unlike and pipe.layout.layers is None:
            _check_stages(
                pipe,
                optimizer,
                params["stages"],
                lambda chunk: view("stages", _separate(pipe, chunk)),
            )

        def start(key: str, tree: PyTree, v: int = 0) -> PyTree:
            stacks = view(key, _separate(pipe, tree))
            return kept(
                key,
                v,
                tree,
                {name: stack.apply(optimizer.init, stack.tree) for name, stack in stacks.items()},
            )

        found: dict[str, PyTree] = {key: start(key, params[key]) for key in OUTER if key in params}
        stages = params["stages"]
        return {
            **found,
            "stages": stages.like(start("stages", chunk, v) for v, chunk in enumerate(stages)),
        }

    def update(
        grads: Mapping[str, PyTree], state: Mapping[str, PyTree], params: Any = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if is_probed():
            return dict(grads), state

        def one(
            key: str, chunk: PyTree, states: PyTree, own: PyTree, v: int = 0
        ) -> tuple[PyTree, PyTree]:
            like, chunk, own = chunk, _separate(pipe, chunk), _separate(pipe, own)
            stacks = view(key, chunk)
            weights = (
                dict.fromkeys(stacks)
                if own is None
                else {name: stack.tree for name, stack in view(key, own).items()}
            )
            before = taken(states, stacks)
            updates, after = {}, {}
            for name, stack in stacks.items():
                updates[name], after[name] = stack.apply(
                    lambda g, s, p: _update(optimizer, g, s, p, extra, checked),
                    stack.tree,
                    before[name],
                    weights[name],
                )
            joined = _joined(key, chunk, updates, layered=pipe.layout.layers is not None)
            layout = like.layout if isinstance(like, Packed) else None
            return repacked(pipe.mesh, pipe.axis, joined, layout), kept(key, v, like, after)

        both = {
            key: one(key, grads[key], state[key], None if params is None else params[key])
            for key in OUTER
            if key in grads
        }
        chunks = [
            one("stages", chunk, states, None if params is None else params["stages"][v], v)
            for v, (chunk, states) in enumerate(zip(grads["stages"], state["stages"], strict=True))
        ]
        like = grads["stages"].like
        updates = {key: padded_like(found[0], grads[key]) for key, found in both.items()}
        updates |= {"stages": like(_there(pipe, v, u) for v, (u, _) in enumerate(chunks))}
        return updates, {key: found[1] for key, found in both.items()} | {
            "stages": like(_spread(pipe, s) for _, s in chunks)
        }

    return PerLayer(init, update)


def _separate(pipe: Pipeline, chunk: PyTree) -> PyTree:
    """The chunk with an array for each parameter."""
    layout = chunk.layout.separate if isinstance(chunk, Packed) else None
    return repacked(pipe.mesh, pipe.axis, chunk, layout)


def _check_stages(
    pipe: Pipeline,
    optimizer: Optimizer,
    stages: Chunks,
    stacks_of: Callable[[PyTree], Mapping[str, _Stack]],
) -> None:
    """PipelineError where a rule tells the stages of a list apart by their numbers: those of a
    chunk go through it together.
    """
    own = {"stages": jax.eval_shape(pipe.layout.canonical_stages, stages)}
    faults = []
    for v, chunk in enumerate(stages):
        seats = _seats(chunk.layout.forms, layered=False)
        for name, stack in stacks_of(chunk).items():
            tree = jax.tree.map(
                lambda leaf, axes=stack.axes: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype),
                stack.tree,
            )
            rules = rules_of(optimizer, own, tree)
            for leaf, owns in by_name(
                chunk.layout.forms, pipe.layout.stage_at(v), layered=False
            ).items():
                path = "/".join(seats[leaf].names)
                if rules is None or seats[leaf].stack != name or path not in rules[1]:
                    continue
                faults += [
                    f"{one.path!r}, which it gives as {path!r}"
                    for one, _ in owns
                    if rules[0][one.path] != rules[1][path]
                ]
    if faults:
        raise PipelineError.listing(
            "per_layer gives a rule the tree of a stage, without its number in the list, since "
            "stages of several devices go through it "
            "together; this optimizer does something else by the whole path, so write its masks "
            "and labels for paths without numbers",
            faults,
        )


def _own_states(
    pipe: Pipeline, chunk: Packed, form: TreeForm, optimizer: Optimizer, *, layer_axis: bool
) -> dict[str, PyTree]:
    """The states (shapes) of those layers that one device has, by stack."""
    layout = ChunkLayout(chunk.layout.forms)
    arrays = [chunk.leaves[name] for name in chunk.layout.names]
    own: dict[str, Any] = dict.fromkeys(layout.names)
    for name, place in zip(form.paths, chunk.layout.places(form), strict=True):
        if (leaf := arrays[place.at]) is not None:
            own[name] = jax.ShapeDtypeStruct((1, *place.shape), leaf.dtype)
    stacks = _stacks(pipe, Packed(own, layout), layer_axis=layer_axis)
    states = {
        name: jax.eval_shape(partial(stack.apply, optimizer.init), stack.tree)
        for name, stack in stacks.items()
    }
    found: dict[str, PyTree] = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states
    )
    return found


def _state_sharing(pipe: Pipeline, chunk: Packed, v: int) -> Sharing:
    """Which leaves of such states of chunk `v` may lie in one buffer: what follows a parameter, as
    it is split.
    """
    layered = pipe.layout.layers is not None
    known = {
        name: owns[0]
        for name, owns in by_name(
            chunk.layout.forms, pipe.layout.stage_at(v), layered=layered
        ).items()
    }
    seats = _seats(chunk.layout.forms, layered=layered)

    def parameter_of(path: str, shape: tuple[int, ...]) -> Parameter | None:
        below = [
            name
            for name, seat in seats.items()
            if not seat.stack or path.startswith(f"{seat.stack}/")
        ]
        return next(
            (
                known[name][0]
                for name in below
                if f"/{path}".endswith(seats[name].end) and known[name][1] == shape
            ),
            None,
        )

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
    """A chunk's leaves, those together that stack as many layers, by the name of the stack; none
    where nothing is trained.
    """
    layered = pipe.layout.layers is not None
    axes = 2 if layered or layer_axis else 1
    if not isinstance(chunk, Packed):
        faults = _layer_faults(chunk) if layer_axis else []
        if faults:
            raise PipelineError.listing(
                "layer_axis=True wants leaves of stages [S, layers, ...]", faults
            )
        return {"": _Stack({"stages": chunk}, axes)} if jax.tree.leaves(chunk) else {}
    found: dict[str, dict[str, Any]] = {}
    for leaf, (stack, names) in _seats(chunk.layout.forms, layered=layered).items():
        *above, last = names
        node = found.setdefault(stack, {})
        for name in above:
            node = node.setdefault(name, {})
        node[last] = chunk.leaves[leaf]
    return {
        name: _Stack(found[name], axes) for name in sorted(found) if jax.tree.leaves(found[name])
    }


def _layer_faults(chunk: PyTree) -> list[str]:
    """Leaves that do not have as many layers as the others."""
    leaves = jax.tree_util.tree_leaves_with_path(chunk)
    counts = {np.shape(leaf)[1:2] for _, leaf in leaves}
    if len(counts) <= 1 and () not in counts:
        return []
    return [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} is [P, ...] of {np.shape(leaf)}"
        for path, leaf in leaves
    ]


class _Seat(NamedTuple):
    """Where a leaf of a chunk stands for a rule: in which stack, and where in {"stages": one
    layer's tree}.
    """

    stack: str
    names: tuple[str, ...]

    @property
    def end(self) -> str:
        """How the paths of what follows it end."""
        return "/".join(["", *self.names])


def _seats(forms: Sequence[TreeForm | None], *, layered: bool) -> dict[str, _Seat]:
    """The seat of each leaf, by name.

    Leaves of one stack have as many layers: those of a letter's stack, "t/0".  Those of one path
    that have names of their own, as some of them are frozen or of another shape, stand in stacks
    "1", "2".
    """
    paths = {
        name: path
        for form in forms
        if form is not None
        for name, path in zip(form.paths, form.tree_paths, strict=True)
    }
    split = {name: [part for part in path.split("/") if part] for name, path in paths.items()}
    if layered:
        return {
            name: _Seat("/".join(parts[:2]), ("stages", parts[0], *parts[2:]))
            for name, parts in split.items()
        }
    same: dict[str, list[str]] = {}
    for name in sorted(paths):
        same.setdefault(paths[name], []).append(name)
    one = len(same) == len(paths)
    return {
        name: _Seat("" if one else str(same[path].index(name) + 1), ("stages", *split[name]))
        for name, path in paths.items()
    }


def _joined(key: str, like: PyTree, updates: Mapping[str, PyTree], *, layered: bool) -> PyTree:
    """The inverse of `_stacks`."""
    if not isinstance(like, Packed):
        return updates[""][key] if updates else like

    def leaf(seat: _Seat) -> Any:
        node = updates.get(seat.stack, {})
        for name in seat.names:
            node = None if not node else node[name]
        return node

    return Packed(
        {name: leaf(seat) for name, seat in _seats(like.layout.forms, layered=layered).items()},
        like.layout,
    )


def _there(pipe: Pipeline, chunk: int, updates: PyTree) -> PyTree:
    """Updates of stages that a device does not have stay zero, whatever a rule makes of zeros."""

    def masked(leaf: Any, there: list[bool]) -> Any:
        if leaf is None or all(there):
            return leaf
        return jnp.where(
            np.array(there).reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf)
        )

    if isinstance(updates, Packed):
        # which hold a device's own and zeros
        layout = updates.layout
        inside = frozenset(buffer.name for buffer in layout.buffers)
        have = [inside if form is None else inside.union(form.paths) for form in layout.forms]
        leaves = {
            path: masked(leaf, [path in paths for paths in have])
            for path, leaf in updates.leaves.items()
        }
        return Packed(leaves, layout)
    return jax.tree.map(
        lambda leaf: masked(leaf, [stage >= 0 for stage in pipe.layout.stage_at(chunk)]), updates
    )


def _spread(pipe: Pipeline, state: PyTree) -> PyTree:
    """The state of a chunk's stages stays with them; left to itself XLA brings constants in it to
    every device.
    """
    if explicit_context(pipe.mesh):
        return state
    layout = state.layout if isinstance(state, Packed) else None

    def constrain(path: Any, leaf: Any) -> Any:
        buffer = None if layout is None else layout.of(path_text(path))
        spec = PartitionSpec(pipe.axis, *(PartitionSpec.UNCONSTRAINED,) * (leaf.ndim - 1))
        spec = spec if buffer is None else pipe.partition.buffer_spec(buffer, leaf.shape)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(pipe.mesh, spec))

    return jax.tree_util.tree_map_with_path(constrain, state)


def _update(
    optimizer: Optimizer,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    extra: dict[str, Any],
    checked: set[Any],
) -> Any:
    """One layer's update; PipelineError where parameters do not go apart."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (grads, state, params))
    key = (
        jax.tree.structure(shapes),
        tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)),
    )
    if key not in checked:
        _check_apart(lambda *given: optimizer.update(*given, **extra)[0], shapes)
        checked.add(key)
    return optimizer.update(grads, state, params, **extra)


def _check_apart(update: Callable[..., PyTree], shapes: tuple[PyTree, PyTree, PyTree]) -> None:
    """PipelineError where the update of one array depends on the gradient of another: the rule
    spans more than a layer.
    """
    paths = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes[0])]
    reads = inputs_of(jax.make_jaxpr(update)(*shapes))
    if len(reads) != len(paths):
        return  # updates that are left out, as of a mask
    for i, mine in enumerate(reads):
        others = [path for j, path in enumerate(paths) if mine >> j & 1 and j != i]
        if others:
            raise PipelineError(
                f"under per_layer the update of {paths[i]!r} depends on the gradient of "
                f"{others[0]!r}: a rule that spans parameters, as "
                "clipping by the global norm, stands outside, as in "
                "optax.chain(optax.clip_by_global_norm(1.0), jp.per_layer(pipe, ...))"
            )
