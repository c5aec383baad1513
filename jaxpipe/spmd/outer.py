"""The inner blocks around the model: `first` and its gradient, `last` with its gradient, and the
loss alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Leaves, Scalar
from ..jaxprs import Total, run_in_slots
from ..program.records import Backward, Forward
from ..stage.code import StageCode, run
from .pools import add, add_at, read, write
from .shared_code import CodeBlock, SharedCode
from .state import Gradients, State, given


@dataclass(frozen=True)
class RunFirst(CodeBlock):
    """`first`: the input of the model's first stage, and residuals for its gradient."""

    row: Forward[Scalar]

    def writes(self, state: State) -> State:
        """The stage's input, and what `first` keeps."""
        return State(x=state.x, first=state.first if self.shared.training else None)

    def run(self, state: State) -> State:
        """Run it."""
        shared, code, row = self.shared, self.shared.first, self.row
        extra = shared.outer_extra(row.stage, row.microbatch)
        jaxpr = code.forward if shared.training else code.evaluate
        outs = run(jaxpr, *code.consts, *shared.operands.first, *extra, *shared.operands.first_once)
        x, residuals = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
        state = state.updated(
            State(x=shared.buffers.x.write(given(state.x), row.x, code.y_avals, x))
        )
        return (
            state.updated(State(first=write(given(state.first), row.first, residuals)))
            if shared.training
            else state
        )


@dataclass(frozen=True)
class FirstGradient(CodeBlock):
    """The gradient of `first`, from that of the first stage's input."""

    row: Backward[Scalar]
    dx: Leaves

    def writes(self, state: State) -> State:
        """The gradients of its own and of the shared parameters."""
        return first_gradients(state)

    def run(self, state: State) -> State:
        """Run it and accumulate."""
        shared, code, row = self.shared, self.shared.first, self.row
        extra = shared.outer_extra(row.stage, row.microbatch)
        residuals = read(given(state.first), row.first)
        arguments = [
            *code.consts,
            *shared.operands.first,
            *extra,
            *shared.operands.first_once,
            *residuals,
            *self.dx,
        ]
        return add_first_gradients(shared, arguments, state)


def first_gradients(state: State) -> State:
    """The part of the state that a gradient of `first` adds to: of its own and of the shared
    parameters.
    """
    gradients = given(state.gradients)
    return State(gradients=Gradients(first=gradients.first, shared=gradients.shared))


def add_first_gradients(shared: SharedCode, arguments: Leaves, state: State) -> State:
    """Run the backward of `first` with these arguments, its results added to the accumulators in
    place.
    """
    gradients = given(state.gradients)
    own, common = given(gradients.first), given(gradients.shared)
    totals = {i: Total(leaf) for i, leaf in enumerate([*own, *common])}
    found = run_in_slots(shared.first.backward, arguments, writes=totals)
    return state.updated(
        State(gradients=Gradients(first=found[: len(own)], shared=found[len(own) :]))
    )


@dataclass(frozen=True)
class RunLast(CodeBlock):
    """The loss and, at once, its gradient: a cotangent of y is far smaller than the residuals of a
    head.
    """

    code: StageCode  # of the last stage
    row: Forward[Scalar]
    y: Leaves

    def writes(self, state: State) -> State:
        """The cotangent of y, the loss and what comes with it, the gradients of its own and of the
        shared parameters.
        """
        gradients = given(state.gradients)
        new = Gradients(last=gradients.last, shared=gradients.shared)
        return State(cotangent=state.cotangent, gradients=new, losses=state.losses, aux=state.aux)

    def run(self, state: State) -> State:
        """Run it and accumulate."""
        shared, code, row, operands = (
            self.shared,
            given(self.shared.last),
            self.row,
            self.shared.operands,
        )
        gradients = given(state.gradients)
        extra = shared.outer_extra(row.stage, row.microbatch)
        loss, *rest = run(
            code.train,
            *code.consts,
            *operands.last,
            *operands.last_once,
            *self.y,
            *extra,
            operands.seed,
        )
        aux, rest = rest[: len(code.aux_avals)], rest[len(code.aux_avals) :]
        own, common = len(given(gradients.last)), len(given(gradients.shared))
        dlast, dshared, dy = rest[:own], rest[own : own + common], rest[own + common :]
        return state.updated(
            State(
                cotangent=shared.buffers.cotangent.write(
                    given(state.cotangent), row.out, self.code.dy_avals, dy
                ),
                gradients=Gradients(
                    last=add(given(gradients.last), dlast),
                    shared=add(given(gradients.shared), dshared),
                ),
                losses=add_at(state.losses, row.microbatch, loss),
                aux=write(given(state.aux), row.microbatch, aux),
            )
        )


@dataclass(frozen=True)
class EvaluateLast(CodeBlock):
    """The loss alone."""

    row: Forward[Scalar]
    y: Leaves

    def writes(self, state: State) -> State:
        """The loss and what comes with it."""
        return State(losses=state.losses, aux=state.aux)

    def run(self, state: State) -> State:
        """Run it."""
        shared, code, row, operands = (
            self.shared,
            given(self.shared.last),
            self.row,
            self.shared.operands,
        )
        extra = shared.outer_extra(row.stage, row.microbatch)
        loss, *aux = run(
            code.evaluate, *code.consts, *operands.last, *operands.last_once, *self.y, *extra
        )
        losses = add_at(state.losses, row.microbatch, loss)
        return state.updated(State(losses=losses, aux=write(given(state.aux), row.microbatch, aux)))
