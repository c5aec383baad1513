"""The state of an optimizer that has one for each layer, where devices have layers of several
kinds: each keeps its own layers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh

from ..arrays import PyTree
from .packed import ChunkLayout, Group, InBuffer, Packed, Parameter, TreeForm, repacked
from .sharing import Sharing
from .specs import path_text

# trees by the name of a stack of layers, "t/0"; "" where a stage is one
ByStack: TypeAlias = "Mapping[str, PyTree]"


def pack_state(
    mesh: Mesh, axis: str, states: ByStack, own: Sequence[ByStack | None], sharing: Sharing
) -> Packed | None:
    """States of the layers of all devices, leaves [P, ...], with room for those of the device that
    has most.

    Args:
        mesh, axis: where they are.
        states: by stack, as if every device had each of them.
        own: by device, the states (shapes, without the axis of devices) of those stacks that it
            has, or None.
        sharing: which leaves may be in one buffer.

    Returns:
        None where the state of a device's own layers is no part of that of all, so that it cannot
        be said what is whose.
    """
    forms = tuple(None if mine is None else TreeForm.of(_tree(mine)) for mine in own)
    leaves = {path: leaf for name, state in states.items() for path, leaf in _by_path(name, state)}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for form in forms:
        for path, shape in () if form is None else zip(form.paths, form.shapes, strict=True):
            shapes.setdefault(path, set()).add(shape)
    if shapes != {path: {tuple(leaf.shape[1:])} for path, leaf in leaves.items()}:
        return None
    dtypes = {path: leaf.dtype for path, leaf in leaves.items()}
    layout = ChunkLayout(forms, sharing.buffers(forms, range(len(forms)), dtypes))
    found: Packed = repacked(mesh, axis, Packed(leaves, ChunkLayout(forms)), layout)
    return found


def unpack_state(mesh: Mesh, axis: str, packed: Packed, likes: ByStack) -> dict[str, PyTree]:
    """The inverse: states by stack, with zeros on devices that do not have it; `likes` are trees of
    their form.
    """
    leaves = repacked(mesh, axis, packed, packed.layout.separate).leaves
    return {
        name: jax.tree.unflatten(
            jax.tree.structure(like), [leaves[path] for path, _ in _by_path(name, like)]
        )
        for name, like in likes.items()
    }


def state_sharing(
    sharing: Sharing, parameter_of: Callable[[str, tuple[int, ...]], Parameter | None]
) -> Sharing:
    """Which leaves of such a state share a buffer: all of one dtype, those that follow a parameter
    split as it is.

    `parameter_of`, of a leaf's path and shape, is the parameter that it belongs to, if it has its
    shape.
    """

    def kept(own: Parameter, dtype: Any) -> InBuffer:
        if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            return InBuffer(Group.ALONE)
        # below "stages" and a number
        parameter = parameter_of(own.path.split("/", 2)[2], own.shape)
        return InBuffer(
            Group.STATE, () if parameter is None else sharing.kept(parameter, dtype).parts
        )

    return Sharing(kept, sharing.multiple, sharing.pinned)


def _tree(own: ByStack) -> PyTree:
    """{"t/0": state, "t/1": state} -> {"t": (state, state)}, as a stage's own parameters are."""
    if not any("/" in name for name in own):
        return own.get("", dict(own))
    letters = {name.split("/")[0] for name in own}
    stacks = {letter: [name for name in own if name.split("/")[0] == letter] for letter in letters}
    return {
        letter: tuple(own[name] for name in sorted(stacks[letter], key=_number))
        for letter in sorted(letters)
    }


def _number(name: str) -> int:
    """That of a stack among those of its letter."""
    return int(name.split("/")[1])


def _by_path(name: str, state: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a stack's state by path."""
    found = [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
    return [(f"{name}/{path}" if name else path, leaf) for path, leaf in found]
