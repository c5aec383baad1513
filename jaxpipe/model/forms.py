"""What the parameters of one stage are by themselves, and which of those of unlike stages share a
buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from ..arrays import PyTree
from ..jaxprs import Entry, Part

Axes: TypeAlias = "tuple[tuple[tuple[str, ...], int], ...]"


class Own(NamedTuple):
    """A parameter as the user knows it: its canonical path, "stages/1/w", and its shape without the
    axis of stages or layers.
    """

    path: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, path: str, shape: Sequence[int], stage: int, *, layered: bool) -> Own:
        """A leaf of a stage's own tree; the layers of a letter are one parameter, wherever their
        stacks "t/0/w" and "t/1/w" lie.
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
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = tuple(keystr(path, simple=True, separator="/") for path, _ in leaves)
        return cls(
            jax.tree.structure(params), paths, tuple(tuple(np.shape(leaf)) for _, leaf in leaves)
        )

    def shape_of(self) -> dict[str, tuple[int, ...]]:
        """Shapes by path."""
        return dict(zip(self.paths, self.shapes, strict=True))

    @cached_property
    def tree_paths(self) -> tuple[str, ...]:
        """The path of each leaf in the tree."""
        return tuple(path for path, number in self._places if number is not None)

    @cached_property
    def _places(self) -> list[tuple[str, Any]]:
        """Paths of the tree, those where it holds None too, and the number of the leaf."""
        numbers = jax.tree.unflatten(self.tree, range(len(self.paths)))
        found = jax.tree_util.tree_leaves_with_path(numbers, is_leaf=lambda node: node is None)
        return [(keystr(path, simple=True, separator="/"), number) for path, number in found]

    def owns(self, stage: int, *, layered: bool) -> list[Own]:
        """The parameters of a stage of this form, in the order of its leaves."""
        return [
            Own.of(path, shape, stage, layered=layered)
            for path, shape in zip(self.tree_paths, self.shapes, strict=True)
        ]

    def gaps(self, stage: int, *, layered: bool) -> list[str]:
        """The paths at which a stage of this form holds None."""
        return [
            Own.of(path, (), stage, layered=layered).path
            for path, number in self._places
            if number is None
        ]


class Group(Enum):
    """Leaves of which some share a buffer."""

    TRAINED = "trained"
    FROZEN = "frozen"
    STATE = "state"


class Lie(NamedTuple):
    """How a leaf may lie in a buffer: beside others of its group, cut into the parts that the
    partitioner makes of it.
    """

    group: Group
    parts: tuple[Part, ...] = ()

    @property
    def axes(self) -> Axes:
        """The mesh axes of each dim that is split, and how many parts they make: alike in all
        leaves of a buffer.
        """
        return tuple((part.axes, part.count) for part in self.parts)


class Buffer(NamedTuple):
    """Leaves that lie in one array, one after the other: as long as the device needs that has most
    of them.

    The array is [parts, ..., size], with a dim for each that the partitioner splits: each of its
    devices has its part of every leaf.
    """

    name: str
    size: int  # of each part
    paths: tuple[str, ...]
    lies: tuple[Lie, ...]  # by path; of one group and the same axes: see `Sharing`
    pinned: bool = False  # there are axes that the partitioner may split over

    @property
    def group(self) -> Group:
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
        """Where each leaf of a stage begins; matrices, whose sizes are round, before vectors, so
        that they lie at round addresses.
        """
        sizes = {path: entry.length for path, entry in self.entries(form).items()}
        order = sorted(sizes, key=lambda path: (-sizes[path], path))
        return dict(
            zip(order, np.cumsum([0, *(sizes[path] for path in order)]).tolist(), strict=False)
        )

    def entries(self, form: TreeForm, *, pinned: bool = False) -> dict[str, Entry]:
        """How each of a stage's leaves is raveled; `pinned`: in a program that says to the
        partitioner how it splits them.
        """
        shapes = form.shape_of()
        return {
            path: Entry(shapes[path], lie.parts, pinned and self.pinned)
            for path, lie in zip(self.paths, self.lies, strict=True)
            if path in shapes
        }


@dataclass(frozen=True)
class Sharing:
    """Which leaves may lie in one buffer: those of one group, split over the same axes (and dtype);
    None is a leaf that stays by itself.

    Where stages give one path leaves that may not lie together, as one of them is frozen, these
    have names of their own.
    """

    lie: Callable[[Own, Any], Lie | None]  # of a parameter and its dtype
    multiple: int = 1  # of which a buffer's length is, as an axis splits it
    pinned: bool = False  # there are axes that the partitioner may split over
    layered: bool = False  # stages are made of layers
    apart: bool = False  # no leaves share a buffer

    def named(
        self, stages: Sequence[PyTree | None], numbers: Sequence[int]
    ) -> tuple[TreeForm | None, ...]:
        """The forms of the stages of one chunk, by device; `numbers` are theirs in the model."""
        forms = [None if stage is None else TreeForm.of(stage) for stage in stages]
        lies = []
        for stage, form, number in zip(stages, forms, numbers, strict=True):
            owns = [] if form is None else form.owns(number, layered=self.layered)
            lies.append(
                [
                    self.lie(own, jax.typeof(leaf).dtype)
                    for own, leaf in zip(owns, jax.tree.leaves(stage), strict=True)
                ]
            )
        return told_apart(forms, lies)

    def buffers(
        self, forms: Sequence[TreeForm | None], numbers: Sequence[int], dtypes: Mapping[str, Any]
    ) -> tuple[Buffer, ...]:
        """The buffers of stages that share a chunk, where these are smaller than an array for each
        leaf.

        What all stages have alike takes no less room together, so it stays by itself, as it is.
        """
        known = [form for form in forms if form is not None]
        shapes: dict[str, list[tuple[int, ...]]] = {}
        groups: dict[Any, dict[str, Lie]] = {}
        for name, owns in by_name(forms, numbers, layered=self.layered).items():
            lie = None if self.apart else self._lie([own for own, _ in owns], dtypes[name])
            found = shapes[name] = [shape for _, shape in owns]
            if lie is not None and (len(found) < len(known) or len(set(found)) > 1):
                groups.setdefault((dtypes[name], lie.group, lie.axes), {})[name] = lie
        name = "buffer"
        while any(path.startswith(name) for path in shapes):
            name += "_"
        return tuple(
            buffer._replace(size=size)
            for number, lies in enumerate(sorted(groups.values(), key=min))
            for buffer in [
                Buffer(
                    f"{name} {number}",
                    0,
                    tuple(sorted(lies)),
                    tuple(lies[path] for path in sorted(lies)),
                    self.pinned,
                )
            ]
            if (size := self._size(known, buffer)) < self._apart(buffer, shapes)
        )

    def _lie(self, owns: Iterable[Own], dtype: Any) -> Lie | None:
        """How the leaf lies, where it does so as each of these."""
        lies = {self.lie(own, dtype) for own in owns}
        return lies.pop() if len(lies) == 1 else None

    def _size(self, forms: Sequence[TreeForm], buffer: Buffer) -> int:
        most = max(sum(entry.length for entry in buffer.entries(form).values()) for form in forms)
        return math.ceil(most / self.multiple) * self.multiple

    def _apart(self, buffer: Buffer, shapes: Mapping[str, Sequence[tuple[int, ...]]]) -> int:
        """Numbers of each part in arrays of their own."""
        return sum(
            max(Entry(shape, lie.parts).length for shape in shapes[p])
            for p, lie in zip(buffer.paths, buffer.lies, strict=True)
        )

    def faults(
        self, owns: Mapping[str, Sequence[Own]], dtype: Any, buffer: Buffer | None
    ) -> list[str]:
        """Why a leaf (a buffer, or one by itself) that was placed with another sharing cannot be
        used with this one.

        `owns` are the parameters that lie in it, by name.
        """
        lies = {name: {self.lie(own, dtype) for own in found} for name, found in owns.items()}
        wanted = {} if buffer is None else dict(zip(buffer.paths, buffer.lies, strict=True))
        odd = [
            name
            for name, found in lies.items()
            if len(found) > 1 or (name in wanted and found != {wanted[name]})
        ]
        again = (
            "bring them over with the pipeline that placed them as `old`: "
            "new.place(old.canonical(...))"
        )
        if odd:
            first, *others = dict.fromkeys(
                [*owns[odd[0]], *(own for found in owns.values() for own in found)]
            )
            beside = f"beside {others[0].path!r}" if others else "as it is not split here"
            return [
                f"{first.path!r} lies in one array {beside}, but frozen=, specs= or the mesh "
                f"axes of this pipeline keep it apart; {again}"
            ]
        if buffer is not None and buffer.pinned != self.pinned:
            return [f"{buffer.name!r} is of a pipeline whose mesh had other axes; {again}"]
        if buffer is not None and buffer.size % self.multiple:
            return [
                f"{buffer.name!r} of {buffer.size} numbers does not divide over the "
                f"{self.multiple} devices of fsdp; {again}"
            ]
        return []


def told_apart(
    forms: Sequence[TreeForm | None], kinds: Sequence[Sequence[Any]]
) -> tuple[TreeForm | None, ...]:
    """The forms, with names of their own for leaves of one name but of unlike kinds; `kinds` are
    those of each form's leaves.
    """
    found: dict[str, list[Any]] = {}
    for form, own in zip(forms, kinds, strict=True):
        for name, kind in zip(() if form is None else form.paths, own, strict=True):
            if kind not in found.setdefault(name, []):
                found[name].append(kind)
    mark = " "
    while any(f"{mark}(" in name for name in found):
        mark += " "

    def renamed(name: str, kind: Any) -> str:
        at = found[name].index(kind)
        return f"{name}{mark}({at + 1})" if at else name

    return tuple(
        None if form is None else replace(form, paths=tuple(map(renamed, form.paths, own)))
        for form, own in zip(forms, kinds, strict=True)
    )


def by_name(
    forms: Sequence[TreeForm | None], numbers: Sequence[int], *, layered: bool
) -> dict[str, list[tuple[Own, tuple[int, ...]]]]:
    """The parameters that have each name in a chunk, with the shapes of their leaves."""
    found: dict[str, list[tuple[Own, tuple[int, ...]]]] = {}
    for form, stage in zip(forms, numbers, strict=True):
        owns = (
            []
            if form is None
            else zip(form.paths, form.owns(stage, layered=layered), form.shapes, strict=True)
        )
        for name, own, shape in owns:
            found.setdefault(name, []).append((own, shape))
    return found


def unlike_paths(forms: Sequence[TreeForm]) -> frozenset[str]:
    """Paths at which stages have leaves of different shapes."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for form in forms:
        for path, shape in zip(form.paths, form.shapes, strict=True):
            shapes.setdefault(path, set()).add(shape)
    return frozenset(path for path, found in shapes.items() if len(found) > 1)
