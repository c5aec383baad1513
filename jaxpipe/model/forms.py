"""What the parameters of one stage are by themselves, and which of those of unlike stages share a buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from ..arrays import PyTree


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

    def sizes(self, paths: Iterable[str]) -> dict[str, int]:
        """Elements of those of these leaves that the stage has."""
        wanted = frozenset(paths)
        return {path: math.prod(shape) for path, shape in zip(self.paths, self.shapes, strict=True) if path in wanted}


class Buffer(NamedTuple):
    """Leaves that lie in one array, one after the other: as long as the device needs that has most of them."""

    name: str
    size: int
    paths: tuple[str, ...]
    group: Hashable  # of all of them: see `Sharing`

    def starts(self, form: TreeForm) -> dict[str, int]:
        """Where each leaf of a stage begins; matrices, whose sizes are round, before vectors, so that they lie at round addresses."""
        sizes = form.sizes(self.paths)
        order = sorted(sizes, key=lambda path: (-sizes[path], path))
        return dict(zip(order, np.cumsum([0, *(sizes[path] for path in order)]).tolist(), strict=False))


@dataclass(frozen=True)
class Sharing:
    """Which leaves may lie in one buffer: those of one group (and dtype); None is a leaf that stays by itself."""

    group: Callable[[str, jax.ShapeDtypeStruct], Hashable | None]
    multiple: int = 1  # of which a buffer's length is, as an axis splits it

    def buffers(self, forms: Sequence[TreeForm], dtypes: Mapping[str, Any]) -> tuple[Buffer, ...]:
        """The buffers of stages that share a chunk, where these are smaller than an array for each leaf.

        What all stages have alike takes no less room together, so it stays by itself, as it is.
        """
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for form in forms:
            for path, shape in zip(form.paths, form.shapes, strict=True):
                shapes.setdefault(path, []).append(shape)
        groups: dict[Any, list[str]] = {}
        for path, found in shapes.items():
            group = self.group(path, jax.ShapeDtypeStruct(found[0], dtypes[path]))
            if group is not None and (len(found) < len(forms) or len(set(found)) > 1):
                groups.setdefault((dtypes[path], group), []).append(path)
        name = "buffer"
        while any(path.startswith(name) for path in shapes):
            name += "_"
        return tuple(
            Buffer(f"{name} {number}", size, tuple(sorted(paths)), key[1])
            for number, (key, paths) in enumerate(sorted(groups.items(), key=lambda item: min(item[1])))
            if (size := self._size(forms, paths)) < sum(max(map(math.prod, shapes[path])) for path in paths)
        )

    def _size(self, forms: Sequence[TreeForm], paths: Sequence[str]) -> int:
        most = max(sum(form.sizes(paths).values()) for form in forms)
        return math.ceil(most / self.multiple) * self.multiple

    def faults(self, buffer: Buffer, forms: Sequence[TreeForm | None], dtype: Any) -> list[str]:
        """Why a buffer made with another sharing cannot be used with this one."""
        shapes = {p: s for form in forms if form is not None for p, s in zip(form.paths, form.shapes, strict=True)}
        odd = [path for path in buffer.paths if self.group(path, jax.ShapeDtypeStruct(shapes[path], dtype)) != buffer.group]
        again = "bring them over with the pipeline that placed them as `old`: new.place(old.canonical(...))"
        if odd:
            others = [path for path in buffer.paths if path != odd[0]]
            return [
                f"{odd[0]!r} lies in one array with {others[0]!r}, but frozen= or the mesh axes of this pipeline keep it apart; {again}"
            ]
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
