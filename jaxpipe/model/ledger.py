"""The rows that a stage appends to the buffers of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..arrays import Number, described
from ..errors import PipelineError


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_place(buffer: Array, rows: Array, offset: Array, size: int, axis: int) -> Array:
    """Return a buffer that has the rows already, to read and to leave for later slices.

    The gradient of the rows is their part of the buffer's gradient.  Every slice that read the rows
    has added to it.
    """
    return buffer


def _forwards(
    buffer: Array, rows: Array, offset: Array, size: int, axis: int
) -> tuple[Array, Array]:
    return buffer, offset


def _backwards(size: int, axis: int, offset: Array, total: Array) -> tuple[Array, Array, None]:
    return total, lax.dynamic_slice_in_dim(total, offset, size, axis), None


_in_place.defvjp(_forwards, _backwards)


@dataclass
class Ledger:
    """The rows that a stage appends while it is traced; with a cache the buffers are those of one
    of its sequences.
    """

    slices: int  # of a sequence
    room: int  # as of `Functions`
    in_place: bool  # likewise
    number: Number  # of the slice; with a cache the position of its first row
    # buffers by name; None while their shapes are inferred
    before: Mapping[str, Array] | None
    prefix: str = ""  # of names
    rows: dict[str, Array] = field(default_factory=dict)
    buffers: dict[str, Array] = field(default_factory=dict)

    def again(self) -> Ledger:
        """An empty ledger, for a function that is traced by itself."""
        return replace(self, rows={}, buffers={})

    def of_layer(self, place: int) -> Ledger:
        """The same ledger for one layer of the stage: layers share no names."""
        return replace(self, prefix=f"{place}/")

    def append(self, name: str, rows: Array, axis: int) -> Array:
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
        buffer = jnp.zeros(shape, rows.dtype) if self.before is None else self.before.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (shape, rows.dtype):
            raise PipelineError(
                f"ctx.append({name!r}, ...) of rows {described(rows)} finds a buffer of "
                f"{described(buffer)}; each slice of a sequence appends rows of the same name, "
                f"shape and dtype, and the buffer has room for {room} of them"
            )
        self.rows[name] = rows
        offset = self.number * (1 if self.room else rows.shape[axis])
        if not self.in_place:
            buffer = lax.dynamic_update_slice_in_dim(buffer, rows, offset, axis)
        elif jnp.issubdtype(rows.dtype, jnp.inexact):
            buffer = _in_place(buffer, rows, offset, rows.shape[axis], axis)
        self.buffers[name] = buffer
        return buffer
