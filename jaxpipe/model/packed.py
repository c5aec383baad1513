"""The storage of unlike stages: the leaves of one chunk of every device share arrays, in which each
has its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import DictKey

from ..arrays import PyTree, by_path, zeros_of
from ..jaxprs.entry import Entry, Part
from ..jaxprs.slots import Piece
from .mesh import jit_on_mesh


class Place(NamedTuple):
    """The place of a leaf: a shared array, as it is or, where kinds differ, raveled from `start`
    on.
    """

    at: int
    entry: Entry  # how the leaf is raveled
    flat: bool
    start: int = 0  # in each part that the partitioner makes of the leaf

    def take(self, leaf: Any) -> Any:
        """The leaf out of the shared buffer's."""
        return Piece(leaf, self.start, self.entry).load() if self.flat else leaf

    def put(self, leaf: Any, value: Any) -> Any:
        """The shared buffer's leaf with this value in its place."""
        value = value.astype(leaf.dtype)
        if not self.flat:
            return value
        return lax.dynamic_update_slice_in_dim(
            leaf, self.entry.ravel(self.entry.pack(value)), self.start, axis=-1
        )


Places: TypeAlias = "tuple[Place, ...]"


class Parameter(NamedTuple):
    """A parameter as the user knows it: its canonical path, "stages/1/w", and its shape without the
    axis of stages or layers.
    """

    path: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, path: str, shape: Sequence[int], stage: int, *, layered: bool) -> Parameter:
        """A leaf of a stage's own tree.  The layers of a letter are one parameter, in whatever
        stacks "t/0/w" and "t/1/w" they are.
        """
        if not layered:
            return cls(
                "/".join(name for name in ("stages", str(stage), path) if name), tuple(shape)
            )
        letter, _, *rest = path.split("/")
        return cls("/".join(["stages", letter, *rest]), tuple(shape[1:]))


@dataclass(frozen=True)
class TreeForm:
    """The tree of a stage's parameters, and the name and shape of each leaf among those of the
    chunk: its path, as a rule.
    """

    tree: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: PyTree) -> TreeForm:
        """Read off a stage's own parameters (arrays or shapes)."""
        leaves = by_path(params)
        shapes = (tuple(np.shape(leaf)) for leaf in leaves.values())
        return cls(jax.tree.structure(params), tuple(leaves), tuple(shapes))

    @cached_property
    def tree_paths(self) -> tuple[str, ...]:
        """The path of each leaf in the tree."""
        return tuple(path for path, number in self._numbered if number is not None)

    @cached_property
    def _numbered(self) -> list[tuple[str, Any]]:
        """Paths of the tree, those where it holds None too, and the number of the leaf."""
        numbers = jax.tree.unflatten(self.tree, range(len(self.paths)))
        return list(by_path(numbers, is_leaf=lambda node: node is None).items())

    def parameters(self, stage: int, *, layered: bool) -> list[Parameter]:
        """The parameters of a stage of this form, in the order of its leaves."""
        return [
            Parameter.of(path, shape, stage, layered=layered)
            for path, shape in zip(self.tree_paths, self.shapes, strict=True)
        ]

    @property
    def is_empty(self) -> bool:
        """Whether it is that of a device without a stage in the chunk."""
        return self == EMPTY

    def gaps(self, stage: int, *, layered: bool) -> list[str]:
        """The paths at which a stage of this form holds None."""
        return [
            Parameter.of(path, (), stage, layered=layered).path
            for path, number in self._numbered
            if number is None and not self.is_empty
        ]


# Of a device whose chunk is empty.
EMPTY = TreeForm.of(None)


class Group(Enum):
    """Leaves of which some share a buffer."""

    TRAINED = "trained"
    FROZEN = "frozen"
    STATE = "state"
    ALONE = "alone"  # each by itself


class InBuffer(NamedTuple):
    """The storage of a leaf in a buffer: with others of its group, cut into the parts that the
    partitioner makes of it.
    """

    group: Group
    parts: tuple[Part, ...] = ()

    @property
    def axes(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """The mesh axes of each dim that is split, and how many parts they make: alike in all
        leaves of a buffer.
        """
        return tuple((part.axes, part.count) for part in self.parts)


class Buffer(NamedTuple):
    """An array that holds leaves one after the other, as many as the device has that needs most
    room.

    The array is [parts, ..., size], with a dim for each that the partitioner splits: each of its
    devices has its part of every leaf.
    """

    name: str
    size: int  # of each part
    paths: tuple[str, ...]
    kept: tuple[InBuffer, ...]  # by path; of one group and the same axes
    pinned: bool = False  # there are axes that the partitioner may split over

    @property
    def group(self) -> Group:
        """The group of the leaves."""
        return self.kept[0].group

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one device's array."""
        return (*(count for _, count in self.kept[0].axes), self.size)

    @property
    def spec(self) -> PartitionSpec:
        """How the partitioner splits the array."""
        return PartitionSpec(*(axes for axes, _ in self.kept[0].axes), None)

    def places(self, form: TreeForm, *, pinned: bool = False) -> dict[str, Place]:
        """The place of each leaf of a stage, in the order of the array; the array's number is 0.

        Matrices, whose sizes are round, come before vectors, so that they begin at round addresses.
        `pinned`: in a program that tells the partitioner how it splits them.
        """
        shapes = dict(zip(form.paths, form.shapes, strict=True))
        entries = {
            path: Entry(shapes[path], kept.parts)
            for path, kept in zip(self.paths, self.kept, strict=True)
            if path in shapes
        }
        found, start = {}, 0
        for path in sorted(entries, key=lambda path: (-entries[path].length, path)):
            entry = entries[path]
            found[path] = Place(0, replace(entry, pinned=pinned and self.pinned), True, start)
            start += entry.length
        return found

    def row(self, places: Sequence[Place], values: Sequence[Any]) -> Any:
        """One device's array."""
        if is_missing(values[0]):
            return values[0]
        parts = [
            place.entry.ravel(place.entry.pack(jnp.asarray(value)))
            for place, value in zip(places, values, strict=True)
        ]
        row = jnp.concatenate(parts, axis=-1)
        return jnp.pad(row, [*((0, 0) for _ in row.shape[1:]), (0, self.size - row.shape[-1])])


@dataclass(frozen=True)
class ChunkLayout:
    """The storage of unlike stages that share a chunk: each leaf is in the array of its name, or in
    a buffer.

    The arrays of all devices have one shape, so a leaf whose shape differs is in a buffer.
    """

    forms: tuple[TreeForm, ...]  # by device
    buffers: tuple[Buffer, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arrays."""
        found = {path for form in self.forms for path in form.paths}
        found -= {path for buffer in self.buffers for path in buffer.paths}
        return tuple(sorted(found | {buffer.name for buffer in self.buffers}))

    def of(self, name: str) -> Buffer | None:
        """The buffer of this name; None for the array of one leaf."""
        return next((buffer for buffer in self.buffers if buffer.name == name), None)

    @property
    def separate(self) -> ChunkLayout:
        """An array for each leaf; leaves of one name but of unlike shapes get names of their
        own.
        """
        return ChunkLayout(with_distinct_names(self.forms, [form.shapes for form in self.forms]))

    def places(self, form: TreeForm, *, pinned: bool = False) -> Places:
        """The place of each leaf of a stage among the arrays (`pinned`: see `Buffer.places`)."""
        at = {name: i for i, name in enumerate(self.names)}
        found = {
            path: place._replace(at=at[buffer.name])
            for buffer in self.buffers
            for path, place in buffer.places(form, pinned=pinned).items()
        }
        return tuple(
            found[path] if path in found else Place(at[path], Entry(shape), False)
            for path, shape in zip(form.paths, form.shapes, strict=True)
        )

    def values(self, form: TreeForm, rows: dict[str, Any], *, pinned: bool = False) -> list[Any]:
        """A stage's leaves out of one device's arrays; what is missing there is missing here."""
        arrays = [rows[name] for name in self.names]
        return [
            arrays[place.at] if is_missing(arrays[place.at]) else place.take(arrays[place.at])
            for place in self.places(form, pinned=pinned)
        ]

    def rows(
        self, form: TreeForm, values: Sequence[Any], *, pinned: bool = False
    ) -> dict[str, Any]:
        """The inverse: those of one device's arrays in which the stage has leaves."""
        own = dict(zip(form.paths, values, strict=True))
        for buffer in self.buffers:
            places = buffer.places(form, pinned=pinned)
            mine = [own.pop(path) for path in places]
            if places:
                own[buffer.name] = buffer.row([*places.values()], mine)
        return own


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Packed:
    """One chunk of every device: arrays [P, ...] by name, and where each device's leaves are in
    them.

    It is a tree of its arrays, so optimizers, norms and casts work on it as on any other.
    """

    leaves: dict[str, Any]
    layout: ChunkLayout

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Any]], ChunkLayout]:
        """Arrays in the order of their names."""
        return [(DictKey(name), self.leaves[name]) for name in self.layout.names], self.layout

    @classmethod
    def tree_unflatten(cls, layout: ChunkLayout, children: Sequence[Any]) -> Packed:
        """The inverse."""
        return cls(dict(zip(layout.names, children, strict=True)), layout)

    @classmethod
    def of(cls, stages: Sequence[PyTree | None], layout: ChunkLayout) -> Packed:
        """The stages of one chunk, by device; a leaf may be missing, where it is so in all."""
        rows = [
            layout.rows(form, form.tree.flatten_up_to(stage))
            for stage, form in zip(stages, layout.forms, strict=True)
        ]
        return cls({name: _stack([row.get(name) for row in rows]) for name in layout.names}, layout)

    def with_own_shapes(self) -> Packed:
        """The arrays of one device, with the shapes that leaves outside of buffers have there."""
        own = {name: np.shape(leaf) for name, leaf in self.leaves.items() if not is_missing(leaf)}
        shared = {path for buffer in self.layout.buffers for path in buffer.paths}

        def shaped(form: TreeForm) -> TreeForm:
            given = zip(form.paths, form.shapes, strict=True)
            shapes = (shape if path in shared else own.get(path, shape) for path, shape in given)
            return replace(form, shapes=tuple(shapes))

        forms = tuple(map(shaped, self.layout.forms))
        return replace(self, layout=replace(self.layout, forms=forms))

    def stage(self, device: int) -> PyTree:
        """One device's own parameters."""
        form = self.layout.forms[device]
        rows = jax.tree.map(lambda leaf: leaf[device], self.leaves)
        return jax.tree.unflatten(form.tree, self.layout.values(form, rows))


def on_one_device(chunk: PyTree) -> PyTree:
    """A chunk on one device: of leaves that are split over data axes, its own part."""
    return chunk.with_own_shapes() if isinstance(chunk, Packed) else chunk


def is_missing(node: PyTree) -> bool:
    """Whether a leaf is missing: a mask took it out, or it is frozen."""
    return not jax.tree.leaves(node)


def _stack(rows: Sequence[Any]) -> Any:
    """The array of all devices; those without a row get zeros."""
    have = [row for row in rows if not is_missing(row)]
    if not have:
        return next((row for row in rows if row is not None), None)
    zeros = jnp.zeros_like(have[0])
    return jnp.stack([zeros if is_missing(row) else jnp.asarray(row) for row in rows])


def with_distinct_names(
    forms: Sequence[TreeForm], kinds: Sequence[Sequence[Any]]
) -> tuple[TreeForm, ...]:
    """The forms, with names of their own for leaves of one name but of unlike kinds; `kinds` are
    those of each form's leaves.
    """
    found: dict[str, list[Any]] = {}
    for form, own in zip(forms, kinds, strict=True):
        for name, kind in zip(form.paths, own, strict=True):
            if kind not in found.setdefault(name, []):
                found[name].append(kind)
    mark = " "
    while any(f"{mark}(" in name for name in found):
        mark += " "

    def renamed(name: str, kind: Any) -> str:
        at = found[name].index(kind)
        return f"{name}{mark}({at + 1})" if at else name

    return tuple(
        replace(form, paths=tuple(map(renamed, form.paths, own)))
        for form, own in zip(forms, kinds, strict=True)
    )


def repacked(mesh: Mesh, axis: str, chunk: PyTree, layout: ChunkLayout | None) -> PyTree:
    """The chunk in another layout of the same stages; each device moves its own leaves.

    What the partitioner splits is split as it says before and after: nothing is exchanged inside,
    where devices do unlike things.
    """
    if not isinstance(chunk, Packed) or layout is None or chunk.layout == layout:
        return chunk
    before = chunk.layout
    pairs = list(zip(before.forms, layout.forms, strict=True))
    kinds = list(dict.fromkeys(pairs))
    number = jnp.array([kinds.index(pair) for pair in pairs])

    def moved(pair: tuple[TreeForm, TreeForm], own: dict[str, Any]) -> dict[str, Any]:
        old, new = pair
        return layout.rows(new, before.values(old, own, pinned=True), pinned=True)

    def split(rows: dict[str, Any], specs: dict[str, PartitionSpec]) -> dict[str, Any]:
        return {
            name: lax.with_sharding_constraint(row, specs[name])
            if name in specs and not is_missing(row)
            else row
            for name, row in rows.items()
        }

    def one(leaves: PyTree) -> PyTree:
        own = split(jax.tree.map(lambda leaf: leaf[0], leaves), _splits(before, layout))
        like: dict[str, Any] = {}
        for pair in kinds:
            like |= jax.eval_shape(partial(moved, pair), own)

        def full(pair: tuple[TreeForm, TreeForm], own: dict[str, Any]) -> PyTree:
            return {**zeros_of(like), **moved(pair, own)}

        found = lax.switch(
            number[lax.axis_index(axis)], [partial(full, pair) for pair in kinds], own
        )
        return jax.tree.map(lambda leaf: leaf[None], split(found, _splits(layout, before)))

    spec = PartitionSpec(axis)
    mapped = jax.shard_map(
        one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis}, check_vma=False
    )
    return Packed(jit_on_mesh(mesh, mapped)(chunk.leaves), layout)


def _splits(layout: ChunkLayout, other: ChunkLayout) -> dict[str, PartitionSpec]:
    """How the partitioner splits one device's arrays that are buffers in this or in the other
    layout.
    """
    found: dict[str, PartitionSpec] = {}
    for old, new in zip(other.forms, layout.forms, strict=True):
        names = dict(zip(old.paths, new.paths, strict=True))
        for buffer in other.buffers:
            places = buffer.places(old).items() if buffer.pinned else ()
            found |= {names[path]: place.entry.spec for path, place in places}
    return found | {buffer.name: buffer.spec for buffer in layout.buffers if buffer.pinned}
