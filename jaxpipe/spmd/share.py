"""`first` and `last` spread over the pipe axis: all devices run their blocks at once, each with its
share of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..arrays import Flag, Leaves, Scalar
from ..jaxprs import Target, Total, run_in_slots
from ..program.records import Backward, Forward, Share
from ..stage.code import StageCode, run
from .block import Block
from .outer import add_first_gradients, first_gradients
from .pools import add, add_at, read, write
from .shared_code import CodeBlock, SharedCode
from .state import Gradients, State, given


@dataclass(frozen=True)
class KeepOutput(Block):
    """The last stage's output, for the share that all devices run later."""

    row: Forward[Scalar]
    y: Leaves

    def writes(self, state: State) -> State:
        """Its pool."""
        return State(last=state.last)

    def run(self, state: State) -> State:
        """Write it."""
        return state.updated(State(last=write(given(state.last), self.row.out, self.y)))


@dataclass(frozen=True)
class KeepInputGrad(Block):
    """The gradient of the first stage's input, for the share of its gradient that all devices run
    later.
    """

    row: Backward[Scalar]
    dx: Leaves

    def writes(self, state: State) -> State:
        """Its pool."""
        return State(first=state.first)

    def run(self, state: State) -> State:
        """Write it."""
        return state.updated(State(first=write(given(state.first), self.row.first, self.dx)))


@dataclass(frozen=True)
class RunFirstShare(Block):
    """A device's share of the first stage's input; every device has it whole, and that of the first
    stage keeps it.
    """

    shared: SharedCode
    row: Share[Scalar]
    waits: bool  # start after all that ran before in the tick: see `exchange.permuted`

    def writes(self, state: State) -> State:
        """The stage's input."""
        return State(x=state.x)

    def run(self, state: State) -> State:
        """Run it."""
        shared, row, code = self.shared, self.row, self.shared.first
        arguments = _of_first(shared, row, state, waits=self.waits)
        found = run(code.evaluate, *arguments)
        pool, buffer = given(state.x), shared.buffers.x
        held = buffer.read(pool, row.out, code.y_avals)
        kept = [
            jnp.where(row.is_source != 0, new, old) for new, old in zip(found, held, strict=True)
        ]
        return state.updated(State(x=buffer.write(pool, row.out, code.y_avals, kept)))


@dataclass(frozen=True)
class RunFirstGradient(Block):
    """A device's share of the gradient of `first`.

    The device of the first stage begins with the gradient of its input, the others with zeros: what
    is differentiated is the input that this device keeps.  The sum that made it from the shares has
    a gradient that takes it to all of them, so no transfer is needed besides.
    """

    shared: SharedCode
    row: Share[Scalar]
    waits: bool

    def writes(self, state: State) -> State:
        """The gradients of its own and of the shared parameters."""
        return first_gradients(state)

    def run(self, state: State) -> State:
        """Run it and accumulate."""
        shared, row = self.shared, self.row
        dx = [
            jnp.where(row.is_source != 0, leaf, jnp.zeros_like(leaf))
            for leaf in read(given(state.first), row.y)
        ]
        return add_first_gradients(
            shared, [*_of_first(shared, row, state, waits=self.waits), *dx], state
        )


def _of_first(shared: SharedCode, row: Share[Scalar], state: State, *, waits: bool) -> Leaves:
    """(consts, parameters, extra, once) of a spread `first`; `waits`: known no sooner than what ran
    before in the tick is over.
    """
    microbatch = jnp.where(given(state.token), 0, row.microbatch) if waits else row.microbatch
    extra = shared.outer_extra(jnp.zeros_like(microbatch), microbatch)
    return [*shared.first.consts, *shared.operands.first, *extra, *shared.operands.first_once]


def last_gradients(state: State) -> State:
    """The part of the state that the gradient of `last` adds to: of its own and of the shared
    parameters.
    """
    gradients = given(state.gradients)
    return State(gradients=Gradients(last=gradients.last, shared=gradients.shared))


@dataclass(frozen=True)
class RunDeferred(CodeBlock):
    """H: the gradient of a device's own part of the parameters of `last`, from what its L left; no
    other device takes part.
    """

    axis: str
    row: Backward[Scalar]

    def writes(self, state: State) -> State:
        """The gradients of its own and of the shared parameters."""
        return last_gradients(state)

    def run(self, state: State) -> State:
        """Run it, its results added to the accumulators in place."""
        shared, code, row, operands = (
            self.shared,
            given(self.shared.last),
            self.row,
            self.shared.operands,
        )
        extra = shared.outer_extra(
            jnp.full_like(row.microbatch, len(shared.kind_of) - 1), row.microbatch
        )
        seed = operands.seed / lax.axis_size(self.axis)
        stash = read(state.share or [], row.stash)
        arguments = [*code.consts, *operands.last, *operands.last_once, *extra, seed, *stash]
        gradients = given(state.gradients)
        own, common = given(gradients.last), given(gradients.shared)
        totals: dict[int, Target] = {i: Total(leaf) for i, leaf in enumerate([*own, *common])}
        found = run_in_slots(given(code.deferred).weights, arguments, writes=totals)
        return state.updated(
            State(gradients=Gradients(last=found[: len(own)], shared=found[len(own) :]))
        )


@dataclass(frozen=True)
class RunShare(Block):
    """A device's share of the loss of a microbatch, and of its gradient.

    The output of the last stage goes to all devices as a sum in which the others are zero: its
    source differs from microbatch to microbatch where stages stand on two devices, and one sum is
    one collective, where a tree of permutes is log2(P) of them, each of the same size.  Every
    device gets the same loss.  Each begins its backward with 1/P of the loss's cotangent: what is
    differentiated is the mean over devices of their equal losses, so that a collective inside,
    which sums cotangents over devices, counts none twice.
    """

    shared: SharedCode
    axis: str
    code: StageCode  # of the last stage
    row: Share[Scalar]
    waits: bool  # start after all that ran before in the tick: see `exchange.permuted`

    def writes(self, state: State) -> State:
        """The loss and what comes with it; in training the cotangent of the output,
        and gradients.
        """
        part = State(losses=state.losses, aux=state.aux)
        if not self.shared.training:
            return part
        part = part.updated(State(cotangent=state.cotangent))
        if given(self.shared.last).deferred is not None:
            return part.updated(State(share=state.share))
        return part.updated(last_gradients(state))

    def run(self, state: State) -> State:
        """Run it."""
        shared, code, row, operands = (
            self.shared,
            given(self.shared.last),
            self.row,
            self.shared.operands,
        )
        source = row.is_source != 0
        if self.waits:
            source = jnp.logical_and(source, jnp.logical_not(given(state.token)))
        y = [self._everywhere(leaf, source) for leaf in read(given(state.last), row.y)]
        stage = jnp.full_like(row.microbatch, len(shared.kind_of) - 1)
        arguments = [
            *code.consts,
            *operands.last,
            *operands.last_once,
            *y,
            *shared.outer_extra(stage, row.microbatch),
        ]
        if not shared.training:
            loss, *aux = run(code.evaluate, *arguments)
            return self._noted(state, source, loss, aux)
        seed = operands.seed / lax.axis_size(self.axis)
        loss, *rest = run(
            code.train if code.deferred is None else code.deferred.loss, *arguments, seed
        )
        aux, rest = rest[: len(code.aux_avals)], rest[len(code.aux_avals) :]
        if code.deferred is None:
            state, dy = self._accumulated(rest, state)
        else:
            dy, stash = rest[: len(self.code.dy_avals)], rest[len(self.code.dy_avals) :]
            state = state.updated(
                State(share=write(given(state.share), row.stash, stash)) if stash else State()
            )
        pool, buffer, avals = given(state.cotangent), shared.buffers.cotangent, self.code.dy_avals
        held = buffer.read(pool, row.out, avals)
        # One reduction of all leaves; only the device of the last stage has room for the result,
        # the others keep what is in the slot.
        whole = lax.psum(dy, self.axis)
        kept = [jnp.where(source, new, old) for new, old in zip(whole, held, strict=True)]
        state = self._noted(state, source, loss, aux)
        return state.updated(State(cotangent=buffer.write(pool, row.out, avals, kept)))

    def _accumulated(self, found: Leaves, state: State) -> tuple[State, Leaves]:
        """The gradients of the parameters added, and what comes after them."""
        gradients = given(state.gradients)
        own, common = len(given(gradients.last)), len(given(gradients.shared))
        dlast, dshared, dy = found[:own], found[own : own + common], found[own + common :]
        new = Gradients(
            last=add(given(gradients.last), dlast), shared=add(given(gradients.shared), dshared)
        )
        return state.updated(State(gradients=new)), dy

    def _everywhere(self, leaf: Any, source: Flag) -> Any:
        """The leaf of the device that has it, on all devices."""
        number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
        return lax.psum(jnp.where(source, number, jnp.zeros_like(number)), self.axis).astype(
            leaf.dtype
        )

    def _noted(self, state: State, source: Flag, loss: Any, aux: Leaves) -> State:
        """The loss and what comes with it, noted on one device: the end of the step sums over
        devices.
        """
        once = jnp.where(source, loss, jnp.zeros_like(loss))
        mine = [jnp.where(source, leaf, jnp.zeros_like(leaf)) for leaf in aux]
        return state.updated(
            State(
                losses=add_at(state.losses, self.row.microbatch, once),
                aux=write(given(state.aux), self.row.microbatch, mine),
            )
        )
