"""Placed stages as a rule for one layer sees them: trees whose leaves are stacked over devices and
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import PyTree, by_path
from ..errors import PipelineError
from .packed import ChunkLayout, Group, InBuffer, Packed, Parameter, TreeForm, repacked
from .partition import Partition
from .sharing import Sharing, by_name


class Stack(NamedTuple):
    """Trees stacked along `axes` leading axes: of devices, and of layers."""

    tree: PyTree
    axes: int

    def state(self, init: Callable[[PyTree], PyTree]) -> PyTree:
        """The shapes of the states that `init` makes."""
        return jax.eval_shape(lambda tree: self.apply(init, tree), self.tree)

    def apply(self, function: Callable[..., Any], *arguments: PyTree) -> Any:
        """A function of one layer, on all of them."""
        for _ in range(self.axes):
            function = jax.vmap(function)
        return function(*arguments)


class _Seat(NamedTuple):
    """The place of a leaf of a chunk in a rule's view: its stack, and its path in {"stages": one
    layer's tree}.
    """

    stack: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class StackedStages:
    """Chunks <-> stacks of layers by name.

    Leaves of one stack have as many layers: those of a letter's stack, "t/0".  Those of one path
    that have names of their own, as some of them are frozen or of another shape, are in stacks "1",
    "2".  Otherwise the name is "".
    """

    partition: Partition
    layer_axis: bool

    @property
    def _layered(self) -> bool:
        return self.partition.layout.layers is not None

    def _repacked(self, chunk: PyTree, layout: ChunkLayout) -> PyTree:
        return repacked(self.partition.mesh, self.partition.axis, chunk, layout)

    def of(self, chunk: PyTree) -> dict[str, Stack]:
        """The stacks of a chunk; none where nothing is trained."""
        axes = 2 if self._layered or self.layer_axis else 1
        if not isinstance(chunk, Packed):
            if self.layer_axis and (faults := _layer_faults(chunk)):
                raise PipelineError.listing(
                    "layer_axis=True wants leaves of stages [S, layers, ...]", faults
                )
            return {"": Stack({"stages": chunk}, axes)} if jax.tree.leaves(chunk) else {}
        chunk = self._repacked(chunk, chunk.layout.separate)
        found: dict[str, dict[str, Any]] = {}
        for leaf, seat in self._seats(chunk.layout).items():
            *above, last = seat.names
            node = found.setdefault(seat.stack, {})
            for name in above:
                node = node.setdefault(name, {})
            node[last] = chunk.leaves[leaf]
        return {n: Stack(found[n], axes) for n in sorted(found) if jax.tree.leaves(found[n])}

    def joined(self, like: PyTree, v: int, trees: Mapping[str, PyTree]) -> PyTree:
        """The inverse, of trees by stack; chunk `v`, laid out as `like`.

        Leaves that a device does not have are zero, whatever a rule made of zeros.
        """
        if not isinstance(like, Packed):
            there = [stage >= 0 for stage in self.partition.layout.stage_at(v)]
            own = trees[""]["stages"] if trees else like
            return jax.tree.map(lambda leaf: _masked(leaf, there), own)
        layout = like.layout.separate
        paths = [form.paths for form in layout.forms]

        def leaf(name: str, seat: _Seat) -> Any:
            node = trees.get(seat.stack, {})
            for key in seat.names:
                node = None if not node else node[key]
            return None if node is None else _masked(node, [name in own for own in paths])

        leaves = {name: leaf(name, seat) for name, seat in self._seats(layout).items()}
        return self._repacked(Packed(leaves, layout), like.layout)

    def parameters(
        self, chunk: Packed, numbers: Sequence[int], stack: str
    ) -> dict[str, list[Parameter]]:
        """The parameters of a stack, by the path at which a rule sees them; `numbers` are those of
        the stages.
        """
        layout = chunk.layout.separate
        named = by_name(layout.forms, numbers, layered=self._layered)
        return {
            "/".join(seat.names): [own for own, _ in named[name]]
            for name, seat in self._seats(layout).items()
            if seat.stack == stack
        }

    def pack_state(
        self, like: Packed, v: int, states: Mapping[str, PyTree], init: Callable[[PyTree], PyTree]
    ) -> PyTree:
        """States by stack, leaves [P, ...], with room for those of the device of chunk `v` that has
        most; `init` makes them.

        States stay as they are where those of a device's own layers are no part of those of all, so
        that it cannot be said what is whose.
        """
        layout = like.layout.separate

        avals = _avals(like, layout)

        def own_form(form: TreeForm) -> TreeForm:
            """The form of the states of those layers that one device has."""
            own = Packed(
                {name: avals.get(name) if name in form.paths else None for name in layout.names},
                layout,
            )
            found = {name: stack.state(init) for name, stack in self.of(own).items()}
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), found)
            return TreeForm.of(_tree(shapes))

        known = {form: form if form.is_empty else own_form(form) for form in {*layout.forms}}
        forms = tuple(known[form] for form in layout.forms)
        leaves = {
            p: leaf for name, state in states.items() for p, leaf in _named(name, state).items()
        }
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for form in forms:
            for path, shape in zip(form.paths, form.shapes, strict=True):
                shapes.setdefault(path, set()).add(shape)
        if shapes != {path: {tuple(leaf.shape[1:])} for path, leaf in leaves.items()}:
            return tuple(states.values())
        dtypes = {path: leaf.dtype for path, leaf in leaves.items()}
        sharing = self._state_sharing(layout, v)
        packed = ChunkLayout(forms, sharing.buffers(forms, range(len(forms)), dtypes))
        return self._repacked(Packed(leaves, ChunkLayout(forms)), packed)

    def unpack_state(
        self, packed: Packed, stacks: Mapping[str, Stack], init: Callable[[PyTree], PyTree]
    ) -> dict[str, PyTree]:
        """The inverse: states by stack, with zeros on devices that do not have it."""
        leaves = self._repacked(packed, packed.layout.separate).leaves
        found = {}
        for name, stack in stacks.items():
            like = stack.state(init)
            own = [leaves[path] for path in _named(name, like)]
            found[name] = jax.tree.unflatten(jax.tree.structure(like), own)
        return found

    def _state_sharing(self, layout: ChunkLayout, v: int) -> Sharing:
        """Which leaves of such states share a buffer: all of one dtype, those that follow a
        parameter split as it is.
        """
        numbers, sharing = self.partition.layout.stage_at(v), self.partition.sharing
        named = by_name(layout.forms, numbers, layered=self._layered)
        seats = self._seats(layout)

        def kept(own: Parameter, dtype: Any) -> InBuffer:
            if jnp.issubdtype(dtype, jax.dtypes.extended):
                return InBuffer(Group.ALONE)
            path = own.path.split("/", 2)[2]  # below "stages" and a number
            for name, (stack, names) in seats.items():
                parameter, shape = named[name][0]
                below = not stack or path.startswith(f"{stack}/")
                if below and shape == own.shape and f"/{path}".endswith("/".join(["", *names])):
                    return InBuffer(Group.STATE, sharing.kept(parameter, dtype).parts)
            return InBuffer(Group.STATE)

        return Sharing(kept, sharing.multiple, sharing.pinned)

    def _seats(self, layout: ChunkLayout) -> dict[str, _Seat]:
        """The seat of each leaf, by name."""
        paths = {
            name: path
            for form in layout.forms
            for name, path in zip(form.paths, form.tree_paths, strict=True)
        }
        split = {name: [part for part in path.split("/") if part] for name, path in paths.items()}
        if self._layered:
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


def _masked(leaf: Any, there: Sequence[bool]) -> Any:
    """The leaf [P, ...] with zeros for devices that are not there."""
    if all(there):
        return leaf
    mask = np.array(there).reshape(-1, *(1,) * (leaf.ndim - 1))
    return jnp.where(mask, leaf, jnp.zeros_like(leaf))


def _avals(chunk: Packed, layout: ChunkLayout) -> dict[str, Any]:
    """The shapes of a chunk's leaves in a layout with an array for each."""
    arrays = [chunk.leaves[name] for name in chunk.layout.names]
    found: dict[str, Any] = {}
    for old, new in zip(chunk.layout.forms, layout.forms, strict=True):
        for name, place in zip(new.paths, chunk.layout.places(old), strict=True):
            leaf = arrays[place.at]
            found[name] = (
                None if leaf is None else jax.ShapeDtypeStruct((1, *place.entry.shape), leaf.dtype)
            )
    return found


def _layer_faults(chunk: PyTree) -> list[str]:
    """Leaves that do not have as many layers as the others."""
    leaves = by_path(chunk)
    counts = {np.shape(leaf)[1:2] for leaf in leaves.values()}
    if len(counts) <= 1 and () not in counts:
        return []
    return [f"{path} is [P, ...] of {np.shape(leaf)}" for path, leaf in leaves.items()]


def _tree(own: Mapping[str, PyTree]) -> PyTree:
    """{"t/0": state, "t/1": state} -> {"t": (state, state)}, as a stage's own parameters are."""
    if not any("/" in name for name in own):
        return own.get("", dict(own))
    found: dict[str, dict[int, PyTree]] = {}
    for name, state in own.items():
        letter, number = name.split("/")
        found.setdefault(letter, {})[int(number)] = state
    return {
        letter: tuple(stacks[number] for number in sorted(stacks))
        for letter, stacks in sorted(found.items())
    }


def _named(name: str, state: PyTree) -> dict[str, Any]:
    """The leaves of a stack's state by path."""
    return by_path({name: state} if name else state)
