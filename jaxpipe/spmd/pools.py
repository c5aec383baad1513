"""The state that a device carries from tick to tick, loops of at most one trip, which are the
program's predicates, and plain pools, which are updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Flag, Leaves, Scalar
from ..table.effects import Place

# Leaves by the name of their place ([slots, ...] of pools); `of_chunk` names places that each chunk
# has.  "losses" [M] and "token" are arrays.  The token is False, but XLA cannot know (see `block`).
# A part of a state has some of its entries.
State: TypeAlias = dict[str, Any]

_BY_CHUNK = (Place.STAGE_GRADIENTS, Place.STAGE_STATE)


def of_chunk(place: Place, chunk: int) -> str:
    """The name of a place in a state."""
    return f"{place.value}.{chunk}" if place in _BY_CHUNK else place.value


def chunks_of(state: State, place: Place) -> list[Leaves]:
    """The leaves of each chunk in a place."""
    count = sum(name.startswith(f"{place.value}.") for name in state)
    return [state[of_chunk(place, chunk)] for chunk in range(count)]


T = TypeVar("T")


def while_once(predicate: Flag, body: Callable[[T], T], carry: T) -> tuple[Flag, T]:
    """A loop of one trip where the predicate holds, and of none elsewhere.  Return a flag that is
    False after the loop, and the carry.
    """

    def once(state: tuple[Any, T]) -> tuple[Flag, T]:
        return jnp.zeros_like(state[0]), body(state[1])

    return lax.while_loop(lambda state: state[0], once, (predicate, carry))


def read(pool: Sequence[Any], slot: Scalar) -> Leaves:
    """One slot of every leaf of a pool ([slots, ...])."""
    return [lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False) for leaf in pool]


def write(pool: Sequence[Any], slot: Scalar, values: Sequence[Any]) -> Leaves:
    """The pool with one slot replaced."""
    return [_replaced(leaf, slot, value) for leaf, value in zip(pool, values, strict=True)]


def add_at(pool: Any, slot: Scalar, value: Any) -> Any:
    """The leaf with a value added to one slot."""
    return _replaced(
        pool,
        slot,
        lax.dynamic_index_in_dim(pool, slot, 0, keepdims=False) + value.astype(pool.dtype),
    )


def _replaced(pool: Any, slot: Scalar, value: Any) -> Any:
    return lax.dynamic_update_index_in_dim(pool, jnp.asarray(value).astype(pool.dtype), slot, 0)


def empty_pool(avals: Sequence[Any], slots: int) -> Leaves:
    """Zeroed leaves [slots, ...]."""
    return [zeros((slots, *aval.shape), aval.dtype) for aval in avals]


def empty(avals: Sequence[Any]) -> Leaves:
    """Zeroed leaves."""
    return [zeros(aval.shape, aval.dtype) for aval in avals]


def add(total: Sequence[Any], values: Sequence[Any]) -> Leaves:
    """Accumulate in the total's dtype."""
    return [t + v.astype(t.dtype) for t, v in zip(total, values, strict=True)]


def without_weak_types(values: Sequence[Any]) -> Leaves:
    """The same values without weak types, which a loop's carry must not change."""
    return [value.astype(value.dtype) for value in values]


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros, or as many keys of the seed 0."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        base = jax.random.key(0, impl=str(dtype._impl.name))
        return jnp.broadcast_to(base, shape)
    return jnp.zeros(shape, dtype)
