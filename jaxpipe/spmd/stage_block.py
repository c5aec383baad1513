"""The blocks of a stage's actions (F, R, B, I, W), and of an overlapped pair of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp

from ..arrays import Leaves
from ..jaxprs.eval_in_slots import run_in_slots
from ..jaxprs.slots import InSlots, Slot, Target
from ..program.segments import BlockUse, Presence
from ..stage.code import StageCode, run
from ..table.effects import Access, Place
from ..table.kinds import Kind
from .block import Block, State, add, add_at, of_chunk, read, run_where, without_weak_types, write
from .shared_code import (
    SharedCode,
    StageOperand,
    accumulate,
    first_inputs,
    last_inputs,
    noted,
    run_last,
    with_last_gradients,
)

# Yields the stage's code with the state before it, receives the code's results with the state after
# it, and returns the last state.
Steps: TypeAlias = Generator[tuple[InSlots, State], tuple[Leaves, State], State]
_RESIDUALS = (Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT)


@dataclass(frozen=True)
class StageAction:
    """An action of one kind of stage on one chunk; `row` is the record that it reads."""

    shared: SharedCode
    use: BlockUse
    kind: int  # of stage
    row: Any

    @property
    def code(self) -> StageCode:
        """The stage's."""
        return self.shared.code.kinds[self.kind]

    @property
    def operand(self) -> StageOperand:
        """The stage's."""
        return self.shared.operands.stages[self.use.block.chunk, self.kind]

    def name(self, place: Place) -> str:
        """A place of the chunk in the state."""
        return of_chunk(place, self.use.block.chunk)

    def changes(self, when: str | None = None) -> set[str]:
        """What the action may change, or the part of it under a flag."""
        return {
            self.name(effect.place)
            for effect in self.shared.effects(self.use.block.kind)
            if effect.access is not Access.READ
            and self.use.does(effect)
            and (effect.when != "has_loss" or self.code.loss is not None)
            and (when is None or effect.when == when)
        }

    def block(self) -> Block:
        """The block of this action alone."""

        def run_alone(state: State) -> State:
            steps = self.steps(state)
            code, state = next(steps)
            (outs,) = run_in_slots(code)
            return _last_step(steps, outs, state)

        return Block(self.changes(), run_alone, self.shared.everywhere)

    def steps(self, state: State) -> Steps:
        """The action, up to the stage's code and on from it."""
        return {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.B: self._backward,
            Kind.I: self._input_grad,
            Kind.W: self._weight_grad,
        }[self.use.block.kind](state)

    def _under(
        self, flag: str, run: Callable[[State], State], state: State, *, fits: bool = True
    ) -> State:
        """Run a part under its flag; `fits`: the stages of this kind may have it."""
        presence = self.use.presence(flag) if fits else Presence.NEVER
        block = Block(self.changes(flag), run, self.shared.everywhere)
        return run_where(presence, getattr(self.row, flag) != 0, block, state)

    def _inputs(self, state: State) -> Leaves:
        """(consts, parameters, x, carry, buffers, extra, once)."""
        shared, code, row, operand = self.shared, self.code, self.row, self.operand
        x = shared.buffers[Place.X].read(state["x"], row.x, code.x_avals)
        own = state[self.name(Place.STAGE_STATE)]
        extra = shared.stage_extra(self.kind, operand, row.stage, row.microbatch, own)
        passed = self._read(Place.CARRY, state) + self._read(Place.BUFFER, state)
        return [*code.consts, *operand.params(), *x, *passed, *extra, *operand.once]

    def _read(self, place: Place, state: State, *, flag: str | None = None) -> Leaves:
        """Values that pass between slices, as slots where they can be; zeros where a flag of the
        record is 0.

        Values that no effect of the action reads are zeros too: its code does not use them.
        """
        avals, buffer = self.code.stored[place], self.shared.buffers[place]
        effects = self.shared.effects(self.use.block.kind)
        if not any(e.place is place and e.access is Access.READ for e in effects):
            return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        name = place.value
        found: Leaves = buffer.lazily(state[name], getattr(self.row, name), avals)
        if flag is None:
            return found
        filled = getattr(self.row, flag) != 0
        return [
            leaf._replace(filled=filled) if isinstance(leaf, Slot) else jnp.where(filled, leaf, 0)
            for leaf in found
        ]

    def _write(self, place: Place, field: str, flag: str, values: Leaves, state: State) -> State:
        """Write values for another slice, where a flag of the record is set."""
        avals, buffer, name = self.code.stored[place], self.shared.buffers[place], place.value
        if not avals:
            return state
        slot, wanted = getattr(self.row, field), getattr(self.row, flag) != 0
        old = buffer.read(state[name], slot, avals)
        new = [jnp.where(wanted, a, b) for a, b in zip(values, old, strict=True)]
        return state | {name: buffer.write(state[name], slot, avals, new)}

    def _appends(self, state: State) -> tuple[dict[int, Slot], dict[int, Target]]:
        """Of a forward, the slots of its buffers by the numbers of inputs and of outputs."""
        code = self.code
        if not code.buffers:
            return {}, {}
        buffer, row = self.shared.buffers[Place.BUFFER], self.row.buffer
        slots = buffer.slots(state["buffer"], row, code.buffers)
        begin = len(code.consts) + code.num_params + len(code.x_avals) + len(code.carry)
        after = len(code.y_avals) + len(code.carry)
        there = [(i, slot) for i, slot in enumerate(slots) if slot is not None]
        return {begin + i: s for i, s in there}, {after + i: s for i, s in there}

    def _forward(self, state: State) -> Steps:
        """F: [first,] stage[, last and its gradient]."""
        shared, code, use, row = self.shared, self.code, self.use, self.row
        if not shared.spreads_first:
            state = self._under("is_first", self._first, state)
        if shared.training and use.block.keeps:
            outs, state = yield from self._keep(code.forward, code.num_outputs, state)
        else:
            arguments, (reads, writes) = self._inputs(state), self._appends(state)
            reads = _slots_of(arguments) | reads
            outs, state = yield InSlots(code.evaluate, arguments, reads, writes), state
        y, rest = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
        state, rest = self._pass_on(rest, state)
        if code.loss is not None:
            loss, *rest = rest
            state = state | {"losses": add_at(state["losses"], row.microbatch, loss)}
        if code.state:
            own = self.name(Place.STAGE_STATE)
            state = state | {own: self.operand.write_state(state[own], rest)}
        state = self._hand_on(Place.X, code.y_avals, y, state)
        return self._under(
            "is_last", lambda s: self._last(y, s), state, fits=shared.fits_last(code)
        )

    def _pass_on(self, outs: Leaves, state: State) -> tuple[State, Leaves]:
        """Write the carry and the buffers for the next slice; return the other results."""
        code, buffer = self.code, self.shared.buffers[Place.BUFFER]
        carries, count = len(code.carry), len(code.passed)
        state = self._write(Place.CARRY, "carry_out", "is_followed", outs[:carries], state)
        if code.buffers:
            after = buffer.stored(
                state["buffer"], self.row.buffer, code.buffers, outs[carries:count]
            )
            state = state | {"buffer": after}
        return state, outs[count:]

    def _recompute(self, state: State) -> Steps:
        """R: the residuals of a forward that kept only its input."""
        _, state = yield from self._keep(self.code.recompute, 0, state)
        return state

    def _keep(
        self, jaxpr: Any, count: int, state: State
    ) -> Generator[tuple[InSlots, State], tuple[Leaves, State], tuple[Leaves, State]]:
        """Run a forward and write its residuals, the outputs after the first `count`, to their
        slots; return the first `count` outputs and the state.
        """
        code, buffers, row = self.code, self.shared.buffers, self.row
        early = len(code.residual_input)
        entries = [
            (buffers[place], state[place.value], getattr(row, place.value), code.stored[place])
            for place in _RESIDUALS
        ]
        slots = [
            slot for buffer, pool, at, avals in entries for slot in buffer.slots(pool, at, avals)
        ]
        writes: dict[int, Target] = {count + i: s for i, s in enumerate(slots) if s is not None}
        reads, appended = self._appends(state) if count else ({}, {})
        arguments = self._inputs(state)
        reads = _slots_of(arguments) | reads
        outs, state = yield InSlots(jaxpr, arguments, reads, writes | appended), state
        found = (outs[count : count + early], outs[count + early :])
        by_input, by_weight = (
            buffer.stored(pool, at, avals, values)
            for (buffer, pool, at, avals), values in zip(entries, found, strict=True)
        )
        return outs[:count], state | {"residual_input": by_input, "residual_weight": by_weight}

    def _first(self, state: State) -> State:
        """`first`: the stage's input, and residuals for its gradient."""
        shared, code, row = self.shared, self.shared.code.first, self.row
        jaxpr = code.forward if shared.training else code.evaluate
        outs = run(jaxpr, *first_inputs(shared, row.microbatch))
        x, residuals = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
        state = state | {"x": shared.buffers[Place.X].write(state["x"], row.x, code.y_avals, x)}
        if not shared.training:
            return state
        return state | {"first": write(state["first"], row.first, residuals)}

    def _last(self, y: Leaves, state: State) -> State:
        """The loss and at once its gradient: a cotangent of y is far smaller than the residuals of
        a head.  With a spread `last`, y alone is kept for the devices' shares.
        """
        shared, row, pool = self.shared, self.row, self.shared.buffers[Place.COTANGENT]
        if shared.spreads_last:
            return state | {"last": write(state["last"], row.out, y)}
        arguments = last_inputs(shared, y, row.microbatch)
        if not shared.training:
            loss, aux, _ = run_last(shared, shared.last_code.evaluate, arguments)
            return noted(loss, aux, row.microbatch, state)
        loss, aux, rest = run_last(
            shared, shared.last_code.train, [*arguments, shared.operands.seed]
        )
        state, dy = with_last_gradients(rest, state)
        state = noted(loss, aux, row.microbatch, state)
        return state | {
            "cotangent": pool.write(state["cotangent"], row.out, self.code.dy_avals, dy)
        }

    def _backward(self, state: State) -> Steps:
        """B: both gradients at once."""
        code = self.code
        arguments, slots = self._held(state)
        writes = self._totals(state) | self._rows_back(state, code.num_trained)
        outs, state = yield InSlots(code.backward, arguments, slots, writes), state
        dparams, dx = outs[: code.num_trained], outs[code.num_trained :]
        state, dx = self._pass_back(dx, state)
        return self._hand_back(dx, self._accumulate(dparams, state))

    def _input_grad(self, state: State) -> Steps:
        """I: the input's gradient, and a stash for W."""
        code, buffer, pool, at = (
            self.code,
            self.shared.buffers[Place.STASH],
            state["stash"],
            self.row.stash,
        )
        arguments, slots = self._held(state)
        count = code.num_dx
        stash = buffer.slots(pool, at, code.stash)
        writes = self._rows_back(state, 0)
        writes |= {count + i: s for i, s in enumerate(stash) if s is not None}
        outs, state = yield InSlots(code.input_grad, arguments, slots, writes), state
        state = state | {"stash": buffer.stored(pool, at, code.stash, outs[count:])}
        state, dx = self._pass_back(outs[:count], state)
        return self._hand_back(dx, state)

    def _rows_back(self, state: State, first: int) -> dict[int, Target]:
        """The slots of the gradients of appended rows, by the numbers of outputs, of which those of
        x are the `first` ones and on.
        """
        code, place = self.code, Place.BUFFER_GRADIENT
        if not code.buffer_gradients:
            return {}
        slots = self.shared.buffers[place].slots(
            state[place.value], self.row.buffer_gradient, code.buffer_gradients
        )
        first += sum(code.x_wanted) + len(code.carry_gradients)
        return {first + i: slot for i, slot in enumerate(slots) if slot is not None}

    def _pass_back(self, dx: Leaves, state: State) -> tuple[State, Leaves]:
        """Write the gradients of carry and buffers for the previous slice; return those of x."""
        code = self.code
        own, end = sum(code.x_wanted), sum(code.x_wanted) + len(code.carry_gradients)
        state = self._write(
            Place.CARRY_GRADIENT, "carry_gradient_out", "continues", dx[own:end], state
        )
        if code.buffer_gradients:
            buffer, pool = self.shared.buffers[Place.BUFFER_GRADIENT], state["buffer_gradient"]
            at = self.row.buffer_gradient
            pool = buffer.stored(pool, at, code.buffer_gradients, dx[end:])
            state = state | {"buffer_gradient": pool}
        return state, dx[:own]

    def _weight_grad(self, state: State) -> Steps:
        """W: the parameters' gradients, from residuals and stash."""
        code = self.code
        arguments, slots = self._held(state)
        stash = self.shared.buffers[Place.STASH].lazily(state["stash"], self.row.stash, code.stash)
        arguments += stash
        reads = slots | _slots_of(arguments)
        outs, state = yield (
            InSlots(code.weight_grad, arguments, reads, self._totals(state)),
            state,
        )
        return self._accumulate(outs, state)

    def _held(self, state: State) -> tuple[Leaves, dict[int, Slot]]:
        """(consts, parameters, x, extra, once, residuals, dy) of a backward action; values of pools
        are slots where they can be.
        """
        shared, code, row = self.shared, self.code, self.row
        before = self._inputs(state)
        kept: Leaves = [
            leaf
            for place in _RESIDUALS
            for leaf in shared.buffers[place].lazily(
                state[place.value], getattr(row, place.value), code.stored[place]
            )
        ]
        dy = shared.buffers[Place.COTANGENT].read(state["cotangent"], row.cotangent, code.dy_avals)
        for place in (Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT):
            dy += self._read(place, state, flag="is_followed")
        dy += [] if code.loss is None else [shared.operands.seed.astype(code.loss.dtype)]
        arguments = [*before, *kept, *dy]
        return arguments, _slots_of(arguments)

    def _totals(self, state: State) -> dict[int, Target]:
        """The accumulators that a scan over layers adds to row by row, by the number of the
        parameter.
        """
        return dict(enumerate(self.operand.totals(state[self.name(Place.STAGE_GRADIENTS)])))

    def _accumulate(self, dparams: Leaves, state: State) -> State:
        """The new totals of a stage's own parameters, and the gradients of the shared ones
        added.
        """
        name, common = self.name(Place.STAGE_GRADIENTS), state["shared_gradients"]
        own = len(dparams) - len(common)
        return state | {
            name: self.operand.with_totals(state[name], dparams[:own]),
            "shared_gradients": add(common, dparams[own:]),
        }

    def _hand_back(self, dx: Leaves, state: State) -> State:
        """Pass dx on.  At the first stage, pass it to `first`, or keep it for shares."""
        shared, row = self.shared, self.row

        def first(state: State) -> State:
            if shared.spreads_first:
                return state | {"first": write(state["first"], row.out, dx)}
            kept = read(state["first"], row.first)
            arguments = [*first_inputs(shared, row.microbatch), *kept, *dx]
            return accumulate("first_gradients", shared.code.first.backward, arguments, state)

        state = self._hand_on(Place.COTANGENT, self.code.dx_avals, dx, state)
        return self._under("is_first", first, state, fits=shared.fits_first(self.code))

    def _hand_on(self, place: Place, avals: Any, values: Leaves, state: State) -> State:
        """Send what the neighbour stage needs, or write it to its slot on this device.

        The output of the stage at this end of the model is never sent.  Where no other kind takes
        it, it has no place in the buffer.
        """
        buffer, name = self.shared.buffers[place], place.value
        if not buffer.has(avals):
            return state
        sent = "sent_x" if place is Place.X else "sent_dx"
        if sent in self.changes():
            state = state | {sent: without_weak_types(buffer.put(state[sent], avals, values))}

        def local(state: State) -> State:
            return state | {name: buffer.write(state[name], self.row.out, avals, values)}

        return self._under("is_local", local, state)


def _slots_of(arguments: Leaves) -> dict[int, Slot]:
    """The arguments that are slots, by their numbers."""
    return {i: leaf for i, leaf in enumerate(arguments) if isinstance(leaf, Slot)}


def _last_step(steps: Steps, outs: Leaves, state: State) -> State:
    """The state after a block, from the results of its code."""
    try:
        steps.send((outs, state))
    except StopIteration as done:
        after: State = done.value
        return after
    raise AssertionError("a block runs its stage's code once")


def pair_block(forward: StageAction, backward: StageAction) -> Block:
    """F and B of an OVERLAP_F_B cell, or F and W of a tick, under one predicate, interleaved layer
    by layer (DualPipe, DeepSeek-V3 section 3.2.1).

    The backward reads its residuals before the forward writes its own, because they share pools.
    """

    def run_both(state: State) -> State:
        ahead_steps = forward.steps(state)
        ahead, state = next(ahead_steps)
        back_steps = backward.steps(state)
        back, _ = next(back_steps)
        back_outs, ahead_outs = run_in_slots(back, ahead)
        return _last_step(back_steps, back_outs, _last_step(ahead_steps, ahead_outs, state))

    return Block(forward.changes() | backward.changes(), run_both, forward.shared.everywhere)
