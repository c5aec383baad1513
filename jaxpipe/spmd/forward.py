"""The block of a forward: [first,] stage[, last and its gradient]; keeps residuals and hands its
output on.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from jax.extend import core

from ..arrays import Leaves, Scalar
from ..jaxprs import InSlots, Target
from ..program.records import Forward
from ..program.templates import Presence
from .block import Block, run_where
from .outer import EvaluateLast, RunFirst, RunLast
from .pools import add_at, strengthen
from .share import KeepOutput
from .stage_block import StageBlock, Steps
from .state import Gradients, State, chunk_part, given


class _StageForward(StageBlock[Forward[Scalar]]):
    """The forward code of one kind of stage on one chunk."""

    def arguments(self, state: State) -> Leaves:
        """(consts, parameters, x, extra, once)."""
        shared, code, row, operand = self.shared, self.code, self.row, self.operand
        x = shared.buffers.x.read(given(state.x), row.x, code.x_avals)
        extra = shared.stage_extra(
            self.kind,
            operand,
            row.stage,
            row.microbatch,
            given(state.stage_state[self.use.block.chunk]),
        )
        return [*code.consts, *operand.params(), *x, *extra, *operand.once]

    def keep(
        self, jaxpr: core.Jaxpr, count: int, state: State
    ) -> Generator[tuple[InSlots, State], tuple[Leaves, State], tuple[Leaves, State]]:
        """Run a forward whose outputs after the first `count` are residuals, which go into their
        slots: those, and the state after it.
        """
        code, buffers, row = self.code, self.shared.buffers, self.row
        early = len(code.residual_input)
        pools = (given(state.residual_input), given(state.residual_weight))
        entries = (
            (buffers.residual_input, pools[0], row.residual_input, code.residual_input),
            (buffers.residual_weight, pools[1], row.residual_weight, code.residual_weight),
        )
        slots = [
            slot for buffer, pool, at, avals in entries for slot in buffer.slots(pool, at, avals)
        ]
        writes: dict[int, Target] = {count + i: s for i, s in enumerate(slots) if s is not None}
        outs, state = yield InSlots(jaxpr, self.arguments(state), {}, writes), state
        found = (outs[count : count + early], outs[count + early :])
        by_input, by_weight = (
            buffer.stored(pool, at, avals, values)
            for (buffer, pool, at, avals), values in zip(entries, found, strict=True)
        )
        return outs[:count], state.updated(
            State(residual_input=by_input, residual_weight=by_weight)
        )


class RunRecompute(_StageForward):
    """R: the residuals of a forward whose microbatch kept its input alone."""

    def writes(self, state: State) -> State:
        """Residuals."""
        return State(residual_input=state.residual_input, residual_weight=state.residual_weight)

    def steps(self, state: State) -> Steps:
        """Run it."""
        _, state = yield from self.keep(self.code.recompute, 0, state)
        return state


class RunForward(_StageForward):
    """F."""

    def writes(self, state: State) -> State:
        """Residuals and the stage's own state; its input by `first`, its output for this device, or
        by `last` what that writes.
        """
        use, training = self.use, self.shared.training
        first, last, local = (
            presence is not Presence.NEVER for presence in (use.first, use.last, use.local)
        )
        first = first and not self.shared.spreads_first
        part = State(sent_x=state.sent_x if Presence.ALWAYS not in (use.last, use.local) else None)
        if first or local:
            part = part.updated(State(x=state.x))
        if last and self.shared.spreads_last:
            part = part.updated(State(last=state.last))
            last = False
        if any(code.loss is not None for code in self.shared.kinds) or last:
            part = part.updated(State(losses=state.losses))
        if last:
            part = part.updated(State(aux=state.aux))
        own = chunk_part(
            given(state.stage_state[use.block.chunk]), use.block.chunk, self.shared.num_chunks
        )
        part = part.updated(State(stage_state=own))
        if not training:
            return part
        if use.block.keeps:
            part = part.updated(
                State(residual_input=state.residual_input, residual_weight=state.residual_weight)
            )
        if first:
            part = part.updated(State(first=state.first))
        if last:
            gradients = given(state.gradients)
            part = part.updated(
                State(
                    cotangent=state.cotangent,
                    gradients=Gradients(last=gradients.last, shared=gradients.shared),
                )
            )
        return part

    def steps(self, state: State) -> Steps:
        """Run it."""
        shared, code, use, row, operand = self.shared, self.code, self.use, self.row, self.operand
        chunk, buffer = use.block.chunk, self.shared.buffers.x
        if not shared.spreads_first:
            state = run_where(use.first, row.is_first != 0, RunFirst(shared, row), state)
        if shared.training and use.block.keeps:
            outs, state = yield from self.keep(code.forward, code.num_outputs, state)
        else:
            outs, state = yield InSlots(code.evaluate, self.arguments(state), {}, {}), state
        y, rest = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
        if code.loss is not None:
            loss, *rest = rest
            state = state.updated(State(losses=add_at(state.losses, row.microbatch, loss)))
        if code.state:
            own = operand.write_state(given(state.stage_state[chunk]), rest)
            state = state.updated(State(stage_state=chunk_part(own, chunk, shared.num_chunks)))
        # What only the last stage returns is never sent; then no other kind takes it.
        if buffer.has(code.y_avals):
            if Presence.ALWAYS not in (use.last, use.local):
                state = state.updated(
                    State(sent_x=strengthen(buffer.put(given(state.sent_x), code.y_avals, y)))
                )
            state = run_where(use.local, row.is_local != 0, _HandOver(self, y), state)
        last: Block = (
            RunLast(shared, code, row, y) if shared.training else EvaluateLast(shared, row, y)
        )
        if shared.spreads_last:
            last = KeepOutput(row, y)
        return run_where(
            use.last if shared.fits_last(code) else Presence.NEVER, row.is_last != 0, last, state
        )


@dataclass(frozen=True)
class _HandOver(Block):
    """The output for the next chunk of this device."""

    forward: RunForward
    y: Leaves

    def writes(self, state: State) -> State:
        """The next chunk's input."""
        return State(x=state.x)

    def run(self, state: State) -> State:
        """Write it."""
        forward = self.forward
        return state.updated(
            State(
                x=forward.shared.buffers.x.write(
                    given(state.x), forward.row.out, forward.code.y_avals, self.y
                )
            )
        )
