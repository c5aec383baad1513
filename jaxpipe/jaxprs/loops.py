"""Scans that are run one by one, or several of one length as one loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh

from .slots import Piece, Slot
from .trip import Answer, Trip


@dataclass(frozen=True)
class Loop:
    """A scan as it is to be run: what it carries, the pools that it writes, and what one trip does
    with them.
    """

    length: int
    reverse: bool
    unroll: Any
    carry: list[Any]
    pools: list[Any]
    scanned: list[Any]  # what a trip reads a row of: slots, pieces, arrays
    trip: Trip

    def merges_with(self, other: Loop) -> bool:
        """Whether both may be one loop."""
        return self.length == other.length and self.unroll == other.unroll


def run_loops(loops: Sequence[Loop]) -> list[Answer]:
    """Loops of one length as one: in each trip all read, then compute, then store.

    Rows are read, stored and stacked by an index that is scanned: XLA:GPU makes no CUDA graph of a
    loop whose slices follow its counter. Where the partitioner splits values, scan stacks them
    itself: collectives keep such a loop out of graphs, and XLA reads its own stacks without a copy.
    """
    length, reverse = loops[0].length, loops[0].reverse
    by_scan = _is_split_further()

    def trip(state: list[Answer], rows: list[Any]) -> tuple[list[Answer], list[list[Any]]]:
        # What one loop reads of a pool that another writes, it reads as that one carries it.
        now = {
            id(old): new
            for loop, (_, pools, _) in zip(loops, state, strict=True)
            for old, new in zip(loop.pools, pools, strict=True)
        }
        read = [
            [_row_of(x, now, row) for x in loop.scanned]
            for loop, row in zip(loops, rows, strict=True)
        ]
        if by_scan and len(loops) > 1:
            state, read = _read_before_writing(loops, state, read)
        found = [
            loop.trip.compute(carry, values)
            for loop, (carry, _, _), values in zip(loops, state, read, strict=True)
        ]
        after = [
            (made.carry, loop.trip.store(pools, row, made.rows), made.stacks)
            for loop, (_, pools, _), row, made in zip(loops, state, rows, found, strict=True)
        ]
        ys = [stack for _, _, stack in after]
        stacks = [
            [] if by_scan else _with_rows(old, row, new)
            for (_, _, old), row, new in zip(state, rows, ys, strict=True)
        ]
        return [
            (carry, pools, stack) for (carry, pools, _), stack in zip(after, stacks, strict=True)
        ], ys if by_scan else []

    count = np.arange(length, dtype=np.int32)
    rows = [jnp.asarray(count if loop.reverse == reverse else count[::-1]) for loop in loops]
    if len(loops) == 1:
        rows = [lax.iota(jnp.int32, length)]
    start = [(loop.carry, loop.pools, [] if by_scan else _empty(loop)) for loop in loops]
    end, ys = lax.scan(trip, start, rows, length=length, reverse=reverse, unroll=loops[0].unroll)
    if not by_scan:
        return end
    return [
        (
            carry,
            pools,
            stacks if loop.reverse == reverse else [jnp.flip(leaf, 0) for leaf in stacks],
        )
        for loop, (carry, pools, _), stacks in zip(loops, end, ys, strict=True)
    ]


def _read_before_writing(
    loops: Sequence[Loop], state: list[Answer], read: list[list[Any]]
) -> tuple[list[Answer], list[list[Any]]]:
    """Tie what was read of pools that another loop writes to them: XLA would slice it again after
    the write, and copy the pool for that.

    Nothing else is tied: a row of parameters is best sliced where it is used, not kept from the
    beginning of the trip.
    """
    tied = [[not late for late in _may_be_late(loop, loops)] for loop in loops]
    early = [
        [x for x, ties in zip(values, those, strict=True) if ties]
        for values, those in zip(read, tied, strict=True)
    ]
    early, pools = lax.optimization_barrier((early, [pools for _, pools, _ in state]))
    own = [iter(values) for values in early]
    read = [
        [next(held) if ties else x for x, ties in zip(values, those, strict=True)]
        for values, those, held in zip(read, tied, own, strict=True)
    ]
    return [
        (carry, now, stacks) for (carry, _, stacks), now in zip(state, pools, strict=True)
    ], read


def _may_be_late(loop: Loop, loops: Sequence[Loop]) -> list[bool]:
    """Which of what a loop scans lies in no pool that any of the loops writes."""
    written = {id(pool) for other in loops for pool in other.pools}
    return [not (isinstance(x, Slot) and id(x.pool) in written) for x in loop.scanned]


def _row_of(scanned: Any, now: Mapping[int, Any], row: Any) -> Any:
    """A row of what is scanned; of a slot, in its pool as it is by now."""
    if isinstance(scanned, Slot):
        return scanned._replace(pool=now.get(id(scanned.pool), scanned.pool)).load_row(row)
    return (
        scanned.load_row(row)
        if isinstance(scanned, Piece)
        else lax.dynamic_index_in_dim(scanned, row, 0, keepdims=False)
    )


def _is_split_further() -> bool:
    """Whether the mesh has axes that are left to the partitioner."""
    mesh = get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _empty(loop: Loop) -> list[Any]:
    """Room for what a loop stacks; every row is written before any is read, so that nothing fills
    it.
    """
    return [lax.empty((loop.length, *aval.shape), aval.dtype) for aval in loop.trip.stacked]


def _with_rows(stacks: Sequence[Any], row: Any, values: Sequence[Any]) -> list[Any]:
    """Each stack with one row written."""
    return [
        lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), row, 0)
        for stack, value in zip(stacks, values, strict=True)
    ]
