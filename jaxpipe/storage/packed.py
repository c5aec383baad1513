"""The storage of unlike stages: the leaves of one chunk of every device share arrays, in which each
has its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from ..arrays import PyTree, as_dtype, by_path, zeros_of
from ..jaxprs.entry import Entry, Part, Piece
from ..model.replaced import Replacement
from ..model.settings import jit_on_mesh


class Home(NamedTuple):
    """The place of a leaf: a shared array, as it is or, where kinds differ, raveled from `start`
    on.
    """

    at: int
    entry: Entry  # how the leaf is raveled
    flat: bool
    start: int = 0  # in each part that the partitioner makes of the leaf
    row: int | None = None  # of a stack that is not raveled

    def layers(self, count: int) -> Places:
        """The places of so many layers of a stack; itself for 0."""
        if not count:
            return (self,)
        entry = replace(
            self.entry,
            shape=self.entry.shape[1:],
            parts=tuple(replace(part, dim=part.dim - 1) for part in self.entry.parts),
        )
        if not self.flat:
            return tuple(self._replace(entry=entry, row=i) for i in range(count))
        starts = (self.start + i * entry.length for i in range(count))
        return tuple(self._replace(entry=entry, start=start) for start in starts)

    def take(self, leaf: Any) -> Any:
        """The leaf out of the shared buffer's."""
        return Piece(leaf, self.start, self.entry).load() if self.flat else leaf

    def put(self, leaf: Any, value: Any) -> Any:
        """The shared buffer's leaf with this value in its place."""
        value = as_dtype(value, leaf.dtype)
        if not self.flat:
            return value
        raveled = self.entry.ravel(self.entry.pack(value))
        return lax.dynamic_update_slice_in_dim(leaf, raveled, self.start, axis=-1)


Places: TypeAlias = "tuple[Home, ...]"


class Parameter(NamedTuple):
    """A parameter as the user knows it: its canonical path, "stages/1/w", and its shape without the
    axis of stages or layers.
    """

    path: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TreeForm:
    """The tree of a stage's parameters, and the name and shape of each leaf among those of the
    chunk: its path, as a rule.
    """

    tree: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: PyTree) -> TreeForm:
        """Read off a stage's own parameters (arrays or shapes)."""
        leaves = by_path(params)
        shapes = (tuple(np.shape(leaf)) for leaf in leaves.values())
        return cls(jax.tree.structure(params), tuple(leaves), tuple(shapes))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf in the tree."""
        return tuple(by_path(jax.tree.unflatten(self.tree, self.names)))

    def parameters(self, stage: int, *, layered: bool) -> list[Parameter]:
        """The parameters of a stage of this form, in the order of its leaves.

        The layers of a letter are one parameter, in whatever stacks "t/0/w" and "t/1/w" they are.
        """
        found = []
        for path, shape in zip(self.paths, self.shapes, strict=True):
            if layered:
                letter, _, *rest = path.split("/")
                found.append(Parameter("/".join(["stages", letter, *rest]), shape[1:]))
            else:
                path = "/".join(filter(None, ["stages", str(stage), path]))
                found.append(Parameter(path, shape))
        return found


def stacks_of_layers(places: Sequence[Home]) -> frozenset[int]:
    """The arrays of which all of these places are layers."""
    return frozenset(p.at for p in places) - {p.at for p in places if p.row is None}


class Group(Enum):
    """Leaves of which some share a buffer."""

    TRAINED = "trained"
    FROZEN = "frozen"
    ALONE = "alone"  # each by itself


class InBuffer(NamedTuple):
    """The storage of a leaf in a buffer: with others of its group, cut into the parts that the
    partitioner makes of it.
    """

    group: Group
    parts: tuple[Part, ...] = ()
    multiple: int = 1  # of which a buffer's length is, as an axis splits it
    pinned: bool = False  # there are axes that the partitioner may split over
    replaced: Replacement | None = None  # see `LeafPlan`

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of each dim that is split: alike in all leaves of a buffer."""
        return tuple(part.axes for part in self.parts)


# How a parameter of some dtype may be stored.
Storing: TypeAlias = "Callable[[Parameter, Any], InBuffer]"


def alone(_parameter: Parameter, _dtype: Any) -> InBuffer:
    """An array for each leaf."""
    return InBuffer(Group.ALONE)


class Buffer(NamedTuple):
    """An array that holds leaves one after the other, as many as the device has that needs most
    room.

    The array is [parts, ..., size], with a dim for each that the partitioner splits: each of its
    devices has its part of every leaf.
    """

    name: str
    size: int  # of each part
    leaves: tuple[tuple[str, InBuffer], ...]  # by name; of one group and the same axes

    @property
    def kept(self) -> InBuffer:
        """What its leaves have in common."""
        return self.leaves[0][1]

    @property
    def spec(self) -> PartitionSpec:
        """How the partitioner splits the array."""
        return PartitionSpec(*self.kept.axes, None)


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
        found = {name for form in self.forms for name in form.names}
        found -= {name for buffer in self.buffers for name, _ in buffer.leaves}
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
        """The place of each leaf of a stage among the arrays.

        Matrices, whose sizes are round, come before vectors in a buffer, so that they begin at
        round addresses.  `pinned`: in a program that tells the partitioner how it splits them.
        """
        at = {name: i for i, name in enumerate(self.names)}
        shapes = dict(zip(form.names, form.shapes, strict=True))
        found: dict[str, Home] = {}
        for buffer in self.buffers:
            entries = [
                (name, Entry(shapes[name], kept.parts, pinned=pinned and kept.pinned))
                for name, kept in buffer.leaves
                if name in shapes
            ]
            start = 0
            for name, entry in sorted(entries, key=lambda pair: (-pair[1].length, pair[0])):
                found[name] = Home(at[buffer.name], entry, True, start)
                start += entry.length
        return tuple(
            found.get(name) or Home(at[name], Entry(shape), False) for name, shape in shapes.items()
        )

    def parameters(
        self, numbers: Sequence[int], *, layered: bool
    ) -> dict[str, list[tuple[Parameter, InBuffer | None]]]:
        """The parameters that are in each array, and how, where it is a buffer; `numbers` are those
        of the stages.
        """
        stored = {name: how for buffer in self.buffers for name, how in buffer.leaves}
        found: dict[str, list[tuple[Parameter, InBuffer | None]]] = {n: [] for n in self.names}
        for form, stage in zip(self.forms, numbers, strict=True):
            owns = form.parameters(stage, layered=layered)
            for name, place, own in zip(form.names, self.places(form), owns, strict=True):
                found[self.names[place.at]].append((own, stored.get(name)))
        return found

    def values(self, form: TreeForm, rows: dict[str, Any], *, pinned: bool = False) -> list[Any]:
        """A stage's leaves out of one device's arrays; those of a missing array are missing."""
        arrays = [rows[name] for name in self.names]
        return [
            arrays[place.at] if is_missing(arrays[place.at]) else place.take(arrays[place.at])
            for place in self.places(form, pinned=pinned)
        ]

    def rows(
        self, form: TreeForm, values: Sequence[Any], *, pinned: bool = False
    ) -> dict[str, Any]:
        """The inverse: those of one device's arrays in which the stage has leaves."""
        found: dict[str, Any] = {}
        for place, value in zip(self.places(form, pinned=pinned), values, strict=True):
            name = self.names[place.at]
            buffer = self.of(name)
            if buffer is not None and not is_missing(value):
                shape, dtype = (*place.entry.counts, buffer.size), jax.typeof(value).dtype
                before = found[name] if name in found else jnp.zeros(shape, dtype)
                value = place.put(before, value)
            found[name] = value
        return found


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
        """The inverse of `tree_flatten`."""
        return cls(dict(zip(layout.names, children, strict=True)), layout)

    @classmethod
    def of(cls, stages: Sequence[PyTree | None], layout: ChunkLayout) -> Packed:
        """The stages of one chunk, by device; a leaf may be missing, where it is so in all."""
        rows = [
            layout.rows(form, form.tree.flatten_up_to(stage))
            for stage, form in zip(stages, layout.forms, strict=True)
        ]
        return cls({name: _stack([row.get(name) for row in rows]) for name in layout.names}, layout)

    def stage(self, device: int) -> PyTree:
        """One device's own parameters."""
        form = self.layout.forms[device]
        rows = jax.tree.map(lambda leaf: leaf[device], self.leaves)
        return jax.tree.unflatten(form.tree, self.layout.values(form, rows))


def is_missing(node: PyTree) -> bool:
    """Whether a leaf is missing: a mask took it out, or it is frozen."""
    return not jax.tree.leaves(node)


def masked(leaf: Any, there: Sequence[bool], axis: int = 0, *, rest: Any = None) -> Any:
    """The leaf [P, ...] with zeros, or the rest's entries, for devices that are not there; these
    are along `axis`.
    """
    if all(there):
        return leaf
    mask = np.array(there).reshape(-1, *(1,) * (leaf.ndim - 1 - axis))
    return jnp.where(mask, leaf, jnp.zeros_like(leaf) if rest is None else rest)


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
    known: dict[str, list[Any]] = {}
    for name, kind in _by_leaf(forms, kinds):
        if kind not in known.setdefault(name, []):
            known[name].append(kind)
    mark = " "
    while any(f"{mark}(" in name for name in known):
        mark += " "

    def renamed(name: str, kind: Any) -> str:
        at = known[name].index(kind)
        return f"{name}{mark}({at + 1})" if at else name

    return tuple(
        replace(form, names=tuple(map(renamed, form.names, own)))
        for form, own in zip(forms, kinds, strict=True)
    )


def _by_leaf(
    forms: Sequence[TreeForm], values: Sequence[Sequence[Any]]
) -> Iterator[tuple[str, Any]]:
    """(name, value) of each leaf of each form."""
    for form, own in zip(forms, values, strict=True):
        yield from zip(form.names, own, strict=True)


def chunk_layout(
    stages: Sequence[PyTree | None], numbers: Sequence[int], kept: Storing, *, layered: bool = False
) -> ChunkLayout:
    """The layout of one chunk: its stages by device (arrays or shapes), and their numbers in the
    model.

    Leaves of one group and dtype that are split over the same axes may be in one buffer.  Where
    stages give one path leaves that may not be together, as one of them is frozen or of another
    dtype, these have names of their own.
    """
    forms = list(map(TreeForm.of, stages))
    kinds = [
        [
            (kept(own, dtype := jax.typeof(leaf).dtype), dtype)
            for own, leaf in zip(
                form.parameters(number, layered=layered), jax.tree.leaves(stage), strict=True
            )
        ]
        for form, number, stage in zip(forms, numbers, stages, strict=True)
    ]
    named = with_distinct_names(forms, kinds)
    return ChunkLayout(named, tuple(_buffers(named, dict(_by_leaf(named, kinds)))))


def _buffers(
    forms: Sequence[TreeForm], kinds: Mapping[str, tuple[InBuffer, Any]]
) -> Iterator[Buffer]:
    """The buffers of stages that share a chunk, where these are smaller than an array for each
    leaf; and one for each leaf whose shapes differ.  `kinds` are how leaves are stored, and dtypes.

    Leaves that all stages have alike take no less room together, so each stays by itself.
    """
    known = [form for form in forms if form.names]
    shapes: dict[str, list[tuple[int, ...]]] = {}
    lengths: list[dict[str, int]] = []
    for form in known:
        own = dict(zip(form.names, form.shapes, strict=True))
        lengths.append({n: Entry(shape, kinds[n][0].parts).length for n, shape in own.items()})
        for name, shape in own.items():
            shapes.setdefault(name, []).append(shape)
    groups: dict[Any, list[str]] = {}
    for name in sorted(shapes):
        if len(shapes[name]) < len(known) or len(set(shapes[name])) > 1:
            how, dtype = kinds[name]
            by_itself = name if how.group is Group.ALONE else ""
            groups.setdefault((dtype, how.group, how.axes, by_itself), []).append(name)

    def buffer(name: str, leaves: Sequence[str]) -> Buffer:
        most = max(sum(own.get(leaf, 0) for leaf in leaves) for own in lengths)
        multiple = kinds[leaves[0]][0].multiple
        size = math.ceil(most / multiple) * multiple
        return Buffer(name, size, tuple((leaf, kinds[leaf][0]) for leaf in leaves))

    word = "buffer"
    while any(name.startswith(word) for name in shapes):
        word += "_"
    for number, leaves in enumerate(groups.values()):
        shared = buffer(f"{word} {number}", leaves)
        if shared.size < sum(max(own.get(leaf, 0) for own in lengths) for leaf in leaves):
            yield shared
        else:
            yield from (buffer(n, [n]) for n in leaves if len(set(shapes[n])) > 1)


def repacked(mesh: Mesh, axis: str, chunk: Packed, layout: ChunkLayout) -> Packed:
    """The chunk in another layout of the same stages; each device moves its own leaves."""
    if chunk.layout == layout:
        return chunk
    return on_own_stages(mesh, axis, lambda _, own: (own,), [chunk], [layout])[0]


def on_own_stages(
    mesh: Mesh,
    axis: str,
    function: Callable[..., tuple[PyTree, ...]],
    chunks: Sequence[Packed],
    layouts: Sequence[ChunkLayout],
    more: PyTree = None,
) -> list[Packed]:
    """What a function makes of the trees of each device's own stage: a tree for each of the
    layouts.  Its first argument is `more`, alike on all devices.

    Devices do unlike things inside.  So buffers, and what goes into buffers, are split in the
    partitioner's way before and after, and moving leaves exchanges nothing.
    """
    before, given = [chunk.layout for chunk in chunks], [chunk.leaves for chunk in chunks]
    by_device = list(zip(*(layout.forms for layout in (*before, *layouts)), strict=True))
    kinds = list(dict.fromkeys(by_device))
    numbers = [kinds.index(forms) for forms in by_device]

    def one(leaves: list[dict[str, Any]], more: PyTree) -> list[dict[str, Any]]:
        own = jax.tree.map(lambda leaf: leaf[0], leaves)
        own = [_split(rows, _splits(of, layouts)) for rows, of in zip(own, before, strict=True)]

        def run(kind: tuple[TreeForm, ...], own: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            trees = [
                jax.tree.unflatten(form.tree, layout.values(form, rows, pinned=True))
                for form, layout, rows in zip(kind, before, own, strict=False)
            ]
            found = zip(kind[len(before) :], layouts, function(more, *trees), strict=True)
            return [
                layout.rows(form, form.tree.flatten_up_to(tree), pinned=True)
                for form, layout, tree in found
            ]

        shapes = [jax.eval_shape(partial(run, kind), own) for kind in kinds]
        like = [
            {k: v for rows in each for k, v in rows.items()} for each in zip(*shapes, strict=True)
        ]

        def full(kind: tuple[TreeForm, ...], own: Any) -> list[dict[str, Any]]:
            pairs = zip(like, run(kind, own), strict=True)
            return [{**zeros_of(shapes), **rows} for shapes, rows in pairs]

        number = jnp.array(numbers)[lax.axis_index(axis)]
        found = lax.switch(number, [partial(full, kind) for kind in kinds], own)
        found = [_split(r, _splits(of, before)) for r, of in zip(found, layouts, strict=True)]
        stacked: list[dict[str, Any]] = jax.tree.map(lambda leaf: leaf[None], found)
        return stacked

    spec, everywhere = PartitionSpec(axis), PartitionSpec()
    mapped = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(spec, everywhere),
        out_specs=spec,
        axis_names={axis},
        check_vma=False,
    )
    found = jit_on_mesh(mesh, mapped)(given, more)
    return [Packed(leaves, layout) for leaves, layout in zip(found, layouts, strict=True)]


def _split(rows: dict[str, Any], specs: Mapping[str, PartitionSpec]) -> dict[str, Any]:
    there = {name: spec for name, spec in specs.items() if not is_missing(rows.get(name))}
    return rows | {n: lax.with_sharding_constraint(rows[n], there[n]) for n in there}


def _splits(layout: ChunkLayout, others: Sequence[ChunkLayout]) -> dict[str, PartitionSpec]:
    """How the partitioner splits one device's arrays that are buffers in this layout or, where the
    trees are the same, in another one.
    """
    found: dict[str, PartitionSpec] = {}
    for other in others:
        for old, new in zip(other.forms, layout.forms, strict=True):
            if old.tree == new.tree:
                places = zip(new.names, other.places(old, pinned=True), strict=True)
                found |= {name: place.entry.spec for name, place in places if place.flat}
    return found | {buffer.name: buffer.spec for buffer in layout.buffers}
