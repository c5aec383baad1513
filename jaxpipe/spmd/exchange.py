"""Transfers at the end of a tick: permutes, and the writes of arrivals to their slots."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, Scalar
from ..program.records import POOL_OF, Record
from ..program.segments import Transit
from ..program.templates import Payload, Permute
from .pools import State
from .shared_buffers import SharedBuffer

# The scopes of transfers in a profile and in a compiled program.  The second is of transfers that
# are awaited in a later tick.
EXCHANGE, WITH_SLACK = "exchange", "exchange_with_slack"


def scope_of(transit: Transit) -> str:
    """The scope of a permute."""
    return WITH_SLACK if transit.is_late else EXCHANGE


def permuted(permute: Permute, axis: str, state: State, *, blocking: bool) -> tuple[Leaves, State]:
    """The values that a permute brings to this device (zeros where nothing is sent to it), and the
    state after it.

    On CPU devices (`blocking`) a permute holds one of the process's few threads until all partners
    have arrived.  It therefore starts after earlier work of the tick, and later work starts after
    it.  Otherwise two permutes in flight could keep a block from starting for which a partner
    waits, and all devices would hang.  On GPUs the permute runs during the blocks.
    """
    sent = state["sent_x" if permute.payload is Payload.ACTIVATION else "sent_dx"]
    if not blocking:
        return [lax.ppermute(leaf, axis, permute.pairs) for leaf in sent], state
    brought = [lax.ppermute(_after(leaf, state), axis, permute.pairs) for leaf in sent]
    return brought, settled(brought, state)


def _after(leaf: Any, state: State) -> Any:
    """The leaf, with a dependence on the end of earlier blocks of the tick (the token is False
    after every block).
    """
    return jnp.where(state["token"], jnp.zeros_like(leaf), leaf) if _is_ordered(leaf) else leaf


def _is_ordered(leaf: Any) -> bool:
    """Whether a token can depend on it; keys cannot give one."""
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool


def settled(brought: Leaves, state: State) -> State:
    """The state, whose token depends on the end of a permute."""
    token = state["token"]
    for leaf in brought:
        if leaf.size and _is_ordered(leaf):
            token = jnp.logical_and(token, leaf.ravel()[0] == 0)
    return state | {"token": token}


def arrive(
    state: State,
    payload: Payload,
    buffer: SharedBuffer,
    arrival: Record[Scalar],
    leaves: Leaves,
    *,
    keep: bool,
) -> State:
    """Write arrivals to their slots.  With `keep`, some devices have no arrival and no free slot,
    and their slots keep their contents.
    """
    name = POOL_OF[payload].value
    pool = state[name]
    if keep:
        held = buffer.take_all(pool, arrival.slot)
        leaves = [
            jnp.where(arrival.takes == 0, old, new) for old, new in zip(held, leaves, strict=True)
        ]
    return state | {name: buffer.put_all(pool, arrival.slot, leaves)}
