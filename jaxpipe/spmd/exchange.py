"""Transfers at the end of a tick: permutes, and what arrives into its slots."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, Scalar
from ..program.pools import POOL_OF
from ..program.records import Arrival
from ..program.segments import Transit
from ..program.templates import Payload, Permute
from .shared_buffers import SharedBuffer
from .state import State

# The scopes of transfers in a profile and in a compiled program: all, and those that are awaited in
# a later tick.
EXCHANGE, WITH_SLACK = "exchange", "exchange_with_slack"


def scope_of(transit: Transit) -> str:
    """The scope of a permute."""
    return WITH_SLACK if transit.is_late else EXCHANGE


def permuted(permute: Permute, axis: str, state: State, *, blocking: bool) -> tuple[Leaves, State]:
    """What a permute brings to this device (zeros where nothing is sent to it), and the state after
    it.

    With `blocking`, on CPU devices, where a permute holds one of the process's few threads until
    all partners have come: it starts after all that ran before in the tick, and what comes next
    starts after it.  Else two permutes under way could keep the very block from starting that a
    partner waits for, and all devices would hang.  On GPUs it runs beside the blocks.
    """
    sent = state["sent_x" if permute.payload is Payload.ACTIVATION else "sent_dx"]
    if not blocking:
        return [lax.ppermute(leaf, axis, permute.pairs) for leaf in sent], state
    brought = [lax.ppermute(_after(leaf, state), axis, permute.pairs) for leaf in sent]
    return brought, settled(brought, state)


def _after(leaf: Any, state: State) -> Any:
    """The leaf, known no sooner than what ran before in the tick is over (the token is False after
    every block).
    """
    return jnp.where(state["token"], jnp.zeros_like(leaf), leaf) if _is_ordered(leaf) else leaf


def _is_ordered(leaf: Any) -> bool:
    """Whether a token can be made of it: not of keys."""
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool


def settled(brought: Leaves, state: State) -> State:
    """The state whose token is known no sooner than that a permute is over."""
    token = state["token"]
    for leaf in brought:
        if leaf.size and _is_ordered(leaf):
            token = jnp.logical_and(token, leaf.ravel()[0] == 0)
    return state | {"token": token}


def arrive(
    state: State,
    payload: Payload,
    buffer: SharedBuffer,
    arrival: Arrival[Scalar],
    leaves: Leaves,
    *,
    keep: bool,
) -> State:
    """Write what has arrived; `keep`: some slots keep what they have, since nothing is meant for
    their device and none is free.
    """
    name = POOL_OF[payload].value
    pool = state[name]
    if keep:
        held = buffer.take_all(pool, arrival.slot)
        leaves = [
            jnp.where(arrival.takes == 0, old, new) for old, new in zip(held, leaves, strict=True)
        ]
    return state | {name: buffer.put_all(pool, arrival.slot, leaves)}
