"""The SPMD executor: program + user functions -> one `shard_map` program, whose body prepares, runs
the segments and reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..arrays import Leaves, Params, PyTree, wider
from ..errors import PipelineError
from ..jaxprs.slots import Piece
from ..model.functions import Loss
from ..model.leaf_plan import LeafPlan, gather, leaf_plans, trained
from ..model.packed import Places, on_one_device
from ..model.spread import unpadded
from ..stage.code import run
from ..stage.job import Job
from ..stage.model_code import ModelCode, trace_model
from ..table.effects import OF_SLICES, Place
from .block import State, empty, empty_pool, false, of_chunk
from .collective import with_cuts
from .entries import StageEntries, mapped, on_cpus, split_entries, whole_entries
from .host import Packing
from .results import finish, with_replicas
from .shared_buffers import Buffers, shared_buffers
from .shared_code import Operands, SharedCode, StageOperand
from .tick import TickEmitter

CANNOT_BE_TIMED = (
    "this step cannot be profiled on CPU devices: its functions permute over a mesh axis, so all "
    "devices run every block at once (ring attention permutes; the partitioner does for a roll, "
    "slice or concatenation along a dimension that is split); profile it without that axis, or "
    "on GPUs"
)


@dataclass(frozen=True)
class Prepared:
    """The inputs of a device's step: whole parameters of its stages, its rows by microbatch, and
    the model's code.
    """

    job: Job  # with the axis and the sizes of spread functions
    owned: list[PyTree]
    kept: tuple[PyTree, ...]  # the stages' own state
    first: PyTree
    last: PyTree
    shared: PyTree
    batch: PyTree  # leaves [M, ...]
    rng: Any
    code: ModelCode


def prepare(
    job: Job, params: Params, batch: PyTree, rng: Any, kept: tuple[PyTree, ...]
) -> Prepared:
    """Gather parameters and trace the model.

    The arguments are as `shard_map` passes them: leaves of `params["stages"]` and of the stages'
    own state `kept` are [1, ...], and leaves of the batch are the [rows, ...] of this data shard.
    """
    with jax.named_scope("prepare"):
        batch = job.functions.split(batch, job.num_microbatches)
        rng = shard_key(rng, job.data_axes, job.data_size)
        mine = [_first_row(tree) for tree in params["stages"]]
        owned = [
            on_one_device(gather(tree, plan))
            for tree, plan in zip(mine, job.plans["stages"], strict=True)
        ]
        kept = tuple(_first_row(tree) for tree in kept)
        first, last, shared = (
            unpadded(gather(params[k], job.plans[k])) for k in ("first", "last", "shared")
        )
    job = replace(job, functions=job.functions.over(job.axis, job.cuts, params))
    code = with_cuts(trace_model(job, owned, kept, shared, first, last, batch, rng), job.axis)
    job = replace(job, functions=job.functions.for_batch(batch))
    return Prepared(job, owned, kept, first, last, shared, batch, rng, code)


def look(job: Job, params: Params, batch: PyTree, rng: Any, state: PyTree) -> Prepared:
    """Trace `prepare` alone: what one device starts from, as tracers."""
    found: list[Prepared] = []

    def trace(*given: PyTree) -> tuple[()]:
        params, batch, rng, state = given
        found.append(prepare(job, params, batch, rng, state))
        return ()

    run = mapped(trace, job.mesh, job.axes, _in_specs(job), PartitionSpec())
    jax.eval_shape(run, params, batch, rng, state)
    return found[0]


def _in_specs(job: Job) -> tuple[Any, ...]:
    """The splits of parameters, the batch, the key and the stages' own state."""
    rows, kept = PartitionSpec(job.data_axes or None), PartitionSpec(job.axis)
    own = jax.tree.map(lambda plan: plan.manual(job.axis), job.plans)
    return own, rows, PartitionSpec(), kept


def body(
    job: Job,
    params: Params,
    batch: PyTree,
    rng: Any,
    kept: tuple[PyTree, ...],
    *,
    entries: Sequence[StageEntries] | None,
    everywhere: bool,
) -> tuple[dict[str, Any], dict[str, PyTree]]:
    """Run the step on each device; return ({"loss", "losses", "metrics", "state"}, gradients laid
    out like `params`).

    The arguments are those of `prepare`.  `entries` is None where no axis is left to the
    partitioner.  `everywhere` says that the partitioner permutes in blocks (see `SpmdExecutor`).
    """
    start = prepare(job, params, batch, rng, kept)
    job, code, blocking = start.job, start.code, job.target.on_cpus
    everywhere = everywhere or (blocking and lax.axis_size(job.axis) > 1 and code.permutes)
    if everywhere and job.clock is not None:
        raise PipelineError(CANNOT_BE_TIMED)
    if entries is None:
        entries = tuple(whole_entries(kind, job.target) for kind in code.kinds)
    buffers = shared_buffers(code.kinds, entries)
    if job.observe is not None:
        job.observe(job, code, entries)
    with jax.named_scope("prepare"):
        chunks = with_replicas(job, start.owned)
        operands = _operands(start, chunks)
        shared_code = SharedCode(code, buffers, operands, job.axis, everywhere, blocking)
        emitter = TickEmitter(shared_code, job.data_axes, job.clock)
        state = _initial(start, buffers, chunks)
        # One table takes one slice per trip.  Dozens of arrays would take dozens of slices.
        table = jnp.asarray(_narrow(np.stack(code.program.ticks.columns, axis=-1)))
        rows = lax.dynamic_index_in_dim(table, lax.axis_index(job.axis), 1, keepdims=False)
    with jax.named_scope("ticks"):
        for segment in code.program.segments:
            state = emitter.run_segment(segment, rows, state)
    with jax.named_scope("finish"):
        return finish(job, code, state, params, start.kept)


def _first_row(tree: PyTree) -> PyTree:
    """This device's part of leaves that are spread over the pipe axis."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def shard_key(rng: Any, data_axes: tuple[str, ...], data_size: int) -> Any:
    """The step's key on this data shard.  Shards have different rows, so they draw different
    numbers.
    """
    if rng is None or data_size == 1:
        return rng
    return jax.random.fold_in(rng, lax.axis_index(data_axes))


def _initial(start: Prepared, buffers: Buffers, chunks: Sequence[PyTree]) -> State:
    """Empty pools and accumulators, and the stages' present state."""
    job, code, kept = start.job, start.code, start.kept
    slots, count = code.program.slots, job.num_microbatches
    losses = [kind.loss.dtype for kind in code.kinds if kind.loss is not None]
    losses += [] if code.last is None else [code.last.loss_dtype]
    state: State = {
        "token": false(),
        "sent_x": empty(buffers[Place.X].avals),
        "losses": jnp.zeros(count, wider(*losses) if losses else jnp.float32),
        "aux": None if code.last is None else empty_pool(code.last.aux_avals, count),
    }
    for v in range(len(chunks)):
        state[of_chunk(Place.STAGE_STATE, v)] = jax.tree.leaves(kept[v]) if kept else []
    for place, buffer in buffers.items():
        size = getattr(slots, place.value)
        if size and (job.training or place in (Place.X, *OF_SLICES)):
            state[place.value] = buffer.empty(size)
    for place, avals in code.outer_pools.items():
        if job.training or place is Place.LAST:
            state[place.value] = empty_pool(avals, getattr(slots, place.value))
    if not job.training:
        return state

    def accumulators(tree: PyTree, plans: PyTree) -> Leaves:
        leaves = zip(jax.tree.leaves(tree), leaf_plans(plans), strict=True)
        return [
            p.constrain(jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype, job.accumulate)))
            for leaf, p in leaves
            if not p.frozen
        ]

    plans = job.plans["stages"]
    for v, chunk in enumerate(chunks):
        own = plans[min(v, len(plans) - 1)]
        state[of_chunk(Place.STAGE_GRADIENTS, v)] = accumulators(chunk, own)
    return state | {
        "first_gradients": accumulators(start.first, job.plans["first"]),
        "last_gradients": accumulators(start.last, job.plans["last"]),
        "shared_gradients": accumulators(start.shared, job.plans["shared"]),
        "sent_dx": empty(buffers[Place.COTANGENT].avals),
        "host": Packing.of(buffers).empty(slots.host),
    }


def accumulator_dtype(dtype: Any, wanted: Any) -> Any:
    """At least `wanted` (float32 by default); a wider parameter keeps its own dtype."""
    return dtype if wanted is None else wider(dtype, wanted)


def _operands(start: Prepared, chunks: Sequence[PyTree]) -> Operands:
    """Compute values of parameters alone once, and gather the operands of the ticks."""
    job, code = start.job, start.code
    shared, first, last = map(jax.tree.leaves, (start.shared, start.first, start.last))
    firsts, lasts = [*first, *shared], [*last, *shared]
    seed = (
        1.0
        if job.functions.loss is Loss.SUM_OVER_COUNT
        else 1.0 / (job.num_microbatches * job.data_size)
    )
    return Operands(
        stages=_stage_operands(start, chunks),
        first=firsts,
        first_once=run(code.first.hoist, *code.first.consts, *firsts),
        last=lasts,
        last_once=[] if code.last is None else run(code.last.hoist, *code.last.consts, *lasts),
        batch=start.batch,
        rng=start.rng,
        seed=jnp.asarray(seed, jnp.result_type(float)),
    )


def _stage_operands(
    start: Prepared, chunks: Sequence[PyTree]
) -> dict[tuple[int, int], StageOperand]:
    """The operands of each kind of stage, on each chunk that has one."""
    job, code, kept = start.job, start.code, start.kept
    shared, on_tpus = jax.tree.leaves(start.shared), job.target.on_tpus
    found: dict[tuple[int, int], StageOperand] = {}
    layout = job.layout
    for stages in layout.placement.stages_of:
        for chunk, stage in enumerate(stages):
            key = (chunk, code.kind_of[stage])
            if key in found:
                continue
            stage_code = code.kinds[key[1]]
            plans = _chunk_plans(job, chunk)
            bare = StageOperand(
                leaves=jax.tree.leaves(chunks[chunk]),
                places=layout.places(stage, chunks),
                shared=shared,
                once=[],
                state_places=layout.places(stage, kept) if kept else (),
                gradient_places=_gradient_places(job, chunk, layout.places(stage, chunks)),
                splits=tuple(
                    PartitionSpec(*plan.auto) if on_tpus else None for plan in trained(plans, plans)
                ),
            )
            whole = [leaf.load() if isinstance(leaf, Piece) else leaf for leaf in bare.params()]
            found[key] = replace(bare, once=run(stage_code.hoist, *stage_code.consts, *whole))
    return found


def _gradient_places(job: Job, chunk: int, places: Places) -> Places:
    """The places of a stage's trained leaves among the accumulators of its chunk."""
    held = _chunk_plans(job, chunk)
    before = np.cumsum([0, *(not plan.frozen for plan in held)]).tolist()
    return tuple(
        place._replace(at=before[place.at]) for place in places if not held[place.at].frozen
    )


def _chunk_plans(job: Job, chunk: int) -> list[LeafPlan]:
    """The plans of a chunk's parameters; a chunk that another device owns is like the last one."""
    plans = job.plans["stages"]
    return leaf_plans(plans[min(chunk, len(plans) - 1)])


def _narrow(table: Any) -> Any:
    """The table in the smallest signed integers that hold it.  It is a constant of the program, and
    grows with M.
    """
    for dtype in (np.int8, np.int16):
        if table.size == 0 or (
            table.min() >= np.iinfo(dtype).min and table.max() <= np.iinfo(dtype).max
        ):
            return table.astype(dtype)
    return table


@dataclass(frozen=True)
class TracedStep:
    """A training step that is traced and not compiled."""

    job: Job
    code: ModelCode
    entries: tuple[StageEntries, ...]  # the entries of pools, by kind of stage
    # the `jax.stages.Traced` step of (params, batch), and `rng` and `state` where they are given
    function: Any


class SpmdExecutor:
    """Runs a job's program on the devices of its mesh, all in one program (an `Executor`)."""

    compiles = True

    def run(
        self, job: Job, params: Params, batch: PyTree, rng: Any, state: tuple[PyTree, ...]
    ) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Do the job; it may be traced."""
        specs = _in_specs(job)
        entries, permutes = self._split(job, params, batch, rng, state)
        run = mapped(
            lambda p, b, r, s: body(job, p, b, r, s, entries=entries, everywhere=permutes),
            job.mesh,
            job.axes,
            in_specs=specs,
            out_specs=(job.result_specs, specs[0] if job.training else PartitionSpec()),
        )
        found: tuple[dict[str, Any], dict[str, PyTree]] = run(params, batch, rng, state)
        return found

    def _split(
        self, job: Job, params: Params, batch: PyTree, rng: Any, state: tuple[PyTree, ...]
    ) -> tuple[tuple[StageEntries, ...] | None, bool]:
        """The entries of pools where the partitioner splits values, and whether it may permute in
        blocks on CPU devices.

        Every permute of XLA:CPU waits for all devices of the program, also for those outside its
        pairs.  Under predicates, some devices would wait in the permute of one block and some in
        that of another, until XLA ends the process.  With axes that are left to the partitioner,
        all devices therefore run every block at once, and keep the result where its predicate holds
        (see `block`).

        The model is traced once more for the entries.  A block compiled alone does not show every
        permute, because the partitioner decides from the whole program.  Permutes are therefore
        assumed, except where blocks are timed.  Timing needs predicates, and
        `jaxpipe.inspect.profile` refuses blocks that permute.
        """
        waits = on_cpus(job.mesh) and job.mesh.shape[job.axis] > 1
        if not job.partition.auto_axes:
            return None, False
        if not job.training:
            return None, waits
        start = look(job, params, batch, rng, state)
        entries = split_entries(job, start.code, start.owned)
        return entries, waits and job.clock is None
