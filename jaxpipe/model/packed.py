"""Parameters of unlike stages side by side: one chunk of every device, with the names of their leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, keystr

from ..arrays import PyTree
from ..errors import PipelineError
from .places import Place, Places


@dataclass(frozen=True)
class TreeForm:
    """What the parameters of one stage are by themselves: their tree, and the path and shape of each leaf."""

    tree: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: PyTree) -> TreeForm:
        """Read off a stage's own parameters (arrays or shapes)."""
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = tuple(keystr(path, simple=True, separator="/") for path, _ in leaves)
        return cls(jax.tree.structure(params), paths, tuple(tuple(np.shape(leaf)) for _, leaf in leaves))


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Packed:
    """One chunk of every device: leaves [P, ...] by path, "dense/kernel", and what each device's part of them is.

    A leaf has the shape that the stages give it, zero for devices whose stage has none; where they give it unlike shapes it is raveled
    and as long as the longest.  It is a tree of its leaves, so optimizers, masks by path, norms and casts work on it as on any other.
    """

    leaves: dict[str, Any]
    forms: tuple[TreeForm | None, ...]  # by device; None where the chunk is empty

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Any]], Any]:
        """Leaves in the order of their paths."""
        names = sorted(self.leaves)
        return [(DictKey(name), self.leaves[name]) for name in names], (tuple(names), self.forms)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> Packed:
        """The inverse."""
        names, forms = aux
        return cls(dict(zip(names, children, strict=True)), forms)

    def places(self, form: TreeForm) -> Places:
        """Where each leaf of a stage lies among these leaves, in the order of their paths."""
        names = sorted(self.leaves)
        flat = unlike_paths([form for form in self.forms if form is not None])
        return tuple(Place(names.index(path), shape, path in flat) for path, shape in zip(form.paths, form.shapes, strict=True))

    def stage(self, device: int) -> PyTree:
        """One device's own parameters, out of leaves [P, ...]."""
        form = self.forms[device]
        assert form is not None
        leaves = [self.leaves[name] for name in sorted(self.leaves)]
        return jax.tree.unflatten(form.tree, [place.take(leaves[place.at][device]) for place in self.places(form)])


def unlike_paths(forms: Sequence[TreeForm]) -> frozenset[str]:
    """Paths at which stages have leaves of different shapes."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for form in forms:
        for path, shape in zip(form.paths, form.shapes, strict=True):
            shapes.setdefault(path, set()).add(shape)
    return frozenset(path for path, found in shapes.items() if len(found) > 1)


def pack(stages: Sequence[PyTree | None]) -> Packed:
    """The stages of one chunk, by device; PipelineError where a path has leaves of different dtypes."""
    forms = tuple(None if stage is None else TreeForm.of(stage) for stage in stages)
    flat = unlike_paths([form for form in forms if form is not None])
    found: dict[str, list[Any]] = {}
    for device, (stage, own) in enumerate(zip(stages, forms, strict=True)):
        if own is None:
            continue
        for path, leaf in zip(own.paths, jax.tree.leaves(stage), strict=True):
            found.setdefault(path, [None] * len(stages))[device] = jnp.ravel(leaf) if path in flat else jnp.asarray(leaf)
    _check_dtypes(found)
    return Packed({path: _stack(leaves) for path, leaves in found.items()}, forms)


def _check_dtypes(found: dict[str, list[Any]]) -> None:
    faults = []
    for path, leaves in found.items():
        dtypes = sorted({str(leaf.dtype) for leaf in leaves if leaf is not None})
        if len(dtypes) > 1:
            faults.append(f"parameters {path!r} of stages that share a chunk are {' and '.join(dtypes)}; give them one dtype")
    if faults:
        raise PipelineError("\n".join(faults), tuple(faults))


def _stack(leaves: Sequence[Any]) -> Any:
    """Leaves of one path, by device; devices without one get zeros, shorter ones are filled up."""
    have = next(leaf for leaf in leaves if leaf is not None)
    shape = max(leaf.shape for leaf in leaves if leaf is not None)
    full = [jnp.zeros(shape, have.dtype) if leaf is None else leaf for leaf in leaves]
    return jnp.stack([jnp.pad(leaf, (0, shape[0] - leaf.shape[0])) if leaf.shape != shape else leaf for leaf in full])
