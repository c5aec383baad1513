"""The blocks of a stage's actions (F, R, B, I, W), of an overlapped pair of them, and of a device's
shares of `first` and `last` where these are spread over the pipe axis (E, G, L, H).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..arrays import Flag, Leaves, Scalar
from ..jaxprs.entry import Destination, Slot, Total
from ..jaxprs.slots import InSlots, run_in_slots
from ..program.ir import Record
from ..program.segments import BlockUse, Presence
from ..stage.code import COTANGENTS, RESIDUALS, RESULTS, run
from ..table.effects import OF_SLICES, TOGETHER, Access, Place
from ..table.kinds import COLLECTIVES, Kind
from .block import (
    BlockCode,
    State,
    add_at,
    empty,
    held_back,
    of_chunk,
    of_slot,
    read,
    run_where,
    without_weak_types,
    write,
)
from .pools import InPool, put, taken, unfilled
from .step import DeviceStep, whole

# The results that a stage's code writes to slots itself.
_IN_SLOTS = (*RESIDUALS, Place.STASH, Place.BUFFER, Place.BUFFER_GRADIENT)
# What the code of an action writes that is there once for each slot.
_BY_SLOT = (*_IN_SLOTS, Place.STAGE_GRADIENTS)
# By what is sent, the pool where it arrives.
_SENT = {Place.SENT_X: Place.X, Place.SENT_DX: Place.COTANGENT}


class StageAction:
    """An action of one kind of stage on one chunk; `row` is the record that it reads.

    Attributes:
        operand: the stage's code and parameters on this device.
        effects: what it reads and writes.
        keeps: whether a forward keeps residuals.
        places: the places of the results of its code.
        slots: where slots are arrays of their own, those that it may use, and `slot` the one that
            it uses: there is code for each.
    """

    def __init__(
        self,
        step: DeviceStep,
        use: BlockUse,
        stage_kind: int,
        row: Any,
        slots: Sequence[int] = (),
    ) -> None:
        self.slots, self.slot = slots, -1
        self.step, self.use, self.row, self.kind = step, use, row, use.block.kind
        self.operand = step.operands[use.block.chunk, stage_kind]
        self.code = self.operand.code
        self.effects = step.program.effects(self.kind)
        self.keeps = step.setup.training and use.block.keeps
        is_bare = self.kind is Kind.F and not self.keeps
        self.places = [p for p in RESULTS[self.kind] if not (is_bare and p in RESIDUALS)]

    def name(self, place: Place) -> str:
        """A place of the chunk, or of the slot, in the state."""
        if self.slots and place in TOGETHER:
            return of_slot(place, self.slot)
        return of_chunk(place, self.use.block.chunk)

    def changes(self, when: str | None = None) -> set[str]:
        """What the action may change, or the part of it under a flag."""
        return {name for place in self._changed(when) for name in self._names(place)}

    def _changed(self, when: str | None = None) -> set[Place]:
        return {
            effect.place
            for effect in self.effects
            if effect.access is not Access.READ
            and self.use.does(effect)
            and (effect.when != "has_loss" or self.code.avals[Place.LOSSES])
            and (when is None or effect.when == when)
        }

    def _names(self, place: Place) -> set[str]:
        if self.slots and place in TOGETHER:
            return {of_slot(place, slot) for slot in self.slots}
        return {self.name(place)}

    def block(self) -> BlockCode:
        """The block of this action alone."""

        def run_alone(state: State) -> State:
            if self.slots:
                return self._in_each_slot(self._prepared(state))
            code, state = self.begin(state)
            (outs,) = run_in_slots(code)
            return self.end(outs, state)

        return BlockCode(self.changes(), run_alone, self.step.everywhere, self.step.code.loops)

    def _prepared(self, state: State) -> State:
        """The state before the stage's code: after `first`, in the first stage."""
        if self.kind is not Kind.F or self.step.code.spreads_first:
            return state
        return self._under("is_first", partial(_first, self.step, self.row), state)

    def begin(self, state: State) -> tuple[InSlots, State]:
        """The stage's code, and the state before it."""
        state = self._prepared(state)
        return self._in_slots(state), state

    def _in_slots(self, state: State) -> InSlots:
        arguments = self._inputs(state)
        if not self.use.block.runs_forward:
            arguments += self._kept(state)
        jaxpr = self.code.of(self.kind, keeps=self.keeps)
        return InSlots(jaxpr, arguments, self._targets(state))

    def end(self, outs: Leaves, state: State) -> State:
        """The state after the stage's code, from its results."""
        return self._written(self.code.results(self.places, outs), state)

    def _written(self, found: Mapping[Place, Leaves], state: State) -> State:
        """The state with the results for some places, which are written in the order of places."""
        for place in filter(found.__contains__, Place):
            state = self._write(place, found[place], state)
        return state

    def _in_each_slot(self, state: State) -> State:
        """The state after the stage's code, which is there for each slot that the action may use.
        What it returns besides the contents of the slot and gradients leaves that code as it is.
        """
        inside = [place for place in self.places if place in _BY_SLOT]
        others = [place for place in self.places if place not in _BY_SLOT]
        results = [[unfilled(a.shape, a.dtype) for a in self.code.avals[p]] for p in others]
        state = state | {"results": results}

        def run(action: StageAction, state: State) -> State:
            (outs,) = run_in_slots(action._in_slots(state))
            found = self.code.results(self.places, outs)
            results = [without_weak_types(found.pop(place)) for place in others]
            return action._written(found, state) | {"results": results}

        for slot in self.slots:
            action = copy(self)
            action.slot = slot
            changes = {action.name(place) for place in self._changed() & {*inside}} | {"results"}
            if Place.STAGE_GRADIENTS in inside:
                changes |= {"shared_gradients"}
            block = BlockCode(
                changes, partial(run, action), self.step.everywhere, self.step.code.loops
            )
            presence = Presence.SOMETIMES if len(self.slots) > 1 else Presence.ALWAYS
            state = run_where(presence, self.row.residual_weight == slot, block, state)
        found = dict(zip(others, state["results"], strict=True))
        return self._written(found, {name: state[name] for name in state if name != "results"})

    def _inputs(self, state: State) -> Leaves:
        """(consts, parameters, x, carry, buffers, extra, once)."""
        step, code, row, operand = self.step, self.code, self.row, self.operand
        x = self._in_pool(Place.X, state).read()
        extra = step.extra(row.stage, row.microbatch, code.wants)
        if "state" in code.wants:
            extra += taken(operand.state_places, state[self.name(Place.STAGE_STATE)])
        if code.loops:
            x, extra = held_back(x, state), held_back(extra, state)
        passed = self._read(Place.CARRY, state) + self._read(Place.BUFFER, state)
        return operand.inputs([*x, *passed], extra)

    def _kept(self, state: State) -> Leaves:
        """(residuals, dy, stash) of a backward action."""
        kept = [leaf for place in RESIDUALS for leaf in self._read(place, state)]
        (own, *later), avals = COTANGENTS, self.code.avals
        kept += self._in_pool(own, state).read()
        for place in later:
            kept += self._read(place, state, flag="is_followed")
        kept += [self.step.seed.astype(loss.dtype) for loss in avals[Place.LOSSES]]
        return kept + (self._read(Place.STASH, state) if self.kind is Kind.W else [])

    def _in_pool(self, place: Place, state: State, slot: Any = None) -> InPool:
        """Values of the stage in a pool: in the slot that the record has by the pool's name, or in
        another one.
        """
        if self.slots and place in TOGETHER:
            return self.step.buffers[place].alone(state[self.name(place)], self.code.avals[place])
        slot = getattr(self.row, place.value) if slot is None else slot
        return self.step.buffers[place].at(state[place.value], slot, self.code.avals[place])

    def _read(self, place: Place, state: State, *, flag: str | None = None) -> Leaves:
        """Values of a pool, as slots where they can be; zeros where a flag of the record is 0.

        Values of other slices that no effect of the action reads are zeros too: its code does not
        use them.
        """
        reads = {effect.place for effect in self.effects if effect.access is Access.READ}
        if place in OF_SLICES and place not in reads:
            return empty(self.code.avals[place])
        found = self._in_pool(place, state).lazily()
        if flag is None:
            return found
        filled = getattr(self.row, flag) != 0
        return [
            leaf._replace(filled=filled) if isinstance(leaf, Slot) else jnp.where(filled, leaf, 0)
            for leaf in found
        ]

    def _targets(self, state: State) -> dict[int, Destination]:
        """The slots and accumulators that the stage's code itself writes, by number of result.  A
        scan over layers writes slots, and adds to accumulators, row by row.
        """
        found: dict[int, Destination] = {}
        for place, span in self.code.spans(self.places).items():
            targets: list[Any] = []
            if place is Place.STAGE_GRADIENTS:
                targets = self.operand.totals(state[self.name(place)])
            elif place in _IN_SLOTS and self.code.avals[place]:
                targets = self._in_pool(place, state).slots()
            found |= {span.start + i: t for i, t in enumerate(targets) if t is not None}
        return found

    def _write(self, place: Place, values: Leaves, state: State) -> State:
        """Write the results for a place, after the code has written those that are in slots."""
        name, row = self.name(place), self.row
        if place in _SENT:
            return self._hand_on(place, values, state)
        if place is Place.STAGE_GRADIENTS:
            step, own = self.step, len(values) - len(state["shared_gradients"])
            is_last = step.is_last(row.microbatch)
            after = self.operand.with_totals(state[name], values[:own], is_last=is_last)
            return state | {name: after} | step.added("shared", values[own:], row.microbatch, state)
        if not values:
            return state
        if place is Place.LOSSES:
            return state | {name: add_at(state[name], row.microbatch, values[0])}
        if place is Place.STAGE_STATE:
            return state | {name: put(self.operand.state_places, state[name], values)}
        if place in _IN_SLOTS:
            return state | {name: self._in_pool(place, state).write(values, in_slots=True)}
        # for another slice, where there is one
        written = {e.place: e for e in self.effects if e.access is Access.WRITE}
        slot, when = written[place].field, str(written[place].when)
        target, flag = self._in_pool(place, state, getattr(row, slot)), getattr(row, when) != 0
        return state | {name: target.write(values, where=flag)}

    def _hand_on(self, sent: Place, values: Leaves, state: State) -> State:
        """Send what the neighbour stage needs, or write it to its slot on this device.  At the end
        of the model, pass it to `first` or `last`.

        The output of the stage at this end of the model is never sent.  Where no other kind takes
        it, it has no place in the buffer.
        """
        step, row, name = self.step, self.row, _SENT[sent].value
        buffer, avals = step.buffers[_SENT[sent]], self.code.avals[sent]

        def local(state: State) -> State:
            return state | {name: buffer.at(state[name], row.out, avals).write(values)}

        if buffer.has(avals):
            if sent.value in self.changes():
                new = buffer.put(state[sent.value], avals, values)
                state = state | {sent.value: without_weak_types(new)}
            state = self._under("is_local", local, state)
        if sent is Place.SENT_X:
            flag, run = "is_last", partial(_last, step, row, y=values)
        else:
            flag, run = "is_first", partial(_first_gradient, step, row, dx=values)
        if step.code.fits(self.code, sent):
            return self._under(flag, run, state)
        return state

    def _under(self, flag: str, run: Callable[[State], State], state: State) -> State:
        """Run a part under its flag."""
        block = BlockCode(self.changes(flag), run, self.step.everywhere, self.step.code.loops)
        happens = getattr(self.row, flag) != 0
        return run_where(self.use.presence(flag), happens, block, state)


def pair_block(forward: StageAction, backward: StageAction) -> BlockCode:
    """F and B of an OVERLAP_F_B cell, or F and W of a tick, under one predicate, interleaved layer
    by layer (DualPipe, DeepSeek-V3 section 3.2.1).

    The backward reads its residuals before the forward writes its own, because they share pools.
    """

    def run_both(state: State) -> State:
        ahead, state = forward.begin(state)
        back, _ = backward.begin(state)
        back_outs, ahead_outs = run_in_slots(back, ahead)
        return backward.end(back_outs, forward.end(ahead_outs, state))

    changes = forward.changes() | backward.changes()
    return BlockCode(changes, run_both, forward.step.everywhere, forward.step.code.loops)


def share_block(step: DeviceStep, kind: Kind, row: Record[Scalar]) -> BlockCode:
    """A device's share of an action.  All devices run E, G and L in any case."""
    effects = step.program.effects(kind)
    changes = {e.place.value for e in effects if e.access is not Access.READ}
    share = {Kind.E: _first, Kind.G: _first_gradient, Kind.L: _last, Kind.H: _last_weight_grad}
    everywhere = step.everywhere and kind not in COLLECTIVES
    return BlockCode(changes, partial(share[kind], step, row), everywhere, step.code.loops)


def _first(step: DeviceStep, row: Record[Scalar], state: State) -> State:
    """The first stage's input and what its gradient needs, in a forward; or E, with which every
    device has the input whole, and the device of the first stage keeps it.
    """
    code, shared = step.code.first, step.code.spreads_first
    microbatch = _ordered(step, row.microbatch, state) if shared else row.microbatch
    if code.loops:
        (microbatch,) = held_back([microbatch], state)
    jaxpr = code.forward if step.setup.training else code.evaluate
    outs = run(jaxpr, *step.end_inputs("first", microbatch))
    avals = code.avals[Place.SENT_X]
    slot, source = (row.out, row.is_source != 0) if shared else (row.x, None)
    x, residuals = outs[: len(avals)], outs[len(avals) :]
    kept = step.buffers[Place.X].at(state["x"], slot, avals).write(x, where=source)
    if shared or not step.setup.training:
        return state | {"x": kept}
    return state | {"x": kept, "first": write(state["first"], row.first, residuals)}


def _first_gradient(
    step: DeviceStep, row: Record[Scalar], state: State, dx: Leaves | None = None
) -> State:
    """The gradient of `first`, in a backward from that of the stage's input; a spread `first` gets
    it later, in G: the gradient of a device's share of the parameters.

    In G, the device of the first stage begins with the gradient of its input, the others begin with
    zeros.  The input is a sum of the devices' shares.  The gradient of that sum reaches all
    devices, so no other transfer is needed.
    """
    microbatch = row.microbatch
    if dx is None:
        late = [_or_zeros(row.is_source != 0, leaf) for leaf in read(state["first"], row.y)]
        microbatch = _ordered(step, microbatch, state)
    elif step.code.spreads_first:
        return state | {"first": write(state["first"], row.out, dx)}
    else:
        late = [*read(state["first"], row.first), *dx]
    arguments = [*step.end_inputs("first", microbatch), *late]
    return _accumulate(step, "first", step.code.first.backward, arguments, row, state)


def _last(step: DeviceStep, row: Record[Scalar], state: State, y: Leaves | None = None) -> State:
    """`last` in a forward, from the stage's output: the loss and at once its gradient, since a
    cotangent of y is far smaller than the residuals of a head.  Of a spread `last`, y alone is kept
    for L: the loss of a microbatch, and its gradient.

    In L, the output of the last stage goes to all devices as a sum, to which the other devices add
    zeros.  The source differs from microbatch to microbatch where a stage is on two devices.  One
    sum is one collective; a tree of permutes would be log2(P) collectives of the same size.  Every
    device gets the same loss and begins its backward with 1/P of the loss's cotangent.  The
    backward thus differentiates the mean of P equal losses.  Collectives inside it sum cotangents
    over devices, and count none twice.
    """
    if y is not None:
        if step.code.spreads_last:
            return state | {"last": write(state["last"], row.out, y)}
        return _loss(step, row, y, state)
    source = row.is_source != 0
    if step.blocking:
        source = jnp.logical_and(source, jnp.logical_not(state["token"]))
    kept = read(state["last"], row.y)
    y = [whole(_or_zeros(source, leaf), step.setup.axis) for leaf in kept]
    return _loss(step, row, y, state, source)


def _loss(
    step: DeviceStep, row: Record[Scalar], y: Leaves, state: State, source: Flag | None = None
) -> State:
    """The state with the loss of a microbatch and its gradients.

    With a `source`, all devices run this.  That device alone notes the loss, since the end of the
    step sums over devices, and has room for the cotangent of y.
    """
    code, training = step.code.last, step.setup.training
    assert code is not None
    microbatch = row.microbatch
    if code.loops:
        microbatch, *y = held_back([microbatch, *y], state)
    arguments = step.end_inputs("last", microbatch, y)
    jaxpr, places = code.evaluate, [Place.LOSSES, Place.AUX]
    if training:
        arguments.append(step.seed if source is None else step.share_seed)
        jaxpr = code.input_grad if step.code.defers_last else code.backward
        more = (Place.SENT_DX, Place.STASH), (Place.STAGE_GRADIENTS, Place.SENT_DX)
        places += more[not step.code.defers_last]
    found = code.results(places, run(jaxpr, *arguments))
    (loss,), aux, dy = found[Place.LOSSES], found[Place.AUX], found.get(Place.SENT_DX)
    if Place.STASH in found:
        state = state | {"share": write(state["share"], row.stash, found[Place.STASH])}
    elif training:
        grads, own = found[Place.STAGE_GRADIENTS], len(state["last_gradients"])
        state |= step.added("last", grads[:own], row.microbatch, state)
        state |= step.added("shared", grads[own:], row.microbatch, state)
    if source is not None:
        # All leaves take one reduction.
        dy = lax.psum(dy, step.setup.axis) if training else dy
        aux = [_or_zeros(source, leaf) for leaf in aux]
        loss = _or_zeros(source, loss)
    state = state | {
        "losses": add_at(state["losses"], row.microbatch, loss),
        "aux": write(state["aux"], row.microbatch, aux),
    }
    if dy is None:
        return state
    buffer, avals = step.buffers[Place.COTANGENT], code.avals[Place.SENT_DX]
    kept = buffer.at(state["cotangent"], row.out, avals).write(dy, where=source)
    return state | {"cotangent": kept}


def _last_weight_grad(step: DeviceStep, row: Record[Scalar], state: State) -> State:
    """H: the gradient of a device's own part of the parameters of `last`, from the values that its
    L left.  No other device takes part.
    """
    assert step.code.last is not None
    stash = read(state["share"], row.stash)
    arguments = [*step.end_inputs("last", row.microbatch), step.share_seed, *stash]
    return _accumulate(step, "last", step.code.last.weight_grad, arguments, row, state)


def _accumulate(
    step: DeviceStep, key: str, jaxpr: Any, arguments: Leaves, row: Record[Scalar], state: State
) -> State:
    """Run code that adds gradients of `first` or `last` and of the shared parameters in place."""
    names = f"{key}_gradients", "shared_gradients"
    rules, totals = step.rules[key] + step.rules["shared"], [*state[names[0]], *state[names[1]]]
    pairs = list(zip(rules, totals, strict=True))
    writes = {i: Total(total) for i, (rule, total) in enumerate(pairs) if rule is None}
    (after,) = run_in_slots(InSlots(jaxpr, arguments, writes=writes))
    for i, (rule, total) in enumerate(pairs):
        if rule is not None:
            after[i] = rule.add(total, after[i], step.is_last(row.microbatch))
    own = len(step.rules[key])
    return state | {names[0]: after[:own], names[1]: after[own:]}


def _ordered(step: DeviceStep, microbatch: Scalar, state: State) -> Scalar:
    """The microbatch.  Where permutes block the device, it depends on the end of earlier blocks of
    the tick.
    """
    return jnp.where(state["token"], 0, microbatch) if step.blocking else microbatch


def _or_zeros(source: Flag, leaf: Any) -> Any:
    return jnp.where(source, leaf, jnp.zeros_like(leaf))
