"""The form of a value in a pool: raveled or in tiles, and in the partitioner's parts.  A reader's
layout then does not reach the pool.  And what reads and writes such values: slots, pieces of a row,
and accumulators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.sharding import PartitionSpec

from ..arrays import Number, as_dtype
from .equations import nbytes, tiled_bytes


@dataclass(frozen=True)
class Part:
    """A dim of a value that the partitioner splits."""

    dim: int
    axes: tuple[str, ...]  # of the mesh
    count: int  # devices of those axes


@dataclass(frozen=True)
class Entry:
    """One entry of a pool: a value of `shape`, kept as [rows,] [parts, ...] [all the rest of it].

    The first dim is a dim of the entry where nothing splits it: a scan reads and writes its rows
    one by one.  A dim that the partitioner splits is cut into its parts.  These come first, so that
    a device's part of an entry is one piece of memory.  A raveled entry has no layout that a reader
    could prefer: XLA:GPU of JAX 0.11 would give that layout to the whole pool, and transpose it in
    every tick.  A plain reshape would gather the parts.

    TPUs keep arrays in tiles over their last two dims.  There all the rest is [tiles, *tile], so
    that an entry fills whole tiles: raveled entries would be rows of tiles that several slots
    share, and a dim of one part among the last two would be padded to a tile.  Where the last two
    dims of the value are whole tiles, these are the value's own, in their order, and nothing is
    moved between the value and its entry.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    # constrain the split, because the mesh has axes of the partitioner
    pinned: bool = False
    tile: tuple[int, ...] = ()  # of the devices' memory

    @property
    def by_row(self) -> bool:
        """Whether the first dim stays."""
        return len(self.shape) > 1 and all(part.dim > 0 for part in self.parts)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The shape in the pool."""
        return (*self._rows, *self.counts, *self.rest)

    @property
    def _rows(self) -> tuple[int, ...]:
        return self.shape[:1] if self.by_row else ()

    @cached_property
    def _numbers(self) -> int:
        """The number of elements in a part of a row."""
        if 0 in self.shape:
            return 0
        return math.prod(self.shape) // math.prod([*self._rows, *self.counts])

    @cached_property
    def rest(self) -> tuple[int, ...]:
        """The shape of a part of a row: its numbers, or tiles, of which the last may be padded.

        A part is in tiles only if their padding is at most an eighth of it.
        """
        tile = math.prod(self.tile)
        if not self.tile or (self._numbers % tile and self._numbers < 8 * tile):
            return (self._numbers,)
        return (-(-self._numbers // tile), *self.tile)

    def holds(self, rows: Entry) -> bool:
        """Whether equal parts of the value along dim 1 are consecutive, each in the form of its own
        entry.
        """
        others = all(
            a == b for d, (a, b) in enumerate(zip(self.shape, rows.shape, strict=True)) if d != 1
        )
        alike = len(self.rest) == len(rest := rows.rest) and bool(self._tiled) == bool(rows._tiled)
        padded = math.prod(rest) != rows._numbers
        behind = self.by_row and all(part.dim > 1 for part in self.parts)
        return others and alike and behind and not padded

    @property
    def local_share(self) -> int:
        """The number of devices that each have an equal share of the value."""
        return math.prod(part.count for part in self.parts)

    def nbytes(self, aval: jax.ShapeDtypeStruct) -> int:
        """Bytes of a device's part of an entry with the dtype of `aval`, with the padding of its
        tiles.
        """
        if not self.tile:
            return nbytes(aval) // self.local_share
        return tiled_bytes((*self._rows, *self.rest), aval.dtype.itemsize, self.tile)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of parts of each dim that is split."""
        return tuple(part.count for part in self.parts)

    @property
    def length(self) -> int:
        """The number of elements in each part."""
        return math.prod(self.shape) // self.local_share

    @property
    def spec(self) -> PartitionSpec:
        """The split of the value."""
        return self._spec(0)

    @property
    def pool_spec(self) -> PartitionSpec:
        """The split of a pool of such entries."""
        axes = (part.axes for part in self.parts)
        return PartitionSpec(*[None] * (1 + self.by_row), *axes, *[None] * len(self.rest))

    def constrain_pool(self, pool: Array) -> Array:
        """Constrain the split of a pool [slots, *kept]."""
        return self._constrain(pool, self.pool_spec)

    def pack(self, value: Array, missing: int = 0) -> Array:
        """A value [*shape] in the form of the pool; a row of it with `missing` = 1."""
        value = self._constrain(value, self._spec(missing))
        if self.parts:
            dims, order = self._order(missing)
            value = lax.transpose(value.reshape(dims), order)
        kept = self.kept[missing:]
        before = kept[: len(kept) - len(self.rest)]
        if self._tiled:
            *outer, down, across, height, width = self._tiled
            value = value.reshape(*before, *outer, down, height, across, width)
            return jnp.swapaxes(value, -3, -2).reshape(kept)
        return _padded(value, before, self._numbers, math.prod(self.rest)).reshape(kept)

    def unpack(self, kept: Array, missing: int = 0) -> Array:
        """The value of an entry; a row with `missing` = 1."""
        before = kept.shape[: kept.ndim - len(self.rest)]
        if self._tiled:
            value = jnp.swapaxes(kept.reshape(*before, *self._tiled), -3, -2)
        else:
            value = _cut_off(kept, before, self._numbers)
        if self.parts:
            dims, order = self._order(missing)
            value = lax.transpose(value.reshape([dims[i] for i in order]), np.argsort(order))
        return self._constrain(value.reshape(self.shape[missing:]), self._spec(missing))

    @property
    def units(self) -> int:
        """The size of a raveled entry (`ravel`) along the dim of consecutive entries: elements of a
        part, or tiles.
        """
        return -(-math.prod([*self._rows, *self.rest]) // math.prod(self.tile))

    def ravel(self, kept: Array) -> Array:
        """[parts, ...] [units] [*tile] of an entry, row by row.  A device's part is one piece of
        memory, and other entries may follow it.
        """
        if self.by_row:
            kept = jnp.moveaxis(kept, 0, len(self.parts))
        whole = math.prod([self.units, *self.tile])
        return _padded(kept, self.counts, math.prod([*self._rows, *self.rest]), whole).reshape(
            *self.counts, self.units, *self.tile
        )

    def unravel(self, raveled: Array) -> Array:
        """The entry."""
        raveled = _cut_off(raveled, self.counts, math.prod([*self._rows, *self.rest]))
        if not self.by_row:
            return raveled.reshape(self.kept)
        rows = raveled.reshape(*self.counts, *self._rows, *self.rest)
        return jnp.moveaxis(rows, len(self.parts), 0)

    def pack_flat(self, value: Array) -> Array:
        """A raveled value as the beginning of an entry that is one long array without parts."""
        if len(self.rest) == 1:
            return value
        tile = math.prod(self.tile)
        whole = -(-value.size // tile) * tile
        return _padded(value, (), value.size, whole).reshape(-1, *self.tile)

    @cached_property
    def _tiled(self) -> tuple[int, ...]:
        """The dims of a part of a row with the last two cut in tiles, [..., rows of tiles, tiles of
        a row, *tile]; () where they are no whole tiles.
        """
        counts = {part.dim: part.count for part in self.parts}
        own = [size // counts.get(dim, 1) for dim, size in enumerate(self.shape)][self.by_row :]
        if len(self.rest) == 1 or len(own) < 2 or own[-2] % self.tile[0] or own[-1] % self.tile[1]:
            return ()
        return (*own[:-2], own[-2] // self.tile[0], own[-1] // self.tile[1], *self.tile)

    def _order(self, missing: int) -> tuple[list[int], list[int]]:
        """Sizes of the dims, those that are split in two, and the order in which the parts come
        first.
        """
        counts = {part.dim: part.count for part in self.parts}
        dims: list[int] = []
        rank = []  # the rows come first, then the parts
        for dim, size in enumerate(self.shape[missing:], missing):
            if dim in counts:
                dims.append(counts[dim])
                rank.append(1)
            dims.append(size // counts.get(dim, 1))
            rank.append(0 if self.by_row and dim == 0 else 2)
        return dims, sorted(range(len(dims)), key=rank.__getitem__)

    def _spec(self, missing: int) -> PartitionSpec:
        """How a value is split, by dim."""
        split = {part.dim: part.axes for part in self.parts}
        return PartitionSpec(*(split.get(dim) for dim in range(missing, len(self.shape))))

    def _constrain(self, value: Array, spec: PartitionSpec) -> Array:
        return lax.with_sharding_constraint(value, spec) if self.pinned else value


def on_parts(function: Callable[[Array], Array], value: Array, split: PartitionSpec) -> Array:
    """What a function makes of each device's part of a value that the partitioner splits.

    Left to itself the partitioner knows no way to split an all-gather, a reduce-scatter or a
    constraint of a layout: it would bring together the whole value on every device first, which is
    as many times the memory and the traffic as the tensor axis is long.
    """
    names = {*jax.tree.leaves(tuple(split))}
    if not names:
        return function(value)
    mapped = jax.shard_map(
        function, in_specs=split, out_specs=split, axis_names=names, check_vma=False
    )
    return mapped(value)


def _padded(value: Array, before: tuple[int, ...], size: int, whole: int) -> Array:
    """[*before, size] in any shape, padded with zeros to [*before, whole]."""
    if size == whole:
        return value
    flat = value.reshape(*before, size)
    return lax.pad(
        flat, jnp.zeros((), flat.dtype), [*((0, 0, 0) for _ in before), (0, whole - size, 0)]
    )


def _cut_off(value: Array, before: tuple[int, ...], size: int) -> Array:
    """Remove the padding of `_padded`; the shape may be any."""
    if value.size == math.prod([*before, size]):
        return value
    return lax.slice_in_dim(value.reshape(*before, -1), 0, size, axis=-1)


class Slot(NamedTuple):
    """One entry of a pool: `pool[number]`, where the pool has a leading axis of slots and keeps
    values as `entry` says.  Where `filled` is False, zeros are read.
    """

    pool: Array
    number: Number
    entry: Entry
    filled: Array | bool = True

    def load(self) -> Array:
        """The whole entry."""
        return self.entry.unpack(self._kept())

    def _kept(self) -> Array:
        kept = lax.dynamic_index_in_dim(self.pool, self.number, 0, keepdims=False)
        return kept if self.filled is True else jnp.where(self.filled, kept, 0)

    def add(self, value: Array) -> Array:
        """The pool with a value added to the entry, in the form of the pool.

        XLA for TPUs would otherwise copy the value, in the layout of the matmul that makes it.
        """
        value = as_dtype(value, self.pool.dtype)
        if self.entry.tile and not self.entry.pinned:
            value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
        value = self.entry.pack(value)
        return lax.dynamic_update_index_in_dim(self.pool, self._kept() + value, self.number, 0)

    def store(self, value: Array) -> Array:
        """The pool with the entry replaced."""
        # A literal of a jaxpr is a number.
        value = as_dtype(value, self.pool.dtype)
        return lax.dynamic_update_index_in_dim(self.pool, self.entry.pack(value), self.number, 0)

    def store_flat(self, value: Array) -> Array:
        """The pool with the raveled value at the beginning of the entry; the entry is one long
        array.
        """
        value = self.entry.pack_flat(as_dtype(value, self.pool.dtype).ravel())
        start = (self.number, *(jnp.int32(0) for _ in value.shape))
        return lax.dynamic_update_slice(self.pool, value[None], start)

    def load_row(self, row: Array) -> Array:
        """`pool[number, row]`."""
        if not self.entry.by_row or self.filled is not True:
            return lax.dynamic_index_in_dim(self.load(), row, 0, keepdims=False)
        kept = self.pool.shape[2:]
        start = (self.number, row, *(jnp.int32(0) for _ in kept))
        own = lax.dynamic_slice(self.pool, start, (1, 1, *kept)).reshape(kept)
        return self.entry.unpack(own, 1)

    def store_row(self, row: Array, value: Array) -> Array:
        """The pool with `pool[number, row]` replaced."""
        if not self.entry.by_row:
            return self.store(
                lax.dynamic_update_index_in_dim(
                    self.load(), as_dtype(value, self.pool.dtype), row, 0
                )
            )
        value = self.entry.pack(as_dtype(value, self.pool.dtype), 1)
        start = (self.number, row, *(jnp.int32(0) for _ in value.shape))
        return lax.dynamic_update_slice(self.pool, value[None, None], start)

    def store_rows(self, rows: Array, *starts: Array) -> Array:
        """The pool with equal rows along dim 1 of the entry replaced, from a multiple of their
        number on: in place where they are one piece of memory in each row of the entry.
        """
        entry, own = self.entry, replace(self.entry, shape=tuple(rows.shape))
        if not entry.holds(own):
            return self.store(lax.dynamic_update_slice(self.load(), rows, starts))
        kept = own.pack(rows.astype(self.pool.dtype))
        zero, at = jnp.int32(0), starts[1] // rows.shape[1] * own.rest[0]
        before, after = kept.ndim - len(own.rest), len(own.rest) - 1
        start = (self.number, *[zero] * before, at.astype(jnp.int32), *[zero] * after)
        return lax.dynamic_update_slice(self.pool, kept[None], start)


class Alone(NamedTuple):
    """An array of its own: one slot, or the stack that a scan makes."""

    pool: Array

    def load(self) -> Array:
        """The value."""
        return self.pool

    def store(self, value: Array) -> Array:
        """The other value."""
        return as_dtype(value, self.pool.dtype)

    def store_flat(self, value: Array) -> Array:
        """The array with the raveled value at its beginning."""
        return lax.dynamic_update_slice(self.pool, as_dtype(value, self.pool.dtype).ravel(), (0,))

    def store_row(self, row: Array, value: Array) -> Array:
        """The array with `[row]` replaced."""
        value = as_dtype(value, self.pool.dtype)
        return lax.dynamic_update_index_in_dim(self.pool, value, row, 0)


class Piece(NamedTuple):
    """A value that is kept raveled in a long array, from `start` on; as a target an accumulator:
    values are added there, in place.

    A scan reads it and adds to it row by row, without a copy of the whole value.

    The array is [parts, ..., numbers]: where the partitioner splits the value, a device's part of
    it is a piece of that device's numbers.
    """

    pool: Array
    start: int
    entry: Entry

    def load(self) -> Array:
        """The whole value."""
        own = lax.slice_in_dim(self.pool, self.start, self.start + self.entry.length, axis=-1)
        return self.entry.unpack(self.entry.unravel(own))

    def load_row(self, row: Array) -> Array:
        """`[row]` of the value."""
        if self._is_cut:
            return lax.dynamic_index_in_dim(self.load(), row, 0, keepdims=False)
        start, size = self._row(row)
        own = lax.dynamic_slice_in_dim(self.pool, start, size, axis=-1)
        if not self.entry.by_row:  # the rows are single numbers
            return own.reshape(())
        return self.entry.unpack(own.reshape(self.entry.kept[1:]), 1)

    def store(self, value: Array) -> Array:
        """The array with a whole value added."""
        return self._add(self.start, self._raveled(value))

    def store_row(self, row: Array, value: Array) -> Array:
        """The array with `[row]` of the piece added to."""
        if self._is_cut:
            whole = jnp.zeros(self.entry.shape, value.dtype)
            return self.store(lax.dynamic_update_index_in_dim(whole, value, row, 0))
        own = self.entry.pack(value, 1).reshape(*self.entry.counts, -1)
        return self._add(self._row(row)[0], own)

    @property
    def _is_cut(self) -> bool:
        """Whether the partitioner splits its rows."""
        return any(part.dim == 0 for part in self.entry.parts)

    def _row(self, row: Array) -> tuple[Array, int]:
        """Where a row begins, and its size."""
        size = self.entry.length // self.entry.shape[0]
        return jnp.int32(self.start) + row * size, size

    def _raveled(self, value: Array) -> Array:
        return self.entry.ravel(self.entry.pack(jnp.asarray(value)))

    def _add(self, start: Array | int, value: Array) -> Array:
        old = lax.dynamic_slice_in_dim(self.pool, start, value.shape[-1], axis=-1)
        return lax.dynamic_update_slice_in_dim(
            self.pool, old + value.astype(self.pool.dtype), start, axis=-1
        )


class Total(NamedTuple):
    """An accumulator: values are added to it, in place.  A scan adds row by row, and a scatter adds
    rows where they belong.

    With `split`, its split over the axes of the partitioner, it has the layout of the step's
    results.  XLA for TPUs would otherwise choose the layout of the matmul that makes a row, and
    copy the whole accumulator after the loop: 114 MiB of temporary memory instead of 104 in a small
    step of 2 pipe x 2 tensor devices of v5p (and 2.6 % fewer cycles).
    """

    pool: Array
    split: PartitionSpec | None = None

    def store(self, value: Array) -> Array:
        """The accumulator with a whole value added."""
        return self.pool + self._in_order(as_dtype(value, self.pool.dtype), 0)

    def store_row(self, row: Array, value: Array) -> Array:
        """The accumulator with `[row]` added to."""
        start = (row, *(jnp.int32(0) for _ in value.shape))
        old = lax.dynamic_slice(self.pool, start, (1, *value.shape))
        value = self._in_order(value.astype(self.pool.dtype), 1)
        return lax.dynamic_update_slice(self.pool, old + value[None], start)

    def _in_order(self, value: Array, missing: int) -> Array:
        """The value, without the first dims of the accumulator, in that layout."""
        if self.split is None or value.ndim < 2:
            return value

        def in_order(part: Array) -> Array:
            return with_layout_constraint(part, Layout(tuple(range(part.ndim))))

        return on_parts(in_order, value, PartitionSpec(*self.split[missing:]))

    def scatter(self, indices: Array, updates: Array, *, eqn: core.JaxprEqn) -> Array:
        """The accumulator with the updates of a scatter-add into zeros added where they belong."""
        options = {
            key: eqn.params[key]
            for key in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        }
        return lax.scatter_add(self.pool, indices, as_dtype(updates, self.pool.dtype), **options)


class StackRow(NamedTuple):
    """One row of a stack, with a static number: a value, or as a target an accumulator."""

    pool: Array
    row: int

    def load(self) -> Array:
        """The row."""
        return lax.index_in_dim(self.pool, self.row, 0, keepdims=False)

    def store(self, value: Array) -> Array:
        """The stack with a value added to the row."""
        return Total(self.pool).store_row(jnp.int32(self.row), jnp.asarray(value))

    def store_row(self, row: Array, value: Array) -> Array:
        """The stack with a value added to `[row]` of the row."""
        whole = Total(jnp.zeros_like(self.load())).store_row(row, value)
        return self.store(whole)


Destination: TypeAlias = "Slot | Alone | Total | Piece | StackRow"
