"""Transfers at the end of a tick: permutes, and what arrives into its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, Scalar
from ..program.records import Arrival
from ..program.segments import Payload, Permute, TickTemplate
from .block import Block
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


@dataclass(frozen=True)
class RunExchange(Block):
    """One of several exchanges, in the ticks that name it.

    All devices choose the same, or those that send would wait for others that do not receive.  One conditional could ask for all
    exchanges at once, but XLA fixes the layouts of its results, and may copy a whole pool into that layout.
    """

    template: TickTemplate
    number: int
    axis: str
    arrivals: Sequence[Arrival[Scalar]]
    keeps: Sequence[bool]  # by lane
    before: State  # what is sent is not carried

    def writes(self, state: State) -> State:
        """The pools that its payloads go to."""
        payloads = {permute.payload for permute in self.template.exchanges[self.number]}
        part = State(x=state.x) if Payload.ACTIVATION in payloads else State()
        return part.updated(State(cotangent=state.cotangent)) if Payload.COTANGENT in payloads else part

    def run(self, state: State) -> State:
        """Make all its permutes, then write what they bring."""
        exchange = self.template.exchanges[self.number]
        arrived = [permuted(permute, self.axis, self.before) for permute in exchange]
        for lane, permute, leaves in zip(self.template.lanes_of(self.number), exchange, arrived, strict=True):
            state = arrive(state, permute.payload, self.arrivals[lane], leaves, keep=self.keeps[lane])
        return state
