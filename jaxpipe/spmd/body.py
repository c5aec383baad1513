"""Program + user functions -> the body of one `shard_map`: prepare, run the segments, reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import PipelineError
from ..lowering.plan import Plan
from ..model.functions import Functions, Loss
from ..model.param_layout import ParamLayout
from ..model.partition import gather, leaf_plans, reduce_gradients
from ..program.ir import Program, Segment
from ..program.liveness import Liveness, longest
from ..stage.code import LastCode, StageCode, reads, run, trace_last, trace_stage
from .operands import Operands, SharedBuffers, StageOperand
from .pools import Leaves, add, empty, empty_pool
from .tick import Emitter, State, make_extra

PyTree: TypeAlias = Any


@dataclass(frozen=True)
class Lowering:
    """What the body needs to know besides its operands."""

    plan: Plan
    functions: Functions
    layout: ParamLayout
    axis: str
    data_axes: tuple[str, ...]
    data_size: int
    accumulate: Any  # dtype of gradient accumulators, or None for the parameters' own
    plans: dict[str, PyTree]  # how each parameter is spread over the mesh
    training: bool
    outputs: bool = False  # return what the last stage returns, which `functions.last` hands over as its metrics
    observe: Callable[[Traced], None] | None = None  # is told what was traced, for reports

    @property
    def results(self) -> tuple[str, ...]:
        """What the body returns besides gradients."""
        if self.outputs:
            return ("outputs",)
        return ("state",) if self.functions.last is None else ("loss", "losses", "metrics", "state")

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.plan.ticks.schedule.num_microbatches


@dataclass(frozen=True)
class Traced:
    """The stages', first's and last's code and the program made for them."""

    kinds: tuple[StageCode, ...]  # of stages that differ in function, parameters or what they take
    kind_of: tuple[int, ...]  # per stage
    wants: tuple[frozenset[str], ...]  # per kind, the keywords whose values differ by microbatch or stage
    buffers: SharedBuffers
    first: StageCode
    last: LastCode | None
    program: Program
    outer_wants: frozenset[str]

    @property
    def liveness(self) -> Liveness:
        """Until when what is kept is needed by any stage."""
        return longest([code.liveness for code in self.kinds])


def body(
    lowering: Lowering, params: dict[str, PyTree], batch: PyTree, rng: Any, kept: tuple[PyTree, ...] = ()
) -> tuple[PyTree, dict[str, PyTree]]:
    """What each device runs: returns ({"loss", "losses", "metrics", "state"}, gradients laid out like `params`).

    Seen by `shard_map`: leaves of `params["stages"]` and of the stages' own state `kept` are [1, ...], leaves of the batch [rows, ...] of
    this data shard.
    """
    batch = split_batch(batch, lowering.num_microbatches)
    rng = shard_key(rng, lowering.data_axes, lowering.data_size)
    plans = lowering.plans
    mine = [_first_row(tree) for tree in params["stages"]]
    owned = [gather(tree, plan) for tree, plan in zip(mine, plans["stages"], strict=True)]
    kept = tuple(_first_row(tree) for tree in kept)
    first, last, shared = (gather(params[k], plans[k]) for k in ("first", "last", "shared"))
    traced = trace(lowering, owned, kept, shared, first, last, batch, rng)
    if lowering.observe is not None:
        lowering.observe(traced)
    chunks = _chunks(lowering, owned)
    state = _initial(lowering, traced, chunks, kept, shared, first, last)
    emitter = _emitter(lowering, traced, chunks, kept, shared, first, last, batch, rng)
    table = jnp.asarray(_narrow(traced.program.table))
    rows = lax.dynamic_index_in_dim(table, lax.axis_index(lowering.axis), 1, keepdims=False)
    for segment in traced.program.segments:
        state = _run_segment(emitter, segment, rows, state)
    return _finish(lowering, traced, state, params, kept)


def _first_row(tree: PyTree) -> PyTree:
    """This device's part of leaves that are spread over the pipe axis."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def shard_key(rng: Any, data_axes: tuple[str, ...], data_size: int) -> Any:
    """The step's key on this data shard: shards have different rows, so they draw different numbers."""
    if rng is None or data_size == 1:
        return rng
    return jax.random.fold_in(rng, lax.axis_index(data_axes))


def split_batch(batch: PyTree, count: int) -> PyTree:
    """Leaves [rows, ...] -> [M, rows / M, ...], rows in order."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), batch)


def trace(
    lowering: Lowering,
    owned: Sequence[PyTree],
    kept: Sequence[PyTree],
    shared: PyTree,
    first: PyTree,
    last: PyTree,
    batch: PyTree,
    rng: Any,
) -> Traced:
    """Trace the user's functions, check that their shapes chain, and make the program."""
    functions = replace(lowering.functions, training=lowering.training)
    outer_wants = frozenset({"microbatch", "ctx"})
    index = jnp.int32(0)
    outer = make_extra(batch, rng, index, index, outer_wants)
    first_code = trace_stage(functions.run_first, (first, shared), (), outer)
    x: PyTree = jax.tree.unflatten(first_code.y_tree, first_code.y_avals)
    kinds: dict[tuple[Any, ...], StageCode] = {}
    kind_of, wants = [], []
    for stage, function in enumerate(functions.stages):
        params, state = lowering.layout.avals_of(stage, owned), lowering.layout.avals_of(stage, kept)
        key = (function, _form(params), _form(state), _form(x))
        if key not in kinds:
            extra = make_extra(batch, rng, index, index, function.wants_arrays)
            if "state" in function.wants:
                extra["state"] = state
            kinds[key] = _trace_one(lowering, functions, stage, (params, shared), x, extra)
            wants.append(function.wants_arrays)
        kind_of.append(list(kinds).index(key))
        x = jax.tree.unflatten(kinds[key].y_tree, kinds[key].y_avals)
    codes = tuple(kinds.values())
    last_code = None
    if functions.last is not None:
        last_code = trace_last(functions.run_last, (last, shared), x, outer)
    program = lowering.plan.program(longest([code.liveness for code in codes]))
    return Traced(codes, tuple(kind_of), tuple(wants), SharedBuffers.of(codes), first_code, last_code, program, outer_wants)


def _form(tree: PyTree) -> Any:
    """A tree's structure, shapes and dtypes, which can be compared."""
    return jax.tree.structure(tree), tuple((tuple(a.shape), a.dtype) for a in jax.tree.leaves(tree))


def _trace_one(lowering: Lowering, functions: Functions, stage: int, params: PyTree, x: PyTree, extra: PyTree) -> StageCode:
    """Trace one stage and check what it returns."""
    call = partial(functions.run_stage, stage)
    if not lowering.layout.unlike:
        _check_chain(lambda p, h, e: call(p, h, e)[0], params, x, extra)
        return _check_state(functions.stages[stage].name, trace_stage(call, params, x, extra), extra)
    before = f"stage {stage - 1}" if stage else "`first`, or the batch,"
    try:
        jax.eval_shape(call, params, x, extra)
    except PipelineError:
        raise
    except (TypeError, ValueError) as error:
        shapes = ", ".join(f"{jax.tree_util.keystr(p) or 'x'} {a.dtype}{list(a.shape)}" for p, a in jax.tree_util.tree_leaves_with_path(x))
        raise PipelineError(f"stage {stage} cannot take what {before} returns ({shapes}): {error}") from error
    return _check_state(functions.stages[stage].name, trace_stage(call, params, x, extra), extra)


def _check_state(name: str, code: StageCode, extra: PyTree) -> StageCode:
    """PipelineError where x depends on the state in a way that the backward would have to know: by then the state is another one."""
    count = len(jax.tree.leaves(extra.get("state", ())))
    before = len(code.consts) + code.num_params + len(code.x_avals) + len(jax.tree.leaves(extra))
    for jaxpr in (code.backward, code.input_grad, code.weight_grad):
        if any(reads(jaxpr)[before - count : before]):
            raise PipelineError(
                f"the gradient of `{name}` depends on its state, which later microbatches have changed by the time of the backward; let x "
                "depend on the state only where training=False, or put jax.lax.stop_gradient around all that it is multiplied with"
            )
    return code


def _check_chain(call: Callable[..., PyTree], params: PyTree, x: PyTree, extra: PyTree) -> None:
    """A stage's output must fit the next stage's input: the same tree, shapes and dtypes."""
    y = jax.eval_shape(call, params, x, extra)
    x_tree: Any = jax.tree.structure(x)
    y_tree: Any = jax.tree.structure(y)
    if x_tree != y_tree:
        raise PipelineError(
            f"`stage` takes x as {x_tree} but returns {y_tree}; a stage's output is the next stage's input, so return the same tree"
        )
    faults = []
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            where = jax.tree_util.keystr(path) or "x"
            faults.append(
                f"`stage` takes {where} as {a.dtype}{list(a.shape)} but returns {b.dtype}{list(b.shape)}; a stage's output is the "
                "next stage's input, so return the same shape and dtype (or cast in `first`)"
            )
    if faults:
        raise PipelineError("\n".join(faults), tuple(faults))


def _chunks(lowering: Lowering, owned: Sequence[PyTree]) -> list[PyTree]:
    """This device's stages in chunk order: its own, and copies of those that another device owns."""
    replicas = lowering.layout.replicas()
    if not replicas:
        return list(owned)
    chunks: dict[int, PyTree] = dict(enumerate(owned))
    device = lax.axis_index(lowering.axis)
    for chunk, held, pairs in _replica_moves(replicas):
        copy = jax.tree.map(lambda leaf, p=pairs: lax.ppermute(leaf, lowering.axis, p), owned[held])
        if chunk not in chunks:
            chunks[chunk] = copy
            continue
        here = jnp.isin(device, jnp.array([t for _, t in pairs]))
        chunks[chunk] = jax.tree.map(lambda new, old, h=here: jnp.where(h, new, old), copy, chunks[chunk])
    return [chunks[v] for v in sorted(chunks)]


def _replica_moves(replicas: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(holder's chunk, owner's chunk, pairs): permutes without cycles that bring every copy to its holder."""
    moves: list[tuple[int, int, bool, list[tuple[int, int]]]] = []
    for owner, owner_chunk, holder, chunk in replicas:
        for move in moves:
            free = all(owner != s and holder != t for s, t in move[3])
            if move[:3] == (chunk, owner_chunk, owner < holder) and free:
                move[3].append((owner, holder))
                break
        else:
            moves.append((chunk, owner_chunk, owner < holder, [(owner, holder)]))
    return [(chunk, owner_chunk, pairs) for chunk, owner_chunk, _, pairs in moves]


def _initial(
    lowering: Lowering, traced: Traced, chunks: Sequence[PyTree], kept: Sequence[PyTree], shared: PyTree, first: PyTree, last: PyTree
) -> State:
    """Empty pools and accumulators, and the stages' state as it is."""
    buffers, slots = traced.buffers, traced.program.slots
    state: State = {"order": jnp.zeros((), bool), "x": empty_pool(buffers.x.avals, slots.x), "out_f": empty(buffers.x.avals)}
    state |= {f"bs.{v}": jax.tree.leaves(kept[v]) if kept else [] for v in range(len(chunks))}
    count = lowering.num_microbatches
    losses = [code.loss.dtype for code in traced.kinds if code.loss is not None]
    losses += [] if traced.last is None else [traced.last.loss_dtype]
    state["loss"] = jnp.zeros(count, jnp.result_type(*losses) if losses else jnp.float32)
    if traced.last is not None:
        state["aux"] = empty_pool(traced.last.aux_avals, count)
    if not lowering.training:
        return state

    def accumulators(tree: PyTree, plans: PyTree) -> Leaves:
        leaves = zip(jax.tree.leaves(tree), leaf_plans(plans), strict=True)
        return [p.constrain(jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype, lowering.accumulate))) for leaf, p in leaves]

    plans = lowering.plans["stages"]
    state |= {f"acc.{v}": accumulators(chunk, plans[min(v, len(plans) - 1)]) for v, chunk in enumerate(chunks)}
    for key, tree in (("first", first), ("last", last), ("shared", shared)):
        state[f"acc.{key}"] = accumulators(tree, lowering.plans[key])
    state["c"], state["out_b"] = empty_pool(buffers.cotangent.avals, slots.cotangent), empty(buffers.cotangent.avals)
    state["ri"] = empty_pool(buffers.residual_input.avals, slots.residual_input)
    state["rw"] = empty_pool(buffers.residual_weight.avals, slots.residual_weight)
    state["st"] = empty_pool(buffers.stash.avals, slots.stash)
    state["fr"] = empty_pool((*traced.first.residual_input, *traced.first.residual_weight), slots.first)
    return state


def accumulator_dtype(dtype: Any, wanted: Any) -> Any:
    """At least `wanted` (float32 by default); a wider parameter keeps its own dtype."""
    return dtype if wanted is None else jnp.promote_types(dtype, wanted)


def _emitter(
    lowering: Lowering,
    traced: Traced,
    chunks: Sequence[PyTree],
    kept: Sequence[PyTree],
    shared: PyTree,
    first: PyTree,
    last: PyTree,
    batch: PyTree,
    rng: Any,
) -> Emitter:
    """Compute what depends on parameters alone, once, and gather the operands of the ticks."""
    common = jax.tree.leaves(shared)
    firsts, lasts = [*jax.tree.leaves(first), *common], [*jax.tree.leaves(last), *common]
    last_code = traced.last
    seed = 1.0 if lowering.functions.loss is Loss.SUM_OVER_COUNT else 1.0 / (lowering.num_microbatches * lowering.data_size)
    seed_dtype = jnp.float32 if last_code is None else jnp.promote_types(last_code.loss_dtype, jnp.float32)
    operands = Operands(
        stages=_stage_operands(lowering, traced, chunks, kept, common),
        first=firsts,
        first_once=run(traced.first.hoist, *traced.first.consts, *firsts),
        last=lasts,
        last_once=[] if last_code is None else run(last_code.hoist, *last_code.consts, *lasts),
        batch=batch,
        rng=rng,
        seed=jnp.asarray(seed, seed_dtype),
    )
    return Emitter(
        program=traced.program,
        axis=lowering.axis,
        kinds=traced.kinds,
        kind_of=traced.kind_of,
        wants=traced.wants,
        buffers=traced.buffers,
        first=traced.first,
        last=last_code,
        operands=operands,
        outer_wants=traced.outer_wants,
        training=lowering.training,
    )


def _stage_operands(
    lowering: Lowering, traced: Traced, chunks: Sequence[PyTree], kept: Sequence[PyTree], shared: Leaves
) -> dict[tuple[int, int], StageOperand]:
    """What each kind of stage reads on each chunk where it stands."""
    found: dict[tuple[int, int], StageOperand] = {}
    layout = lowering.layout
    for stages in layout.placement.stages_of:
        for chunk, stage in enumerate(stages):
            key = (chunk, traced.kind_of[stage])
            if key in found:
                continue
            code = traced.kinds[key[1]]
            bare = StageOperand(
                leaves=jax.tree.leaves(chunks[chunk]),
                places=layout.places(stage, chunks, chunk),
                shared=shared,
                once=[],
                state_places=layout.places(stage, kept, chunk) if kept else None,
            )
            found[key] = replace(bare, once=run(code.hoist, *code.consts, *bare.params()))
    return found


def _run_segment(emitter: Emitter, segment: Segment, table: Any, state: State) -> State:
    """Emit one period of ticks; scan it over the segment's rows of the table where it repeats."""
    rows = table[segment.start : segment.stop].reshape(segment.repeats, segment.period, table.shape[1])

    def trip(state: State, rows: Any) -> tuple[State, None]:
        return emitter.trip(segment, rows.astype(jnp.int32), state), None

    if segment.repeats == 1:
        return trip(state, rows[0])[0]
    return lax.scan(trip, state, rows)[0]


def _narrow(table: Any) -> Any:
    """The table in the smallest signed integers that hold it: it is a constant of the program, and grows with M."""
    for dtype in (np.int8, np.int16):
        if table.size == 0 or (table.min() >= np.iinfo(dtype).min and table.max() <= np.iinfo(dtype).max):
            return table.astype(dtype)
    return table


def _finish(
    lowering: Lowering, traced: Traced, state: State, params: dict[str, PyTree], kept: Sequence[PyTree]
) -> tuple[PyTree, dict[str, PyTree]]:
    """Sum once over devices what only some of them have: losses, gradients of first, last and shared, data shards."""
    if lowering.outputs:
        return {"outputs": _outputs(lowering, traced, state)}, {}
    everyone = (lowering.axis, *lowering.data_axes)
    results, scale = _losses(lowering, traced, state, everyone)
    results["state"] = _new_state(lowering, state, kept)
    if not lowering.training:
        return results, {}
    leaves = {int(k[4:]): v for k, v in state.items() if k.startswith("acc.") and k[4:].isdigit()}
    owned = _return_replicas(lowering, leaves)

    def finish(values: Leaves, plans: PyTree, axes: tuple[str, ...]) -> Leaves:
        summed = reduce_gradients(values, leaf_plans(plans), axes)
        return summed if scale is None else [g * scale.astype(g.dtype) for g in summed]

    stages = []
    for tree, plans, values in zip(params["stages"], lowering.plans["stages"], owned, strict=True):
        summed = [v[None] for v in finish(values, plans, lowering.data_axes)]
        stages.append(jax.tree.unflatten(jax.tree.structure(tree), summed))
    grads: dict[str, PyTree] = {"stages": tuple(stages)}
    for key in ("first", "last", "shared"):
        grads[key] = jax.tree.unflatten(jax.tree.structure(params[key]), finish(state[f"acc.{key}"], lowering.plans[key], everyone))
    return results, grads


def _outputs(lowering: Lowering, traced: Traced, state: State) -> PyTree:
    """What the last stage returned for every row of this data shard, on every device of the pipe axis."""
    assert traced.last is not None

    def whole(leaf: Any) -> Any:
        # Only the last stage's device wrote any of these; the others hold zeros, and False.
        number = leaf.astype(jnp.int8) if leaf.dtype == bool else leaf
        return lax.psum(number, lowering.axis).astype(leaf.dtype).reshape(-1, *leaf.shape[2:])

    return jax.tree.map(whole, jax.tree.unflatten(traced.last.aux_tree, state["aux"])["metrics"])


def _new_state(lowering: Lowering, state: State, kept: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """The stages' state after the step, leaves [1, ...]; what data shards disagree on is averaged."""

    def merge(leaf: Any) -> Any:
        if not lowering.data_axes:
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return lax.pmax(leaf, lowering.data_axes)
        return lax.psum(leaf, lowering.data_axes) / lowering.data_size

    return tuple(
        jax.tree.unflatten(jax.tree.structure(tree), [merge(leaf)[None] for leaf in state[f"bs.{v}"]]) for v, tree in enumerate(kept)
    )


def _losses(lowering: Lowering, traced: Traced, state: State, everyone: tuple[str, ...]) -> tuple[PyTree, Any]:
    """The step's loss, per-microbatch losses and metrics on every device; and what gradients are still to be scaled by."""
    if traced.last is None:
        return {}, None
    # Only the last stage's device wrote any of these; the others hold zeros.
    losses = lax.psum(state["loss"], everyone)
    aux = jax.tree.unflatten(traced.last.aux_tree, [lax.psum(leaf, everyone) for leaf in state["aux"]])
    if lowering.functions.loss is Loss.SUM_OVER_COUNT:
        count = jnp.sum(aux["count"])
        weight = 1.0 / count.astype(losses.dtype)
        loss = jnp.sum(losses) * weight
    else:
        losses = losses / lowering.data_size
        loss, weight = jnp.mean(losses), None
    total = lowering.num_microbatches * lowering.data_size
    metrics = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) / total, aux["metrics"])
    return {"loss": loss, "losses": losses, "metrics": metrics}, weight


def _return_replicas(lowering: Lowering, leaves: dict[int, Leaves]) -> list[Leaves]:
    """Send the gradients of copied stages to their owners and add them there."""
    replicas = lowering.layout.replicas()
    owned = [leaves[v] for v in range(lowering.layout.num_owned)]
    if not replicas:
        return owned
    # A device may hold copies in a chunk that others own: count each gradient where its stage is owned.
    device = lax.axis_index(lowering.axis)
    for v in range(lowering.layout.num_owned):
        mine = jnp.array([s >= 0 for s in lowering.layout.stage_at(v)])[device]
        owned[v] = [jnp.where(mine, g, jnp.zeros_like(g)) for g in owned[v]]
    for chunk, held, pairs in _replica_moves(replicas):
        back = [(t, s) for s, t in pairs]
        owned[held] = add(owned[held], [lax.ppermute(g, lowering.axis, back) for g in leaves[chunk]])
    return owned
