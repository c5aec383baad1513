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
from ..model.replaced import ADDED
from ..program.ir import Program
from ..stage.code import run
from ..stage.codes import ModelCode
from ..stage.counts import total_count
from ..stage.setup import Inputs, Setup
from ..storage.chunks import Chunks
from ..storage.plan import (
    LeafPlan,
    Stored,
    leaf_plans,
    reduce_gradients,
    stored,
    trained,
    whole_shapes,
    with_frozen,
)
from ..storage.room import RoomLeaves
from ..storage.table import Home, stacks_of_layers
from ..table.effects import OF_SLICES, TOGETHER, Place
from ..table.kinds import By
from .block import TOKEN, Key, State, chunks_of, empty, false, of_chunk
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
        room: what each room holds.
        whole: the shapes of the whole parameters of each chunk, or room.
        apart: by chunk, the leaves whose accumulators are an array for each layer.
        operands: by function, chunk and kind of stage.
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
        self.rooms, self.room = range(program.num_rooms), RoomLeaves.of(self.chunks)
        self._room_plans = list(RoomLeaves.of(setup.plans["stages"]).arrays.values())
        parts = [list(self.room.arrays.values()) for _ in self.rooms]
        parts = parts or list(map(jax.tree.leaves, self.chunks))
        self.whole = [whole_shapes(own, self.plans_of(v)) for v, own in enumerate(parts)]
        self.operands: dict[tuple[By, int, int], Operand] = {}
        shared = self._outer_gradients("shared")
        for held in setup.layout.placement.stages_of:
            for chunk, stage in enumerate(held):
                for key in product((By.STAGE,), self.rooms or (chunk,), (code.kind_of[stage],)):
                    if key not in self.operands:
                        self.operands[key] = self._operand(chunk, stage, shared)
        self.apart = [self._apart(chunk) for chunk in self.rooms or range(len(self.chunks))]
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

    def _operand(self, chunk: int, stage: int, shared: Mapping[Place, Gradients]) -> Operand:
        layout, plans, kept = self.setup.layout, self.plans_of(chunk), self.inputs.kept
        code = self.code.kinds[self.code.kind_of[stage]]
        names, of_state = None, None
        if self.rooms:
            names, of_state = self.room.names, kept and RoomLeaves.of(kept).names
        places = code.places(layout.held(stage, self.chunks, names).places)
        own = Gradients.of(plans, places, splits=self.setup.target.on_tpus)
        state = layout.held(stage, kept, of_state).places if kept else ()
        return Operand(code, [], [], {Place.STAGE_GRADIENTS: own, **shared}, state, places)

    def gathered(self, held: int, parts: Leaves) -> Leaves:
        """The whole parameters of a chunk, or of a room, from a device's parts; None for those that
        it does not have.
        """
        triples = enumerate(zip(self.plans_of(held), parts, strict=True))
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

    def plans_of(self, chunk: int) -> list[LeafPlan]:
        """The plans of a chunk's parameters, or of those in a room.  A chunk that another device
        owns is like the last one.
        """
        if self.rooms:
            return self._room_plans
        plans = self.setup.plans["stages"]
        return leaf_plans(plans[min(chunk, len(plans) - 1)])

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
        for v in range(len(self.chunks)):
            of = RoomLeaves.of(kept if self.rooms else kept[v : v + 1]) if kept else None
            own = [] if of is None else of.parts(kept[v])
            state[of_chunk(Place.STAGE_STATE, v)] = own
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
            totals = self.totals(self.whole[v], self.plans_of(v), apart)
            state[of_chunk(Place.STAGE_GRADIENTS, v)] = totals
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
            if plan.replaced:
                return plan.constrain(plan.replaced.empty(leaf.shape, dtype))
            if number not in apart:
                return plan.constrain(jnp.zeros(leaf.shape, dtype))
            rows = range(leaf.shape[0])
            return tuple(plan.of_layer.constrain(jnp.zeros(leaf.shape[1:], dtype)) for _ in rows)

        return list(map(total, count(), leaves, plans))


def with_replicas[T](setup: Setup, owned: Sequence[T]) -> list[T]:
    """This device's stages in chunk order: its own stages, and copies of another device's."""
    chunks = dict(enumerate(owned))
    for chunk, held, pairs in _replica_moves(setup.layout.replicas()):
        copy = lax.ppermute(owned[held], setup.axis, pairs)
        if chunk in chunks:
            targets = jnp.array([target for _, target in pairs])
            here = jnp.isin(lax.axis_index(setup.axis), targets)
            copy = jax.tree.map(partial(jnp.where, here), copy, chunks[chunk])
        chunks[chunk] = copy
    return [chunks[v] for v in sorted(chunks)]


def _replica_moves(
    replicas: Sequence[tuple[int, int, int, int]],
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(holder's chunk, owner's chunk, pairs): permutes without cycles that bring every copy to its
    holder.
    """
    moves: dict[tuple[int, int, bool, int], list[tuple[int, int]]] = {}
    for owner, owner_chunk, holder, chunk in replicas:
        # A permute takes each source and each target once.
        for number in range(len(replicas)):
            key = chunk, owner_chunk, owner < holder, number
            pairs = moves.setdefault(key, [])
            if all(owner != s and holder != t for s, t in pairs):
                pairs.append((owner, holder))
                break
    return [(chunk, owner_chunk, pairs) for (chunk, owner_chunk, *_), pairs in moves.items()]


def return_replicas(setup: Setup, leaves: Sequence[Leaves]) -> list[Leaves]:
    """Send the gradients of copied stages to their owners and add them there, or what the rules of
    leaves that are replaced say.
    """
    replicas = setup.layout.replicas()
    owned = [leaves[v] for v in range(setup.layout.num_owned)]
    if not replicas:
        return owned
    # A device may hold copies in a chunk that others own: count each gradient where its stage is
    # owned.
    leaves = [list(map(stored, own)) for own in leaves]
    owned, device = leaves[: len(owned)], lax.axis_index(setup.axis)
    plans = [trained(own, own) for own in map(leaf_plans, setup.plans["stages"])]
    rules = [[plan.replaced or ADDED for plan in own] for own in plans]
    for v in range(setup.layout.num_owned):
        mine = jnp.array([s >= 0 for s in setup.layout.stage_at(v)])[device]
        owned[v] = [rule.kept(mine, leaf) for rule, leaf in zip(rules[v], owned[v], strict=True)]
    for chunk, held, pairs in _replica_moves(replicas):
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
    results, scale = totals(setup, state[Key(Place.LOSSES)], aux, (setup.axis,), setup.data_axes)
    if last is not None and last.count is not None:
        scale = None  # the backwards began with it
    results |= scaled_loss(results, step.inputs.scale)
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
        own, shapes = trained(every, every), trained(jax.tree.leaves(like), every)
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

        return jax.tree.unflatten(
            jax.tree.structure(like), with_frozen(list(map(one, sums, own, shapes)), every)
        )

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
    setup: Setup, losses: Array, aux: PyTree, pipe: tuple[str, ...], data: tuple[str, ...]
) -> tuple[dict[str, PyTree], Array | None]:
    """The step's loss, per-microbatch losses and metrics on every device, and the remaining factor
    of gradients; or the last stage's outputs for all rows of this data shard.

    Only the last stage's device wrote any of the losses [M] and of `aux`; the others along the axes
    `pipe` hold zeros, and False.
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
    return {"loss": loss, "losses": losses, "metrics": metrics}, factor


def scaled_loss(results: Mapping[str, PyTree], scale: LossScale) -> dict[str, Array]:
    """The loss with a factor, where there are both."""
    if scale is None or "loss" not in results:
        return {}
    loss = results["loss"]
    return {"loss": loss * jnp.asarray(scale, loss.dtype)}


def merged_state(setup: Setup, leaf: Array, data: tuple[str, ...]) -> Array:
    """A leaf of the stages' state after the step, averaged over data shards; the greatest of what
    is not floating.
    """
    if not data or is_key(leaf):  # keys are of one data shard: see `state_faults`
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return lax.pmax(leaf, data)
    return (lax.psum(summable(leaf), data) / setup.data_size).astype(leaf.dtype)
