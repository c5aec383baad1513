"""Parameters that are gathered during the step, and gradients that are reduced: what a device does
for its rooms before the blocks of a tick, or beside one of them.

A room holds the whole parameters of one stage at a time, the values that depend on them alone, and
the stage's whole gradient.  Each device works on its own stages, so it gathers under predicates of
its own.  Along the fsdp axis all devices do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from ..arrays import Flag, Leaves, Scalar
from ..program.ir import NOBODY, TickRecord
from ..program.segments import Presence
from ..storage.chunks import arrays_in
from ..storage.plan import LeafPlan, Stored
from ..table.effects import EFFECTS, Place
from ..table.kinds import By, Kind
from .block import BlockCode, Key, State, one_of, run_where, zeros
from .step import DeviceStep


def empty_rooms(step: DeviceStep) -> State:
    """Empty rooms, and the accumulators of gradients that devices split; nothing where parameters
    are whole during the step.
    """
    state: State = {}
    for room in step.rooms:
        shapes = jax.eval_shape(partial(_room, step, room), step.whole[room])
        found = jax.tree.map(lambda leaf: zeros(leaf.shape, leaf.dtype), shapes)
        state[Key(Place.PARAMETERS, room)] = found
    for v, chunk in enumerate(step.chunks if state and step.setup.training else ()):
        state[Key(Place.REDUCED, v)] = step.totals(arrays_in(chunk, step.held[0]), step.plans[0])
    return state


def _room(step: DeviceStep, room: int, leaves: Leaves) -> tuple[Leaves, list[Leaves]]:
    """What a room holds with these parameters, the layers of stacks apart: also what is hoisted, by
    kind of stage.
    """
    leaves = [tuple(leaf) if n in step.apart[room] else leaf for n, leaf in enumerate(leaves)]
    own = (step.operand(By.STAGE, room, kind) for kind in range(len(step.code.kinds)))
    return leaves, [operand.filled(leaves, step.shared).once for operand in own]


class TickWork(NamedTuple):
    """What devices do under one predicate, in ticks that share their code."""

    where: NDArray[np.bool_]  # by tick and device
    flag: Flag  # of this device
    block: BlockCode
    # where all devices do it: whether it is in order with other blocks, and in a loop all the same
    ordered: bool
    looped: bool
    room: int = NOBODY  # for which it is done

    def only(self, where: NDArray[np.bool_], flag: Flag) -> TickWork:
        """A part of it."""
        return self._replace(where=self.where & where, flag=jnp.logical_and(self.flag, flag))

    def apart_from(self, others: Iterable[TickWork]) -> TickWork:
        """The rest of it, that none of the others is or runs beside."""
        rest = self
        for other in others:
            rest = rest.only(~other.where, jnp.logical_not(other.flag))
        return rest

    def run(self, state: State) -> State:
        """The state after it."""
        presence = Presence.among(self.where)
        if self.looped and presence is Presence.ALWAYS:
            presence = Presence.SOMETIMES
        ordered = self.ordered or presence is not Presence.ALWAYS
        return run_where(presence, self.flag, self.block, state, ordered=ordered)


def works_of(
    step: DeviceStep, ticks: NDArray[np.int64], row: TickRecord[Scalar]
) -> Iterator[TickWork]:
    """What devices do for rooms before the blocks of these ticks: they reduce a gradient, gather
    parameters, or both.
    """
    for table, record in zip(step.program.ticks.links, row.links, strict=True):
        for room in step.rooms:
            names = f"reduce_{room}", f"gather_{room}"
            chunks = [table.columns[name][ticks] for name in names]
            numbers = [record.columns[name] for name in names]
            for wanted in ((True, False), (False, True), (True, True)):
                pairs = list(zip(chunks, numbers, wanted, strict=True))
                where = np.logical_and.reduce([(c != NOBODY) == want for c, _, want in pairs])
                flags = [(n != NOBODY) == want for _, n, want in pairs]
                if where.any():
                    codes = [
                        code(step, room, sorted({*own[where].tolist()}), number)
                        for code, (own, number, want) in zip((_reduce, _gather), pairs, strict=True)
                        if want
                    ]
                    flag = jnp.logical_and(*flags)
                    # A collective may hold its device's thread: a loop keeps it in order.
                    block, looped = one_after_another(*codes), step.blocking
                    yield TickWork(where, flag, block, ordered=False, looped=looped, room=room)


def _gather(step: DeviceStep, room: int, chunks: Sequence[int], number: Scalar) -> BlockCode:
    """The parameters of one of these chunks go into a room."""

    def run(state: State) -> State:
        with jax.named_scope("gather"):
            key, own = Key(Place.PARAMETERS, room), step.held[room]
            found = one_of({v: arrays_in(step.chunks[v], own) for v in chunks}, number)
            pairs = zip(step.gathered(room, found), state[key][0], strict=True)
            whole = [old if new is None else new for new, old in pairs]
            return state | {key: _room(step, room, whole)}

    return _block(step, Kind.U, room, chunks, run)


def _reduce(step: DeviceStep, room: int, chunks: Sequence[int], number: Scalar) -> BlockCode:
    """The gradient in a room is added to the split one of one of these chunks, and is zero
    again.
    """
    own = Key(Place.STAGE_GRADIENTS, room)

    def run(state: State) -> State:
        with jax.named_scope("reduce"):
            plans = step.plans[room]
            reduced = [Key(Place.REDUCED, chunk) for chunk in chunks]
            split = zip(*(state[key] for key in reduced), strict=True)
            parts = [
                None
                if all(part is None for part in into)
                else plan.scatter(total, step.setup.data_axes)
                for plan, total, into in zip(plans, state[own], split, strict=True)
            ]
            state = state | {own: list(map(_emptied, plans, state[own], parts))}
            for key in reduced:
                add = partial(_added, key, plans, parts)
                presence = Presence.SOMETIMES if len(chunks) > 1 else Presence.ALWAYS
                block = BlockCode(set(), {key}, add, step.everywhere)
                state = run_where(presence, number == key.number, block, state)
            return state

    return _block(step, Kind.X, room, chunks, run)


def _emptied(plan: LeafPlan, total: Any, part: Array | None) -> Stored | None:
    """An empty accumulator, once its reduction has ended: if XLA could write it before, it would
    reduce a copy.
    """
    if part is None:
        return total
    if plan.replaced:
        return plan.replaced.empty(total.shape, total.dtype)
    sign = jnp.signbit(jnp.real(part.ravel()[:1]).sum()).astype(jnp.int32)
    zero = jnp.minimum(sign, 0)  # XLA does not know that it is
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, zero.astype(leaf.dtype)), total)


def _added(key: Key, plans: Sequence[LeafPlan], parts: Leaves, state: State) -> State:
    def one(total: Array | None, plan: LeafPlan, part: Array) -> Array | None:
        return None if total is None else plan.rule.joined(total, part)

    return state | {key: list(map(one, state[key], plans, parts))}


def _block(
    step: DeviceStep, kind: Kind, room: int, chunks: Iterable[int], run: Callable[[State], State]
) -> BlockCode:
    """Code with the effects of a kind; what is split is a chunk's, and what is whole a room's."""
    places = {effect.place for effect in EFFECTS if effect.kind is kind}
    keys = {
        Key(place, number)
        for place in places
        for number in (chunks if place is Place.REDUCED else (room,))
    }
    return BlockCode(set(), keys, run, step.everywhere)


def one_after_another(*blocks: BlockCode) -> BlockCode:
    """Blocks under one predicate: those that share no part of the state may overlap."""

    def run(state: State) -> State:
        for block in blocks:
            state = block.run(state)
        return state

    return BlockCode.of_all(blocks, run)
