"""How a pool keeps a value: raveled, so that no reader's layout reaches the pool, and by the parts
that the partitioner makes of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class Part:
    """A dim of a value that the partitioner splits."""

    dim: int
    axes: tuple[str, ...]  # of the mesh
    count: int  # devices of those axes


@dataclass(frozen=True)
class Entry:
    """One entry of a pool: a value of `shape`, kept as [rows,] [parts, ...] [all the rest of it].

    The first dim stays apart where nothing splits it: a scan reads and writes its rows one by one.
    A dim that the partitioner splits is cut into its parts, which come first, so that a device's
    part of an entry is one piece of memory.  Without this XLA:GPU gives the whole pool the layout
    that a reader prefers, and transposes it in every tick; and a plain reshape would bring the
    parts together.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    pinned: bool = False  # there are axes that the partitioner may split over: say what it does

    @property
    def by_row(self) -> bool:
        """Whether the first dim stays."""
        return len(self.shape) > 1 and all(part.dim > 0 for part in self.parts)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The shape in the pool."""
        counts = [part.count for part in self.parts]
        rows = self.shape[:1] if self.by_row else ()
        return (
            *rows,
            *counts,
            math.prod(self.shape) // math.prod([*rows, *counts]) if 0 not in self.shape else 0,
        )

    @property
    def local_share(self) -> int:
        """Of how many devices each has an equal share of the value."""
        return math.prod(part.count for part in self.parts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of parts of each dim that is split."""
        return tuple(part.count for part in self.parts)

    @property
    def length(self) -> int:
        """Numbers in each part."""
        return math.prod(self.shape) // self.local_share

    @property
    def spec(self) -> PartitionSpec:
        """How the partitioner splits the value."""
        return self._spec(0)

    @property
    def pool_spec(self) -> PartitionSpec:
        """How it splits a pool of such entries."""
        return PartitionSpec(*[None] * (1 + self.by_row), *(part.axes for part in self.parts), None)

    def pool(self, slots: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape of a pool of so many slots."""
        return jax.ShapeDtypeStruct((slots, *self.kept), dtype)

    def constrain_pool(self, pool: Any) -> Any:
        """Tell the partitioner how a pool [slots, *kept] is split."""
        return self._constrain(pool, self.pool_spec)

    def pack(self, value: Any) -> Any:
        """A value [*shape] as it is kept."""
        return self._cut(value, 0).reshape(self.kept)

    def unpack(self, kept: Any) -> Any:
        """The value."""
        return self._join(kept, 0)

    def ravel(self, kept: Any) -> Any:
        """[parts, ...] [all the rest, row by row] of an entry: a device's part of it is one row of
        numbers, that of others may follow.
        """
        return (jnp.moveaxis(kept, 0, len(self.parts)) if self.by_row else kept).reshape(
            *self.counts, self.length
        )

    def unravel(self, raveled: Any) -> Any:
        """The entry."""
        if not self.by_row:
            return raveled.reshape(self.kept)
        rows = raveled.reshape(*self.counts, self.shape[0], self.length // max(1, self.shape[0]))
        return jnp.moveaxis(rows, len(self.parts), 0).reshape(self.kept)

    def pack_row(self, value: Any) -> Any:
        """A row [*shape[1:]] as it is kept."""
        return self._cut(value, 1).reshape(self.kept[1:])

    def unpack_row(self, kept: Any) -> Any:
        """The row."""
        return self._join(kept, 1)

    def _cut(self, value: Any, missing: int) -> Any:
        """Split dims in two, their parts moved to the front (after the rows)."""
        value = self._constrain(value, self._spec(missing))
        if not self.parts:
            return value
        dims, order = self._order(missing)
        return lax.transpose(value.reshape(dims), order)

    def _join(self, kept: Any, missing: int) -> Any:
        if not self.parts:
            return self._constrain(kept.reshape(self.shape[missing:]), self._spec(missing))
        dims, order = self._order(missing)
        back = sorted(range(len(order)), key=order.__getitem__)
        parts = lax.transpose(kept.reshape([dims[i] for i in order]), back)
        return self._constrain(parts.reshape(self.shape[missing:]), self._spec(missing))

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
