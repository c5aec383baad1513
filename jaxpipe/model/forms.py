"""What the parameters of one stage are by themselves, and which of those of unlike stages share a buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from ..arrays import PyTree
from ..jaxprs import Entry, Part

Axes: TypeAlias = "tuple[tuple[tuple[str, ...], int], ...]"


@dataclass(frozen=True)
class TreeForm:
    """The tree of a stage's parameters, and the path and shape of each leaf."""

    tree: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: PyTree) -> TreeForm:
        """Read off a stage's own parameters (arrays or shapes)."""
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = tuple(keystr(path, simple=True, separator="/") for path, _ in leaves)
        return cls(jax.tree.structure(params), paths, tuple(tuple(np.shape(leaf)) for _, leaf in leaves))

    def shape_of(self) -> dict[str, tuple[int, ...]]:
        """Shapes by path."""
        return dict(zip(self.paths, self.shapes, strict=True))


class Lie(NamedTuple):
    """How a leaf may lie in a buffer: beside others of its group, cut into the parts that the partitioner makes of it."""

    group: Hashable
    parts: tuple[Part, ...] = ()

    @property
    def axes(self) -> Axes:
        """The mesh axes of each dim that is split, and how many parts they make: alike in all leaves of a buffer."""
        return tuple((part.axes, part.count) for part in self.parts)


class Buffer(NamedTuple):
    """Leaves that lie in one array, one after the other: as long as the device needs that has most of them.

    The array is [parts, ..., size], with a dim for each that the partitioner splits: each of its devices has its part of every leaf.
    """

    name: str
    size: int  # of each part
    paths: tuple[str, ...]
    lies: tuple[Lie, ...]  # by path; of one group and the same axes: see `Sharing`
    pinned: bool = False  # there are axes that the partitioner may split over

    @property
    def group(self) -> Hashable:
        """What the leaves have in common."""
        return self.lies[0].group

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of parts of each dim that is split."""
        return tuple(count for _, count in self.lies[0].axes)

    @property
    def spec(self) -> PartitionSpec:
        """How the partitioner splits the array."""
        return PartitionSpec(*(axes for axes, _ in self.lies[0].axes), None)

    def starts(self, form: TreeForm) -> dict[str, int]:
        """Where each leaf of a stage begins; matrices, whose sizes are round, before vectors, so that they lie at round addresses."""
        sizes = {path: entry.length for path, entry in self.entries(form).items()}
        order = sorted(sizes, key=lambda path: (-sizes[path], path))
        return dict(zip(order, np.cumsum([0, *(sizes[path] for path in order)]).tolist(), strict=False))

    def entries(self, form: TreeForm, *, pinned: bool = False) -> dict[str, Entry]:
        """How each of a stage's leaves is raveled; `pinned`: in a program that says to the partitioner how it splits them."""
        shapes = form.shape_of()
        return {
            path: Entry(shapes[path], lie.parts, pinned and self.pinned)
            for path, lie in zip(self.paths, self.lies, strict=True)
            if path in shapes
        }


@dataclass(frozen=True)
class Sharing:
    """Which leaves may lie in one buffer: those of one group, split over the same axes (and dtype); None is a leaf that stays by itself."""

    lie: Callable[[str, jax.ShapeDtypeStruct], Lie | None]
    multiple: int = 1  # of which a buffer's length is, as an axis splits it
    pinned: bool = False  # there are axes that the partitioner may split over

    def buffers(self, forms: Sequence[TreeForm], dtypes: Mapping[str, Any]) -> tuple[Buffer, ...]:
        """The buffers of stages that share a chunk, where these are smaller than an array for each leaf.

        What all stages have alike takes no less room together, so it stays by itself, as it is.
        """
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for form in forms:
            for path, shape in zip(form.paths, form.shapes, strict=True):
                shapes.setdefault(path, []).append(shape)
        groups: dict[Any, dict[str, Lie]] = {}
        for path, found in shapes.items():
            lie = self._lie(path, found, dtypes[path])
            if lie is not None and (len(found) < len(forms) or len(set(found)) > 1):
                groups.setdefault((dtypes[path], lie.group, lie.axes), {})[path] = lie
        name = "buffer"
        while any(path.startswith(name) for path in shapes):
            name += "_"
        return tuple(
            buffer._replace(size=size)
            for number, lies in enumerate(sorted(groups.values(), key=min))
            for buffer in [Buffer(f"{name} {number}", 0, tuple(sorted(lies)), tuple(lies[path] for path in sorted(lies)), self.pinned)]
            if (size := self._size(forms, buffer)) < self._apart(buffer, shapes)
        )

    def _lie(self, path: str, shapes: Iterable[tuple[int, ...]], dtype: Any) -> Lie | None:
        """How the leaf lies, where it does so in every shape that stages give it."""
        lies = {self.lie(path, jax.ShapeDtypeStruct(shape, dtype)) for shape in shapes}
        return lies.pop() if len(lies) == 1 else None

    def _size(self, forms: Sequence[TreeForm], buffer: Buffer) -> int:
        most = max(sum(entry.length for entry in buffer.entries(form).values()) for form in forms)
        return math.ceil(most / self.multiple) * self.multiple

    def _apart(self, buffer: Buffer, shapes: Mapping[str, Sequence[tuple[int, ...]]]) -> int:
        """Numbers of each part in arrays of their own."""
        return sum(max(Entry(shape, lie.parts).length for shape in shapes[p]) for p, lie in zip(buffer.paths, buffer.lies, strict=True))

    def faults(self, buffer: Buffer, forms: Sequence[TreeForm | None], dtype: Any) -> list[str]:
        """Why a buffer made with another sharing cannot be used with this one."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for form in forms:
            for path, shape in () if form is None else zip(form.paths, form.shapes, strict=True):
                shapes.setdefault(path, []).append(shape)
        odd = [path for path, lie in zip(buffer.paths, buffer.lies, strict=True) if self._lie(path, shapes[path], dtype) != lie]
        again = "bring them over with the pipeline that placed them as `old`: new.place(old.canonical(...))"
        if odd:
            others = [path for path in buffer.paths if path != odd[0]]
            beside = f"beside {others[0]!r}" if others else "as it is not split here"
            return [f"{odd[0]!r} lies in one array {beside}, but frozen=, specs= or the mesh axes of this pipeline keep it apart; {again}"]
        if buffer.pinned != self.pinned:
            return [f"{buffer.name!r} is of a pipeline whose mesh had other axes; {again}"]
        if buffer.size % self.multiple:
            return [f"{buffer.name!r} of {buffer.size} numbers does not divide over the {self.multiple} devices of fsdp; {again}"]
        return []


def unlike_paths(forms: Sequence[TreeForm]) -> frozenset[str]:
    """Paths at which stages have leaves of different shapes."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for form in forms:
        for path, shape in zip(form.paths, form.shapes, strict=True):
            shapes.setdefault(path, set()).add(shape)
    return frozenset(path for path, found in shapes.items() if len(found) > 1)
