"""A device's step before its first tick (whole parameters, the model's code, values that depend on
parameters alone) and after its last: one sum over devices of values that only some of them have.

Stages on two devices (DualPipe) are copied from their owner before, and their gradients return to
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..arrays import (
    Flag,
    Leaves,
    Params,
    PyTree,
    Scalar,
    accumulator_dtype,
    in_rows,
    is_key,
    summable,
    wider,
    with_words,
)
from ..jaxprs.entry import Destination, Piece, StackRow, Total
from ..model.calls import OUTER_WANTS
from ..model.functions import mean_over_microbatches
from ..model.keys import KeyOf
from ..model.layers import OUTER
from ..model.replaced import ADDED, Replacement
from ..program.ir import Program
from ..stage.code import StageCode, run
from ..stage.counts import total_count
from ..stage.model_code import ModelCode
from ..stage.setup import Inputs, Setup
from ..storage.chunks import Chunks
from ..storage.plan import LeafPlan, leaf_plans, reduce_gradients, trained, with_frozen
from ..storage.table import Home, Places, stacks_of_layers
from ..table.effects import OF_SLICES, TOGETHER, Place
from .block import State, add, chunks_of, empty, false, of_chunk, of_slot
from .pools import Buffers, Packing


@dataclass(frozen=True)
class Operand:
    """The code of a kind of stage in a chunk, or of `first` or `last`, with its parameters on this
    device, and the places of its state.
    """

    code: StageCode
    # its parameters, then the shared ones; those inside a longer array as `Piece`s, and layers of a
    # stack as `StackRow`s, since every device would otherwise hold copies of the parameters
    params: Leaves
    once: Leaves  # what was hoisted
    state_places: Places = ()
    gradient_places: Places = ()  # of the parameters that have a gradient
    rules: tuple[Replacement | None, ...] = ()  # of the same, where they are replaced
    # of the chunk's accumulators, see `Total`
    splits: tuple[PartitionSpec | None, ...] = ()

    def inputs(self, x: Leaves, extra: Leaves) -> Leaves:
        """The inputs of its code; x with what comes from other slices."""
        return [*self.code.consts, *self.params, *x, *extra, *self.once]

    def totals(self, chunk: Leaves) -> list[Destination | None]:
        """The accumulators of the stage's own gradients, among those of its chunk; None for leaves
        that are replaced, whose values are not always added.
        """

        def total(place: Home, rule: Replacement | None) -> Destination | None:
            if rule is not None:
                return None
            held, split = chunk[place.at], self.splits[place.at]
            if isinstance(held, tuple) and place.row is not None:
                return Total(held[place.row], split and PartitionSpec(*split[1:]))
            kept = _in_place(place, held)
            return kept if isinstance(kept, Piece | StackRow) else Total(kept, split)

        return list(map(total, self.gradient_places, self.rules))

    def with_totals(self, chunk: Leaves, totals: Leaves, *, is_last: Flag) -> Leaves:
        """The accumulators of the chunk with these in the place of the stage's own; of leaves that
        are replaced, these are the values of a microbatch, `is_last` of the last one.
        """
        after = list(chunk)
        for place, total, rule in zip(self.gradient_places, totals, self.rules, strict=True):
            held = after[place.at]
            if rule is not None:
                after[place.at] = place.put(held, rule.add(place.take(held), total, is_last))
            elif isinstance(held, tuple):
                held = dict(enumerate(held)) | {place.row: total}
                after[place.at] = tuple(held.values())
            else:
                after[place.at] = total
        return after


def _in_place(place: Home, leaf: Any) -> Any:
    """What is in a place of an array: a value, or a part of it that is not read yet."""
    if place.flat:
        return Piece(leaf, place.start, place.entry)
    return leaf if place.row is None else StackRow(leaf, place.row)


class DeviceStep:
    """The code and the read-only inputs of the ticks, on one device, with values of parameters
    alone, which are computed here.

    Attributes:
        everywhere: blocks permute, so all devices run each: see `ModelCode.permutes`.
        blocking: whether a permute holds its device's thread until it is over: see `SegmentCode`.
        chunks: the parameters of the device's stages, with copies of others'.
        apart: by chunk, the leaves whose accumulators are an array for each layer.
        operands: by chunk and kind of stage, and of "first" and "last".
        rules: of first, last and shared parameters that have a gradient, see `Replacement`.
        seed: the cotangent of one microbatch's loss.
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
        self.operands: dict[Any, Operand] = {}
        for held in setup.layout.placement.stages_of:
            for chunk, stage in enumerate(held):
                key = chunk, code.kind_of[stage]
                if key not in self.operands:
                    self.operands[key] = self._operand(chunk, stage)
        self.apart = [self._apart(chunk) for chunk in range(len(self.chunks))]
        for name, end in (("first", code.first), ("last", code.last)):
            if end is not None:
                params = jax.tree.leaves((getattr(inputs, name), inputs.shared))
                once = run(end.hoist, *end.consts, *params)
                self.operands[name] = Operand(end, params, once)
        self.rules = {
            key: tuple(plan.replaced for plan in leaf_plans(setup.plans[key]) if not plan.frozen)
            for key in OUTER
        }
        self.seed: Any = setup.seed(self._count(), inputs.scale) if setup.training else None

    @property
    def share_seed(self) -> Any:
        """The cotangent of a loss that all devices of the pipe axis compute."""
        return self.seed / lax.axis_size(self.setup.axis)

    def is_last(self, microbatch: Scalar) -> Flag:
        """Whether it is the last microbatch of the batch."""
        return microbatch == self.setup.num_microbatches - 1

    def added(self, key: str, values: Leaves, microbatch: Scalar, state: State) -> State:
        """The gradients of first, last or shared parameters with those of a microbatch."""
        by_rule = partial(add, is_last=self.is_last(microbatch))
        name = f"{key}_gradients"
        return {name: list(map(by_rule, state[name], values, self.rules[key]))}

    def end_inputs(self, key: str, microbatch: Scalar, y: Leaves | None = None) -> Leaves:
        """The inputs of `first` or `last`."""
        stage = 0 if key == "first" else len(self.code.kind_of) - 1
        extra = self.extra(jnp.full_like(microbatch, stage), microbatch, of=KeyOf[key.upper()])
        return self.operands[key].inputs(y or [], extra)

    def _count(self) -> Any:
        """The count of the step, where the rows of the batch determine it.  All devices have them,
        so that no device waits for another's.
        """
        setup, last, inputs = self.setup, self.code.last, self.inputs
        if last is None:
            return None
        stage = jnp.int32(len(self.code.kind_of) - 1)
        rows = inputs.batch, inputs.rng
        return total_count(last, setup.functions, *rows, stage, setup.data_axes)

    def _operand(self, chunk: int, stage: int) -> Operand:
        layout, plans, kept = self.setup.layout, self.plans_of(chunk), self.inputs.kept
        leaves = jax.tree.leaves(self.chunks[chunk])
        code, on_tpus = self.code.kinds[self.code.kind_of[stage]], self.setup.target.on_tpus
        places = code.places(layout.held(stage, self.chunks).places)
        params = [_in_place(place, leaves[place.at]) for place in places]
        params += jax.tree.leaves(self.inputs.shared)
        whole = [p.load() if isinstance(p, Piece | StackRow) else p for p in params]
        return Operand(
            code,
            params,
            once=run(code.hoist, *code.consts, *whole),
            state_places=layout.held(stage, kept).places if kept else (),
            gradient_places=tuple(p for p in places if not plans[p.at].frozen),
            rules=tuple(plans[p.at].replaced for p in places if not plans[p.at].frozen),
            splits=tuple(PartitionSpec(*p.auto) if on_tpus else None for p in plans),
        )

    def _apart(self, chunk: int) -> frozenset[int]:
        """The leaves of a chunk of which all of its kinds of stages take the layers."""
        own = [each for (of, _), each in self.operands.items() if of == chunk]
        return stacks_of_layers([place for each in own for place in each.gradient_places])

    def plans_of(self, chunk: int) -> list[Any]:
        """The plans of a chunk's parameters.  A chunk that another device owns is like the last
        one.
        """
        plans = self.setup.plans["stages"]
        return leaf_plans(plans[min(chunk, len(plans) - 1)])

    def extra(
        self,
        stage: Scalar,
        microbatch: Scalar,
        wants: frozenset[str] = OUTER_WANTS,
        *,
        of: KeyOf = KeyOf.STAGE,
    ) -> Leaves:
        """Leaves of a function's arguments besides parameters, x and state: "ctx", "microbatch"."""
        batch, rng, functions = self.inputs.batch, self.inputs.rng, self.setup.functions
        return jax.tree.leaves(functions.extra(batch, rng, stage, microbatch, wants, of=of))

    def empty_state(self) -> State:
        """Empty pools and accumulators, and the stages' present state."""
        setup, code, kept = self.setup, self.code, self.inputs.kept
        slots, microbatches = self.program.slots, setup.num_microbatches
        codes = [*code.kinds, *([] if code.last is None else [code.last])]
        losses = [loss.dtype for each in codes for loss in each.avals[Place.LOSSES]]
        state: State = {
            "token": false(),
            "sent_x": empty(self.buffers[Place.X].avals),
            "losses": jnp.zeros(microbatches, wider(*losses) if losses else jnp.float32),
        }
        last = code.last
        state["aux"] = None if last is None else empty(last.avals[Place.AUX], microbatches)
        for v in range(len(self.chunks)):
            own = jax.tree.leaves(kept[v]) if kept else []
            state[of_chunk(Place.STAGE_STATE, v)] = own
        for place, buffer in self.buffers.items():
            size = getattr(slots, place.value)
            if self.program.together and place in TOGETHER:
                state |= {of_slot(place, n): buffer.empty_slot() for n in range(size)}
            elif size and (setup.training or place in (Place.X, *OF_SLICES)):
                # Rows of buffers that no slice has appended are read, under a mask.
                filled = setup.form.filled or place in OF_SLICES
                state[place.value] = buffer.empty(size, filled=filled)
        for place, avals in code.outer_pools.items():
            if setup.training or place is Place.LAST:
                state[place.value] = empty(avals, getattr(slots, place.value))
        if not setup.training:
            return state
        for v, chunk in enumerate(self.chunks):
            totals = self._totals(chunk, self.plans_of(v), self.apart[v])
            state[of_chunk(Place.STAGE_GRADIENTS, v)] = totals
        for key in OUTER:
            totals = self._totals(getattr(self.inputs, key), leaf_plans(setup.plans[key]))
            state[f"{key}_gradients"] = [total for total in totals if total is not None]
        return state | {
            "sent_dx": empty(self.buffers[Place.COTANGENT].avals),
            "host": self.packing.empty(slots.host),
        }

    def _totals(
        self, tree: PyTree, plans: Sequence[LeafPlan], apart: Set[int] = frozenset()
    ) -> Leaves:
        """Empty accumulators; None for what is frozen, and of what is `apart` one for each
        layer.
        """

        def total(number: int, leaf: Any, plan: LeafPlan) -> Any:
            if plan.frozen:
                return None
            dtype = accumulator_dtype(leaf.dtype, self.setup.accumulate)
            if plan.replaced:
                return plan.constrain(plan.replaced.empty(leaf.shape, dtype))
            if number not in apart:
                return plan.constrain(jnp.zeros(leaf.shape, dtype))
            of_layer = replace(plan, auto=plan.auto[1:])
            rows = range(leaf.shape[0])
            return tuple(of_layer.constrain(jnp.zeros(leaf.shape[1:], dtype)) for _ in rows)

        return list(map(total, count(), jax.tree.leaves(tree), plans))


def with_replicas(setup: Setup, owned: Sequence[PyTree]) -> list[PyTree]:
    """This device's stages in chunk order: its own stages, and copies of another device's."""
    chunks: dict[int, PyTree] = dict(enumerate(owned))
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
    device = lax.axis_index(setup.axis)
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


def finish(step: DeviceStep, state: State, params: Params) -> tuple[PyTree, dict[str, PyTree]]:
    """Sum losses and the gradients of first, last and shared over devices, and all gradients over
    data shards.
    """
    setup, code = step.setup, step.code
    aux = None if code.last is None else jax.tree.unflatten(code.last.y_tree, state["aux"])
    results, scale = totals(setup, state["losses"], aux, (setup.axis,), setup.data_axes)
    if code.last is not None and code.last.count is not None:
        scale = None  # the backwards began with it
    results |= scaled_loss(results, step.inputs.scale)
    trees = map(jax.tree.structure, step.inputs.kept)
    held = list(map(jax.tree.unflatten, trees, chunks_of(state, Place.STAGE_STATE)))
    merged = jax.tree.map(lambda leaf: merged_state(setup, leaf, setup.data_axes)[None], held)
    results["state"] = Chunks(merged, setup.layout) if held else ()
    if not setup.training:
        return results, {}
    chunks = chunks_of(state, Place.STAGE_GRADIENTS)
    owned = return_replicas(
        setup, [[_stacked(total) for total in chunk if total is not None] for chunk in chunks]
    )

    def finished(values: Leaves, plans: PyTree, like: PyTree, axes: tuple[str, ...]) -> PyTree:
        """The sums of gradients, and the next values of leaves that are replaced; None for frozen
        parameters.
        """
        every, by_parts = leaf_plans(plans), setup.target.on_tpus
        own, shapes = trained(every, every), trained(jax.tree.leaves(like), every)
        sums = reduce_gradients(values, own, axes, by_parts=by_parts)

        def one(total: Any, plan: LeafPlan, param: Any) -> Any:
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
        found[key] = finished(state[f"{key}_gradients"], plans[key], params[key], everyone)
    return results, found


def _stacked(total: Any) -> Any:
    """An accumulator as the parameter is stored."""
    return jnp.stack(total) if isinstance(total, tuple) else total


def whole(leaf: Any, axes: str | tuple[str, ...]) -> Any:
    """A leaf on all devices, where one of them has it and the others have zeros, False, or keys of
    zeros.
    """

    def summed(leaf: Any) -> Any:
        number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
        return lax.psum(number, axes).astype(leaf.dtype)

    return with_words(summed, leaf)


def totals(
    setup: Setup, losses: Any, aux: PyTree, pipe: tuple[str, ...], data: tuple[str, ...]
) -> tuple[dict[str, Any], Any]:
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


def scaled_loss(results: Mapping[str, Any], scale: Any) -> dict[str, Any]:
    """The loss with a factor, where there are both."""
    if scale is None or "loss" not in results:
        return {}
    loss = results["loss"]
    return {"loss": loss * jnp.asarray(scale, loss.dtype)}


def merged_state(setup: Setup, leaf: Any, data: tuple[str, ...]) -> Any:
    """A leaf of the stages' state after the step, averaged over data shards; the greatest of what
    is not floating.
    """
    if not data or is_key(leaf):  # keys are of one data shard: see `state_faults`
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return lax.pmax(leaf, data)
    return (lax.psum(summable(leaf), data) / setup.data_size).astype(leaf.dtype)
