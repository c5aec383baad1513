"""The table of unlike stages: a row for each leaf says in which array of its chunk it is stored, as
it is or in a buffer, from which place on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import batched, chain, islice
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from ..arrays import PyTree, as_dtype, by_path
from ..jaxprs.entry import Entry, Part, Piece
from ..model.replaced import Replacement


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

    def take(self, leaf: jax.Array) -> jax.Array:
        """The leaf out of the shared buffer's."""
        return Piece(leaf, self.start, self.entry).load() if self.flat else leaf

    def put(self, leaf: jax.Array, value: jax.Array) -> jax.Array:
        """The shared buffer's leaf with this value in its place."""
        value = as_dtype(value, leaf.dtype)
        if not self.flat:
            return value
        raveled = self.entry.ravel(self.entry.pack(value))
        return lax.dynamic_update_slice_in_dim(leaf, raveled, self.start, axis=-1)


Places: TypeAlias = "tuple[Home, ...]"


def stacks_of_layers(places: Sequence[Home]) -> frozenset[int]:
    """The arrays of which all of these places are layers."""
    return frozenset(p.at for p in places) - {p.at for p in places if p.row is None}


class Parameter(NamedTuple):
    """A parameter as the user knows it: its canonical path, "stages/1/w", and its shape without the
    axis of stages or layers.
    """

    path: str
    shape: tuple[int, ...]


class Group(Enum):
    """Leaves of which some share a buffer."""

    TRAINED = "trained"
    FROZEN = "frozen"
    ALONE = "alone"  # each by itself


class BufferKey(NamedTuple):
    """What decides with which others a leaf may share a buffer."""

    group: Group = Group.ALONE
    parts: tuple[Part, ...] = ()  # that the partitioner makes of it
    replaced: Replacement | None = None  # see `LeafPlan`

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of each dim that is split: alike in all leaves of a buffer."""
        return tuple(part.axes for part in self.parts)


class Storing(NamedTuple):
    """How parameters of some dtypes may be stored; by itself, an array for each leaf."""

    kept: Callable[[Parameter, DTypeLike], BufferKey] = lambda _parameter, _dtype: BufferKey()
    multiple: int = 1  # of which a buffer's size is, as an axis splits it
    pinned: bool = False  # there are axes that the partitioner may split over


ALONE = Storing()


class LeafRow(NamedTuple):
    """Where a leaf of a stage is stored."""

    path: str  # in the stage's own tree
    name: str  # of its array, where that holds nothing else; alike in stages that share it
    entry: Entry  # its shape, and the parts that the partitioner makes of it
    kept: BufferKey = BufferKey()
    buffer: str = ""  # the array that holds it with others
    start: int = 0  # there, in each part

    @property
    def array(self) -> str:
        """The name of the array that holds it."""
        return self.buffer or self.name


@dataclass(frozen=True)
class TreeForm:
    """The tree of a stage's parameters, and a row for each leaf."""

    tree: PyTreeDef
    rows: tuple[LeafRow, ...]

    @classmethod
    def of(cls, params: PyTree) -> TreeForm:
        """Read off a stage's own parameters (arrays or shapes), an array for each."""
        leaves = by_path(params)
        rows = (LeafRow(path, path, Entry(tuple(np.shape(leaf)))) for path, leaf in leaves.items())
        return cls(jax.tree.structure(params), tuple(rows))

    def places(self, arrays: Iterable[str], *, pinned: bool = False) -> Places:
        """The place of each leaf among the arrays of these names.  `pinned`: in a program that
        tells the partitioner how it splits them.
        """
        at = {name: i for i, name in enumerate(arrays)}
        return tuple(
            Home(at[row.array], replace(row.entry, pinned=pinned), bool(row.buffer), row.start)
            for row in self.rows
        )

    def parameters(self, stage: int | None, *, layered: bool) -> list[Parameter]:
        """The parameters of a stage of this form, in the order of its leaves; None: their paths
        without the stage's number.

        The layers of a letter are one parameter, in whatever stacks "t/0/w" and "t/1/w" they are.
        """
        found = []
        for row in self.rows:
            if layered:
                letter, _, *rest = row.path.split("/")
                path = "/".join(["stages", letter, *rest])
            else:
                number = "" if stage is None else str(stage)
                path = "/".join(filter(None, ["stages", number, row.path]))
            found.append(Parameter(path, row.entry.shape[int(layered) :]))
        return found


def rows_of(forms: Iterable[TreeForm]) -> list[LeafRow]:
    """The rows of all forms."""
    return [row for form in forms for row in form.rows]


class Buffer(NamedTuple):
    """An array that holds leaves one after the other, as many as the device has that needs most
    room.

    The array is [parts, ..., size], with a dim for each that the partitioner splits: each of its
    devices has its part of every leaf.
    """

    name: str
    size: int  # of each part
    axes: tuple[tuple[str, ...], ...]  # of the parts

    @property
    def spec(self) -> PartitionSpec:
        """How the partitioner splits the array."""
        return PartitionSpec(*self.axes, None)


@dataclass(frozen=True)
class ChunkLayout:
    """The storage of unlike stages that share a chunk.

    The arrays of all devices have one shape, so a leaf whose shape differs is in a buffer.
    """

    forms: tuple[TreeForm, ...]  # by device
    buffers: tuple[Buffer, ...] = ()
    pinned: bool = False  # see `Storing`

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arrays."""
        return tuple(sorted({row.array for row in rows_of(self.forms)}))

    def of(self, name: str) -> Buffer | None:
        """The buffer of this name; None for the array of one leaf."""
        return next((buffer for buffer in self.buffers if buffer.name == name), None)

    @property
    def separate(self) -> ChunkLayout:
        """An array for each leaf; leaves of one name but of unlike shapes get names of their
        own.
        """
        shapes = [row.entry.shape for row in rows_of(self.forms)]
        forms = _named([_in_buffers(form, {}) for form in self.forms], shapes)
        return replace(self, forms=tuple(forms), buffers=())

    def parameters(
        self, numbers: Sequence[int], *, layered: bool
    ) -> dict[str, list[tuple[Parameter, BufferKey | None]]]:
        """The parameters that are in each array, and how, where it is a buffer; `numbers` are those
        of the stages.
        """
        found: dict[str, list[tuple[Parameter, BufferKey | None]]] = {n: [] for n in self.names}
        for form, stage in zip(self.forms, numbers, strict=True):
            parameters = form.parameters(stage, layered=layered)
            for row, own in zip(form.rows, parameters, strict=True):
                found[row.array].append((own, row.kept if row.buffer else None))
        return found

    def load(self, form: TreeForm, arrays: dict[str, jax.Array], *, pinned: bool = False) -> PyTree:
        """A stage's own tree out of one device's arrays; leaves of a missing array are missing."""
        own = [arrays[name] for name in self.names]
        places = form.places(self.names, pinned=pinned and self.pinned)
        values = [own[p.at] if is_missing(own[p.at]) else p.take(own[p.at]) for p in places]
        return jax.tree.unflatten(form.tree, values)

    def store(self, form: TreeForm, tree: PyTree, *, pinned: bool = False) -> dict[str, jax.Array]:
        """The inverse: those of one device's arrays in which the stage has leaves."""
        found: dict[str, jax.Array] = {}
        places = form.places(self.names, pinned=pinned and self.pinned)
        for place, value in zip(places, form.tree.flatten_up_to(tree), strict=True):
            name = self.names[place.at]
            if (buffer := self.of(name)) and not is_missing(value):
                shape, dtype = (*place.entry.counts, buffer.size), jax.typeof(value).dtype
                value = place.put(found.get(name, jnp.zeros(shape, dtype)), value)
            found[name] = value
        return found


def is_missing(node: object) -> bool:
    """Whether a leaf is missing: a mask took it out, or it is frozen."""
    return not jax.tree.leaves(node)


def chunk_layouts(
    chunks: Sequence[Sequence[PyTree | None]],
    numbers: Sequence[Sequence[int]],
    how: Storing,
    *,
    layered: bool = False,
    alike: bool = False,
) -> list[ChunkLayout]:
    """The layout of each chunk: its stages by device (arrays or shapes), and their numbers in the
    model.  `alike`: see `ParamLayout`.

    Leaves of one group and dtype that are split over the same axes may be in one buffer.  Where
    stages give one path leaves that may not be together, as one of them is frozen or of another
    dtype, these have names of their own.
    """
    if not alike and len(chunks) > 1:
        pairs = zip(chunks, numbers, strict=True)
        return [chunk_layouts([c], [n], how, layered=layered)[0] for c, n in pairs]
    forms, dtypes = [], list[np.dtype]()
    for stage, number in zip(chain(*chunks), chain(*numbers), strict=True):
        form, own = TreeForm.of(stage), [jax.typeof(leaf).dtype for leaf in jax.tree.leaves(stage)]
        kept = map(how.kept, form.parameters(number, layered=layered), own)
        rows = (
            row._replace(entry=replace(row.entry, parts=key.parts), kept=key)
            for row, key in zip(form.rows, kept, strict=True)
        )
        forms.append(replace(form, rows=tuple(rows)))
        dtypes += own
    kinds = zip((row.kept for row in rows_of(forms)), dtypes, strict=True)
    named = _named(forms, kinds)
    of_name = dict(zip((row.name for row in rows_of(named)), dtypes, strict=True))
    buffers = dict(_buffers(named, of_name, how.multiple))
    forms = [_in_buffers(form, buffers) for form in named]
    every = tuple(dict.fromkeys(buffers.values()))
    return [ChunkLayout(own, every, how.pinned) for own in batched(forms, len(chunks[0]))]


def _named(forms: Sequence[TreeForm], kinds: Iterable[object]) -> list[TreeForm]:
    """The forms, with names of their own for leaves of one name but of unlike kinds; `kinds` are
    those of all rows.
    """
    known: dict[str, dict[object, int]] = {row.name: {} for row in rows_of(forms)}
    mark = " "
    while any(f"{mark}(" in name for name in known):
        mark += " "

    def renamed(row: LeafRow, kind: object) -> LeafRow:
        number = known[row.name].setdefault(kind, len(known[row.name]))
        return row._replace(name=f"{row.name}{mark}({number + 1})") if number else row

    rows = map(renamed, rows_of(forms), kinds)
    return [replace(form, rows=tuple(islice(rows, len(form.rows)))) for form in forms]


def _in_buffers(form: TreeForm, buffers: Mapping[str, Buffer]) -> TreeForm:
    """The form with leaves in buffers, by name.

    Matrices, whose sizes are round, come before vectors in a buffer, so that they begin at round
    addresses.
    """
    rows, ends = dict(enumerate(form.rows)), Counter[str]()
    for n, row in sorted(rows.items(), key=lambda pair: (-pair[1].entry.length, pair[1].name)):
        name = buffers[row.name].name if row.name in buffers else ""
        rows[n] = row._replace(buffer=name, start=ends[name] if name else 0)
        ends[name] += row.entry.length
    return replace(form, rows=tuple(rows.values()))


def _buffers(
    forms: Sequence[TreeForm], dtypes: Mapping[str, np.dtype], multiple: int
) -> Iterator[tuple[str, Buffer]]:
    """The buffers of leaves by name, for stages that share a chunk, where these are smaller than an
    array for each leaf; and one for each leaf whose shapes differ.

    Leaves that all stages have alike take no less room together, so each stays by itself.
    """
    known = [{row.name: row for row in form.rows} for form in forms if form.rows]
    every = {name: [own[name] for own in known if name in own] for name in sorted(dtypes)}
    differ = {name for name, own in every.items() if len({row.entry.shape for row in own}) > 1}
    groups: dict[object, list[str]] = {}
    for name, (row, *more) in every.items():
        if 1 + len(more) < len(known) or name in differ:
            by_itself = name if row.kept.group is Group.ALONE else ""
            key = dtypes[name], row.kept.group, row.kept.axes, by_itself
            groups.setdefault(key, []).append(name)

    def buffer(name: str, leaves: Sequence[str]) -> Buffer:
        most = max(sum(own[n].entry.length for n in leaves if n in own) for own in known)
        return Buffer(name, math.ceil(most / multiple) * multiple, every[leaves[0]][0].kept.axes)

    word = "buffer"
    while any(name.startswith(word) for name in every):
        word += "_"
    for number, leaves in enumerate(groups.values()):
        shared = buffer(f"{word} {number}", leaves)
        if shared.size < sum(max(row.entry.length for row in every[leaf]) for leaf in leaves):
            yield from ((leaf, shared) for leaf in leaves)
        else:
            yield from ((leaf, buffer(leaf, [leaf])) for leaf in leaves if leaf in differ)
