"""Cut a batch into slices of sequences, and hold the rows that a stage appends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..arrays import PyTree, path_text
from ..errors import PipelineError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("batch", "position"),
    meta_fields=("room",),
)
@dataclass(frozen=True)
class Positioned:
    """A batch whose sequences go on at a position of their cache.

    Attributes:
        batch: the user's, whole or by microbatch.
        position: that of each sequence's first row of time, [sequences].
        room: positions that the buffers of the cache have.
    """

    batch: PyTree
    position: Any
    room: int


def has_time(path: tuple[Any, ...], time: tuple[str, ...]) -> bool:
    """Whether a leaf of the batch is named in `time`: by its path, or by the first part of it."""
    name = path_text(path)
    return name in time or name.split("/")[0] in time


def split_slices(batch: PyTree, count: int, slices: int, time: tuple[str, ...]) -> PyTree:
    """Leaves [rows, ...] -> [count, rows / sequences, ...]: entry m is slice m % slices of sequence
    m // slices.  Leaves without a time axis are the same for all slices of a sequence.
    """
    sequences = count // slices

    def split(path: tuple[Any, ...], leaf: Any) -> Any:
        rows = leaf.reshape(sequences, leaf.shape[0] // sequences, *leaf.shape[1:])
        if not has_time(path, time):
            return jnp.repeat(rows, slices, axis=0)
        length = leaf.shape[1] // slices
        cut = rows.reshape(*rows.shape[:2], slices, length, *leaf.shape[2:])
        return jnp.moveaxis(cut, 2, 1).reshape(count, rows.shape[1], length, *leaf.shape[2:])

    return jax.tree_util.tree_map_with_path(split, batch)


def join_slices(outputs: PyTree, slices: int, length: int) -> PyTree:
    """Leaves [M, rows, ...] of slices -> [M / slices, rows, ...]: a leaf whose third axis has the
    `length` of a slice becomes whole sequences.  Of another leaf the last slice is kept.
    """

    def join(leaf: Any) -> Any:
        cut = leaf.reshape(leaf.shape[0] // slices, slices, *leaf.shape[1:])
        if leaf.ndim < 3 or leaf.shape[2] != length:
            return cut[:, -1]
        whole = jnp.moveaxis(cut, 1, 2)
        return whole.reshape(*whole.shape[:2], slices * length, *leaf.shape[3:])

    return jax.tree.map(join, outputs)


def positions(batch: PyTree, time: tuple[str, ...], axis: int = 1) -> int:
    """The positions of time of a batch; `axis` 2: of a slice, where the batch is cut."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return int(next(np.shape(leaf)[axis] for path, leaf in leaves if has_time(path, time)))


def time_faults(
    batch: PyTree, slices: int, time: tuple[str, ...], *, always: bool = False
) -> list[str]:
    """Faults of a batch whose leaves in `time` are cut along axis 1; `always`: one slice too."""
    if slices == 1 and not always:
        return []
    if not time:
        why = "a cache has a time"
        if slices > 1:
            why = f"the schedule has {slices} slices a sequence"
        return [
            f"{why}; name the leaves of the batch that have "
            'a time axis (axis 1): jaxpipe.Model(..., time=("tokens", "targets"))'
        ]
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    absent = [name for name in time if not any(has_time(path, (name,)) for path, _ in leaves)]
    timed = [(jax.tree_util.keystr(p), leaf) for p, leaf in leaves if has_time(p, time)]
    shapes = {f"batch{name}": np.shape(leaf) for name, leaf in timed}
    lengths = {name: shape[1] for name, shape in shapes.items() if len(shape) > 1}
    faults = [f"the batch has no {name!r}, which time= of the model names" for name in absent]
    faults += [
        f"{name} has shape {list(shape)}; a leaf in time= needs axis 1, of time"
        for name, shape in shapes.items()
        if len(shape) < 2
    ]
    faults += [
        f"{name} has {n} positions of time, which do not divide into {slices} equal slices; use "
        f"{max(1, round(n / slices)) * slices}"
        for name, n in lengths.items()
        if not n or n % slices
    ]
    if len(set(lengths.values())) > 1:
        every = ", ".join(f"{name} {n}" for name, n in lengths.items())
        faults.append(f"leaves with a time axis have different lengths: {every}")
    return faults


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_place(buffer: Any, rows: Any, offset: Any, size: int, axis: int) -> tuple[Any, Any]:
    """Return a buffer that has the rows already: once to read, once to leave for later slices.

    The gradient of the rows is their part of the buffer's gradient.  Every slice that read the rows
    has added to it.
    """
    return buffer, buffer


def _forwards(
    buffer: Any, rows: Any, offset: Any, size: int, axis: int
) -> tuple[tuple[Any, Any], Any]:
    return (buffer, buffer), offset


def _backwards(size: int, axis: int, offset: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    total = cotangents[1] + cotangents[0]
    return total, lax.dynamic_slice_in_dim(total, offset, size, axis), None


_in_place.defvjp(_forwards, _backwards)


@dataclass
class Ledger:
    """The rows that a stage appends while it is traced.

    With a `room` the buffers are a cache's: they outlive a call, and `before` has them for all
    sequences, [sequences, ...].
    """

    # buffers by name; None while their shapes are inferred
    before: Mapping[str, Any] | None
    number: Any  # of the slice; with a cache the position of its first row
    slices: int = 1
    # buffers have the rows of this slice already: the executor writes them
    holds: bool = False
    room: int = 0  # positions of a cache's buffers
    sequence: Any = None  # of a cache
    prefix: str = ""  # of names
    rows: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)

    def again(self) -> Ledger:
        """An empty ledger, for a function that is traced by itself."""
        return replace(self, rows={}, buffers={})

    def of_layer(self, place: int) -> Ledger:
        """The same ledger for one layer of the stage: layers share no names."""
        return replace(self, prefix=f"{place}/")

    def append(self, name: str, rows: Any, axis: int) -> Any:
        """Return the whole buffer; PipelineError for a used name or other shapes."""
        rows, name = jnp.asarray(rows), self.prefix + name
        if name in self.rows:
            raise PipelineError(
                f"ctx.append({name!r}, ...) is called twice in a stage; "
                "give each buffer its own name"
            )
        if not -rows.ndim <= axis < rows.ndim:
            raise PipelineError(
                f"ctx.append({name!r}, rows, axis={axis}) has no such axis: the rows have shape "
                f"{list(rows.shape)}"
            )
        axis %= rows.ndim
        room = self.room or self.slices * rows.shape[axis]
        shape = (*rows.shape[:axis], room, *rows.shape[axis + 1 :])
        if self.before is None:
            buffer: Any = jnp.zeros(shape, rows.dtype)
        else:
            buffer = self.before.get(name)
        lead = buffer.shape[:1] if self.of_cache and buffer is not None else ()
        if buffer is None or (buffer.shape, buffer.dtype) != ((*lead, *shape), rows.dtype):
            what = "no buffer"
            if buffer is not None:
                what = f"a buffer {buffer.dtype}{list(buffer.shape)}"
            raise PipelineError(
                f"ctx.append({name!r}, ...) of rows {rows.dtype}{list(rows.shape)} finds {what}; "
                "each slice of a sequence appends rows of the same name, shape and dtype, and the "
                f"buffer has room for {room} of them"
            )
        self.rows[name] = rows
        whole, self.buffers[name] = self._written(buffer, rows, axis)
        return whole

    @property
    def of_cache(self) -> bool:
        """Whether buffers are those of all sequences of a cache."""
        return self.room > 0 and self.before is not None

    def _written(self, buffer: Any, rows: Any, axis: int) -> tuple[Any, Any]:
        """The buffer with the rows: once to read, once to leave for later slices."""
        if self.of_cache:
            starts = [jnp.int32(0)] * rows.ndim
            starts[axis] = self.number
            buffer = lax.dynamic_update_slice(buffer, rows[None], [self.sequence, *starts])
            own = lax.dynamic_index_in_dim(buffer, self.sequence, 0, keepdims=False)
            return own, buffer
        offset = self.number * rows.shape[axis]
        if not self.holds:
            buffer = lax.dynamic_update_slice_in_dim(buffer, rows, offset, axis)
        elif jnp.issubdtype(rows.dtype, jnp.inexact):
            whole, left = _in_place(buffer, rows, offset, rows.shape[axis], axis)
            return whole, left
        return buffer, buffer
