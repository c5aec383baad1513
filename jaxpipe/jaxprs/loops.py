"""Scans that are run one by one, or several of one length as one loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh

from .equations import results_of
from .slots import Piece, Slot, Target


class State(NamedTuple):
    """The values that pass from trip to trip."""

    carry: list[Any]
    pools: list[Any]
    stacks: list[Any]


@dataclass(frozen=True)
class Loop:
    """A scan as it is to be run: its body, what it carries, the pools that it writes, and for each
    output after the carry its target; None: it is stacked.
    """

    params: Mapping[str, Any]  # of the scan
    fixed: list[Any]  # what is the same in all trips
    carry: list[Any]
    pools: list[Any]
    scanned: list[Any]  # what a trip reads a row of: slots, pieces, arrays
    targets: Sequence[Target | None]

    @property
    def length(self) -> int:
        """How many trips it has."""
        return int(self.params["length"])

    def merges_with(self, other: Loop) -> bool:
        """Whether both may be one loop."""
        return all(self.params[name] == other.params[name] for name in ("length", "unroll"))

    def empty_stacks(self) -> list[Any]:
        """Room for what it stacks; every row is written before any is read, so that nothing fills
        it.
        """
        outs = self.params["jaxpr"].jaxpr.outvars[len(self.carry) :]
        return [
            lax.empty((self.length, *out.aval.shape), out.aval.dtype)
            for out, target in zip(outs, self.targets, strict=True)
            if target is None
        ]

    def compute(self, carry: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        """The next carry and the other results of a trip, from the carry and what was read."""
        results = results_of(self.params["jaxpr"], *self.fixed, *carry, *values)
        count = len(carry)
        after = [r.astype(c.dtype) for r, c in zip(results[:count], carry, strict=True)]
        return after, results[count:]

    def store(self, pools: list[Any], row: Any, results: list[Any]) -> list[Any]:
        """The pools with the rows of a trip that have a target."""
        found = list(pools)
        targets = [target for target in self.targets if target is not None]
        numbers = {first: k for k, first in enumerate(dict.fromkeys(id(t.pool) for t in targets))}
        for value, target in zip(results, self.targets, strict=True):
            if target is not None:
                number = numbers[id(target.pool)]
                found[number] = target._replace(pool=found[number]).store_row(row, value)
        return found

    def stacked(self, results: list[Any]) -> list[Any]:
        """Those results of a trip that have no target."""
        return [y for y, target in zip(results, self.targets, strict=True) if target is None]


def run_loops(loops: Sequence[Loop]) -> list[State]:
    """Loops of one length as one: in each trip all read, then compute, then store, one after the
    other.

    Rows are read, stored and stacked by an index that is scanned: XLA:GPU makes no CUDA graph of a
    loop whose slices follow its counter. Where the partitioner splits values, scan stacks them
    itself: collectives keep such a loop out of graphs, and XLA reads its own stacks without a copy.
    """
    length, reverse = loops[0].length, loops[0].params["reverse"]
    by_scan = _is_split_further()

    def trip(states: list[State], rows: list[Any]) -> tuple[list[State], list[list[Any]]]:
        # A pool that one loop writes and another reads is carried by the one that writes it.
        now = {
            id(old): new
            for loop, state in zip(loops, states, strict=True)
            for old, new in zip(loop.pools, state.pools, strict=True)
        }
        read = [
            [_row_of(x, now, row) for x in loop.scanned]
            for loop, row in zip(loops, rows, strict=True)
        ]
        if by_scan and len(loops) > 1:
            states, read = _read_before_writing(loops, states, read)
        found = [
            loop.compute(state.carry, values)
            for loop, state, values in zip(loops, states, read, strict=True)
        ]
        after: list[State] = []
        ys: list[list[Any]] = []
        for loop, before, row, (carry, results) in zip(loops, states, rows, found, strict=True):
            if after and not by_scan:
                row = _row_after(row, [leaf for state in after for kept in state for leaf in kept])
            pools, new = loop.store(before.pools, row, results), loop.stacked(results)
            stacks = [] if by_scan else _with_rows(before.stacks, row, new)
            after.append(State(carry, pools, stacks))
            ys.append(new if by_scan else [])
        return after, ys

    count = np.arange(length, dtype=np.int32)
    flipped = [loop.params["reverse"] != reverse for loop in loops]
    rows = [jnp.asarray(count[::-1] if flip else count) for flip in flipped]
    if len(loops) == 1:
        rows = [lax.iota(jnp.int32, length)]
    start = [
        State(loop.carry, loop.pools, [] if by_scan else loop.empty_stacks()) for loop in loops
    ]
    unroll = loops[0].params["unroll"]
    end, ys = lax.scan(trip, start, rows, length=length, reverse=reverse, unroll=unroll)
    if not by_scan:
        return end
    return [
        state._replace(stacks=[jnp.flip(leaf, 0) for leaf in stacks] if flip else stacks)
        for state, stacks, flip in zip(end, ys, flipped, strict=True)
    ]


def _row_after(row: Any, values: Sequence[Any]) -> Any:
    """The row, with a dependence on these values: XLA stores there after all reads that the values
    are computed from.

    Otherwise it may run a late read of a pool after the write, and copy the whole pool for that.
    The flags are False, also for values that are not finite, but XLA cannot know.
    """
    starts = [
        jnp.real(lax.slice(leaf, [0] * leaf.ndim, [1] * leaf.ndim)).reshape(())
        for leaf in values
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    for start in starts:
        row = row + jnp.logical_and(start < 0, start > 0).astype(row.dtype)
    return row


def _read_before_writing(
    loops: Sequence[Loop], states: list[State], read: list[list[Any]]
) -> tuple[list[State], list[list[Any]]]:
    """Order reads of pools that a loop writes before the writes.  XLA would slice the pool again
    after the write, and copy the pool for that.  Where the partitioner splits values, an element of
    them (see `_row_after`) would have to be sent to the other devices.

    Other reads have no such order: a row of parameters is best sliced where it is used, not kept
    from the beginning of the trip.
    """
    written = {id(pool) for loop in loops for pool in loop.pools}
    tied = [
        {k: values[k] for k, x in enumerate(loop.scanned) if _is_in(x, written)}
        for loop, values in zip(loops, read, strict=True)
    ]
    tied, pools = lax.optimization_barrier((tied, [state.pools for state in states]))
    return [state._replace(pools=now) for state, now in zip(states, pools, strict=True)], [
        [own.get(k, value) for k, value in enumerate(values)]
        for own, values in zip(tied, read, strict=True)
    ]


def _is_in(scanned: Any, pools: set[int]) -> bool:
    return isinstance(scanned, Slot) and id(scanned.pool) in pools


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


def _with_rows(stacks: Sequence[Any], row: Any, values: Sequence[Any]) -> list[Any]:
    """Each stack with one row written."""
    return [
        lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), row, 0)
        for stack, value in zip(stacks, values, strict=True)
    ]
