"""One buffer for values of unlike kinds, with the place of each leaf of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ..arrays import Leaves, Scalar
from ..jaxprs.entry import Entry
from ..jaxprs.slots import Slot
from ..model.packed import Place, Places
from ..stage.code import StageCode
from ..table.effects import Place as Pool
from .block import zeros
from .entries import StageEntries

Avals: TypeAlias = "Sequence[Any]"
_Key: TypeAlias = "tuple[tuple[int, ...], Any]"


# The room that keeping shapes may take, as a multiple of the largest kind's.
KEEP_SHAPES = 1.1


class _Leaf(NamedTuple):
    """A leaf of the buffer, and by number of a kind which leaf of it is there."""

    aval: Any
    members: dict[int, int]


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

    avals: tuple[Any, ...]
    places: dict[tuple[_Key, ...], Places]
    entries: tuple[Entry, ...]  # how a pool of buffers keeps each leaf

    @classmethod
    def of(
        cls, kinds: Sequence[Avals], entries: Sequence[Sequence[Entry]] | None = None
    ) -> SharedBuffer:
        """The buffer of these kinds; one kind alone is its own buffer.  `entries` has the entry of
        each leaf of each kind.
        """
        keyed = list(dict.fromkeys(_keys(kind) for kind in kinds))
        shaped = cls._laid_out(kinds, entries, keyed, _by_shape(keyed))
        if len(keyed) < 2 or shaped.nbytes <= KEEP_SHAPES * max(_local_bytes(kinds, entries)):
            return shaped
        raveled = cls._laid_out(kinds, entries, keyed, _by_size(keyed))
        # A raveled leaf is whole on all devices, also where the partitioner would split it.
        return min((raveled, shaped), key=lambda buffer: buffer.nbytes)

    @classmethod
    def _laid_out(
        cls,
        kinds: Sequence[Avals],
        entries: Sequence[Sequence[Entry]] | None,
        keyed: Sequence[tuple[_Key, ...]],
        leaves: Sequence[_Leaf],
    ) -> SharedBuffer:
        """The buffer of these leaves.

        Where the partitioner splits any value, raveled leaves are constrained to be whole when they
        are read or written.  Otherwise the partitioner would cut the buffer as the reader of one
        leaf wants it, and permute.
        """
        pinned = any(entry.pinned for own in entries or () for entry in own)
        at: dict[tuple[int, int], int] = {
            member: i for i, leaf in enumerate(leaves) for member in leaf.members.items()
        }
        places = {
            kind: tuple(
                Place(i, Entry(shape, pinned=pinned), shape != leaves[i].aval.shape)
                for i, (shape, _) in ((at[number, n], key) for n, key in enumerate(kind))
            )
            for number, kind in enumerate(keyed)
        }
        avals = tuple(leaf.aval for leaf in leaves)
        return cls(avals, places, _entries(avals, kinds, places, entries))

    @property
    def nbytes(self) -> int:
        """Bytes of a device's part of one slot."""
        return sum(entry.nbytes(aval) for aval, entry in zip(self.avals, self.entries, strict=True))

    def has(self, avals: Avals) -> bool:
        """Whether this is one of the kinds."""
        return _keys(avals) in self.places

    def of_kind(self, avals: Avals) -> Places:
        """The places of a kind's leaves."""
        return self.places[_keys(avals)]

    def read(self, pool: Sequence[Any], slot: Scalar, avals: Avals) -> Leaves:
        """A kind's values out of one slot of a pool of buffers."""
        return [p.take(self._slot(pool, slot, p).load()) for p in self.of_kind(avals)]

    def write(
        self, pool: Sequence[Any], slot: Scalar, avals: Avals, values: Sequence[Any]
    ) -> Leaves:
        """The pool with a kind's values in one slot."""
        return self._write(list(pool), slot, list(zip(self.of_kind(avals), values, strict=True)))

    def _write(self, found: Leaves, slot: Scalar, values: Sequence[tuple[Place, Any]]) -> Leaves:
        for place, value in values:
            at = self._slot(found, slot, place)
            found[place.at] = at.store_flat(value) if place.flat else at.store(value)
        return found

    def _slot(self, pool: Sequence[Any], slot: Scalar, place: Place) -> Slot:
        return Slot(pool[place.at], slot, self.entries[place.at])

    def empty(self, slots: int) -> Leaves:
        """A pool of so many slots, of zeros."""
        found = zip(self.entries, self.avals, strict=True)
        return [
            entry.constrain_pool(zeros((slots, *entry.kept), aval.dtype)) for entry, aval in found
        ]

    def take_all(self, pool: Sequence[Any], slot: Scalar) -> Leaves:
        """Every leaf of a buffer out of one slot."""
        return [
            Slot(leaf, slot, entry).load() for leaf, entry in zip(pool, self.entries, strict=True)
        ]

    def put_all(self, pool: Sequence[Any], slot: Scalar, leaves: Sequence[Any]) -> Leaves:
        """The pool with every leaf of a buffer in one slot."""
        return [
            Slot(old, slot, entry).store(new)
            for old, entry, new in zip(pool, self.entries, leaves, strict=True)
        ]

    def slots(self, pool: Sequence[Any], slot: Scalar, avals: Avals) -> list[Slot | None]:
        """A slot for each leaf of a kind that is in the buffer in its own shape."""
        return [None if p.flat else self._slot(pool, slot, p) for p in self.of_kind(avals)]

    def lazily(self, pool: Sequence[Any], slot: Scalar, avals: Avals) -> Leaves:
        """A kind's values out of one slot, still as slots where they can be."""
        slots = [(p, self._slot(pool, slot, p)) for p in self.of_kind(avals)]
        return [p.take(s.load()) if p.flat else s for p, s in slots]

    def stored(
        self, pool: Sequence[Any], slot: Scalar, avals: Avals, values: Sequence[Any]
    ) -> Leaves:
        """The pool after a kind's values are written to a slot.  For leaves with a slot of `slots`,
        `values` has the updated pool.
        """
        found = list(pool)
        places = self.of_kind(avals)
        for place, value in zip(places, values, strict=True):
            if not place.flat:
                found[place.at] = value
        flat = [(p, v) for p, v in zip(places, values, strict=True) if p.flat]
        return self._write(found, slot, flat)

    def put(self, leaves: Sequence[Any], avals: Avals, values: Sequence[Any]) -> Leaves:
        """A buffer's leaves, in which a kind's values replace the old ones."""
        found = list(leaves)
        for place, value in zip(self.of_kind(avals), values, strict=True):
            found[place.at] = place.put(found[place.at], jnp.asarray(value))
        return found


def _entries(
    avals: Avals,
    kinds: Sequence[Avals],
    places: dict[tuple[_Key, ...], Places],
    wanted: Sequence[Sequence[Entry]] | None,
) -> tuple[Entry, ...]:
    """How a pool keeps each leaf."""
    by_leaf: list[list[Entry]] = [[] for _ in avals]
    raveled: set[int] = set()
    for kind, entries in zip(kinds, wanted or (), strict=wanted is not None):
        for place, entry in zip(places[_keys(kind)], entries, strict=True):
            by_leaf[place.at].append(entry)
            raveled |= {place.at} if place.flat else set()
    return tuple(
        _agreed(aval, entries, raveled=i in raveled)
        for i, (aval, entries) in enumerate(zip(avals, by_leaf, strict=True))
    )


def _agreed(aval: Any, wanted: Sequence[Entry], *, raveled: bool) -> Entry:
    """The wanted entry with the most parts.  Kinds that want fewer parts, such as a stage without
    layers, use it too.

    A leaf that some kind ravels is whole.
    """
    tile = next((entry.tile for entry in wanted), ())
    whole = Entry(tuple(aval.shape), pinned=any(entry.pinned for entry in wanted), tile=tile)
    return (
        whole
        if raveled
        else max(wanted, key=lambda entry: (entry.local_share, wanted.count(entry)), default=whole)
    )


def _local_bytes(kinds: Sequence[Avals], entries: Sequence[Sequence[Entry]] | None) -> list[int]:
    """By kind, bytes of a device's part of its values."""
    wanted = entries or [[Entry(tuple(aval.shape)) for aval in kind] for kind in kinds]
    pairs = (zip(kind, own, strict=True) for kind, own in zip(kinds, wanted, strict=True))
    return [sum(entry.nbytes(aval) for aval, entry in each) for each in pairs]


def _keys(avals: Avals) -> tuple[_Key, ...]:
    return tuple((tuple(a.shape), a.dtype) for a in avals)


def _by_shape(keyed: Sequence[tuple[_Key, ...]]) -> list[_Leaf]:
    """Leaves by shape and dtype, as many of each as the kind with the most."""
    found: dict[tuple[_Key, int], dict[int, int]] = {}
    for number in sorted(range(len(keyed)), key=lambda number: -len(keyed[number])):
        seen: Counter[_Key] = Counter()
        for n, key in enumerate(keyed[number]):
            found.setdefault((key, seen[key]), {})[number] = n
            seen[key] += 1
    return [_Leaf(jax.ShapeDtypeStruct(*key), members) for (key, _), members in found.items()]


def _by_size(keyed: Sequence[tuple[_Key, ...]]) -> list[_Leaf]:
    """The leaves that all kinds have.  For the others, by dtype, one leaf for the largest of each
    kind, one for the second largest, and so on.
    """
    found = [leaf for leaf in _by_shape(keyed) if len(leaf.members) == len(keyed)]
    taken = {member for leaf in found for member in leaf.members.items()}
    rest = [
        [(*key, n) for n, key in enumerate(kind) if (number, n) not in taken]
        for number, kind in enumerate(keyed)
    ]
    for dtype in dict.fromkeys(dtype for leaves in rest for _, dtype, _ in leaves):
        ranked = [
            sorted((leaf for leaf in leaves if leaf[1] == dtype), key=lambda leaf: -prod(leaf[0]))
            for leaves in rest
        ]
        for rank in range(max(map(len, ranked))):
            mine = {number: own[rank] for number, own in enumerate(ranked) if rank < len(own)}
            shapes = {shape for shape, *_ in mine.values()}
            shape = shapes.pop() if len(shapes) == 1 else (max(map(prod, shapes)),)
            members = {number: n for number, (*_, n) in mine.items()}
            found.append(_Leaf(jax.ShapeDtypeStruct(shape, dtype), members))
    return found


# The buffers of pools and transfers.
Buffers: TypeAlias = "Mapping[Pool, SharedBuffer]"


def shared_buffers(
    kinds: Sequence[StageCode], entries: Sequence[StageEntries] | None = None
) -> Buffers:
    """The buffers of several kinds of stages, with the entries of each."""
    return {
        place: SharedBuffer.of(
            [kind.stored[place] for kind in kinds],
            None if entries is None else [each.stored[place] for each in entries],
        )
        for place in kinds[0].stored
    }
