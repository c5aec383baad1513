"""A device's step before its first tick (whole parameters, the model's code, values that depend on
parameters alone) and after its last: one sum over devices of values that only some of them have.

Stages on two devices (DualPipe) are copied from their owner before, and their gradients return to
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from itertools import count, product

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..arrays import (
    Flag,
    Leaf,
    Leaves,
    LossScale,
    Params,
    PyTree,
    Scalar,
    StepResults,
    accumulator_dtype,
    in_rows,
    is_key,
    summable,
    whole,
    wider,
)
from ..jaxprs.entry import Entry
from ..model.functions import mean_over_microbatches
from ..model.layers import OUTER
from ..program.ir import Program
from ..program.segments import pairs_by
from ..stage.code import StageCode, run
from ..stage.codes import ModelCode
from ..stage.counts import total_count
from ..stage.setup import Inputs, Setup
from ..storage.chunks import Chunks, arrays_in, room_arrays
from ..storage.packed import ByName
from ..storage.plan import (
    LeafPlan,
    Stored,
    leaf_plans,
    reduce_gradients,
    stored,
    trained,
    whole_shapes,
)
from ..storage.table import Home, stacks_of_layers
from ..table.effects import OF_SLICES, TOGETHER, Place
from ..table.kinds import By
from .block import TOKEN, Key, State, chunks_of, empty, false
from .operand import GRADIENTS_OF, Gradients, Operand
from .pools import Buffers, Packing


class DeviceStep:
    """The code and the read-only inputs of the ticks, on one device, with values of parameters
    alone, which are computed here.

    Attributes:
        everywhere: blocks permute, so all devices run each: see `ModelCode.permutes`.
        blocking: whether a permute holds its device's thread until it is over: see `SegmentCode`.
        chunks: the device's parts of the parameters of its stages, with copies of others'.
        rooms: those into which the program gathers them, which its blocks have for chunks; none
            where the whole parameters are there from the first tick on.
        turns: by chunk, itself; by room, the chunks that it holds in turn.
        held: by chunk or room, what it may hold.
        plans: of what it may hold, in that order.
        whole: the shapes of its whole parameters.
        kept: the state of its stages, where they have any.
        apart: its leaves whose accumulators are an array for each layer.
        operands: by function, chunk or room, and kind of stage.
        seed: in training, the cotangent of one microbatch's loss.
    """

    def __init__(
        self,
        setup: Setup,
        inputs: Inputs,
        code: ModelCode,
        program: Program,
        buffers: Buffers,
        *,
        everywhere: bool,
    ) -> None:
        self.setup, self.inputs, self.code, self.buffers = setup, inputs, code, buffers
        self.program = program
        self.packing = Packing(buffers)
        self.everywhere, self.blocking = everywhere, setup.target.on_cpus
        self.chunks = with_replicas(setup, inputs.owned)
        self.rooms, every = range(program.num_rooms), range(len(self.chunks))
        self.turns = [list(every) for _ in self.rooms] or [[v] for v in every]
        self.held = self._by_turns(self.chunks)
        # A chunk that another device owns is like the last one.
        plans = [setup.plans["stages"][min(v, len(inputs.owned) - 1)] for v in every]
        self.plans = [list(own.values()) for own in self._by_turns(plans)]
        parts = [list(own.values()) for own in self.held]
        self.whole = list(map(whole_shapes, parts, self.plans))
        self.kept = self._by_turns(inputs.kept) if inputs.kept else []
        self.operands: dict[tuple[By, int, int], Operand] = {}
        shared, layout = self._outer_gradients("shared"), setup.layout
        for (held, turn), stages in product(enumerate(self.turns), layout.placement.stages_of):
            for stage in (stages[v] for v in turn if v < len(stages)):
                key = By.STAGE, held, code.kind_of[stage]
                if key not in self.operands:
                    self.operands[key] = self._operand(held, stage, shared)
        self.apart = list(map(self._apart, range(len(self.held))))
        if not self.rooms:
            whole = [self.gathered(v, own) for v, own in enumerate(parts)]
            for (by, v, kind), operand in self.operands.items():
                self.operands[by, v, kind] = operand.filled(whole[v], self.shared)
        for name, end in (("first", code.first), ("last", code.last)):
            if end is not None:
                params = jax.tree.leaves((getattr(inputs, name), inputs.shared))
                once = run(end.hoist, *end.consts, *params)
                own = self._outer_gradients(name) | shared
                self.operands[By[name.upper()], 0, 0] = Operand(end, params, once, own)
        if setup.training:
            self.seed = setup.seed(self._count(), inputs.scale)

    def _by_turns(self, trees: Sequence[PyTree]) -> list[ByName]:
        """By chunk or room, the arrays of those trees of chunks that it holds in turn."""
        return [room_arrays([trees[v] for v in own]) for own in self.turns]

    @property
    def share_seed(self) -> Array:
        """The cotangent of a loss that all devices of the pipe axis compute."""
        return self.seed / lax.axis_size(self.setup.axis)

    def is_last(self, microbatch: Scalar) -> Flag:
        """Whether it is the last microbatch of the batch."""
        return microbatch == self.setup.num_microbatches - 1

    def operand(self, by: By, chunk: int, kind: int) -> Operand:
        """That of a kind of stage in a chunk, or of `first` or `last`."""
        return self.operands[(by, chunk, kind) if by is By.STAGE else (by, 0, 0)]

    def _outer_gradients(self, key: str) -> dict[Place, Gradients]:
        plans = leaf_plans(self.setup.plans[key])
        places = (Home(i, Entry(()), flat=False) for i in range(len(plans)))
        return {GRADIENTS_OF[key]: Gradients.of(plans, places)}

    def _count(self) -> Array | None:
        """The count of the step, where the rows of the batch determine it.  All devices have them,
        so that no device waits for another's.
        """
        setup, last, inputs = self.setup, self.code.last, self.inputs
        if last is None:
            return None
        stage = jnp.int32(len(self.code.kind_of) - 1)
        rows = inputs.batch, inputs.rng
        return total_count(last, setup.functions, *rows, stage, setup.data_axes)

    def _operand(self, held: int, stage: int, shared: Mapping[Place, Gradients]) -> Operand:
        layout, kept = self.setup.layout, self.inputs.kept
        code = self.code.kinds[self.code.kind_of[stage]]
        places = code.places(layout.held(stage, self.chunks, self.held[held]).places)
        own = Gradients.of(self.plans[held], places, splits=self.setup.target.on_tpus)
        state = layout.held(stage, kept, self.kept[held]).places if kept else ()
        return Operand(code, [], [], {Place.STAGE_GRADIENTS: own, **shared}, state, places)

    def gathered(self, held: int, parts: Leaves) -> Leaves:
        """The whole parameters of a chunk, or of a room, from a device's parts; None for those that
        it does not have.
        """
        triples = enumerate(zip(self.plans[held], parts, strict=True))
        return [
            None if part is None else plan.gather(part, apart=n in self.apart[held])
            for n, (plan, part) in triples
        ]

    @property
    def shared(self) -> Leaves:
        """The parameters that all stages share."""
        return jax.tree.leaves(self.inputs.shared)

    def _apart(self, chunk: int) -> frozenset[int]:
        """The leaves of a chunk of which all of its kinds of stages take the layers."""
        own = [
            each.gradients[Place.STAGE_GRADIENTS]
            for (_, of, _), each in self.operands.items()
            if of == chunk
        ]
        return stacks_of_layers([place for each in own for place in each.places])

    def in_room(self, operand: Operand, room: int, kind: int, state: State) -> Operand:
        """The operand of a kind of stage with the parameters that a room holds."""
        leaves, hoisted = state[Key(Place.PARAMETERS, room)]
        return operand.filled(leaves, self.shared, hoisted[kind])

    def extra(self, by: By, stage: Scalar, microbatch: Scalar, wants: frozenset[str]) -> Leaves:
        """Leaves of a function's arguments besides parameters, x and state: "ctx", "microbatch"."""
        batch, rng, functions = self.inputs.batch, self.inputs.rng, self.setup.functions
        return jax.tree.leaves(functions.extra(batch, rng, stage, microbatch, wants, of=by))

    def empty_state(self) -> State:
        """Empty pools and accumulators, and the stages' present state."""
        setup, code, kept = self.setup, self.code, self.inputs.kept
        slots, microbatches = self.program.slots, setup.num_microbatches
        losses = [loss.dtype for each in code.codes for loss in each.avals[Place.LOSSES]]
        last = code.last
        state: State = {
            TOKEN: false(),
            Key(Place.SENT_X): empty(self.buffers[Place.X].avals),
            Key(Place.LOSSES): jnp.zeros(microbatches, wider(*losses) if losses else jnp.float32),
            Key(Place.AUX): [] if last is None else empty(last.avals[Place.AUX], microbatches),
        }
        stages = {v: arrays_in(kept[v], of) for of, own in zip(self.kept, self.turns) for v in own}
        for v in range(len(self.chunks)):
            state[Key(Place.STAGE_STATE, v)] = stages.get(v, [])
        for place, buffer in self.buffers.items():
            size = getattr(slots, place.value)
            if self.program.together and place in TOGETHER:
                state |= {Key(place, n): buffer.empty_slot() for n in range(size)}
            elif size and (setup.training or place in (Place.X, Place.LAST, *OF_SLICES)):
                # Rows of buffers that no slice has appended are read, under a mask.
                filled = setup.form.filled or place in OF_SLICES
                state[Key(place)] = buffer.empty(size, filled=filled)
        if not setup.training:
            return state
        for v, apart in enumerate(self.apart):
            totals = self.totals(self.whole[v], self.plans[v], apart)
            state[Key(Place.STAGE_GRADIENTS, v)] = totals
        for key, place in GRADIENTS_OF.items():
            plans = leaf_plans(setup.plans[key])
            outer = jax.tree.leaves(getattr(self.inputs, key))
            state[Key(place)] = self.totals(outer, plans)
        return state | {
            Key(Place.SENT_DX): empty(self.buffers[Place.COTANGENT].avals),
            Key(Place.HOST): self.packing.empty(slots.host),
        }

    def totals(
        self, leaves: Leaves, plans: Sequence[LeafPlan], apart: Set[int] = frozenset()
    ) -> Leaves:
        """Empty accumulators; None for what is frozen or not there, and of what is `apart` one for
        each layer.
        """

        def total(number: int, leaf: Leaf | None, plan: LeafPlan) -> Stored | None:
            if plan.frozen or leaf is None:
                return None
            dtype = accumulator_dtype(leaf.dtype, self.setup.accumulate)
            if number not in apart:
                return plan.constrain(plan.rule.empty(leaf.shape, dtype))
            rows = range(leaf.shape[0])
            return tuple(plan.of_layer.constrain(jnp.zeros(leaf.shape[1:], dtype)) for _ in rows)

        return list(map(total, count(), leaves, plans))


def with_replicas[T](setup: Setup, owned: Sequence[T]) -> list[T]:
    """This device's stages in chunk order: its own stages, and copies of another device's."""
    chunks = dict(enumerate(owned))
    for (chunk, held), pairs in _replica_moves(setup):
        copy = lax.ppermute(owned[held], setup.axis, pairs)
        if chunk in chunks:
            targets = jnp.array([target for _, target in pairs])
            here = jnp.isin(lax.axis_index(setup.axis), targets)
            copy = jax.tree.map(partial(jnp.where, here), copy, chunks[chunk])
        chunks[chunk] = copy
    return [chunks[v] for v in sorted(chunks)]


def _replica_moves(setup: Setup) -> list[tuple[tuple[int, int], tuple[tuple[int, int], ...]]]:
    """((holder's chunk, owner's chunk), pairs): permutes without cycles that bring every copy to
    its holder.
    """
    replicas = setup.layout.replicas()
    return pairs_by(((chunk, own), owner, holder) for owner, own, holder, chunk in replicas)


def return_replicas(setup: Setup, leaves: Sequence[Leaves]) -> list[Leaves]:
    """Send the gradients of copied stages to their owners and add them there, or what the rules of
    leaves that are replaced say.
    """
    moves, owned = _replica_moves(setup), [leaves[v] for v in range(setup.layout.num_owned)]
    if not moves:
        return owned
    # A device may hold copies in a chunk that others own: count each gradient where its stage is
    # owned.
    leaves = [list(map(stored, own)) for own in leaves]
    owned, device = leaves[: len(owned)], lax.axis_index(setup.axis)
    plans = [trained(own, own) for own in map(leaf_plans, setup.plans["stages"])]
    rules = [[plan.rule for plan in own] for own in plans]
    for v in range(setup.layout.num_owned):
        mine = jnp.array([s >= 0 for s in setup.layout.stage_at(v)])[device]
        owned[v] = [rule.kept(mine, leaf) for rule, leaf in zip(rules[v], owned[v], strict=True)]
    for (chunk, held), pairs in moves:
        sent = lax.ppermute(leaves[chunk], setup.axis, [(t, s) for s, t in pairs])
        comes = jnp.isin(device, jnp.array([owner for owner, _ in pairs]))
        both = zip(rules[held], owned[held], sent, strict=True)
        owned[held] = [rule.joined(own, leaf, comes) for rule, own, leaf in both]
    return owned


def finish(step: DeviceStep, state: State, params: Params) -> StepResults:
    """Sum losses and the gradients of first, last and shared over devices, and all gradients over
    data shards.
    """
    setup, last = step.setup, step.code.last
    aux = last and jax.tree.unflatten(last.y_tree, state[Key(Place.AUX)])
    losses, axes = state[Key(Place.LOSSES)], ((setup.axis,), setup.data_axes)
    results, scale = totals(setup, losses, aux, *axes, code=last, scale=step.inputs.scale)
    trees = map(jax.tree.structure, step.inputs.kept)
    states = map(_present, chunks_of(state, Place.STAGE_STATE))
    held = list(map(jax.tree.unflatten, trees, states))
    merged = jax.tree.map(lambda leaf: merged_state(setup, leaf, setup.data_axes)[None], held)
    results["state"] = Chunks(merged, setup.layout) if held else ()
    if not setup.training:
        return results, {}
    chunks = chunks_of(state, Place.REDUCED if step.rooms else Place.STAGE_GRADIENTS)
    owned = return_replicas(setup, list(map(_present, chunks)))

    def finished(values: Leaves, plans: PyTree, like: PyTree, axes: tuple[str, ...]) -> PyTree:
        """The sums of gradients, and the next values of leaves that are replaced; None for frozen
        parameters.
        """
        every, by_parts = leaf_plans(plans), setup.target.on_tpus
        own = trained(every, every)
        kept = jax.tree.map(lambda plan, leaf: None if plan.frozen else leaf, plans, like)
        shapes, tree = jax.tree.flatten(kept)
        scattered = bool(step.rooms) and axes == setup.data_axes  # those of stages
        sums = reduce_gradients(values, own, axes, by_parts=by_parts, scattered=scattered)

        def one(total: Array, plan: LeafPlan, param: Array) -> Array | None:
            if rule := plan.replaced:
                pipe = [setup.axis] if setup.axis in axes else []
                data = [axis for axis in plan.whole_axes(axes) if axis != setup.axis]
                return rule.next_value(total, setup.num_microbatches, pipe, data).astype(
                    param.dtype
                )
            total = total if scale is None else total * scale.astype(total.dtype)
            return plan.cleared(total, setup.axis)

        return jax.tree.unflatten(tree, map(one, sums, own, shapes))

    everyone, plans, stages = (setup.axis, *setup.data_axes), setup.plans, []
    for values, own, tree in zip(owned, plans["stages"], params["stages"], strict=True):
        grads = finished(values, own, tree, setup.data_axes)
        stages.append(jax.tree.map(lambda leaf: leaf[None], grads))
    found = {"stages": params["stages"].like(stages)}
    for key in OUTER:
        sums = _present(state[Key(GRADIENTS_OF[key])])
        found[key] = finished(sums, plans[key], params[key], everyone)
    return results, found


def _present(leaves: Leaves) -> Leaves:
    """Those that are there."""
    return [leaf for leaf in leaves if leaf is not None]


def totals(
    setup: Setup,
    losses: Array,
    aux: PyTree,
    pipe: tuple[str, ...],
    data: tuple[str, ...],
    *,
    code: StageCode | None,
    scale: LossScale,
) -> tuple[dict[str, PyTree], Array | None]:
    """The step's loss, times `scale`, per-microbatch losses and metrics on every device, and the
    remaining factor of gradients; or the last stage's outputs for all rows of this data shard.

    Only the last stage's device wrote any of the losses [M] and of `aux`; the others along the axes
    `pipe` hold zeros, and False.  `code` is that of `last`, whose backwards may have begun with the
    factor.
    """
    if setup.functions.last is None:
        return {}, None
    if setup.outputs:
        outputs = setup.functions.join(jax.tree.map(lambda x: whole(x, pipe), aux["metrics"]))
        return {"outputs": in_rows(outputs)}, None
    everyone = (*pipe, *data)
    losses = lax.psum(losses, everyone)
    counts = jax.tree.map(lambda leaf: lax.psum(leaf, everyone), aux["count"])
    loss, losses, factor = setup.functions.total(losses, counts, setup.data_size)
    parts = setup.num_microbatches * setup.data_size
    metrics = mean_over_microbatches(
        aux["metrics"], lambda leaf: jnp.sum(lax.psum(leaf, everyone), axis=0), parts
    )
    loss = loss if scale is None else loss * jnp.asarray(scale, loss.dtype)
    is_late = code is None or code.count is None
    results = {"loss": loss, "losses": losses, "metrics": metrics}
    return results, factor if is_late else None


def merged_state(setup: Setup, leaf: Array, data: tuple[str, ...]) -> Array:
    """A leaf of the stages' state after the step, averaged over data shards; the greatest of what
    is not floating.
    """
    if not data or is_key(leaf):  # keys are of one data shard: see `state_faults`
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return lax.pmax(leaf, data)
    return (lax.psum(summable(leaf), data) / setup.data_size).astype(leaf.dtype)
