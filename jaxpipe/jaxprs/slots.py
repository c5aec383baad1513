"""Where values are in pools: slots to read and write, accumulators to add to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.sharding import PartitionSpec

from .entry import Entry


class Slot(NamedTuple):
    """One entry of a pool: `pool[index]`, where the pool has a leading axis of slots and keeps
    values as `entry` says.  Where `filled` is False, zeros are read.
    """

    pool: Any
    index: Any
    entry: Entry
    filled: Any = True

    def load(self) -> Any:
        """The whole entry."""
        return self.entry.unpack(self._kept())

    def _kept(self) -> Any:
        kept = lax.dynamic_index_in_dim(self.pool, self.index, 0, keepdims=False)
        return kept if self.filled is True else jnp.where(self.filled, kept, 0)

    def add(self, value: Any) -> Any:
        """The pool with a value added to the entry, in the form of the pool.

        XLA for TPUs would otherwise copy the value, in the layout of the matmul that makes it.
        """
        value = jnp.asarray(value).astype(self.pool.dtype)
        if self.entry.tile and not self.entry.pinned:
            value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
        value = self.entry.pack(value)
        return lax.dynamic_update_index_in_dim(self.pool, self._kept() + value, self.index, 0)

    def store(self, value: Any) -> Any:
        """The pool with the entry replaced."""
        value = jnp.asarray(value).astype(self.pool.dtype)  # a literal of a jaxpr is a number
        return lax.dynamic_update_index_in_dim(self.pool, self.entry.pack(value), self.index, 0)

    def store_flat(self, value: Any) -> Any:
        """The pool with the raveled value at the beginning of the entry; the entry is one long
        array.
        """
        value = self.entry.pack_flat(jnp.asarray(value).astype(self.pool.dtype).ravel())
        start = (self.index, *(jnp.int32(0) for _ in value.shape))
        return lax.dynamic_update_slice(self.pool, value[None], start)

    def load_row(self, row: Any) -> Any:
        """`pool[index, row]`."""
        if not self.entry.by_row or self.filled is not True:
            return lax.dynamic_index_in_dim(self.load(), row, 0, keepdims=False)
        kept = self.pool.shape[2:]
        start = (self.index, row, *(jnp.int32(0) for _ in kept))
        own = lax.dynamic_slice(self.pool, start, (1, 1, *kept)).reshape(kept)
        return self.entry.unpack(own, 1)

    def store_row(self, row: Any, value: Any) -> Any:
        """The pool with `pool[index, row]` replaced."""
        if not self.entry.by_row:
            return self.store(
                lax.dynamic_update_index_in_dim(self.load(), value.astype(self.pool.dtype), row, 0)
            )
        value = self.entry.pack(value.astype(self.pool.dtype), 1)
        start = (self.index, row, *(jnp.int32(0) for _ in value.shape))
        return lax.dynamic_update_slice(self.pool, value[None, None], start)

    def store_rows(self, rows: Any, starts: Sequence[Any]) -> Any:
        """The pool with equal rows along dim 1 of the entry replaced, from a multiple of their
        number on: in place where they are one piece of memory in each row of the entry.
        """
        entry, own = self.entry, replace(self.entry, shape=tuple(rows.shape))
        if not entry.holds(own):
            return self.store(lax.dynamic_update_slice(self.load(), rows, starts))
        kept = own.pack(rows.astype(self.pool.dtype))
        zero, at = jnp.int32(0), starts[1] // rows.shape[1] * own.rest[0]
        before, after = kept.ndim - len(own.rest), len(own.rest) - 1
        start = (self.index, *[zero] * before, at.astype(jnp.int32), *[zero] * after)
        return lax.dynamic_update_slice(self.pool, kept[None], start)


class Piece(NamedTuple):
    """A value that is kept raveled in a long array, from `start` on.

    A scan reads it row by row, without a copy of the whole value.

    The array is [parts, ..., numbers]: where the partitioner splits the value, a device's part of
    it is a piece of that device's numbers.
    """

    pool: Any
    start: int
    entry: Entry

    def load(self) -> Any:
        """The whole value."""
        own = lax.slice_in_dim(self.pool, self.start, self.start + self.entry.length, axis=-1)
        return self.entry.unpack(self.entry.unravel(own))

    def load_row(self, row: Any) -> Any:
        """`[row]` of the value."""
        if any(part.dim == 0 for part in self.entry.parts):
            return lax.dynamic_index_in_dim(self.load(), row, 0, keepdims=False)
        size = self.entry.length // self.entry.shape[0]
        own = lax.dynamic_slice_in_dim(self.pool, jnp.int32(self.start) + row * size, size, axis=-1)
        if not self.entry.by_row:  # the rows are single numbers
            return own.reshape(())
        return self.entry.unpack(own.reshape(self.entry.kept[1:]), 1)


class Total(NamedTuple):
    """An accumulator: values are added to it, in place.  A scan adds row by row, and a scatter adds
    rows where they belong.

    With `split`, its split over the axes of the partitioner, it has the layout of the step's
    results.  XLA for TPUs would otherwise choose the layout of the matmul that makes a row, and
    copy the whole accumulator after the loop.
    """

    pool: Any
    split: PartitionSpec | None = None

    def store(self, value: Any) -> Any:
        """The accumulator with a whole value added."""
        return self.pool + self._in_order(jnp.asarray(value).astype(self.pool.dtype), 0)

    def store_row(self, row: Any, value: Any) -> Any:
        """The accumulator with `[row]` added to."""
        start = (row, *(jnp.int32(0) for _ in value.shape))
        old = lax.dynamic_slice(self.pool, start, (1, *value.shape))
        value = self._in_order(value.astype(self.pool.dtype), 1)
        return lax.dynamic_update_slice(self.pool, old + value[None], start)

    def _in_order(self, value: Any, missing: int) -> Any:
        """The value, without the first dims of the accumulator, in that layout."""
        if self.split is None or value.ndim < 2:
            return value
        spec = PartitionSpec(*self.split[missing:])
        names = {
            name for dim in spec if dim for name in (dim if isinstance(dim, tuple) else (dim,))
        }

        def in_order(part: Any) -> Any:
            return with_layout_constraint(part, Layout(tuple(range(part.ndim))))

        if not names:
            return in_order(value)
        # The partitioner would gather the value for the constraint.
        return jax.shard_map(
            in_order, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False
        )(value)

    def scatter(self, eqn: core.JaxprEqn, indices: Any, updates: Any) -> Any:
        """The accumulator with the updates of a scatter-add into zeros added where they belong."""
        options = {
            key: eqn.params[key]
            for key in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        }
        return lax.scatter_add(
            self.pool, indices, jnp.asarray(updates).astype(self.pool.dtype), **options
        )


class TotalPiece(NamedTuple):
    """An accumulator that is a piece of a long array (see `Piece`): values are added there, in
    place.
    """

    pool: Any
    start: int
    entry: Entry

    def store(self, value: Any) -> Any:
        """The array with a whole value added."""
        return self._add(self.start, self.entry.ravel(self.entry.pack(jnp.asarray(value))))

    def store_row(self, row: Any, value: Any) -> Any:
        """The array with `[row]` of the piece added to."""
        if any(part.dim == 0 for part in self.entry.parts):
            whole = jnp.zeros(self.entry.shape, value.dtype)
            return self.store(lax.dynamic_update_index_in_dim(whole, value, row, 0))
        size = self.entry.length // self.entry.shape[0]
        own = self.entry.pack(value, 1).reshape(*self.entry.counts, size)
        return self._add(jnp.int32(self.start) + row * size, own)

    def scatter(self, eqn: core.JaxprEqn, indices: Any, updates: Any) -> Any:
        """The array with the updates of a scatter-add into zeros added where they belong in the
        piece.
        """
        piece = Total(Piece(self.pool, self.start, self.entry).load()).scatter(
            eqn, indices, updates
        )
        return lax.dynamic_update_slice_in_dim(
            self.pool, self.entry.ravel(self.entry.pack(piece)), self.start, axis=-1
        )

    def _add(self, start: Any, value: Any) -> Any:
        old = lax.dynamic_slice_in_dim(self.pool, start, value.shape[-1], axis=-1)
        return lax.dynamic_update_slice_in_dim(
            self.pool, old + value.astype(self.pool.dtype), start, axis=-1
        )


Target: TypeAlias = "Slot | Total | TotalPiece"


class InSlots(NamedTuple):
    """A jaxpr to evaluate; inputs in `reads` are slots (their arguments are ignored), outputs in
    `writes` are returned as updated pools.

    Arguments may be pieces of long arrays.  Several outputs may go into one pool.
    """

    jaxpr: core.Jaxpr
    arguments: Sequence[Any]
    reads: Mapping[int, Slot] = MappingProxyType({})
    writes: Mapping[int, Target] = MappingProxyType({})
