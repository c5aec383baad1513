"""Scans that are run one by one, or several of one length as one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh


@dataclass(frozen=True)
class Loop:
    """A scan as it is to be run: what it carries, the pools that it writes, and what one trip does with them."""

    length: int
    reverse: bool
    unroll: Any
    carry: list[Any]
    pools: list[Any]
    stacked: list[Any]  # what a trip makes for a stack: shape and dtype
    # (carry, pools as they are by now, row) -> what the trip reads
    read: Callable[[Callable[[Any], Any], Any], list[Any]]
    # (carry, what was read) -> (carry, rows to store, rows to stack)
    compute: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any], list[Any]]]
    store: Callable[[list[Any], Any, list[Any]], list[Any]]

    def merges_with(self, other: Loop) -> bool:
        """Whether both may be one loop."""
        return self.length == other.length and self.unroll == other.unroll


Answer: TypeAlias = "tuple[list[Any], list[Any], list[Any]]"  # carry, pools, stacks


def run_loops(loops: Sequence[Loop]) -> list[Answer]:
    """Loops of one length as one: in each trip all read, then compute, then store.

    Rows are read, stored and stacked by an index that is scanned: XLA:GPU makes no CUDA graph of a loop whose slices follow its counter.
    Where the partitioner splits values, scan stacks them itself: collectives keep such a loop out of graphs, and XLA reads its own
    stacks without a copy.
    """
    length, reverse = loops[0].length, loops[0].reverse
    by_scan = _is_split_further()

    def trip(state: list[Answer], rows: list[Any]) -> tuple[list[Answer], list[list[Any]]]:
        # What one loop reads of a pool that another writes, it reads as that one carries it.
        now = {id(old): new for loop, (_, pools, _) in zip(loops, state, strict=True) for old, new in zip(loop.pools, pools, strict=True)}
        read = [loop.read(lambda pool: now.get(id(pool), pool), row) for loop, row in zip(loops, rows, strict=True)]
        if by_scan and len(loops) > 1:
            state, read = _read_before_writing(state, read)
        found = [loop.compute(carry, values) for loop, (carry, _, _), values in zip(loops, state, read, strict=True)]
        stored = [loop.store(pools, row, new) for loop, (_, pools, _), row, (_, new, _) in zip(loops, state, rows, found, strict=True)]
        ys = [stack for _, _, stack in found]
        stacks = [[] if by_scan else _with_rows(old, row, new) for (_, _, old), row, new in zip(state, rows, ys, strict=True)]
        after = [(carry, pools, stack) for (carry, _, _), pools, stack in zip(found, stored, stacks, strict=True)]
        return after, ys if by_scan else []

    count = np.arange(length, dtype=np.int32)
    rows = [jnp.asarray(count if loop.reverse == reverse else count[::-1]) for loop in loops]
    if len(loops) == 1:
        rows = [lax.iota(jnp.int32, length)]
    start = [(loop.carry, loop.pools, [] if by_scan else _empty(loop)) for loop in loops]
    end, ys = lax.scan(trip, start, rows, length=length, reverse=reverse, unroll=loops[0].unroll)
    if not by_scan:
        return end
    return [
        (carry, pools, stacks if loop.reverse == reverse else [jnp.flip(leaf, 0) for leaf in stacks])
        for loop, (carry, pools, _), stacks in zip(loops, end, ys, strict=True)
    ]


def _read_before_writing(state: list[Answer], read: list[list[Any]]) -> tuple[list[Answer], list[list[Any]]]:
    """Tie what was read to the pools: XLA would slice it again for a later use, after another loop's write, and copy the pool for that."""
    read, pools = lax.optimization_barrier((read, [pools for _, pools, _ in state]))
    return [(carry, held, stacks) for (carry, _, stacks), held in zip(state, pools, strict=True)], read


def _is_split_further() -> bool:
    """Whether the mesh has axes that are left to the partitioner."""
    mesh = get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def _empty(loop: Loop) -> list[Any]:
    """Room for what a loop stacks; every row is written before any is read, so that nothing fills it."""
    return [lax.empty((loop.length, *aval.shape), aval.dtype) for aval in loop.stacked]


def _with_rows(stacks: Sequence[Any], row: Any, values: Sequence[Any]) -> list[Any]:
    """Each stack with one row written."""
    return [lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), row, 0) for stack, value in zip(stacks, values, strict=True)]
