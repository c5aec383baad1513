"""The blocks of actions: one loop for all kinds.

An action runs functions of the model one after the other.  Of each, the values that its effects
read are loaded, its code runs, and what it returns is stored where its effects write
(`table.effects`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial

import jax
import jax.numpy as jnp

from ..arrays import Flag, Leaves, Scalar
from ..jaxprs.entry import Destination, Slot
from ..jaxprs.slots import InSlots, run_in_slots
from ..program.ir import NOBODY, Record
from ..program.segments import NESTED, BlockUse
from ..stage.code import INPUTS, RESIDUALS, Signature, signature
from ..table.effects import TOGETHER, Access, Effect, Place, by_function
from ..table.kinds import By
from .block import (
    BY_CHUNK,
    TOKEN,
    BlockCode,
    Key,
    State,
    empty,
    held_back,
    one_of,
    read,
    run_one_of,
    run_where,
    without_weak_types,
    write,
)
from .operand import Operand
from .pools import InPool, put, taken, unfilled
from .step import DeviceStep

# The results that code writes to slots itself.
_IN_SLOTS = (*RESIDUALS, Place.STASH, Place.BUFFER, Place.BUFFER_GRADIENT)
# What the code of an action writes that is there once for each slot.
_BY_SLOT = (*_IN_SLOTS, Place.STAGE_GRADIENTS, Place.SHARED_GRADIENTS)
# By what is sent, the pool where it arrives.
_SENT = {Place.SENT_X: Place.X, Place.SENT_DX: Place.COTANGENT}
# The flags of reads whose code takes zeros where they are 0.
_ELSE_ZEROS = ("is_followed", "is_source")
# The number of the keys of results that leave the code of one slot.
_RESULT = -1
# The inputs of code before `extra`.
_INPUTS = {By.FIRST: (), By.STAGE: INPUTS, By.LAST: (Place.SENT_X, Place.LAST)}


class DeviceAction:
    """An action of one kind of stage on one chunk, or a share of `first` or `last`; `row` is the
    record that it reads.

    Attributes:
        effects: what it reads and writes, by function in the order in which they run.
        main: the function that decides when it runs; others run under a flag.
        slots: where slots are arrays of their own, those that it may use: there is code for each.
    """

    def __init__(
        self,
        step: DeviceStep,
        use: BlockUse,
        stage_kind: int,
        row: Record[Scalar],
        slots: Sequence[int] = (),
    ) -> None:
        self.step, self.use, self.row, self.slots = step, use, row, slots
        self.kind, self.stage_kind = use.block.kind, stage_kind
        happen = [e for e in step.program.effects(self.kind) if self._does(e)]
        self.effects = dict(by_function(happen))
        self.main = By.STAGE if By.STAGE in self.effects else next(iter(self.effects))

    def _does(self, effect: Effect) -> bool:
        """Whether its code has an effect."""
        if self.use.block.is_share:
            return True
        if effect.place is Place.PARAMETERS:
            return bool(self.step.rooms)
        if not self.use.does(effect):
            return False
        code, result = self._operand(By.STAGE).code, effect.result
        if effect.when == "has_loss":
            return bool(code.avals[Place.LOSSES])
        # A stage of this kind may be at no end of the model, or no other stage takes its result.
        if effect.when in ("is_first", "is_last"):
            sent = Place.SENT_X if effect.when == "is_last" else Place.SENT_DX
            return self.step.code.fits(code, sent)
        if result in _SENT and effect.access is Access.WRITE:
            return self.step.buffers[_SENT[result]].has(code.avals[result])
        return True

    def _operand(self, by: By) -> Operand:
        return self.step.operand(by, self.use.block.chunk, self.stage_kind)

    def _signature(self, by: By) -> Signature:
        # R makes the residuals of a stage again, and of no other function.
        keeps = self.step.setup.training and (self.use.block.keeps or by is not By.STAGE)
        defers = self.step.code.defers_last
        return signature(self._operand(by).code, by, self.kind, keeps=keeps, defers=defers)

    def _keys(self, place: Place) -> list[Key]:
        """The keys of a place that it may use: of its chunk, or of its slots where these are arrays
        of their own; of states those of all chunks that a room holds in turn.
        """
        if self.slots and place in TOGETHER:
            return [Key(place, slot) for slot in self.slots]
        if self.step.rooms and place is Place.STAGE_STATE:
            every, kinds = self.step.program.schedule.placement, self.step.code.kind_of
            rows = map(enumerate, every.stages_of)
            chunks = {v for row in rows for v, s in row if kinds[s] == self.stage_kind}
            return [Key(place, v) for v in sorted(chunks)]
        return [Key(place, self.use.block.chunk if place in BY_CHUNK else 0)]

    def _key(self, place: Place) -> Key:
        """The one key of a place."""
        (key,) = self._keys(place)
        return key

    @property
    def _chunk(self) -> Scalar:
        """The chunk of its stage."""
        table = self.step.program.schedule.placement
        numbers = [table.chunk_of(s, held[0]) for s, held in enumerate(table.devices_of)]
        return jnp.array(numbers)[self.row.stage]

    def _block(
        self, effects: Iterable[Effect], run: Callable[[State], State], more: Iterable[Key] = ()
    ) -> BlockCode:
        """Code with these effects, which may change `more`."""
        reads, changes = set[Key](), {*more}
        for effect in effects:
            own = reads if effect.access is Access.READ else changes
            own.update(self._keys(effect.place))
        everywhere = self.step.everywhere and not self.use.block.is_collective
        return BlockCode(reads, changes, run, everywhere, self.step.code.loops)

    def block(self) -> BlockCode:
        """The block of this action alone."""

        def run_alone(state: State) -> State:
            action = self._ordered(state) if self.use.block.is_collective else self
            if self.slots:
                return action._in_each_slot(action._before(state))
            return _run_together([action], state)

        every = [effect for own in self.effects.values() for effect in own]
        return self._block(every, run_alone)

    def _ordered(self, state: State) -> DeviceAction:
        """The action, which where permutes block the device depends on the end of earlier blocks of
        the tick.
        """
        if not self.step.blocking:
            return self
        after, row = copy(self), self.row
        names = ("microbatch", "is_source")
        late = {name: jnp.where(state[TOKEN], 0, getattr(row, name)) for name in names}
        after.row = row.changed(**late)
        return after

    def begin(self, state: State) -> tuple[InSlots, State]:
        """The code of the main function, and the state before it."""
        state = self._before(state)
        return self._code(self.main, {}, state), state

    def end(self, outs: Leaves, state: State) -> State:
        """The state after the action, from the results of the main function."""
        return self._after(self.effects[self.main], self._results(self.main, outs), state)

    def _results(self, by: By, outs: Leaves) -> dict[Place, Leaves]:
        """The results of a function by place."""
        return self._operand(by).code.results(self._signature(by).returns, outs)

    def _before(self, state: State) -> State:
        """The state after the functions that run before the main one."""
        functions = list(self.effects)
        for by in functions[: functions.index(self.main)]:
            state = self._nested(by, {}, state)
        return state

    def _after(
        self, effects: Iterable[Effect], found: Mapping[Place, Leaves], state: State
    ) -> State:
        """The state with these effects of the main function, and after those that follow it."""
        state = self._stored(effects, found, state)
        functions = list(self.effects)
        for by in functions[functions.index(self.main) + 1 :]:
            state = self._nested(by, found, state)
        return state

    def _nested(self, by: By, found: Mapping[Place, Leaves], state: State) -> State:
        """The state after a function that runs under a flag, and takes what others have found."""
        effects = self.effects[by]
        (flag,) = {str(effect.when) for effect in effects}

        def run(state: State) -> State:
            (outs,) = run_in_slots(self._code(by, found, state))
            return self._stored(effects, self._results(by, outs), state, under=flag)

        return self._under(flag, effects, run, state)

    def _under(
        self, flag: str, effects: Sequence[Effect], run: Callable[[State], State], state: State
    ) -> State:
        """Run a part with these effects under its flag."""
        happens = getattr(self.row, flag) != 0
        return run_where(self.use.presence(flag), happens, self._block(effects, run), state)

    def _in_each_slot(self, state: State) -> State:
        """The state after the stage's code, which is there for each slot that the action may use.
        What it returns besides the contents of the slot and gradients leaves that code as it is.
        """
        effects, code = self.effects[self.main], self._operand(self.main).code
        returns = self._signature(self.main).returns
        inside = [e for e in effects if e.access is Access.READ or e.place in _BY_SLOT]
        others = {place: Key(place, _RESULT) for place in returns if place not in _BY_SLOT}
        for place, key in others.items():
            state = state | {key: [unfilled(a.shape, a.dtype) for a in code.avals[place]]}

        def run(action: DeviceAction, state: State) -> State:
            (outs,) = run_in_slots(action._code(self.main, {}, state))
            found = self._results(self.main, outs)
            left = {key: without_weak_types(found[place]) for place, key in others.items()}
            return action._stored(inside, found, state) | left

        blocks = {}
        for slot in self.slots:
            action = copy(self)
            action.slots = (slot,)
            blocks[slot] = action._block(inside, partial(run, action), others.values())
        state = run_one_of(self.row.residual_weight, blocks, state)
        found = {place: state[key] for place, key in others.items()}
        rest = {key: leaves for key, leaves in state.items() if key.number != _RESULT}
        return self._after([e for e in effects if e not in inside], found, rest)

    def _code(self, by: By, found: Mapping[Place, Leaves], state: State) -> InSlots:
        """The code of a function: (consts, parameters, inputs, extra, once, what it takes)."""
        operand, called = self._operand(by), self._signature(by)
        if by is By.STAGE and self.step.rooms:
            operand = self.step.in_room(operand, self.use.block.chunk, self.stage_kind, state)
        code, row = operand.code, self.row
        ends = {By.FIRST: 0, By.LAST: len(self.step.code.kind_of) - 1}
        stage = row.stage if by is By.STAGE else jnp.full_like(row.microbatch, ends[by])
        extra = self.step.extra(by, stage, row.microbatch, code.wants)
        if "state" in code.wants:
            extra += self._value(by, found, state, Place.STAGE_STATE)
        value = partial(self._value, by, found, state)
        inputs = [leaf for place in _INPUTS[by] for leaf in value(place)]
        if code.loops:
            inputs, extra = held_back(inputs, state), held_back(extra, state)
        takes = [leaf for place in called.takes for leaf in value(place)]
        arguments = [*code.consts, *operand.params, *inputs, *extra, *operand.once, *takes]
        return InSlots(called.jaxpr, arguments, self._targets(by, state))

    def _value(self, by: By, found: Mapping[Place, Leaves], state: State, place: Place) -> Leaves:
        """The values of a place, as slots where they can be.

        What no effect reads the code does not use; it gets zeros.
        """
        if place is Place.LOSSES:  # the cotangent of a loss
            seed = self.step.share_seed if self.use.block.is_share else self.step.seed
            return [seed.astype(a.dtype) for a in self._operand(by).code.avals[place]]
        if place in found:
            return found[place]
        reads = (e for e in self.effects[by] if e.access is Access.READ and e.place is place)
        effect = next(reads, None)
        if effect is not None and place is Place.STAGE_STATE:
            own = {key.number: state[key] for key in self._keys(place)}
            return taken(self._operand(by).state_places, one_of(own, self._chunk))
        if effect is None:
            return empty(self._operand(by).code.avals[place])
        held = self._in_pool(effect, state)
        # Residuals, the x of a backward and what passes between slices are read where code needs
        # them; not x where XLA could move a loop of the user's out of its predicate.
        early = self.use.block.runs_forward or self._operand(by).code.loops
        first = (Place.X,) if early else ()
        at_once = place in (*first, Place.COTANGENT, *self.step.code.outer_pools)
        leaves = held.read() if at_once else held.lazily()
        if effect.when not in _ELSE_ZEROS:
            return leaves
        filled = getattr(self.row, effect.when) != 0
        return [
            leaf._replace(filled=filled) if isinstance(leaf, Slot) else _or_zeros(filled, leaf)
            for leaf in leaves
        ]

    def _in_pool(self, effect: Effect, state: State) -> InPool:
        """The values of an effect in their slot."""
        place, buffer = effect.place, self.step.buffers[effect.place]
        name = place if effect.access is Access.READ else effect.result
        outer = self.step.code.outer_pools
        avals = outer[place] if place in outer else self._operand(effect.by).code.avals[name]
        is_alone = self.slots and place in TOGETHER
        slot = None if is_alone else getattr(self.row, effect.field)
        return buffer.at(state[self._key(place)], slot, avals)

    def _targets(self, by: By, state: State) -> dict[int, Destination]:
        """The slots and accumulators that code itself writes, by number of result.  A scan over
        layers writes slots, and adds to accumulators, row by row.
        """
        operand, found = self._operand(by), dict[int, Destination]()
        effects = {e.place: e for e in self.effects[by] if e.access is Access.WRITE}
        for place, span in operand.code.spans(self._signature(by).returns).items():
            targets: Sequence[Destination | None] = ()
            if place in operand.gradients:
                targets = operand.gradients[place].targets(state[self._key(place)])
            elif place in _IN_SLOTS and place in effects and operand.code.avals[place]:
                targets = self._in_pool(effects[place], state).slots()
            found |= {span.start + i: t for i, t in enumerate(targets) if t is not None}
        return found

    def _stored(
        self,
        effects: Iterable[Effect],
        found: Mapping[Place, Leaves],
        state: State,
        *,
        under: str | None = None,
    ) -> State:
        """The state with the writes of a function, whose code has written what is in slots and
        accumulators; `under`: the flag that is known to be set.
        """
        for effect in (e for e in effects if e.access is not Access.READ):
            flag = effect.when
            write_it = partial(self._write, effect, found[effect.result])
            if flag in NESTED and flag != under:
                state = self._under(str(flag), [effect], write_it, state)
            elif flag in self.row.columns and flag not in ("keeps", under):
                state = write_it(state, where=getattr(self.row, str(flag)) != 0)
            else:
                state = write_it(state)
        return state

    def _write(
        self, effect: Effect, values: Leaves, state: State, *, where: Flag | None = None
    ) -> State:
        """The state with what an effect writes, where a flag holds."""
        place, row = effect.place, self.row
        if place is Place.STAGE_STATE:
            for key in self._keys(place):
                old = {NOBODY: state[key]} if self.step.rooms else {}
                new = put(self._operand(effect.by).state_places, state[key], values)
                state = state | {key: one_of(old | {key.number: new}, self._chunk)}
            return state
        operand, key = self._operand(effect.by), self._key(place)
        old = state[key]
        after: Leaves | jax.Array
        if place in operand.gradients:
            is_last = self.step.is_last(row.microbatch)
            after = operand.gradients[place].after(old, values, is_last=is_last)
        elif place is Place.LOSSES:
            loss = _or_zeros(where, *values)
            (before,) = read([old], row.microbatch)
            (after,) = write([old], row.microbatch, [before + loss.astype(old.dtype)])
        elif place is Place.AUX:
            after = write(old, row.microbatch, [_or_zeros(where, leaf) for leaf in values])
        elif place in _SENT:
            avals = operand.code.avals[place]
            after = without_weak_types(self.step.buffers[_SENT[place]].put(old, avals, values))
        else:
            pool, in_slots = self._in_pool(effect, state), place in _IN_SLOTS
            after = pool.write(values, where=where, in_slots=in_slots)
        return state | {key: after}


def pair_block(forward: DeviceAction, backward: DeviceAction) -> BlockCode:
    """F and B of an OVERLAP_F_B cell, or F and W of a tick, under one predicate, interleaved layer
    by layer (DualPipe, DeepSeek-V3 section 3.2.1).

    The backward reads its residuals before the forward writes its own, because they share pools.
    """

    both = forward, backward
    return BlockCode.of_all([each.block() for each in both], partial(_run_together, both))


def _run_together(actions: Sequence[DeviceAction], state: State) -> State:
    """The state after actions whose code runs as one; a later one reads its slots before an earlier
    one writes.
    """
    codes: list[InSlots] = []
    for action in actions:
        code, state = action.begin(state)
        codes.insert(0, code)
    for action, outs in zip(actions, reversed(run_in_slots(*codes)), strict=True):
        state = action.end(outs, state)
    return state


def _or_zeros(flag: Flag | None, leaf: jax.Array) -> jax.Array:
    """The leaf where a flag holds, zeros elsewhere."""
    return leaf if flag is None else jnp.where(flag, leaf, jnp.zeros_like(leaf))
