"""What lies in placed leaves: parameters by the paths and shapes that the user knows them by, in
every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ..arrays import PyTree
from .packed import Packed, Parameter
from .placed import Chunks
from .sharing import by_name
from .specs import path_text
from .spread import is_padded


@dataclass(frozen=True)
class Owners:
    """The parameters that lie in one placed leaf, by the name that they have in their chunk."""

    names: Mapping[str, tuple[Parameter, ...]]

    @property
    def of(self) -> tuple[Parameter, ...]:
        """All of them."""
        return tuple(own for found in self.names.values() for own in found)


def owners(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Placed parameters (arrays or shapes) with `Owners` for leaves."""
    return {
        key: _of_stages(tree) if isinstance(tree, Chunks) else _of_outer(key, tree)
        for key, tree in params.items()
    }


def gaps(params: Mapping[str, PyTree]) -> list[str]:
    """The paths at which the canonical parameters hold None."""
    found = []
    for key, tree in params.items():
        for chunk, numbers in _chunks(tree) if isinstance(tree, Chunks) else [(tree, ())]:
            if isinstance(chunk, Packed):
                layered = bool(tree.home.layers)
                forms = zip(chunk.layout.forms, numbers, strict=True)
                found += [
                    gap
                    for form, stage in forms
                    if form is not None
                    for gap in form.gaps(stage, layered=layered)
                ]
                continue
            leaves = jax.tree_util.tree_leaves_with_path(chunk, is_leaf=lambda node: node is None)
            found += [_joined(key, path_text(path)) for path, leaf in leaves if leaf is None]
    return list(dict.fromkeys(found))


def _of_outer(key: str, tree: PyTree) -> PyTree:
    def of(path: Any, leaf: Any) -> Any:
        where = _joined(key, path_text(path))
        if is_padded(leaf) and leaf.array is None:
            return leaf  # frozen
        if not is_padded(leaf):
            return Owners({where: (Parameter(where, tuple(np.shape(leaf))),)})
        shape = tuple(
            leaf.size if dim == leaf.dim else size for dim, size in enumerate(np.shape(leaf.array))
        )
        return replace(leaf, array=Owners({where: (Parameter(where, shape),)}))

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=is_padded)


def _of_stages(stages: Chunks) -> Chunks:
    return stages.like(
        _of_chunk(chunk, numbers, layered=bool(stages.home.layers))
        for chunk, numbers in _chunks(stages)
    )


def _chunks(stages: Chunks) -> list[tuple[PyTree, list[int]]]:
    """Each chunk, and by device the number of the stage that it is, or -1."""
    return [
        (chunk, [row[v] if v < len(row) else -1 for row in stages.home.owned])
        for v, chunk in enumerate(stages)
    ]


def _of_chunk(chunk: PyTree, numbers: Sequence[int], *, layered: bool) -> PyTree:
    if not isinstance(chunk, Packed):

        def alike(path: Any, leaf: Any) -> Owners:
            where = _joined("stages", path_text(path))
            return Owners({where: (Parameter(where, tuple(np.shape(leaf)[1:])),)})

        return jax.tree_util.tree_map_with_path(alike, chunk)
    found = {
        name: tuple(own for own, _ in owns)
        for name, owns in by_name(chunk.layout.forms, numbers, layered=layered).items()
    }
    inside = {buffer.name: buffer.paths for buffer in chunk.layout.buffers}
    leaves = {
        name: None
        if leaf is None
        else Owners({path: found[path] for path in inside.get(name, (name,))})
        for name, leaf in chunk.leaves.items()
    }
    return Packed(leaves, chunk.layout)


def _joined(key: str, path: str) -> str:
    return f"{key}/{path}" if path else key
