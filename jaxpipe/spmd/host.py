"""Residuals in the host's memory: long-lived ones are stored and fetched around the blocks of a
tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# an uninitialised array, as `lax.scan` uses for its stacks
from jax._src.lax.lax import empty2
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from ..arrays import Flag, Leaves, Scalar
from ..jaxprs.entry import Entry
from ..program.ir import Program
from ..program.records import NOBODY, Record, TickRecord
from ..table.effects import Place
from .block import State, zeros
from .shared_buffers import Buffers

# JAX has no public name for its memory spaces.
_Space: Any = type(jax.typeof(np.float32(0)).memory_space)


class Moved(NamedTuple):
    """The moves in the ticks of a template."""

    stores: bool
    fetches: bool
    always: bool  # every device fetches something in each of the ticks

    @classmethod
    def at(cls, program: Program, ticks: NDArray[np.int64]) -> Moved:
        """The moves in these ticks."""
        for move in program.ticks.moves:
            stores, fetches = (value[ticks] != NOBODY for value in (move.stores, move.fetches))
            return cls(bool(stores.any()), bool(fetches.any()), bool(fetches.all()))
        return cls(stores=False, fetches=False, always=False)


@dataclass(frozen=True)
class Packing:
    """One array for all residuals of a forward (one for each dtype, and each way in which the
    partitioner splits them).

    One large copy is in flight at a time.  XLA would make several small ones wait for each other.
    """

    entries: tuple[Entry, ...]  # of both pools
    dtypes: tuple[Any, ...]
    num_input: int  # how many of them are of the pool that only I (and B) reads

    @classmethod
    def of(cls, buffers: Buffers) -> Packing:
        """The packing of these pools' values."""
        by_input, by_weight = buffers[Place.RESIDUAL_INPUT], buffers[Place.RESIDUAL_WEIGHT]
        dtypes = (aval.dtype for aval in (*by_input.avals, *by_weight.avals))
        return cls((*by_input.entries, *by_weight.entries), tuple(dtypes), len(by_input.entries))

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the leaves that are packed into one array."""
        found: dict[Any, list[int]] = {}
        for number, (entry, dtype) in enumerate(zip(self.entries, self.dtypes, strict=True)):
            found.setdefault(
                (dtype, tuple((part.axes, part.count) for part in entry.parts), entry.tile), []
            ).append(number)
        return list(found.values())

    def empty(self, slots: int) -> Leaves:
        """A pool in the host's memory, with one more slot for values that nobody needs."""
        return [self._empty(group, slots + 1) for group in self.groups] if slots else []

    def _empty(self, group: Sequence[int], slots: int) -> Any:
        like = self.entries[group[0]]
        shape = (slots, *like.counts, sum(self.entries[i].units for i in group), *like.tile)
        dtype = self.dtypes[group[0]]
        if not _moves(dtype):
            return zeros(shape, dtype)
        return lax.broadcast(empty2(np.dtype(dtype), memory_space=_Space.Host), shape)

    def pack(self, leaves: Sequence[Any]) -> Leaves:
        """Leaves as pools keep them, in one array a group."""
        return [self._pack(group, [leaves[i] for i in group]) for group in self.groups]

    def _pack(self, group: Sequence[int], leaves: Sequence[Any]) -> Any:
        flat = [self.entries[i].ravel(leaf) for i, leaf in zip(group, leaves, strict=True)]
        entry = self.entries[group[0]]
        packed = jnp.concatenate(flat, axis=len(entry.counts))
        pinned = any(self.entries[i].pinned for i in group)
        return (
            lax.with_sharding_constraint(
                packed, PartitionSpec(*(part.axes for part in entry.parts))
            )
            if pinned
            else packed
        )

    def unpack(self, packed: Sequence[Any]) -> Leaves:
        """The leaves."""
        found: dict[int, Any] = {}
        for group, array in zip(self.groups, packed, strict=True):
            at = 0
            for i in group:
                entry = self.entries[i]
                end, axis = at + entry.units, len(entry.counts)
                found[i] = entry.unravel(lax.slice_in_dim(array, at, end, axis=axis))
                at = end
        return [found[i] for i in range(len(found))]


@dataclass(frozen=True)
class InFlight:
    """Values between the memories."""

    stored: Leaves
    fetched: Leaves


@dataclass(frozen=True)
class HostMoves:
    """The moves of one tick: `begin` before its blocks, `store` once after the first of them, `end`
    after all.

    XLA:GPU turns each move into a copy that starts in one place and is awaited in another.  A tick
    with both fetches during its first block and stores during the next.  A pool that is read and
    written at once would be copied whole in every tick.
    """

    moved: Moved
    packing: Packing
    row: TickRecord[Scalar]

    @property
    def _move(self) -> Record[Scalar]:
        (move,) = self.row.moves
        return move

    def begin(self, state: State) -> tuple[InFlight, State]:
        """Read values to store from the device's pools before a block overwrites them, and start to
        fetch.
        """
        if not (self.moved.stores or self.moved.fetches):
            return InFlight([], []), state
        move, pools = self._move, (state["residual_input"], state["residual_weight"])
        stored: Leaves = []
        if self.moved.stores:
            slots = (move.from_input, move.from_weight)
            stored = self.packing.pack(
                [_at(leaf, slot) for pool, slot in zip(pools, slots, strict=True) for leaf in pool]
            )
        # The fetch is ordered after the earlier blocks; otherwise the store during them would be
        # awaited before them.  It is ordered before the later blocks.
        slot = jnp.where(state["token"], 0, jnp.maximum(move.from_host, 0))
        slot, stored, token = lax.optimization_barrier((slot, stored, state["token"]))
        fetched = (
            [_to(_Space.Device, _at(leaf, slot)) for leaf in state["host"]]
            if self.moved.fetches
            else []
        )
        way, state = InFlight(stored, fetched), state | {"token": token}
        return self.store(way, state) if stored and not fetched else (way, state)

    def store(self, way: InFlight, state: State) -> tuple[InFlight, State]:
        """Start to store, unless that is done; the fetch has ended by now."""
        if not way.stored:
            return way, state
        fetched, host, token = _after(way.fetched, state)
        spare = jnp.int32(len(host[0]) - 1)
        slot = jnp.where(
            jnp.logical_or(state["token"], self._move.stores == NOBODY),
            spare,
            self._move.to_host,
        )
        new = [
            lax.dynamic_update_index_in_dim(leaf, _to(_Space.Host, v), slot, 0)
            for leaf, v in zip(host, way.stored, strict=True)
        ]
        return InFlight([], fetched), state | {"host": new, "token": token}

    def end(self, way: InFlight, state: State) -> State:
        """Put fetched values into their slots."""
        way, state = self.store(way, state)
        if not way.fetched:
            return state
        fetched, host, token = _after(way.fetched, state)
        move, leaves, count = self._move, self.packing.unpack(fetched), self.packing.num_input
        by_input = self._put(state["residual_input"], move.to_input, leaves[:count], state)
        by_weight = self._put(state["residual_weight"], move.to_weight, leaves[count:], state)
        return state | {
            "host": host,
            "token": token,
            "residual_input": by_input,
            "residual_weight": by_weight,
        }

    def _put(self, pool: Leaves, slot: Scalar, values: Leaves, state: State) -> Leaves:
        at = jnp.where(state["token"], 0, jnp.maximum(slot, 0))
        if not self.moved.always:
            takes = self._move.fetches != NOBODY
            values = [
                jnp.where(takes, new, _at(leaf, at)) for leaf, new in zip(pool, values, strict=True)
            ]
        return [
            lax.dynamic_update_index_in_dim(leaf, value, at, 0)
            for leaf, value in zip(pool, values, strict=True)
        ]


def _after(fetched: Leaves, state: State) -> tuple[Leaves, Leaves, Flag]:
    """Order the fetched values after earlier blocks, or XLA:TPU would await them before those
    blocks.  Order the host's pool after the fetch, so that the next store needs no copy of the
    pool.
    """
    host, token = state["host"], state["token"]
    return lax.optimization_barrier((fetched, host, token)) if fetched else (fetched, host, token)


def _at(leaf: Any, slot: Scalar) -> Any:
    return lax.dynamic_index_in_dim(leaf, jnp.maximum(slot, 0), 0, keepdims=False)


def _to(space: Any, leaf: Any) -> Any:
    return jax.device_put(leaf, space) if _moves(leaf.dtype) else leaf


def _moves(dtype: Any) -> bool:
    """Keys of random numbers stay: they are small."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended)
