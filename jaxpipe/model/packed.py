"""Parameters of unlike stages side by side: one chunk of every device, with the names of their
leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from ..arrays import PyTree
from ..errors import PipelineError
from .forms import Buffer, Sharing, TreeForm, unlike_paths
from .places import Place, Places


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Packed:
    """One chunk of every device: leaves [P, ...] by path, "dense/kernel", and what each device's
    part of them is.

    A leaf has the shape that the stages give it, zero for devices whose stage has none; where they
    give it unlike shapes it is raveled and as long as the longest.  What lies in a buffer has no
    leaf of its own: the buffer has, and the leaves of a device lie in it one after the other.  It
    is a tree of its leaves, so optimizers, norms and casts work on it as on any other.
    """

    leaves: dict[str, Any]
    forms: tuple[TreeForm | None, ...]  # by device; None where the chunk is empty
    buffers: tuple[Buffer, ...] = ()

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Any]], Any]:
        """Leaves in the order of their paths."""
        names = sorted(self.leaves)
        return [(DictKey(name), self.leaves[name]) for name in names], (
            tuple(names),
            self.forms,
            self.buffers,
        )

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> Packed:
        """The inverse."""
        names, forms, buffers = aux
        return cls(dict(zip(names, children, strict=True)), forms, buffers)

    def places(self, form: TreeForm, *, pinned: bool = False) -> Places:
        """Where each leaf of a stage lies among these leaves, in the order of their paths
        (`pinned`: see `Buffer.entries`).
        """
        at = {name: i for i, name in enumerate(sorted(self.leaves))}
        flat = unlike_paths([form for form in self.forms if form is not None])
        found: dict[str, Place] = {}
        for buffer in self.buffers:
            starts = buffer.starts(form)
            for path, entry in buffer.entries(form, pinned=pinned).items():
                found[path] = Place(
                    at[buffer.name], entry.shape, True, starts[path], entry.parts, entry.pinned
                )
        return tuple(
            found[path] if path in found else Place(at[path], shape, path in flat)
            for path, shape in zip(form.paths, form.shapes, strict=True)
        )

    def of_form(self, form: TreeForm) -> list[Any]:
        """For each leaf of a stage, the leaf in which it lies."""
        leaves = [self.leaves[name] for name in sorted(self.leaves)]
        return [leaves[place.at] for place in self.places(form)]

    def stage(self, device: int) -> PyTree:
        """One device's own parameters, out of leaves [P, ...]."""
        form = self.forms[device]
        assert form is not None
        return jax.tree.unflatten(
            form.tree, self.take(form, jax.tree.map(lambda leaf: leaf[device], self.leaves))
        )

    def take(self, form: TreeForm, own: dict[str, Any], *, pinned: bool = False) -> list[Any]:
        """A stage's leaves out of one device's; None where there is none."""
        leaves = [own[name] for name in sorted(own)]
        return [
            None if leaves[place.at] is None else place.take(leaves[place.at])
            for place in self.places(form, pinned=pinned)
        ]


def pack(
    stages: Sequence[PyTree | None], numbers: Sequence[int], sharing: Sharing | None = None
) -> Packed:
    """The stages of one chunk, by device; PipelineError where a path has leaves of different
    dtypes.
    """
    if sharing is None:
        forms = tuple(None if stage is None else TreeForm.of(stage) for stage in stages)
    else:
        forms = sharing.named(stages, numbers)
    dtypes = _dtypes(forms, stages)
    return _packed(
        stages, forms, () if sharing is None else sharing.buffers(forms, numbers, dtypes)
    )


def pack_like(stages: Sequence[PyTree | None], like: Packed) -> Packed:
    """The stages of one chunk packed as others were; a leaf may be None, where it is so in all
    stages.
    """
    return _packed(stages, like.forms, like.buffers)


def _packed(
    stages: Sequence[PyTree | None], forms: tuple[TreeForm | None, ...], buffers: tuple[Buffer, ...]
) -> Packed:
    flat = unlike_paths([form for form in forms if form is not None])
    apart: dict[str, list[Any]] = {}
    rows: dict[str, list[Any]] = {buffer.name: [None] * len(stages) for buffer in buffers}
    for device, (stage, form) in enumerate(zip(stages, forms, strict=True)):
        if form is None:
            continue
        own = dict(zip(form.paths, form.tree.flatten_up_to(stage), strict=True))
        for buffer in buffers:
            rows[buffer.name][device] = buffer_row(
                buffer, form, {path: own.pop(path) for path in buffer.starts(form)}
            )
        for path, leaf in own.items():
            apart.setdefault(path, [None] * len(stages))[device] = (
                leaf if leaf is None or path not in flat else jnp.ravel(leaf)
            )
    found = {path: _stack(leaves) for path, leaves in apart.items()}
    return Packed(
        found | {buffer.name: _stack(rows[buffer.name]) for buffer in buffers}, forms, buffers
    )


def _dtypes(forms: Sequence[TreeForm | None], stages: Sequence[PyTree | None]) -> dict[str, Any]:
    """The dtype of each path; PipelineError where stages give it several."""
    found: dict[str, list[Any]] = {}
    for form, stage in zip(forms, stages, strict=True):
        for path, leaf in zip(
            () if form is None else form.paths, jax.tree.leaves(stage), strict=True
        ):
            found.setdefault(path, []).append(jax.typeof(leaf).dtype)
    faults = [
        f"parameters {path!r} of stages that share a chunk are "
        f"{' and '.join(sorted({str(d) for d in dtypes}))}; give them one dtype"
        for path, dtypes in found.items()
        if len(set(dtypes)) > 1
    ]
    if faults:
        raise PipelineError("\n".join(faults), tuple(faults))
    return {path: dtypes[0] for path, dtypes in found.items()}


def _stack(leaves: Sequence[Any]) -> Any:
    """Leaves of one path, by device; devices without one get zeros, shorter ones are filled up."""
    have = [jnp.asarray(leaf) for leaf in leaves if leaf is not None]
    if not have:
        return None
    shape = max(leaf.shape for leaf in have)
    full = [
        jnp.zeros(shape, have[0].dtype) if leaf is None else jnp.asarray(leaf) for leaf in leaves
    ]
    return jnp.stack(
        [
            jnp.pad(leaf, (0, shape[0] - leaf.shape[0])) if leaf.shape != shape else leaf
            for leaf in full
        ]
    )


def buffer_row(buffer: Buffer, form: TreeForm, own: dict[str, Any], *, pinned: bool = False) -> Any:
    """One device's leaves by path, raveled, one after the other; None where they are, or where it
    has none.
    """
    entries = buffer.entries(form, pinned=pinned)
    have = [
        (entries[path], jnp.asarray(own[path]))
        for path in buffer.starts(form)
        if own[path] is not None
    ]
    if not have:
        return None
    row = jnp.concatenate([entry.ravel(entry.pack(leaf)) for entry, leaf in have], axis=-1)
    return jnp.pad(row, [*((0, 0) for _ in row.shape[1:]), (0, buffer.size - row.shape[-1])])
