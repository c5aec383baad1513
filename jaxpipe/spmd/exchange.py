"""Transfers at the end of a tick: permutes, and what arrives into its slots."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, Scalar
from ..program.records import Arrival, TickRecord
from ..program.segments import Payload, Permute, TickTemplate
from .pools import read, write
from .state import State, given


def permuted(permute: Permute, axis: str, state: State) -> Leaves:
    """What a permute brings to this device: zeros where nothing is sent to it."""
    sent = state.sent_x if permute.payload is Payload.ACTIVATION else state.sent_dx
    return [lax.ppermute(leaf, axis, permute.pairs) for leaf in given(sent)]


def arrive(state: State, payload: Payload, arrival: Arrival[Scalar], leaves: Leaves, *, keep: bool) -> State:
    """Write what has arrived; `keep`: some slots keep what they have, since nothing is meant for their device and none is free."""
    pool = given(state.x if payload is Payload.ACTIVATION else state.cotangent)
    if keep:
        held = read(pool, arrival.slot)
        leaves = [jnp.where(arrival.takes == 0, old, new) for old, new in zip(held, leaves, strict=True)]
    new = write(pool, arrival.slot, leaves)
    return state.updated(State(x=new) if payload is Payload.ACTIVATION else State(cotangent=new))


def run_chosen(template: TickTemplate, axis: str, row: TickRecord[Scalar], state: State) -> State:
    """One of several exchanges: that which the record names.  All devices choose the same, or senders would wait for nobody.

    One conditional, which waits once: it is handed what is sent and returns what arrives, never a pool, since XLA:GPU copies what
    passes through a conditional.  Lanes that the exchange has not give back what was sent, and no slot takes it.
    """
    lanes = template.lanes
    sent = [given(state.sent_x if payload is Payload.ACTIVATION else state.sent_dx) for payload in lanes]

    def branch(number: int) -> Callable[[list[Leaves]], list[Leaves]]:
        def exchange(leaves: list[Leaves]) -> list[Leaves]:
            found = list(leaves)
            for lane, permute in zip(template.lanes_of(number), template.exchanges[number], strict=True):
                found[lane] = [lax.ppermute(leaf, axis, permute.pairs) for leaf in leaves[lane]]
            return found

        return exchange

    after_blocks = jnp.where(given(state.token), 0, row.exchange)
    arrived = lax.switch(after_blocks, [branch(number) for number in range(len(template.exchanges))], sent)
    for lane, (payload, leaves) in enumerate(zip(lanes, arrived, strict=True)):
        state = arrive(state, payload, row.arrivals[lane], leaves, keep=True)
    return state
