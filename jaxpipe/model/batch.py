"""A batch: which of its leaves have rows and a time, how it is cut into microbatches, and why it
cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import LeafPath, PyTree, array_faults, path_text


@partial(jax.tree_util.register_dataclass, data_fields=("batch", "position"), meta_fields=("room",))
@dataclass(frozen=True)
class Positioned:
    """A batch whose sequences go on at a position of their cache.

    Attributes:
        batch: the user's, whole or by microbatch.
        position: that of each sequence's first row of time, [sequences].
        room: positions that the buffers of the cache have.
    """

    batch: PyTree
    position: jax.Array
    room: int


def is_named(path: LeafPath, names: Sequence[str]) -> bool:
    """Whether a leaf of the batch is one of these: by its path, or by the first part of it."""
    name = path_text(path)
    return name in names or name.split("/")[0] in names


def _same[T](leaf: T) -> T:
    return leaf


def map_rows(
    change: Callable[[jax.Array], object],
    batch: PyTree,
    whole: Sequence[str],
    others: Callable[[jax.Array], Any] = _same,
) -> PyTree:
    """The batch with `change` of each leaf that has rows, and `others` of each leaf that all
    microbatches are given as it is: those that `whole` names, and positions of a cache.
    """
    if isinstance(batch, Positioned):
        own = map_rows(change, batch.batch, whole, others)
        return replace(batch, batch=own, position=others(batch.position))

    def changed(path: LeafPath, leaf: jax.Array) -> object:
        return (others if is_named(path, whole) else change)(leaf)

    return jax.tree_util.tree_map_with_path(changed, batch)


def num_rows(batch: PyTree, whole: Sequence[str]) -> int:
    """The rows of a batch that `batch_faults` finds no fault with."""
    with_rows = jax.tree.leaves(map_rows(_same, batch, whole, lambda _: None))
    return int(np.shape(with_rows[0])[0])


def split_batch[T](
    batch: T, count: int, slices: int = 1, time: Sequence[str] = (), whole: Sequence[str] = ()
) -> T:
    """Leaves [rows, ...] -> [count, rows / sequences, ...], rows in order: entry m is slice m %
    slices of sequence m // slices.  Leaves without a time axis are the same for all slices of a
    sequence, and those that `whole` names stay as they are.
    """
    sequences = count // slices

    def split(path: LeafPath, leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        if is_named(path, whole):
            return leaf
        rows = leaf.reshape(sequences, leaf.shape[0] // sequences, *leaf.shape[1:])
        if slices == 1:
            return rows
        if not is_named(path, time):
            return jnp.repeat(rows, slices, axis=0)
        length = leaf.shape[1] // slices
        cut = rows.reshape(*rows.shape[:2], slices, length, *leaf.shape[2:])
        return jnp.moveaxis(cut, 2, 1).reshape(count, rows.shape[1], length, *leaf.shape[2:])

    found: T = jax.tree_util.tree_map_with_path(split, batch)
    return found


def positions(batch: PyTree, time: Sequence[str], axis: int = 1) -> int:
    """The positions of time of a batch; `axis` 2: of a slice, where the batch is cut."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return int(next(np.shape(leaf)[axis] for path, leaf in leaves if is_named(path, time)))


def batch_faults(
    batch: PyTree, count: int, *, data_shards: int = 1, whole: Sequence[str] = ()
) -> list[str]:
    """Faults of a batch whose rows are cut into `count` microbatches on each data shard."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    with_rows = [(path, np.shape(leaf)) for path, leaf in leaves if not is_named(path, whole)]
    if not with_rows:
        besides = " besides those in whole= of the model" if leaves else ""
        return [f"the batch has no leaves{besides}; give arrays with a leading axis of rows"]
    if faults := array_faults(batch, "batch"):
        return faults
    faults = _missing(leaves, whole, "whole")
    shapes = {f"batch{jax.tree_util.keystr(path)}": shape for path, shape in with_rows}
    if scalars := [
        (name, path) for (path, shape), name in zip(with_rows, shapes, strict=True) if not shape
    ]:
        (name, path), *others = scalars
        several = f"{len(scalars)} leaves of the batch are plain numbers, {name} the first of them"
        faults.append(
            f"{several if others else f'{name} is a plain number'}: name values that all rows "
            f"share in jaxpipe.Model(..., whole=({path_text(path)!r},)), and every function is "
            "given them as they are; lists are trees to JAX: make arrays of them, "
            "jax.numpy.asarray([...]), with a leading axis of rows"
        )
    cuts = [f"{count} microbatches"] if count > 1 or data_shards == 1 else []
    cuts += [f"{data_shards} data shards"] if data_shards > 1 else []
    into = " x ".join(cuts)
    advice = "; name those without an axis of rows in jaxpipe.Model(..., whole=(...))"
    return faults + _cut_faults(shapes, 0, count * data_shards, "rows", into, advice)


def _missing(
    leaves: Sequence[tuple[LeafPath, object]], names: Sequence[str], keyword: str
) -> list[str]:
    """Names without a leaf."""
    return [
        f"the batch has no {name!r}, which {keyword}= of the model names"
        for name in names
        if not any(is_named(path, (name,)) for path, _ in leaves)
    ]


def time_faults(
    batch: PyTree, slices: int, time: Sequence[str], *, always: bool = False
) -> list[str]:
    """Faults of a batch whose leaves in `time` are cut along axis 1; `always`: one slice too."""
    if slices == 1 and not always:
        return []
    if not time:
        several = f"the schedule has {slices} slices a sequence"
        return [
            f"{several if slices > 1 else 'a cache has a time'}; name the leaves of the batch that "
            'have a time axis (axis 1): jaxpipe.Model(..., time=("tokens", "targets"))'
        ]
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    timed = [(jax.tree_util.keystr(p), leaf) for p, leaf in leaves if is_named(p, time)]
    shapes = {f"batch{name}": np.shape(leaf) for name, leaf in timed}
    faults = _missing(leaves, time, "time")
    faults += [
        f"{name} has shape {list(shape)}; a leaf in time= needs axis 1, of time"
        for name, shape in shapes.items()
        if len(shape) < 2
    ]
    into = f"{slices} equal slices"
    return faults + _cut_faults(shapes, 1, slices, "positions of time", into)


def _cut_faults(
    shapes: Mapping[str, tuple[int, ...]],
    axis: int,
    parts: int,
    what: str,
    into: str,
    advice: str = "",
) -> list[str]:
    """Leaves that are not cut into equal parts along an axis, or have other lengths there."""
    lengths = {name: shape[axis] for name, shape in shapes.items() if len(shape) > axis}
    faults = [
        f"{name} has {n} {what}, which do not divide into {into}; use "
        f"{max(1, round(n / parts)) * parts} {what}"
        for name, n in lengths.items()
        if not n or n % parts
    ]
    if len(set(lengths.values())) > 1:
        every = ", ".join(f"{name} has {n} {what}" for name, n in lengths.items())
        faults.append(f"leaves of the batch have different lengths: {every}{advice}")
    return faults
