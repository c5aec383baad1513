"""Scans that are run one by one, or several of one length as one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Loop:
    """A scan as it is to be run: what it carries, the pools that it writes, and what one trip does with them."""

    length: int
    reverse: bool
    unroll: Any
    carry: list[Any]
    pools: list[Any]
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
    """Loops of one length as one: in each trip all read, then compute, then store."""
    length, reverse = loops[0].length, loops[0].reverse

    def trip(state: list[tuple[list[Any], list[Any]]], rows: list[Any]) -> tuple[list[tuple[list[Any], list[Any]]], list[list[Any]]]:
        # What one loop reads of a pool that another writes, it reads as that one carries it.
        now = {id(old): new for loop, (_, pools) in zip(loops, state, strict=True) for old, new in zip(loop.pools, pools, strict=True)}
        read = [loop.read(lambda pool: now.get(id(pool), pool), row) for loop, row in zip(loops, rows, strict=True)]
        found = [loop.compute(carry, values) for loop, (carry, _), values in zip(loops, state, read, strict=True)]
        stored = [loop.store(pools, row, new) for loop, (_, pools), row, (_, new, _) in zip(loops, state, rows, found, strict=True)]
        return [(carry, pools) for (carry, _, _), pools in zip(found, stored, strict=True)], [stack for _, _, stack in found]

    count = np.arange(length, dtype=np.int32)
    rows = [jnp.asarray(count if loop.reverse == reverse else count[::-1]) for loop in loops]
    if len(loops) == 1:
        rows = [lax.iota(jnp.int32, length)]
    start = [(loop.carry, loop.pools) for loop in loops]
    end, stacks = lax.scan(trip, start, rows, length=length, reverse=reverse, unroll=loops[0].unroll)
    return [
        (carry, pools, stack if loop.reverse == reverse else [jnp.flip(leaf, 0) for leaf in stack])
        for loop, (carry, pools), stack in zip(loops, end, stacks, strict=True)
    ]
