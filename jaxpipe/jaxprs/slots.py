"""Where values lie in pools: slots to read and write, accumulators to add to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from .entry import Entry


class Slot(NamedTuple):
    """One entry of a pool: `pool[index]`, where the pool has a leading axis of slots and keeps values as `entry` says."""

    pool: Any
    index: Any
    entry: Entry

    def load(self) -> Any:
        """The whole entry."""
        return self.entry.unpack(lax.dynamic_index_in_dim(self.pool, self.index, 0, keepdims=False))

    def store(self, value: Any) -> Any:
        """The pool with the entry replaced."""
        value = jnp.asarray(value).astype(self.pool.dtype)  # a literal of a jaxpr is a number
        return lax.dynamic_update_index_in_dim(self.pool, self.entry.pack(value), self.index, 0)

    def store_flat(self, value: Any) -> Any:
        """The pool with the raveled value at the beginning of the entry, which is one long array."""
        value = jnp.asarray(value).astype(self.pool.dtype).reshape(1, -1)
        return lax.dynamic_update_slice(self.pool, value, (self.index, jnp.int32(0)))

    def load_row(self, row: Any) -> Any:
        """`pool[index, row]`."""
        if not self.entry.by_row:
            return lax.dynamic_index_in_dim(self.load(), row, 0, keepdims=False)
        kept = self.pool.shape[2:]
        start = (self.index, row, *(jnp.int32(0) for _ in kept))
        return self.entry.unpack_row(lax.dynamic_slice(self.pool, start, (1, 1, *kept)).reshape(kept))

    def store_row(self, row: Any, value: Any) -> Any:
        """The pool with `pool[index, row]` replaced."""
        if not self.entry.by_row:
            return self.store(lax.dynamic_update_index_in_dim(self.load(), value.astype(self.pool.dtype), row, 0))
        value = self.entry.pack_row(value.astype(self.pool.dtype))
        start = (self.index, row, *(jnp.int32(0) for _ in value.shape))
        return lax.dynamic_update_slice(self.pool, value[None, None], start)


class Piece(NamedTuple):
    """A value that lies raveled in a long array, from `start` on; a scan reads it row by row without taking it out."""

    pool: Any
    start: int
    shape: tuple[int, ...]

    def load(self) -> Any:
        """The whole value."""
        return lax.slice(self.pool, (self.start,), (self.start + math.prod(self.shape),)).reshape(self.shape)

    def load_row(self, row: Any) -> Any:
        """`[row]` of the value."""
        kept = self.shape[1:]
        size = math.prod(kept)
        return lax.dynamic_slice(self.pool, (jnp.int32(self.start) + row * size,), (size,)).reshape(kept)


class Total(NamedTuple):
    """An accumulator: what is stored is added to it, in place; row by row what a scan stacks, and what is scattered where it belongs."""

    pool: Any

    def store(self, value: Any) -> Any:
        """The accumulator with a whole value added."""
        return self.pool + jnp.asarray(value).astype(self.pool.dtype)

    def store_row(self, row: Any, value: Any) -> Any:
        """The accumulator with `[row]` added to."""
        start = (row, *(jnp.int32(0) for _ in value.shape))
        old = lax.dynamic_slice(self.pool, start, (1, *value.shape))
        return lax.dynamic_update_slice(self.pool, old + value.astype(self.pool.dtype)[None], start)

    def scatter(self, eqn: core.JaxprEqn, indices: Any, updates: Any) -> Any:
        """The accumulator with the updates of a scatter-add into zeros added where they belong."""
        options = {key: eqn.params[key] for key in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return lax.scatter_add(self.pool, indices, jnp.asarray(updates).astype(self.pool.dtype), **options)


class TotalPiece(NamedTuple):
    """An accumulator that is a piece of a long array: what is stored is added there, in place."""

    pool: Any
    start: int
    shape: tuple[int, ...]

    def store(self, value: Any) -> Any:
        """The array with a whole value added."""
        return self._add(self.start, jnp.asarray(value).reshape(-1))

    def store_row(self, row: Any, value: Any) -> Any:
        """The array with `[row]` of the piece added to."""
        return self._add(jnp.int32(self.start) + row * value.size, value.reshape(-1))

    def scatter(self, eqn: core.JaxprEqn, indices: Any, updates: Any) -> Any:
        """The array with the updates of a scatter-add into zeros added where they belong in the piece."""
        piece = Total(Piece(self.pool, self.start, self.shape).load()).scatter(eqn, indices, updates)
        return lax.dynamic_update_slice(self.pool, piece.reshape(-1), (self.start,))

    def _add(self, start: Any, value: Any) -> Any:
        old = lax.dynamic_slice(self.pool, (start,), value.shape)
        return lax.dynamic_update_slice(self.pool, old + value.astype(self.pool.dtype), (start,))


Target: TypeAlias = "Slot | Total | TotalPiece"


class InSlots(NamedTuple):
    """A jaxpr to evaluate; inputs in `reads` are slots (their arguments are ignored), outputs in `writes` are returned as updated pools.

    Arguments may be pieces of long arrays.  Several outputs may go into one pool.
    """

    jaxpr: core.Jaxpr
    arguments: Sequence[Any]
    reads: Mapping[int, Slot]
    writes: Mapping[int, Target]
