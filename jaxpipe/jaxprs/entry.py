"""The form of a value in a pool: raveled or in tiles, and in the partitioner's parts.  A reader's
layout then does not reach the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

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
    could prefer: XLA:GPU would give that layout to the whole pool, and transpose it in every tick.
    A plain reshape would gather the parts.

    TPUs keep arrays in tiles over their last two dims.  There all the rest is [tiles, *tile], so
    that an entry fills whole tiles: raveled entries would be rows of tiles that several slots
    share, and a dim of one part among the last two would be padded to a tile.  Where the last two
    dims of the value are whole tiles, these are the value's own, in their order, and nothing is
    moved between the value and its entry.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    pinned: bool = False  # constrain the split, because the mesh has axes of the partitioner
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

    def nbytes(self, aval: Any) -> int:
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

    def pool(self, slots: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape of a pool of so many slots."""
        return jax.ShapeDtypeStruct((slots, *self.kept), dtype)

    def constrain_pool(self, pool: Any) -> Any:
        """Constrain the split of a pool [slots, *kept]."""
        return self._constrain(pool, self.pool_spec)

    def pack(self, value: Any, missing: int = 0) -> Any:
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

    def unpack(self, kept: Any, missing: int = 0) -> Any:
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

    def ravel(self, kept: Any) -> Any:
        """[parts, ...] [units] [*tile] of an entry, row by row.  A device's part is one piece of
        memory, and other entries may follow it.
        """
        if self.by_row:
            kept = jnp.moveaxis(kept, 0, len(self.parts))
        whole = math.prod([self.units, *self.tile])
        return _padded(kept, self.counts, math.prod([*self._rows, *self.rest]), whole).reshape(
            *self.counts, self.units, *self.tile
        )

    def unravel(self, raveled: Any) -> Any:
        """The entry."""
        raveled = _cut_off(raveled, self.counts, math.prod([*self._rows, *self.rest]))
        if not self.by_row:
            return raveled.reshape(self.kept)
        rows = raveled.reshape(*self.counts, *self._rows, *self.rest)
        return jnp.moveaxis(rows, len(self.parts), 0)

    def pack_flat(self, value: Any) -> Any:
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

    def _constrain(self, value: Any, spec: PartitionSpec) -> Any:
        return lax.with_sharding_constraint(value, spec) if self.pinned else value


def _padded(value: Any, before: tuple[int, ...], size: int, whole: int) -> Any:
    """[*before, size] in any shape, padded with zeros to [*before, whole]."""
    if size == whole:
        return value
    flat = value.reshape(*before, size)
    return lax.pad(
        flat, jnp.zeros((), flat.dtype), [*((0, 0, 0) for _ in before), (0, whole - size, 0)]
    )


def _cut_off(value: Any, before: tuple[int, ...], size: int) -> Any:
    """Remove the padding of `_padded`; the shape may be any."""
    if value.size == math.prod([*before, size]):
        return value
    return lax.slice_in_dim(value.reshape(*before, -1), 0, size, axis=-1)
