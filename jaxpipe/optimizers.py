"""Optimizers on placed parameters: state on the devices of its parameters, and rules that act on
a layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .arrays import PyTree, by_path, followed, shapes_of
from .errors import PipelineError
from .model.arguments import PROBE, init_as_updated, inputs_of, rules_of
from .model.calls import cut_off, padded_like
from .model.packed import (
    ChunkLayout,
    Group,
    InBuffer,
    Packed,
    Parameter,
    Storing,
    TreeForm,
    chunk_layout,
    is_missing,
    masked,
    repacked,
)
from .model.param_layout import OUTER, Chunks
from .model.placer import Followers
from .model.settings import on_mesh
from .pipeline import Pipeline


class PerLayer(NamedTuple):
    """An optimizer by optax's protocol."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def per_layer(pipe: Pipeline, optimizer: Any, *, layer_axis: bool | None = None) -> PerLayer:
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


class _Stack(NamedTuple):
    """Trees stacked along `axes` leading axes: of devices, and of layers."""

    tree: PyTree
    axes: int

    def apply(self, function: Callable[..., Any], *arguments: PyTree) -> Any:
        """A function of one layer, on all of them."""
        for _ in range(self.axes):
            function = jax.vmap(function)
        return function(*arguments)

    def state(self, init: Callable[[PyTree], PyTree]) -> PyTree:
        """The shapes of the states that `init` makes."""
        return jax.eval_shape(lambda tree: self.apply(init, tree), self.tree)


class _ModelPart(NamedTuple):
    """A part of the model whose rules run together: an outer key, or a chunk of stages.

    Unlike stages have an array [P, ...] for each leaf here; `home` is their placed layout.
    """

    key: str
    chunk: int
    tree: PyTree
    home: ChunkLayout | None


class _StackPlace(NamedTuple):
    """A leaf of the states of unlike stages: its stack, and its path in the state of a stage."""

    stack: str
    path: str


# By name of a leaf of unlike stages: its stack, and its path in {"stages": one layer's tree}.
_Seats: TypeAlias = "dict[str, tuple[str, str]]"


@dataclass(frozen=True)
class _PerLayer:
    """The rule of `per_layer`.

    A part of the model is one stack, of the name "", or several where stages are unlike.  Leaves of
    one stack have as many layers: those of a letter's stack, "t/0".  Those of one path that have
    names of their own, as some of them are frozen or of another shape, are in stacks "1", "2".
    """

    pipe: Pipeline
    optimizer: Any
    layer_axis: bool

    @cached_property
    def _init(self) -> Callable[[PyTree], PyTree]:
        """The state of a rule, with the dtypes that updates give it."""
        return init_as_updated(self.optimizer, self.pipe.memory.accumulate)

    def init(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        if PROBE in params:
            return {}
        parts = self._parts(params)
        if self.pipe.layout.unlike and not self.pipe.layout.is_layered:
            self._check_stages(params["stages"])
        found = []
        for part in parts:
            stacks = self._stacks(part).items()
            states = {name: one.apply(self._init, one.tree) for name, one in stacks}
            found.append(self._kept(part, states))
        return _joined(params, found)

    def update(
        self,
        grads: Mapping[str, PyTree],
        state: Mapping[str, PyTree],
        params: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        if PROBE in grads:
            return dict(grads), state

        to = tuple(map(Followers(grads, self.pipe.partition).shardings, (grads, state)))
        run = on_mesh(self.pipe.mesh, partial(self._updated, to[1]), to)
        updates: tuple[PyTree, PyTree] = run(grads, state, params, extra)
        return updates

    def _updated(
        self,
        to: PyTree,
        grads: Mapping[str, PyTree],
        state: Mapping[str, PyTree],
        params: Any,
        extra: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        parts = self._parts(grads)
        weights = parts if params is None else self._parts(params)
        update, updates, after = partial(self._update, extra), [], []
        for part, own, weight in zip(parts, _trees(state), weights, strict=True):
            stacks, of_weights = self._stacks(part), self._stacks(weight)
            before, changes, states = self._taken(part, own, stacks), {}, {}
            for name, stack in stacks.items():
                tree = None if params is None else of_weights[name].tree
                changes[name], states[name] = stack.apply(update, stack.tree, before[name], tree)
            updates.append(self._as_placed(part, changes))
            after.append(self._kept(part, states, own))
        # left to itself XLA brings constants in the state to every device
        kept = jax.lax.with_sharding_constraint(_joined(grads, after), to)
        return _joined(grads, updates), kept

    def _repacked(self, chunk: Packed, layout: ChunkLayout | None) -> PyTree:
        return repacked(self.pipe.mesh, self.pipe.axis, chunk, layout)

    def _parts(self, params: Mapping[str, PyTree]) -> list[_ModelPart]:
        """The parts of a tree like the placed parameters."""
        parts = [_ModelPart(key, 0, params[key], None) for key in OUTER if key in params]
        for v, chunk in enumerate(params["stages"]):
            home = chunk.layout if isinstance(chunk, Packed) else None
            tree = chunk if home is None else self._repacked(chunk, home.separate)
            parts.append(_ModelPart("stages", v, tree, home))
        return parts

    def _stacks(self, part: _ModelPart) -> dict[str, _Stack]:
        """The trees that a rule acts on, by name; none where nothing is trained."""
        if part.key != "stages":
            return {"": _Stack({part.key: cut_off(part.tree)}, 0)}
        if part.home is not None:
            return _by_stack(self._seats(part), part.tree.leaves, self._axes)
        if self.layer_axis:
            head = "layer_axis=True wants leaves of stages [S, layers, ...]"
            PipelineError.refuse(head, _layer_faults(part.tree))
        has_leaves = jax.tree.leaves(part.tree)
        return {"": _Stack({"stages": part.tree}, self._axes)} if has_leaves else {}

    @property
    def _axes(self) -> int:
        """The leading axes of leaves of stages: of devices and, where it is a rule's, of layers."""
        return 2 if self.pipe.layout.is_layered or self.layer_axis else 1

    def _as_placed(self, part: _ModelPart, updates: Mapping[str, PyTree]) -> PyTree:
        """The inverse, of updates by stack.

        Leaves that a device does not have are zero, whatever a rule made of zeros.
        """
        if part.key != "stages":
            return padded_like(updates[""][part.key], part.tree)
        if part.home is None:
            there = [stage >= 0 for stage in self.pipe.layout.stage_at(part.chunk)]
            own = updates[""]["stages"] if updates else part.tree
            return jax.tree.map(lambda leaf: masked(leaf, there), own)
        layout, leaves = part.tree.layout, dict[str, Any]()
        for name, (stack, path) in self._seats(part).items():
            there = [name in form.names for form in layout.forms]
            leaf = by_path(updates.get(stack)).get(path)
            leaves[name] = None if leaf is None else masked(leaf, there)
        return self._repacked(Packed(leaves, layout), part.home)

    def _seats(self, part: _ModelPart) -> _Seats:
        """The seats of the leaves of unlike stages."""
        paths = {
            name: path
            for form in part.tree.layout.forms
            for name, path in zip(form.names, form.paths, strict=True)
        }
        if self.pipe.layout.is_layered:
            split = {name: path.split("/") for name, path in paths.items()}
            return {
                name: (f"{letter}/{number}", "/".join(["stages", letter, *rest]))
                for name, (letter, number, *rest) in split.items()
            }
        same: dict[str, list[str]] = {}
        for name in sorted(paths):
            same.setdefault(paths[name], []).append(name)
        one = len(same) == len(paths)
        return {
            name: (
                "" if one else str(same[path].index(name) + 1),
                f"stages/{path}" if path else "stages",
            )
            for name, path in paths.items()
        }

    # The state of a part

    def _kept(
        self, part: _ModelPart, states: Mapping[str, PyTree], before: PyTree | None = None
    ) -> PyTree:
        """The states of a part: each device's own, where the others are of other kinds; cut over
        the devices as the part is.  `before`: as these are.
        """
        own = tuple(states.values())
        if part.home is None:
            return own if part.key == "stages" else padded_like(own, {part.key: part.tree})
        leaves = self._by_place(states)
        layout = self._layout(part, leaves) if before is None else getattr(before, "layout", None)
        if layout is None:
            return own
        by_device: dict[str, dict[int, _StackPlace]] = {}
        for device, name, place in self._places(part, layout.separate):
            by_device.setdefault(name, {}).setdefault(device, place)
        arrays = {name: _merged(leaves, places) for name, places in by_device.items()}
        return self._repacked(Packed(arrays, layout.separate), layout)

    def _taken(
        self, part: _ModelPart, states: PyTree, stacks: Mapping[str, _Stack]
    ) -> dict[str, PyTree]:
        """The inverse, with any numbers on devices that do not have a state."""
        if not isinstance(states, Packed):
            return dict(zip(stacks, cut_off(states), strict=True))
        separate = states.layout.separate
        leaves = self._repacked(states, separate).leaves
        names = {place: name for _, name, place in self._places(part, separate)}
        found = {}
        for stack, own in stacks.items():
            like = own.state(self._init)
            values = [leaves[names[place]] for place in self._by_place({stack: like})]
            found[stack] = jax.tree.unflatten(jax.tree.structure(like), values)
        return found

    def _by_place(self, states: Mapping[str, PyTree]) -> dict[_StackPlace, Any]:
        """The leaves of states by stack."""
        above = {stack: [stack] if self.pipe.layout.is_layered else [] for stack in states}
        return {
            _StackPlace(stack, "/".join(filter(None, [*above[stack], path]))): leaf
            for stack, state in states.items()
            for path, leaf in by_path(state).items()
        }

    def _places(
        self, part: _ModelPart, layout: ChunkLayout
    ) -> Iterator[tuple[int, str, _StackPlace]]:
        """The device, the name and all places of each leaf of the devices' own states, which are
        laid out so.  A leaf of several stacks, such as a count, is one in the state of a stage.
        """
        seats = self._seats(part)
        forms = zip(part.tree.layout.forms, layout.forms, strict=True)
        for device, (form, own) in enumerate(forms):
            places = self._by_place(self._own_states(part, form, seats))
            for name, path in zip(own.names, own.paths, strict=True):
                yield from ((device, name, place) for place in places if place.path == path)

    def _layout(self, part: _ModelPart, leaves: Mapping[_StackPlace, Any]) -> ChunkLayout | None:
        """The layout of states, leaves [P, ...], with room for those of the device that has most.
        Each device's own say what the model says: of a stage's tree, or of each stack of a letter.

        None where those of a device's own layers are no part of those of all: it is not known then
        which numbers belong to which device.
        """
        forms, numbers = part.tree.layout.forms, self.pipe.layout.stage_at(part.chunk)
        seats = self._seats(part)
        if not self.pipe.layout.is_layered:  # a stage's own tree has one leaf of a path
            seats = {name: ("", path) for name, (_, path) in seats.items()}
        own = [
            None if number < 0 else _state_tree(self._own_states(part, form, seats))
            for form, number in zip(forms, numbers, strict=True)
        ]
        shapes = {(path, leaf.shape) for tree in own for path, leaf in by_path(tree).items()}
        if shapes != {(place.path, leaf.shape[1:]) for place, leaf in leaves.items()}:
            return None
        return chunk_layout(own, range(len(own)), self._kept_state(part))

    def _own_states(self, part: _ModelPart, form: TreeForm, seats: _Seats) -> dict[str, PyTree]:
        """The shapes of the states of those layers that one device has, by stack."""
        own = {name: part.tree.leaves[name] for name in form.names}
        own = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), own)
        stacks = _by_stack({name: seats[name] for name in own}, own, self._axes - 1)
        return {name: stack.state(self._init) for name, stack in stacks.items()}

    def _kept_state(self, part: _ModelPart) -> Storing:
        """Which leaves of such states share a buffer: all of one dtype, those that follow a
        parameter split as it is.
        """
        layout, partition = self.pipe.layout, self.pipe.partition
        numbers, forms = layout.stage_at(part.chunk), part.tree.layout.forms
        inside = part.tree.layout.parameters(numbers, layered=layout.is_layered)
        seats, arrays = self._seats(part), part.tree.leaves

        def kept(own: Parameter, dtype: jax.typing.DTypeLike) -> InBuffer:
            if jnp.issubdtype(dtype, jax.dtypes.extended):
                return partition.in_buffer(Group.ALONE)
            device, _, path = own.path.removeprefix("stages/").partition("/")
            known = {
                seats[name][1]: (arrays[name].shape[1:], inside[name][0][0])
                for name in forms[int(device)].names
                if not is_missing(arrays[name])
                and (not layout.is_layered or path.startswith(f"{seats[name][0]}/"))
            }
            found = followed(path, own.shape, known)
            parts = () if found is None else partition.kept(found[1], dtype).parts
            return partition.in_buffer(Group.TRAINED, parts)

        return kept

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

    def _update(self, extra: dict[str, Any], grads: PyTree, state: PyTree, params: PyTree) -> Any:
        """One layer's update; PipelineError where the update of a parameter depends on others."""
        shapes = shapes_of((grads, state, params))
        _check_independent(lambda *trees: self.optimizer.update(*trees, **extra)[0], shapes)
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


def _trees(state: Mapping[str, PyTree]) -> list[PyTree]:
    """The trees of a tree like the placed parameters, by part."""
    return [*(state[key] for key in OUTER if key in state), *state["stages"]]


def _joined(like: Mapping[str, PyTree], trees: Sequence[PyTree]) -> dict[str, PyTree]:
    """The inverse of `_trees`: a tree like the placed parameters."""
    own = iter(trees)
    outer = {key: next(own) for key in OUTER if key in like}
    return {**outer, "stages": like["stages"].like(own)}


def _by_stack(seats: _Seats, leaves: Mapping[str, Any], axes: int) -> dict[str, _Stack]:
    """Leaves by name as stacks of trees for a rule; without stacks of nothing."""
    found: dict[str, dict[str, Any]] = {}
    for name, (stack, path) in seats.items():
        node = found.setdefault(stack, {})
        *above, last = path.split("/")
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaves[name]
    return {n: _Stack(found[n], axes) for n in sorted(found) if jax.tree.leaves(found[n])}


def _merged(leaves: Mapping[_StackPlace, Any], places: Mapping[int, _StackPlace]) -> Any:
    """The leaf [P, ...] whose rows are these leaves', by device; other rows are zeros."""
    found = None
    for place in dict.fromkeys(places.values()):
        leaf = leaves[place]
        there = [places.get(device) == place for device in range(leaf.shape[0])]
        found = masked(leaf, there, rest=found)
    return found


def _layer_faults(chunk: PyTree) -> list[str]:
    """Leaves that do not have as many layers as the others."""
    leaves = by_path(chunk)
    counts = {leaf.shape[1:2] for leaf in leaves.values()}
    if len(counts) <= 1 and () not in counts:
        return []
    return [f"{path} is [P, ...] of {leaf.shape}" for path, leaf in leaves.items()]


def _state_tree(states: Mapping[str, PyTree]) -> PyTree:
    """{"t/0": state, "t/1": state} -> {"t": (state, state)}, as a stage's own parameters are."""
    if not any("/" in name for name in states):
        return states.get("", {})
    found: dict[str, dict[int, PyTree]] = {}
    for name, state in states.items():
        letter, number = name.split("/")
        found.setdefault(letter, {})[int(number)] = state
    return {letter: tuple(own[n] for n in sorted(own)) for letter, own in found.items()}
