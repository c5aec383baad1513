"""Parameters that are gathered during the step, and gradients that are reduced: what a device does
for its rooms before and after the blocks of a tick.

A room holds the whole parameters of one stage at a time, the values that depend on them alone, and
the stage's whole gradient.  Each device works on its own stages, so it gathers under predicates of
its own.  Along the fsdp axis all devices do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..arrays import Leaves, Scalar
from ..program.ir import TickRecord
from ..program.segments import Presence
from ..table.effects import EFFECTS, By, Place
from ..table.kinds import Kind
from .block import BlockCode, Key, State, of_chunk, run_where, zeros
from .step import DeviceStep, Operand, stacked


def empty_rooms(step: DeviceStep) -> State:
    """Empty rooms, and the accumulators of gradients that devices split; nothing where parameters
    are whole during the step.
    """
    state: State = {}
    for room in range(step.program.num_rooms):
        shapes = jax.eval_shape(partial(_room, step, room), jax.tree.leaves(step.whole[0]))
        found = jax.tree.map(lambda leaf: zeros(leaf.shape, leaf.dtype), shapes)
        state[Key(Place.PARAMETERS, room)] = found
    for v, chunk in enumerate(step.chunks if state and step.setup.training else ()):
        state[Key(Place.REDUCED, v)] = step.totals(chunk, step.plans_of(v))
    return state


def _room(step: DeviceStep, room: int, leaves: Leaves) -> tuple[Leaves, list[Leaves]]:
    """What a room holds with these parameters: also what is hoisted, by kind of stage."""
    own = (step.operand(By.STAGE, room, kind) for kind in range(len(step.code.kinds)))
    return leaves, [operand.filled(leaves, step.shared).once for operand in own]


def in_room(step: DeviceStep, operand: Operand, room: int, kind: int, state: State) -> Operand:
    """The operand of a kind of stage with the parameters that a room holds."""
    leaves, hoisted = state[Key(Place.PARAMETERS, room)]
    return operand.filled(leaves, step.shared, hoisted[kind])


def gathered(
    step: DeviceStep, ticks: NDArray[np.int64], row: TickRecord[Scalar], state: State
) -> State:
    """The state with what ticks that share their code gather before their blocks."""
    return _moved(step, "gather", _gather, ticks, row, state)


def reduced(
    step: DeviceStep, ticks: NDArray[np.int64], row: TickRecord[Scalar], state: State
) -> State:
    """The state with the gradients reduced that are complete after their blocks."""
    return _moved(step, "reduce", _reduce, ticks, row, state)


def _moved(
    step: DeviceStep,
    name: str,
    between: Callable[[DeviceStep, int, int], BlockCode],
    ticks: NDArray[np.int64],
    row: TickRecord[Scalar],
    state: State,
) -> State:
    """The state after the blocks between rooms and chunks that some device runs in these ticks."""
    for table, record in zip(step.program.ticks.links, row.links, strict=True):
        for room in range(step.program.num_rooms):
            column = f"{name}_{room}"
            wanted = table.columns[column][ticks]
            for chunk in range(len(step.chunks)):
                presence = Presence.of(int((wanted == chunk).sum()), wanted.size)
                if presence is Presence.NEVER:
                    continue
                if step.blocking:
                    presence = Presence.SOMETIMES  # in a loop, which keeps collectives in order
                flag, block = record.columns[column] == chunk, between(step, room, chunk)
                ordered = presence is Presence.SOMETIMES
                state = run_where(presence, flag, block, state, ordered=ordered)
    return state


def _gather(step: DeviceStep, room: int, chunk: int) -> BlockCode:
    """The parameters of a chunk go into a room."""

    def run(state: State) -> State:
        with jax.named_scope("gather"):
            leaves = zip(jax.tree.leaves(step.chunks[chunk]), step.plans_of(chunk), strict=True)
            whole = [plan.gather(leaf) for leaf, plan in leaves]
            return state | {Key(Place.PARAMETERS, room): _room(step, room, whole)}

    return BlockCode(set(), _changes(Kind.U, room, chunk), run, step.everywhere)


def _reduce(step: DeviceStep, room: int, chunk: int) -> BlockCode:
    """The gradient in a room is added to the split one of a chunk, and is zero again."""
    own, split = of_chunk(Place.STAGE_GRADIENTS, room), Key(Place.REDUCED, chunk)

    def run(state: State) -> State:
        with jax.named_scope("reduce"):
            every = zip(state[split], state[own], step.plans_of(chunk), strict=True)
            sums = [
                None if plan.frozen else total + plan.scatter(stacked(part), step.setup.data_axes)
                for total, part, plan in every
            ]
            return state | {split: sums, own: jax.tree.map(jnp.zeros_like, state[own])}

    return BlockCode(set(), _changes(Kind.X, room, chunk), run, step.everywhere)


def _changes(kind: Kind, room: int, chunk: int) -> set[Key]:
    """What a kind may change; what is split is the chunk's, and what is whole the room's."""
    places = {effect.place for effect in EFFECTS if effect.kind is kind}
    return {Key(place, chunk if place is Place.REDUCED else room) for place in places}
