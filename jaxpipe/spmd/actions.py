"""The blocks of a stage's actions (F, R, B, I, W), of an overlapped pair of them, and of a device's
shares of `first` and `last` where these are spread over the pipe axis (E, G, L, H).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..arrays import Flag, Leaves, Scalar
from ..jaxprs.slots import InSlots, Slot, Target, Total, run_in_slots
from ..program.ir import Record
from ..program.segments import BlockUse, Presence
from ..stage.code import COTANGENTS, RESIDUALS, RESULTS, StageCode, run
from ..table.effects import OF_SLICES, Access, Effect, Place
from ..table.kinds import COLLECTIVES, Kind
from .block import Block, State, add, add_at, of_chunk, read, run_where, without_weak_types, write
from .step import DeviceStep, StageOperand

# The results that a stage's code writes to slots itself.
_IN_SLOTS = (*RESIDUALS, Place.STASH, Place.BUFFER, Place.BUFFER_GRADIENT)
# The order in which results are written.
_ORDER = (
    *(*RESIDUALS, Place.STASH, Place.CARRY, Place.CARRY_GRADIENT),
    *(Place.BUFFER, Place.BUFFER_GRADIENT, Place.LOSSES, Place.STAGE_STATE),
    *(Place.STAGE_GRADIENTS, Place.SENT_X, Place.SENT_DX),
)


@dataclass(frozen=True)
class StageAction:
    """An action of one kind of stage on one chunk; `row` is the record that it reads."""

    step: DeviceStep
    use: BlockUse
    stage_kind: int
    row: Any

    @property
    def kind(self) -> Kind:
        """The kind of the action."""
        return self.use.block.kind

    @property
    def code(self) -> StageCode:
        """The code of the stage."""
        return self.step.code.kinds[self.stage_kind]

    @property
    def operand(self) -> StageOperand:
        """The inputs of the stage's code on this device."""
        return self.step.stages[self.use.block.chunk, self.stage_kind]

    @property
    def keeps(self) -> bool:
        """Whether a forward keeps residuals."""
        return self.step.job.training and self.use.block.keeps

    @property
    def effects(self) -> Sequence[Effect]:
        """What it reads and writes."""
        return self.step.code.program.effects(self.kind)

    def name(self, place: Place) -> str:
        """A place of the chunk in the state."""
        return of_chunk(place, self.use.block.chunk)

    def changes(self, when: str | None = None) -> set[str]:
        """What the action may change, or the part of it under a flag."""
        return {
            self.name(effect.place)
            for effect in self.effects
            if effect.access is not Access.READ
            and self.use.does(effect)
            and (effect.when != "has_loss" or self.code.loss is not None)
            and (when is None or effect.when == when)
        }

    def block(self) -> Block:
        """The block of this action alone."""

        def run_alone(state: State) -> State:
            code, state = self.begin(state)
            (outs,) = run_in_slots(code)
            return self.end(outs, state)

        return Block(self.changes(), run_alone, self.step.everywhere)

    def begin(self, state: State) -> tuple[InSlots, State]:
        """The stage's code, and the state before it: after `first`, in the first stage."""
        if self.kind is Kind.F and not self.step.code.spreads_first:
            first = partial(_inner_first, self.step, self.row)
            state = self._under("is_first", first, state)
        arguments = self._inputs(state)
        if not self.use.block.runs_forward:
            arguments += self._kept(state)
        slots = {i: leaf for i, leaf in enumerate(arguments) if isinstance(leaf, Slot)}
        jaxpr = self.code.of(self.kind, keeps=self.keeps)
        return InSlots(jaxpr, arguments, slots, self._targets(state)), state

    def end(self, outs: Leaves, state: State) -> State:
        """The state after the stage's code, from its results."""
        found = {place: outs[span.start : span.stop] for place, span in self._results.items()}
        for place in sorted(found, key=_ORDER.index):
            state = self._write(place, found[place], state)
        return state

    @property
    def _results(self) -> dict[Place, range]:
        """The numbers of the results for each place."""
        places = RESULTS[self.kind]
        if self.kind is Kind.F and not self.keeps:
            places = tuple(place for place in places if place not in RESIDUALS)
        return self.code.spans(places)

    def _inputs(self, state: State) -> Leaves:
        """(consts, parameters, x, carry, buffers, extra, once)."""
        step, code, row, operand = self.step, self.code, self.row, self.operand
        x = step.buffers[Place.X].read(state["x"], row.x, code.x_avals)
        wants = step.code.wants[self.stage_kind]
        extra = step.extra(row.stage, row.microbatch, wants)
        if "state" in wants:
            extra += operand.read_state(state[self.name(Place.STAGE_STATE)])
        passed = self._read(Place.CARRY, state) + self._read(Place.BUFFER, state)
        return [*code.consts, *operand.params, *x, *passed, *extra, *operand.once]

    def _kept(self, state: State) -> Leaves:
        """(residuals, dy, stash) of a backward action."""
        kept = [leaf for place in RESIDUALS for leaf in self._read(place, state)]
        own, *later = COTANGENTS
        dy = self.step.buffers[own].read(state[own.value], self.row.cotangent, self.code.dy_avals)
        for place in later:
            dy += self._read(place, state, flag="is_followed")
        dy += [] if self.code.loss is None else [self.step.seed.astype(self.code.loss.dtype)]
        return [*kept, *dy, *(self._read(Place.STASH, state) if self.kind is Kind.W else [])]

    def _read(self, place: Place, state: State, *, flag: str | None = None) -> Leaves:
        """Values of a pool, as slots where they can be; zeros where a flag of the record is 0.

        Values of other slices that no effect of the action reads are zeros too: its code does not
        use them.
        """
        avals, name = self.code.stored[place], place.value
        is_read = any(e.place is place and e.access is Access.READ for e in self.effects)
        if place in OF_SLICES and not is_read:
            return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        found = self.step.buffers[place].lazily(state[name], getattr(self.row, name), avals)
        if flag is None:
            return found
        filled = getattr(self.row, flag) != 0
        return [
            leaf._replace(filled=filled) if isinstance(leaf, Slot) else jnp.where(filled, leaf, 0)
            for leaf in found
        ]

    def _targets(self, state: State) -> dict[int, Target]:
        """The slots and accumulators that the stage's code itself writes, by number of result.  A
        scan over layers writes slots, and adds to accumulators, row by row.
        """
        found: dict[int, Target] = {}
        for place, span in self._results.items():
            targets: list[Any] = []
            if place is Place.STAGE_GRADIENTS:
                targets = self.operand.totals(state[self.name(place)])
            elif place in _IN_SLOTS and span:
                slot, avals = getattr(self.row, place.value), self.code.stored[place]
                targets = self.step.buffers[place].slots(state[place.value], slot, avals)
            found |= {span.start + i: t for i, t in enumerate(targets) if t is not None}
        return found

    def _write(self, place: Place, values: Leaves, state: State) -> State:
        """Write the results for a place, after the code has written those that are in slots."""
        name, row = self.name(place), self.row
        if place is Place.SENT_X:
            return self._hand_on(Place.X, self.code.y_avals, values, state)
        if place is Place.SENT_DX:
            return self._hand_on(Place.COTANGENT, self.code.dx_avals, values, state)
        if place is Place.STAGE_GRADIENTS:
            common = state["shared_gradients"]
            own = len(values) - len(common)
            return state | {
                name: self.operand.with_totals(state[name], values[:own]),
                "shared_gradients": add(common, values[own:]),
            }
        if not values:
            return state
        if place is Place.LOSSES:
            return state | {name: add_at(state[name], row.microbatch, values[0])}
        if place is Place.STAGE_STATE:
            return state | {name: self.operand.write_state(state[name], values)}
        buffer, avals, pool = self.step.buffers[place], self.code.stored[place], state[name]
        if place in _IN_SLOTS:
            return state | {name: buffer.stored(pool, getattr(row, name), avals, values)}
        # for another slice, where there is one
        (effect,) = (e for e in self.effects if e.place is place and e.access is Access.WRITE)
        slot, flag = getattr(row, effect.field), getattr(row, str(effect.when)) != 0
        return state | {name: buffer.write(pool, slot, avals, values, where=flag)}

    def _hand_on(self, place: Place, avals: Any, values: Leaves, state: State) -> State:
        """Send what the neighbour stage needs, or write it to its slot on this device.  At the end
        of the model, pass it to `first` or `last`.

        The output of the stage at this end of the model is never sent.  Where no other kind takes
        it, it has no place in the buffer.
        """
        step, row, buffer, name = self.step, self.row, self.step.buffers[place], place.value
        sent = "sent_x" if place is Place.X else "sent_dx"

        def local(state: State) -> State:
            return state | {name: buffer.write(state[name], row.out, avals, values)}

        if buffer.has(avals):
            if sent in self.changes():
                state = state | {sent: without_weak_types(buffer.put(state[sent], avals, values))}
            state = self._under("is_local", local, state)
        if place is Place.X:
            last = partial(_inner_last, step, row, values)
            return self._under("is_last", last, state, fits=step.code.fits_last(self.code))
        first = partial(_inner_first_gradient, step, row, values)
        return self._under("is_first", first, state, fits=step.code.fits_first(self.code))

    def _under(
        self, flag: str, run: Callable[[State], State], state: State, *, fits: bool = True
    ) -> State:
        """Run a part under its flag; `fits`: the stages of this kind may have it."""
        presence = self.use.presence(flag) if fits else Presence.NEVER
        block = Block(self.changes(flag), run, self.step.everywhere)
        return run_where(presence, getattr(self.row, flag) != 0, block, state)


def pair_block(forward: StageAction, backward: StageAction) -> Block:
    """F and B of an OVERLAP_F_B cell, or F and W of a tick, under one predicate, interleaved layer
    by layer (DualPipe, DeepSeek-V3 section 3.2.1).

    The backward reads its residuals before the forward writes its own, because they share pools.
    """

    def run_both(state: State) -> State:
        ahead, state = forward.begin(state)
        back, _ = backward.begin(state)
        back_outs, ahead_outs = run_in_slots(back, ahead)
        return backward.end(back_outs, forward.end(ahead_outs, state))

    return Block(forward.changes() | backward.changes(), run_both, forward.step.everywhere)


def share_block(step: DeviceStep, kind: Kind, row: Record[Scalar]) -> Block:
    """A device's share of an action.  All devices run E, G and L in any case."""
    effects = step.code.program.effects(kind)
    changes = {e.place.value for e in effects if e.access is not Access.READ}
    share = {Kind.E: _first, Kind.G: _first_gradient, Kind.L: _last, Kind.H: _last_weight_grad}
    return Block(
        changes,
        lambda state: share[kind](step, row, state),
        step.everywhere and kind not in COLLECTIVES,
    )


def _inner_first(step: DeviceStep, row: Record[Scalar], state: State) -> State:
    """`first` in a forward: the stage's input, and residuals for its gradient."""
    code = step.code.first
    jaxpr = code.forward if step.job.training else code.evaluate
    outs = run(jaxpr, *_first_inputs(step, row.microbatch))
    x, residuals = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
    state = state | {"x": step.buffers[Place.X].write(state["x"], row.x, code.y_avals, x)}
    if not step.job.training:
        return state
    return state | {"first": write(state["first"], row.first, residuals)}


def _first(step: DeviceStep, row: Record[Scalar], state: State) -> State:
    """E: the first stage's input.  Every device has it whole, and the device of the first stage
    keeps it.
    """
    code, buffer = step.code.first, step.buffers[Place.X]
    x = run(code.evaluate, *_first_inputs(step, _ordered(step, row.microbatch, state)))
    kept = buffer.write(state["x"], row.out, code.y_avals, x, where=row.is_source != 0)
    return state | {"x": kept}


def _inner_first_gradient(step: DeviceStep, row: Record[Scalar], dx: Leaves, state: State) -> State:
    """The gradient of `first` in a backward.  A spread `first` gets it in a block of its own."""
    if step.code.spreads_first:
        return state | {"first": write(state["first"], row.out, dx)}
    kept = read(state["first"], row.first)
    return _add_first(step, row.microbatch, [*kept, *dx], state)


def _first_gradient(step: DeviceStep, row: Record[Scalar], state: State) -> State:
    """G: the gradient of a device's share of the parameters of `first`.

    The device of the first stage begins with the gradient of its input, the others begin with
    zeros.  The input is a sum of the devices' shares.  The gradient of that sum reaches all
    devices, so no other transfer is needed.
    """
    dx = [_or_zeros(row.is_source != 0, leaf) for leaf in read(state["first"], row.y)]
    return _add_first(step, _ordered(step, row.microbatch, state), dx, state)


def _add_first(step: DeviceStep, microbatch: Scalar, more: Leaves, state: State) -> State:
    arguments = [*_first_inputs(step, microbatch), *more]
    return _accumulate("first_gradients", step.code.first.backward, arguments, state)


def _inner_last(step: DeviceStep, row: Record[Scalar], y: Leaves, state: State) -> State:
    """`last` in a forward: the loss and at once its gradient, since a cotangent of y is far smaller
    than the residuals of a head.  With a spread `last`, y alone is kept for the devices' shares.
    """
    if step.code.spreads_last:
        return state | {"last": write(state["last"], row.out, y)}
    return _loss(step, row, y, state)


def _last(step: DeviceStep, row: Record[Scalar], state: State) -> State:
    """L: the loss of a microbatch, and its gradient.

    The output of the last stage goes to all devices as a sum, to which the other devices add zeros.
    The source differs from microbatch to microbatch where a stage is on two devices.  One sum is
    one collective; a tree of permutes would be log2(P) collectives of the same size.  Every device
    gets the same loss and begins its backward with 1/P of the loss's cotangent.  The backward thus
    differentiates the mean of P equal losses.  Collectives inside it sum cotangents over devices,
    and count none twice.
    """
    source = row.is_source != 0
    if step.blocking:
        source = jnp.logical_and(source, jnp.logical_not(state["token"]))

    def everywhere(leaf: Any) -> Any:
        number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
        return lax.psum(_or_zeros(source, number), step.job.axis).astype(leaf.dtype)

    y = [everywhere(leaf) for leaf in read(state["last"], row.y)]
    return _loss(step, row, y, state, source)


def _loss(
    step: DeviceStep, row: Record[Scalar], y: Leaves, state: State, source: Flag | None = None
) -> State:
    """The state with the loss of a microbatch and its gradients.

    With a `source`, all devices run this.  That device alone notes the loss, since the end of the
    step sums over devices, and has room for the cotangent of y.
    """
    code, training = step.code.last, step.job.training
    assert code is not None
    arguments = _last_inputs(step, y, row.microbatch)
    seed = step.seed
    if training:
        seed = seed if source is None else seed / lax.axis_size(step.job.axis)
        arguments.append(seed)
    train = code.train if code.input_grad is None else code.input_grad
    loss, *rest = run(train if training else code.evaluate, *arguments)
    aux, rest = rest[: len(code.aux_avals)], rest[len(code.aux_avals) :]
    dy_avals = step.code.kinds[step.code.kind_of[-1]].dy_avals
    dy = rest[len(rest) - len(dy_avals) :]
    if training and code.weight_grad is not None:
        dy, stash = rest[: len(dy_avals)], rest[len(dy_avals) :]
        state = state | {"share": write(state["share"], row.stash, stash)}
    elif training:
        own, common = state["last_gradients"], state["shared_gradients"]
        state = state | {
            "last_gradients": add(own, rest[: len(own)]),
            "shared_gradients": add(common, rest[len(own) : len(own) + len(common)]),
        }
    if source is not None:
        # All leaves take one reduction.
        dy = lax.psum(dy, step.job.axis) if training else dy
        aux = [_or_zeros(source, leaf) for leaf in aux]
        loss = _or_zeros(source, loss)
    state = state | {
        "losses": add_at(state["losses"], row.microbatch, loss),
        "aux": write(state["aux"], row.microbatch, aux),
    }
    if not training:
        return state
    buffer, pool = step.buffers[Place.COTANGENT], state["cotangent"]
    return state | {"cotangent": buffer.write(pool, row.out, dy_avals, dy, where=source)}


def _last_weight_grad(step: DeviceStep, row: Record[Scalar], state: State) -> State:
    """H: the gradient of a device's own part of the parameters of `last`, from the values that its
    L left.  No other device takes part.
    """
    assert step.code.last is not None
    seed = step.seed / lax.axis_size(step.job.axis)
    stash = read(state["share"], row.stash)
    arguments = [*_last_inputs(step, [], row.microbatch), seed, *stash]
    return _accumulate("last_gradients", step.code.last.weight_grad, arguments, state)


def _first_inputs(step: DeviceStep, microbatch: Scalar) -> Leaves:
    """(consts, parameters, extra, once) of `first`."""
    extra = step.extra(jnp.zeros_like(microbatch), microbatch)
    return [*step.code.first.consts, *step.first, *extra, *step.first_once]


def _last_inputs(step: DeviceStep, y: Leaves, microbatch: Scalar) -> Leaves:
    """(consts, parameters, once, y, extra) of `last`."""
    assert step.code.last is not None
    extra = step.extra(jnp.full_like(microbatch, len(step.code.kind_of) - 1), microbatch)
    return [*step.code.last.consts, *step.last, *step.last_once, *y, *extra]


def _accumulate(name: str, jaxpr: Any, arguments: Leaves, state: State) -> State:
    """Run code that adds gradients of `first` or `last` and of the shared parameters in place."""
    own, common = state[name], state["shared_gradients"]
    totals = {i: Total(leaf) for i, leaf in enumerate([*own, *common])}
    (after,) = run_in_slots(InSlots(jaxpr, arguments, writes=totals))
    return state | {name: after[: len(own)], "shared_gradients": after[len(own) :]}


def _ordered(step: DeviceStep, microbatch: Scalar, state: State) -> Scalar:
    """The microbatch.  Where permutes block the device, it depends on the end of earlier blocks of
    the tick.
    """
    return jnp.where(state["token"], 0, microbatch) if step.blocking else microbatch


def _or_zeros(source: Flag, leaf: Any) -> Any:
    return jnp.where(source, leaf, jnp.zeros_like(leaf))
