"""Zero-or-one-trip loops and slot access: how the lowered program predicates work and keeps buffers in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..program.ir import Presence

T = TypeVar("T")
Leaves: TypeAlias = "list[Any]"


def when(presence: Presence, predicate: Any, body: Callable[[T], T], state: T) -> T:
    """Run `body` on the state where the predicate holds.

    A conditional would make XLA:GPU copy every buffer that passes through it; a `while_loop` of at most one trip updates
    them in place.  Where the predicate is known, nothing is tested.
    """
    return when_flagged(presence, predicate, body, state)[1]


def when_flagged(presence: Presence, predicate: Any, body: Callable[[T], T], state: T) -> tuple[Any, T]:
    """`when`, and a flag that is False once it is over, for what must not start before."""
    if presence is Presence.NEVER:
        return jnp.zeros((), bool), state
    if presence is Presence.ALWAYS:
        return jnp.zeros((), bool), body(state)

    def once(carry: tuple[Any, T]) -> tuple[Any, T]:
        return jnp.zeros_like(carry[0]), body(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (predicate, state))


def read(pool: Sequence[Any], slot: Any) -> Leaves:
    """One slot of every leaf of a pool ([slots, ...])."""
    return [lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False) for leaf in pool]


def write(pool: Sequence[Any], slot: Any, values: Sequence[Any]) -> Leaves:
    """The pool with one slot replaced."""
    cast = [jnp.asarray(value).astype(leaf.dtype) for leaf, value in zip(pool, values, strict=True)]  # literals of jaxprs are numbers
    return [lax.dynamic_update_index_in_dim(leaf, value, slot, 0) for leaf, value in zip(pool, cast, strict=True)]


def empty_pool(avals: Sequence[Any], slots: int) -> Leaves:
    """Zeroed leaves [slots, ...]."""
    return [_zeros((slots, *aval.shape), aval.dtype) for aval in avals]


def empty(avals: Sequence[Any]) -> Leaves:
    """Zeroed leaves."""
    return [_zeros(aval.shape, aval.dtype) for aval in avals]


def add(total: Sequence[Any], values: Sequence[Any]) -> Leaves:
    """Accumulate in the total's dtype."""
    return [t + v.astype(t.dtype) for t, v in zip(total, values, strict=True)]


def strengthen(values: Sequence[Any]) -> Leaves:
    """The same values without weak types, which a loop's carry must not change."""
    return [value.astype(value.dtype) for value in values]


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        base = jax.random.key(0, impl=str(dtype._impl.name))
        return jnp.broadcast_to(base, shape)
    return jnp.zeros(shape, dtype)
