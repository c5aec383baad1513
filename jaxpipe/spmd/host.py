"""Residuals in the host's memory: long-lived ones are stored and fetched around the blocks of a
tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# an uninitialised array, as `lax.scan` uses for its stacks
from jax._src.lax.lax import empty2
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from ..arrays import Leaves, Scalar
from ..jaxprs.entry import Entry
from ..program.ir import NOBODY, Program, TickRecord
from ..table.effects import Place
from .block import State, zeros
from .shared_buffers import Buffers

# JAX has no public name for its memory spaces.
_Space: Any = type(jax.typeof(np.float32(0)).memory_space)


@dataclass(frozen=True)
class Packing:
    """One array for all residuals of a forward (one for each dtype, and each way in which the
    partitioner splits them).

    One large copy is in flight at a time.  XLA would make several small ones wait for each other.
    """

    # by dtype and split, the leaves that are packed into one array: their numbers and entries
    groups: Mapping[tuple[Any, ...], Sequence[tuple[int, Entry]]]
    num_input: int  # how many leaves are of the pool that only I (and B) reads

    @classmethod
    def of(cls, buffers: Buffers) -> Packing:
        """The packing of these pools' values."""
        pools = buffers[Place.RESIDUAL_INPUT], buffers[Place.RESIDUAL_WEIGHT]
        leaves = [pair for pool in pools for pair in zip(pool.entries, pool.avals, strict=True)]
        groups: dict[tuple[Any, ...], list[tuple[int, Entry]]] = {}
        for number, (entry, aval) in enumerate(leaves):
            split = tuple((part.axes, part.count) for part in entry.parts)
            groups.setdefault((aval.dtype, split, entry.tile), []).append((number, entry))
        return cls(groups, len(pools[0].entries))

    def empty(self, slots: int) -> Leaves:
        """A pool in the host's memory, with one more slot for values that nobody needs."""

        def pool(dtype: Any, leaves: Sequence[tuple[int, Entry]]) -> Any:
            _, like = leaves[0]
            shape = (slots + 1, *like.counts, sum(e.units for _, e in leaves), *like.tile)
            if not _moves(dtype):
                return zeros(shape, dtype)
            return lax.broadcast(empty2(np.dtype(dtype), memory_space=_Space.Host), shape)

        return [pool(key[0], leaves) for key, leaves in self.groups.items()] if slots else []

    def pack(self, values: Sequence[Any]) -> Leaves:
        """Leaves as pools keep them, in one array a group."""
        packed = []
        for leaves in self.groups.values():
            _, like = leaves[0]
            flat = [entry.ravel(values[i]) for i, entry in leaves]
            array = jnp.concatenate(flat, axis=len(like.counts))
            if any(entry.pinned for _, entry in leaves):
                spec = PartitionSpec(*(part.axes for part in like.parts))
                array = lax.with_sharding_constraint(array, spec)
            packed.append(array)
        return packed

    def unpack(self, packed: Sequence[Any]) -> Leaves:
        """The leaves."""
        found: dict[int, Any] = {}
        for leaves, array in zip(self.groups.values(), packed, strict=True):
            at = 0
            for i, entry in leaves:
                end, axis = at + entry.units, len(entry.counts)
                found[i] = entry.unravel(lax.slice_in_dim(array, at, end, axis=axis))
                at = end
        return [found[i] for i in range(len(found))]


@dataclass(frozen=True)
class HostMoves:
    """The moves of one tick: `begin` before its blocks, `store` once after the first of them, `end`
    after all.  In between, the state has the values that are under way.

    XLA:GPU turns each move into a copy that starts in one place and is awaited in another.  A tick
    with both fetches during its first block and stores during the next.  A pool that is read and
    written at once would be copied whole in every tick.
    """

    packing: Packing
    move: Any  # of the tick's record
    stores: bool = False  # of any device, in a tick that shares this code
    fetches: bool = False
    always: bool = False  # every device fetches something in each of the ticks

    @classmethod
    def of(
        cls, program: Program, ticks: NDArray[np.int64], packing: Packing, row: TickRecord[Scalar]
    ) -> HostMoves:
        """The moves of a tick; `ticks` share its code."""
        for table, move in zip(program.ticks.moves, row.moves, strict=True):
            stores, fetches = (value[ticks] != NOBODY for value in (table.stores, table.fetches))
            flags = bool(stores.any()), bool(fetches.any()), bool(fetches.all())
            return cls(packing, move, *flags)
        return cls(packing, None)

    def begin(self, state: State) -> State:
        """Read values to store from the device's pools before a block overwrites them, and start to
        fetch.
        """
        if not (self.stores or self.fetches):
            return state
        move, stored = self.move, []
        if self.stores:
            slots = {"residual_input": move.from_input, "residual_weight": move.from_weight}
            stored = self.packing.pack(
                [_at(leaf, slot) for pool, slot in slots.items() for leaf in state[pool]]
            )
        # The fetch is ordered after the earlier blocks; otherwise the store during them would be
        # awaited before them.  It is ordered before the later blocks.
        slot = jnp.where(state["token"], 0, jnp.maximum(move.from_host, 0))
        slot, stored, token = lax.optimization_barrier((slot, stored, state["token"]))
        host = state["host"] if self.fetches else []
        fetched = [_to(_Space.Device, _at(leaf, slot)) for leaf in host]
        state = state | {"token": token, "stored": stored, "fetched": fetched}
        return state if fetched else self.store(state)

    def store(self, state: State) -> State:
        """Start to store, unless that is done; the fetch has ended by now."""
        if not state.get("stored"):
            return state
        token, state = state["token"], _after_fetch(state)
        host, spare = state["host"], jnp.int32(len(state["host"][0]) - 1)
        idle = jnp.logical_or(token, self.move.stores == NOBODY)
        slot = jnp.where(idle, spare, self.move.to_host)
        after = [
            lax.dynamic_update_index_in_dim(leaf, _to(_Space.Host, value), slot, 0)
            for leaf, value in zip(host, state["stored"], strict=True)
        ]
        return state | {"host": after, "stored": []}

    def end(self, state: State) -> State:
        """Put fetched values into their slots."""
        state = self.store(state)
        if state.get("fetched"):
            token, state = state["token"], _after_fetch(state)
            leaves, count = self.packing.unpack(state["fetched"]), self.packing.num_input
            by_pool = {
                "residual_input": (self.move.to_input, leaves[:count]),
                "residual_weight": (self.move.to_weight, leaves[count:]),
            }
            state = state | {
                name: self._put(state[name], jnp.where(token, 0, jnp.maximum(slot, 0)), values)
                for name, (slot, values) in by_pool.items()
            }
        return {name: leaf for name, leaf in state.items() if name not in ("stored", "fetched")}

    def _put(self, pool: Leaves, slot: Scalar, values: Leaves) -> Leaves:
        if not self.always:
            takes = self.move.fetches != NOBODY
            pairs = zip(pool, values, strict=True)
            values = [jnp.where(takes, new, _at(leaf, slot)) for leaf, new in pairs]
        return [
            lax.dynamic_update_index_in_dim(leaf, value, slot, 0)
            for leaf, value in zip(pool, values, strict=True)
        ]


def _after_fetch(state: State) -> State:
    """Order the fetched values after earlier blocks, or XLA:TPU would await them before those
    blocks.  Order the host's pool after the fetch, so that the next store needs no copy of the
    pool.
    """
    if not state["fetched"]:
        return state
    names = ("fetched", "host", "token")
    return state | dict(
        zip(names, lax.optimization_barrier(tuple(state[name] for name in names)), strict=True)
    )


def _at(leaf: Any, slot: Scalar) -> Any:
    return lax.dynamic_index_in_dim(leaf, jnp.maximum(slot, 0), 0, keepdims=False)


def _to(space: Any, leaf: Any) -> Any:
    return jax.device_put(leaf, space) if _moves(leaf.dtype) else leaf


def _moves(dtype: Any) -> bool:
    """Keys of random numbers stay: they are small."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended)
