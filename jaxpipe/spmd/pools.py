"""Pools of slots: one buffer for values of unlike kinds, with the place of each leaf of each kind;
and residuals in the host's memory, which are stored and fetched around the blocks of a tick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# an uninitialised array, as `lax.scan` uses for its stacks
from jax._src.lax.lax import empty2
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from numpy.typing import NDArray

from ..arrays import Avals, Flag, Leaves, Scalar, is_key
from ..jaxprs.entry import Alone, Entry, Slot
from ..jaxprs.flat import MemorySpace
from ..jaxprs.slots import is_split_further
from ..program.ir import NOBODY, Program, TickRecord
from ..program.segments import Presence
from ..stage.code import STORED, StageCode
from ..storage.table import Home, Places
from ..table.effects import MOVES, Place
from .block import TOKEN, Key, State, read, write, zeros

_Typed: TypeAlias = "tuple[tuple[int, ...], np.dtype]"


# The room that keeping shapes may take, as a multiple of the largest kind's.
KEEP_SHAPES = 1.1


def taken(places: Places, leaves: Sequence[Array]) -> Leaves:
    """The values in these places of shared leaves."""
    return [place.take(leaves[place.at]) for place in places]


def put(places: Places, leaves: Sequence[Array], values: Iterable[Array]) -> Leaves:
    """The shared leaves with these values in the places."""
    after = list(leaves)
    for place, value in zip(places, values, strict=True):
        after[place.at] = place.put(after[place.at], value)
    return after


class InPool(NamedTuple):
    """Values in one slot of a pool of buffers: the place of each leaf, and the slot of the leaf of
    the buffer there.
    """

    pool: Sequence[Array]
    held: list[tuple[Home, Slot | Alone]]

    def read(self) -> Leaves:
        """The values."""
        return [p.take(leaf.load()) for p, leaf in self.held]

    def lazily(self) -> Leaves:
        """The values, still as slots where they can be."""
        return [p.take(leaf.load()) if p.flat else leaf for p, leaf in self.held]

    def slots(self) -> list[Slot | Alone | None]:
        """A slot for each leaf that is in the buffer in its own shape."""
        return [None if p.flat else leaf for p, leaf in self.held]

    def write(
        self, values: Sequence[Array], *, where: Flag | None = None, in_slots: bool = False
    ) -> Leaves:
        """The pool with other values in the slot, where a flag is True.

        With `in_slots`, `values` has the updated pool for each leaf with a slot of `slots`.
        """
        if where is not None:
            pairs = zip(values, self.read(), strict=True)
            values = [jnp.where(where, new, old) for new, old in pairs]
        after = list(self.pool)
        for (p, leaf), value in zip(self.held, values, strict=True):
            store = leaf.store_flat if p.flat else leaf.store
            after[p.at] = value if in_slots and not p.flat else store(value)
        return after


# The leaves of several kinds that share a leaf of the buffer: by number of a kind, which of its
# leaves.
_Members: TypeAlias = dict[int, int]


@dataclass(frozen=True)
class SharedBuffer:
    """Leaves that hold any of several kinds of values, and their places by kind.

    Leaves of one shape and dtype share a leaf of the buffer.  The buffer has as many of these as
    the kind with the most of them.  Values so keep their shapes, and their splits over other mesh
    axes.  If that takes much more room than the largest kind, only leaves that all kinds have are
    shared so.  Of the others, the largest leaves of each kind share one leaf, then the next
    largest, raveled where they differ.  Room is counted on one device, with its part of split
    values.
    """

    avals: Avals
    places: dict[tuple[_Typed, ...], Places]
    entries: tuple[Entry, ...]  # how a pool of buffers keeps each leaf

    @classmethod
    def of(
        cls, kinds: Sequence[Avals], entries: Sequence[Sequence[Entry]] | None = None
    ) -> SharedBuffer:
        """The buffer of these kinds; one kind alone is its own buffer.  `entries` has the entry of
        each leaf of each kind.
        """
        keyed = [_typed(kind) for kind in kinds]
        wanted = entries or [[Entry(tuple(aval.shape)) for aval in kind] for kind in kinds]
        shaped = cls._laid_out(keyed, wanted, _groups(keyed, by_size=False))
        largest = max(map(_nbytes, wanted, kinds))
        if len(set(keyed)) < 2 or shaped.nbytes <= KEEP_SHAPES * largest:
            return shaped
        raveled = cls._laid_out(keyed, wanted, _groups(keyed, by_size=True))
        # A raveled leaf is whole on all devices, also where the partitioner would split it.
        return min((raveled, shaped), key=lambda buffer: buffer.nbytes)

    @classmethod
    def _laid_out(
        cls,
        keyed: Sequence[tuple[_Typed, ...]],
        wanted: Sequence[Sequence[Entry]],
        groups: Sequence[_Members],
    ) -> SharedBuffer:
        """The buffer of these leaves.

        Where the partitioner splits any value, raveled leaves are constrained to be whole when they
        are read or written.  Otherwise the partitioner would cut the buffer as the reader of one
        leaf wants it, and permute.
        """
        pinned = any(entry.pinned for own in wanted for entry in own)
        avals, entries = [], []
        places: dict[tuple[int, int], Home] = {}
        for at, group in enumerate(groups):
            members = sorted(group.items())
            keys = [keyed[number][n] for number, n in members]
            shapes, dtypes = zip(*keys, strict=True)
            shape = shapes[0] if len(set(shapes)) == 1 else (max(map(prod, shapes)),)
            for member, own in zip(members, shapes, strict=True):
                places[member] = Home(at, Entry(own, pinned=pinned), own != shape)
            avals.append(jax.ShapeDtypeStruct(shape, dtypes[0]))
            fits = [wanted[number][n] for number, n in members]
            entries.append(_agreed(shape, fits, raveled={*shapes} != {shape}))
        by_kind = {
            kind: tuple(places[number, n] for n in range(len(kind)))
            for number, kind in enumerate(keyed)
        }
        return cls(tuple(avals), by_kind, tuple(entries))

    @property
    def nbytes(self) -> int:
        """Bytes of a device's part of one slot."""
        return _nbytes(self.entries, self.avals)

    def has(self, avals: Avals) -> bool:
        """Whether this is one of the kinds."""
        return _typed(avals) in self.places

    def of_kind(self, avals: Avals) -> Places:
        """The places of a kind's leaves."""
        return self.places[_typed(avals)]

    def at(self, pool: Sequence[Array], slot: Scalar | None, avals: Avals) -> InPool:
        """A kind's values in one slot of a pool of buffers; None: whose leaves are arrays of their
        own.
        """
        slots = [Alone(leaf) for leaf in pool] if slot is None else self.whole(pool, slot)
        return InPool(pool, [(place, slots[place.at]) for place in self.of_kind(avals)])

    def put(self, leaves: Sequence[Array], avals: Avals, values: Iterable[Array]) -> Leaves:
        """A buffer's leaves, in which a kind's values replace the old ones."""
        return put(self.of_kind(avals), leaves, map(jnp.asarray, values))

    def whole(self, pool: Sequence[Array], slot: Scalar) -> list[Slot]:
        """One slot of every leaf of the buffer."""
        return [Slot(leaf, slot, entry) for leaf, entry in zip(pool, self.entries, strict=True)]

    def empty(self, slots: int, *, filled: bool = True) -> Leaves:
        """A pool of so many slots, of zeros; not `filled`, of whatever is in the memory."""
        fill = zeros if filled else unfilled
        return [
            entry.constrain_pool(fill((slots, *entry.kept), aval.dtype))
            for entry, aval in zip(self.entries, self.avals, strict=True)
        ]

    def empty_slot(self) -> Leaves:
        """A slot whose leaves are arrays of their own, of whatever is in the memory."""
        return [unfilled(aval.shape, aval.dtype) for aval in self.avals]


def unfilled(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array whose values are written before they are read.

    The partitioner does not split an array that nothing fills: each device would have all of it.
    """
    if is_key(jax.ShapeDtypeStruct(shape, dtype)) or is_split_further():
        return zeros(shape, dtype)
    return lax.empty(shape, dtype)


def _nbytes(entries: Sequence[Entry], avals: Avals) -> int:
    """Bytes of a device's part of values."""
    return sum(entry.nbytes(aval) for entry, aval in zip(entries, avals, strict=True))


def _agreed(shape: tuple[int, ...], wanted: Sequence[Entry], *, raveled: bool) -> Entry:
    """How a pool keeps a leaf: the entry with the most parts that a kind wants.  Kinds that want
    fewer parts, such as a stage without layers, use it too.

    A leaf that some kind ravels is whole.
    """
    if not raveled:
        return max(wanted, key=lambda entry: (entry.local_share, wanted.count(entry)))
    return Entry(shape, pinned=any(entry.pinned for entry in wanted), tile=wanted[0].tile)


def _typed(avals: Avals) -> tuple[_Typed, ...]:
    return tuple((tuple(a.shape), a.dtype) for a in avals)


def _groups(keyed: Sequence[tuple[_Typed, ...]], *, by_size: bool) -> list[_Members]:
    """Leaves that share one: those of a shape and dtype, as many of each as the kind with the most.

    `by_size`: of these only leaves that all kinds have.  For the others, by dtype, one leaf for the
    largest of each kind, one for the second largest, and so on.
    """
    found: dict[tuple[object, int], _Members] = {}

    def add(number: int, leaves: Iterable[tuple[int, Hashable]]) -> None:
        """Leaves of a kind, each to the first group of its key that has none of this kind."""
        seen: Counter[Hashable] = Counter()
        for n, key in leaves:
            found.setdefault((key, seen[key]), {})[number] = n
            seen[key] += 1

    for number in sorted(range(len(keyed)), key=lambda number: -len(keyed[number])):
        add(number, enumerate(keyed[number]))
    if by_size:
        found = {key: group for key, group in found.items() if len(group) == len(keyed)}
        placed = {member for group in found.values() for member in group.items()}
        for number, kind in enumerate(keyed):
            rest = [n for n in range(len(kind)) if (number, n) not in placed]
            rest.sort(key=lambda n: -prod(kind[n][0]))
            add(number, ((n, kind[n][1]) for n in rest))
    return list(found.values())


# The buffers of pools and transfers.
Buffers: TypeAlias = "Mapping[Place, SharedBuffer]"


@dataclass(frozen=True)
class StageEntries:
    """For one kind of stage, the entry of each stored leaf, and the splits of its parameters and
    the shared ones.
    """

    parameters: tuple[PartitionSpec, ...]
    stored: Mapping[Place, tuple[Entry, ...]]


def shared_buffers(
    kinds: Sequence[StageCode], entries: Sequence[StageEntries], outer: Mapping[Place, Avals]
) -> Buffers:
    """The buffers of several kinds of stages, with the entries of each, and those of `outer` values
    for `first` and `last`.
    """
    stored = {
        place: SharedBuffer.of(
            [kind.avals[place] for kind in kinds], [each.stored[place] for each in entries]
        )
        for place in STORED
    }
    return stored | {place: SharedBuffer.of([avals]) for place, avals in outer.items()}


_STORES, _FETCHES = MOVES
# The pool in the host's memory, and during a tick what is under way to it and from it.
_ON_HOST, _STORED, _FETCHED = (Key(Place.HOST, number) for number in range(3))


class Packing:
    """One array for all residuals of a forward (one for each dtype, and each way in which the
    partitioner splits them).

    One large copy is in flight at a time.  XLA would make several small ones wait for each other.

    Attributes:
        groups: by dtype and split, the leaves that are packed into one array: their numbers and
            entries.
    """

    def __init__(self, buffers: Buffers) -> None:
        pools = [buffers[place] for place in _STORES.reads.values()]
        leaves = (zip(pool.entries, pool.avals, strict=True) for pool in pools)
        self.groups: dict[tuple[np.dtype, object, object], list[tuple[int, Entry]]] = {}
        for number, (entry, aval) in enumerate(chain.from_iterable(leaves)):
            split = tuple((part.axes, part.count) for part in entry.parts)
            key = aval.dtype, split, entry.tile
            self.groups.setdefault(key, []).append((number, entry))

    def empty(self, slots: int) -> Leaves:
        """A pool in the host's memory, with one more slot for values that no block needs."""
        pools = []
        for (dtype, *_), leaves in self.groups.items() if slots else ():
            _, like = leaves[0]
            units = sum(entry.units for _, entry in leaves)
            shape = slots + 1, *like.counts, units, *like.tile
            if is_key(jax.ShapeDtypeStruct(shape, dtype)):
                pools.append(zeros(shape, dtype))
            else:
                number = empty2(np.dtype(dtype), memory_space=MemorySpace.Host)
                pools.append(lax.broadcast(number, shape))
        return pools

    def pack(self, values: Sequence[Array]) -> Leaves:
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

    def unpack(self, packed: Sequence[Array]) -> Leaves:
        """The leaves."""
        found: dict[int, Array] = {}
        for leaves, array in zip(self.groups.values(), packed, strict=True):
            numbers, entries = zip(*leaves, strict=True)
            sizes, axis = [entry.units for entry in entries], len(entries[0].counts)
            found |= zip(numbers, map(Entry.unravel, entries, lax.split(array, sizes, axis)))
        return [found[i] for i in range(len(found))]


class HostMoves:
    """The moves of one tick: `begin` before its blocks, `store` once after the first of them, `end`
    after all.  In between, the state has the values that are under way.

    XLA:GPU turns each move into a copy that starts in one place and is awaited in another.  A tick
    with both fetches during its first block and stores during the next.  A pool that is read and
    written at once would be copied whole in every tick.

    Attributes:
        stores: how many devices store something, in the ticks that share this code.
        fetches: how many fetch something.
    """

    stores = fetches = Presence.NEVER

    def __init__(
        self, packing: Packing, program: Program, ticks: NDArray[np.int64], row: TickRecord[Scalar]
    ) -> None:
        self.packing = packing
        for table, move in zip(program.ticks.moves, row.moves, strict=True):
            self.move = move
            own = (table.columns[each.value][ticks] != NOBODY for each in MOVES)
            self.stores, self.fetches = map(Presence.among, own)

    def begin(self, state: State) -> State:
        """Read values to store from the device's pools before a block overwrites them, and start to
        fetch.
        """
        if self.stores is self.fetches is Presence.NEVER:
            return state
        move, stored = self.move, []
        if self.stores is not Presence.NEVER:
            values = [
                leaf
                for name, place in _STORES.reads.items()
                for leaf in read(state[Key(place)], jnp.maximum(getattr(move, name), 0))
            ]
            stored = self.packing.pack(values)
        # The fetch is ordered after the earlier blocks; otherwise the store during them would be
        # awaited before them.  It is ordered before the later blocks.
        slot = jnp.where(state[TOKEN], 0, jnp.maximum(move.from_host, 0))
        slot, stored, token = lax.optimization_barrier((slot, stored, state[TOKEN]))
        host = state[_ON_HOST] if self.fetches is not Presence.NEVER else []
        fetched = [_to(MemorySpace.Device, leaf) for leaf in read(host, slot)]
        state = state | {TOKEN: token, _STORED: stored, _FETCHED: fetched}
        return state if fetched else self.store(state)

    def store(self, state: State) -> State:
        """Start to store, unless that is done; the fetch has ended by now."""
        if not state.get(_STORED):
            return state
        token, state = state[TOKEN], _after_fetch(state)
        host, spare = state[_ON_HOST], jnp.int32(len(state[_ON_HOST][0]) - 1)
        idle = jnp.logical_or(token, self.move.stores == NOBODY)
        slot = jnp.where(idle, spare, self.move.to_host)
        values = [_to(MemorySpace.Host, value) for value in state[_STORED]]
        return state | {_ON_HOST: write(host, slot, values), _STORED: []}

    def end(self, state: State) -> State:
        """Put fetched values into their slots."""
        state = self.store(state)
        if state.get(_FETCHED):
            token, state = state[TOKEN], _after_fetch(state)
            leaves = iter(self.packing.unpack(state[_FETCHED]))
            for name, place in _FETCHES.writes.items():
                slot = jnp.where(token, 0, jnp.maximum(getattr(self.move, name), 0))
                pool = state[Key(place)]
                values = list(islice(leaves, len(pool)))
                if self.fetches is not Presence.ALWAYS:
                    takes = self.move.fetches != NOBODY
                    pairs = zip(values, read(pool, slot), strict=True)
                    values = [jnp.where(takes, new, old) for new, old in pairs]
                state = state | {Key(place): write(pool, slot, values)}
        return {key: leaf for key, leaf in state.items() if key not in (_STORED, _FETCHED)}


def _after_fetch(state: State) -> State:
    """Order the fetched values after earlier blocks, or XLA:TPU would await them before those
    blocks.  Order the host's pool after the fetch, so that the next store needs no copy of the
    pool.
    """
    if not state[_FETCHED]:
        return state
    names = (_FETCHED, _ON_HOST, TOKEN)
    values = lax.optimization_barrier([state[name] for name in names])
    return state | dict(zip(names, values, strict=True))


def _to(space: Any, leaf: Array) -> Array:
    """The leaf in a memory; keys of random numbers stay: they are small."""
    return leaf if is_key(leaf) else jax.device_put(leaf, space)
