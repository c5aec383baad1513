"""The blocks of a backward: B, or I and W apart."""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Leaves, Scalar
from ..jaxprs import InSlots, Slot, Target
from ..program.records import Backward
from ..program.templates import Presence
from ..table.action import Kind
from .block import Block, run_where
from .outer import FirstGradient
from .pools import add, strengthen
from .share import KeepInputGrad
from .stage_block import StageBlock, Steps
from .state import Gradients, State, chunk_part, given


class RunBackward(StageBlock[Backward[Scalar]]):
    """B, I or W of one kind of stage on one chunk."""

    def writes(self, state: State) -> State:
        """B and W: gradients of parameters; B and I: the gradient of the input, and by `first` what
        its gradient writes; I: the stash.
        """
        use, gradients, part = self.use, given(state.gradients), State()
        action, chunk = use.block.kind, use.block.chunk
        first, local = (presence is not Presence.NEVER for presence in (use.first, use.local))
        if action is not Kind.I:
            own = chunk_part(given(gradients.chunks[chunk]), chunk, self.shared.num_chunks)
            part = part.updated(State(gradients=Gradients(chunks=own, shared=gradients.shared)))
        if action is Kind.I:
            part = part.updated(State(stash=state.stash))
        if action is not Kind.W and first and self.shared.spreads_first:
            part = part.updated(State(first=state.first))
        elif action is not Kind.W and first:
            part = part.updated(
                State(gradients=Gradients(first=gradients.first, shared=gradients.shared))
            )
        if local:
            part = part.updated(State(cotangent=state.cotangent))
        if action is not Kind.W and Presence.ALWAYS not in (use.first, use.local):
            part = part.updated(State(sent_dx=state.sent_dx))
        return part

    def steps(self, state: State) -> Steps:
        """Run it."""
        return {Kind.B: self._both, Kind.I: self._input_grad, Kind.W: self._weight_grad}[
            self.use.block.kind
        ](state)

    def _both(self, state: State) -> Steps:
        """B: both gradients at once."""
        code = self.code
        arguments, slots = self._inputs(state)
        outs, state = yield InSlots(code.backward, arguments, slots, self._totals(state)), state
        dparams, dx = outs[: code.num_trained], outs[code.num_trained :]
        return self._hand_on(dx, self._accumulate(dparams, state))

    def _input_grad(self, state: State) -> Steps:
        """I: the input's gradient, and a stash for W."""
        code, buffer, pool, at = (
            self.code,
            self.shared.buffers.stash,
            given(state.stash),
            self.row.stash,
        )
        arguments, slots = self._inputs(state)
        count = sum(code.x_wanted)
        stash = buffer.slots(pool, at, code.stash)
        writes: dict[int, Target] = {count + i: s for i, s in enumerate(stash) if s is not None}
        outs, state = yield InSlots(code.input_grad, arguments, slots, writes), state
        return self._hand_on(
            outs[:count],
            state.updated(State(stash=buffer.stored(pool, at, code.stash, outs[count:]))),
        )

    def _weight_grad(self, state: State) -> Steps:
        """W: the parameters' gradients, from residuals and stash."""
        code = self.code
        arguments, slots = self._inputs(state)
        stash = self.shared.buffers.stash.lazily(given(state.stash), self.row.stash, code.stash)
        reads = slots | {len(arguments) + i: s for i, s in enumerate(stash) if isinstance(s, Slot)}
        outs, state = yield (
            InSlots(code.weight_grad, [*arguments, *stash], reads, self._totals(state)),
            state,
        )
        return self._accumulate(outs, state)

    def _inputs(self, state: State) -> tuple[Leaves, dict[int, Slot]]:
        """(consts, parameters, x, extra, once, residuals, dy) of a backward action; residuals are
        slots where they can be.
        """
        shared, code, row, buffers, operand = (
            self.shared,
            self.code,
            self.row,
            self.shared.buffers,
            self.operand,
        )
        own = given(state.stage_state[self.use.block.chunk])
        extra = shared.stage_extra(self.kind, operand, row.stage, row.microbatch, own)
        x = buffers.x.read(given(state.x), row.x, code.x_avals)
        before = [*code.consts, *operand.params(), *x, *extra, *operand.once]
        kept: Leaves = [
            *buffers.residual_input.lazily(
                given(state.residual_input), row.residual_input, code.residual_input
            ),
            *buffers.residual_weight.lazily(
                given(state.residual_weight), row.residual_weight, code.residual_weight
            ),
        ]
        dy = buffers.cotangent.read(given(state.cotangent), row.cotangent, code.dy_avals)
        dy += [] if code.loss is None else [shared.operands.seed.astype(code.loss.dtype)]
        return [*before, *kept, *dy], {
            len(before) + i: s for i, s in enumerate(kept) if isinstance(s, Slot)
        }

    def _totals(self, state: State) -> dict[int, Target]:
        """The accumulators that a scan over layers adds to row by row, by the number of the
        parameter.
        """
        return dict(
            enumerate(
                self.operand.totals(given(given(state.gradients).chunks[self.use.block.chunk]))
            )
        )

    def _accumulate(self, dparams: Leaves, state: State) -> State:
        """The new totals of a stage's own parameters, and the gradients of the shared
        ones added.
        """
        operand, gradients, chunk = self.operand, given(state.gradients), self.use.block.chunk
        own = len(dparams) - len(given(gradients.shared))
        total = operand.with_totals(given(gradients.chunks[chunk]), dparams[:own])
        new = Gradients(
            chunks=chunk_part(total, chunk, self.shared.num_chunks),
            shared=add(given(gradients.shared), dparams[own:]),
        )
        return state.updated(State(gradients=new))

    def _hand_on(self, dx: Leaves, state: State) -> State:
        """Send dx, keep it for the chunk before on this device, or give it to `first` (or keep it
        for G).
        """
        shared, code, use, row, buffer = (
            self.shared,
            self.code,
            self.use,
            self.row,
            self.shared.buffers.cotangent,
        )
        # The first stage's goes nowhere; where no other stage has one like it, it has no place
        # among them.
        if buffer.has(code.dx_avals):
            if Presence.ALWAYS not in (use.first, use.local):
                state = state.updated(
                    State(sent_dx=strengthen(buffer.put(given(state.sent_dx), code.dx_avals, dx)))
                )
            state = run_where(use.local, row.is_local != 0, _HandOver(self, dx), state)
        at_first = use.first if shared.fits_first(code) else Presence.NEVER
        first: Block = (
            KeepInputGrad(row, dx) if shared.spreads_first else FirstGradient(shared, row, dx)
        )
        return run_where(at_first, row.is_first != 0, first, state)


@dataclass(frozen=True)
class _HandOver(Block):
    """The input gradient for the chunk before on this device."""

    backward: RunBackward
    dx: Leaves

    def writes(self, state: State) -> State:
        """Its cotangent."""
        return State(cotangent=state.cotangent)

    def run(self, state: State) -> State:
        """Write it."""
        backward = self.backward
        pool, avals = given(state.cotangent), backward.code.dx_avals
        return state.updated(
            State(
                cotangent=backward.shared.buffers.cotangent.write(
                    pool, backward.row.out, avals, self.dx
                )
            )
        )
