"""One pool entry for unlike kinds: shapes are kept or raveled by the room on one device, and what a
kind splits stays split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpipe.jaxprs.entry import Entry, Part
from jaxpipe.spmd.pools import SharedBuffer

EIGHT = 8  # devices of the axis that the partitioner has


def shapes(*dims: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(each, jnp.float32) for each in dims]


def split(*dims: int, dim: int) -> Entry:
    return Entry(dims, (Part(dim, ("tensor",), EIGHT),), pinned=True)


def test_what_is_split_keeps_its_shape_where_raveled_it_would_be_whole() -> None:
    """A stage of one layer and one of two: three eighths of a layer on each device, not
    two whole.
    """
    kinds = [shapes((1, 64, 16)), shapes((2, 1, 64, 16))]
    buffer = SharedBuffer.of(kinds, [[split(1, 64, 16, dim=1)], [split(2, 1, 64, 16, dim=2)]])
    assert sorted(aval.shape for aval in buffer.avals) == [(1, 64, 16), (2, 1, 64, 16)]
    assert {entry.local_share for entry in buffer.entries} == {EIGHT}
    assert buffer.nbytes == 3 * 64 * 16 * 4 // EIGHT


def test_what_nobody_splits_is_raveled_where_shapes_take_more_room() -> None:
    buffer = SharedBuffer.of([shapes((1, 64, 16)), shapes((2, 1, 64, 16))])
    assert [aval.shape for aval in buffer.avals] == [(2 * 64 * 16,)]


def test_a_kind_that_does_not_split_takes_it_split() -> None:
    """A last stage without layers, whose code says nothing of x."""
    whole = Entry((1, 64, 16), pinned=True)
    for entries in ([[split(1, 64, 16, dim=1)], [whole]], [[whole], [split(1, 64, 16, dim=1)]]):
        buffer = SharedBuffer.of([shapes((1, 64, 16))] * 2, entries)
        assert buffer.entries == (split(1, 64, 16, dim=1),)


def test_a_leaf_that_one_kind_ravels_is_whole() -> None:
    """Its numbers begin at 0, of which a part of another kind would know nothing."""
    kinds, entries = (
        [shapes((64,)), shapes((4, 15))],
        [[split(64, dim=0)], [Entry((4, 15), pinned=True)]],
    )
    buffer = SharedBuffer.of(kinds, entries)
    assert [aval.shape for aval in buffer.avals] == [(64,)]
    assert buffer.entries == (Entry((64,), pinned=True),)
