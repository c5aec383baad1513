"""The memory of one device in a step by purpose, predicted from the program, its pools, and each
block compiled alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from ..arrays import Params, PyTree
from ..jaxprs.equations import nbytes, tiled_bytes
from ..lowering.target import RunsOn
from ..model.leaf_plan import PART, LeafPlan, leaf_plans
from ..model.mesh import outside_contexts
from ..model.param_layout import with_outer
from ..pipeline import Pipeline
from ..planner.memory import Sizes, memory_of
from ..program.ir import Program
from ..program.records import POOL_OF
from ..program.segments import Payload
from ..spmd.executor import TracedStep
from ..spmd.pools import Buffers, shared_buffers
from ..spmd.step import accumulator_dtype
from ..spmd.xla import compiled_alone, outer_specs
from ..stage.code import RESIDUALS, run
from ..stage.model_code import Job, ModelCode
from ..table.effects import Place
from ..table.kinds import Kind
from .blocks import Step


@outside_contexts
def memory(
    pipe: Pipeline, params: Params, batch: PyTree, *, rng: Any = None, state: Any = ()
) -> dict[str, int]:
    """Bytes that a step takes on one device by purpose, and their "total".

    Takes what `pipe.lower` takes.  The step is traced, and each block of it compiled alone; the
    step itself is not compiled.

        parameters, batch   what the step is given
        gradients           what it returns
        pools               the slots that the program has, each as large as a device's part of what
                            it holds
        host                what waits in the host's memory (`offload`); not in the total
        gathered            whole parameters and accumulators where only parts are given and
                            returned (fsdp, outer, DualPipe's copies)
        hoisted             what is computed from parameters once a step
        sent                what is to be sent next, what of it is under way while the next is made,
                            and what arrives beside a block
        raveled             copies of what a pool that unlike stages share holds raveled
        work                of the block that needs most, its own arrays
        summed              results of sums of gradients over CPU devices, but for what lies in
                            their room before, and of small ones on TPUs; all other sums are
                            in place

    On TPUs all have the padding of tiles.

    Raises:
        PipelineError: as `value_and_grad` does.
    """
    traced = pipe.trace(params, batch, rng=rng, state=state)
    return facts(traced, step_sizes(pipe, traced, params, batch))


def facts(traced: TracedStep, sizes: Sizes) -> dict[str, int]:
    """The result of `memory`."""
    found = memory_of(traced.code.program.slots, sizes)
    parts = {name: int(size) for name, size in found.facts().items() if name != "optimizer"}
    return {**parts, "total": int(found.total)}


def placed_shapes(pipe: Pipeline, params: Params) -> dict[str, PyTree]:
    """Parameters as shapes, with the shardings that a step has."""
    found: dict[str, PyTree] = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params,
        pipe.partition.shardings(pipe.partition.plans(params)),
    )
    return found


def step_sizes(
    pipe: Pipeline, traced: TracedStep, arrays: dict[str, PyTree], batch: PyTree
) -> Sizes:
    """Sizes of a traced model on one device."""
    step, params = Step.of(traced), with_outer(placed_shapes(pipe, arrays))
    job, code, program = step.job, step.code, step.code.program
    buffers = shared_buffers(code.kinds, step.entries)
    splits = bool(program.schedule.encoded.of_kinds((Kind.I,)).any())
    entry = dict.fromkeys(vars(program.slots), 0)
    entry |= {place.value: buffer.nbytes for place, buffer in buffers.items()}
    for place, avals in code.outer_pools.items():
        entry[place.value] = sum(map(nbytes, avals))
    entry["stash"] *= splits
    entry["host"] = (entry["residual_input"] + entry["residual_weight"]) * bool(program.slots.host)
    work = step.work_space()
    most = max(work.values(), default=0)
    found = Sizes(
        parameters=sum(map(local_bytes, jax.tree.leaves(params))),
        gradients=sum(
            gradient_bytes(job, leaf)
            for leaf, plan in _planned(params, job.plans)
            if not plan.frozen
        ),
        batch=sum(map(nbytes, jax.tree.leaves(batch))) // job.data_size,
        gathered=_gathered(step, params),
        hoisted=_hoisted(step),
        entry=entry,
        sent=_sent_bytes(program, buffers) + _with_arrivals(program, buffers, work) - most,
        raveled=_raveled(buffers, code, splits=splits),
        work=most,
    )
    if job.target.on_cpus:
        return replace(found, **_summed(step, params, most))
    if RunsOn.of(job.mesh) is RunsOn.TPUS:
        # The accumulators of the ticks and the results both have room.
        ends = sum(_summed_bytes(step, key, params[key], most=PART) for key in params)
        return replace(found, ends=(ends,))
    return found


def _planned(tree: PyTree, plans: PyTree) -> Iterator[tuple[Any, LeafPlan]]:
    """Each leaf of parameters with its plan."""
    return zip(jax.tree.leaves(tree), leaf_plans(plans), strict=True)


def _sent_bytes(program: Program, buffers: Buffers) -> int:
    """Bytes of the values to send, by payload; twice where a permute is awaited in a later tick,
    after the next value is computed.
    """
    late = {
        p.payload
        for segment in program.segments
        for template in segment.templates
        for p in template.permutes
        if p.delay
    }
    return sum((1 + (payload in late)) * buffers[POOL_OF[payload]].nbytes for payload in Payload)


def _with_arrivals(program: Program, buffers: Buffers, work: Mapping[str, int]) -> int:
    """The largest sum of a block's work space and the arrivals during it."""
    most = max(work.values(), default=0)
    for segment in program.segments:
        for j, *_ in segment.emitted:
            for place, use in enumerate(segment.templates[j].blocks):
                arriving = sum(
                    buffers[POOL_OF[t.permute.payload]].nbytes
                    for t in segment.transits
                    if t.issued <= (j, place) < t.written
                )
                most = max(most, work.get(use.block.kind.name, 0) + arriving)
    return most


def _raveled(buffers: Buffers, code: ModelCode, *, splits: bool) -> int:
    """Copies of values that have another shape in their pool, on which no block works in place.
    Copies of one block exist at a time.
    """

    kept = (*RESIDUALS, *((Place.STASH,) if splits else ()))

    def copies(avals: Mapping[Place, Sequence[Any]]) -> int:
        return sum(
            nbytes(aval)
            for pool in kept
            for aval, place in zip(avals[pool], buffers[pool].of_kind(avals[pool]), strict=True)
            if place.flat
        )

    return max(copies(kind.avals) for kind in code.kinds)


def local_bytes(leaf: Any) -> int:
    """Bytes of one device's part of an array, or of a shape with a sharding, with the padding of
    tiles.
    """
    own, mesh = leaf.sharding.shard_shape(leaf.shape), getattr(leaf.sharding, "mesh", None)
    return tiled_bytes(own, leaf.dtype.itemsize, () if mesh is None else RunsOn.of(mesh).tile)


def gradient_bytes(job: Job, leaf: Any) -> int:
    """Bytes of one device's part of its accumulator."""
    wide = accumulator_dtype(leaf.dtype, job.accumulate).itemsize
    return int(local_bytes(leaf) // leaf.dtype.itemsize * wide)


def _summed(step: Step, params: Mapping[str, PyTree], most: int) -> dict[str, Any]:
    """Room for the results of sums of gradients on CPU devices, where they are outputs of their
    own.

    The room of the ticks' values is free by then.  XLA reuses it for the largest result that fits:
    the gradient of the own parameters of `last`.
    """
    sizes = {key: _summed_bytes(step, key, params[key]) for key in params}
    ends: tuple[int, ...] = ()
    if any(size for key, size in sizes.items() if key != "stages"):
        ends = tuple(
            min(rest, most) + sizes[name.removesuffix(" gradient")] + sizes["shared"] - most
            for name, rest in step.work_without_gradients().items()
        )
    return {"summed": sum(sizes.values()), "ends": ends}


def _summed_bytes(step: Step, key: str, tree: PyTree, most: float = math.inf) -> int:
    """Bytes of gradients, of at most `most` each, that are summed whole over devices; gradients of
    gathered parameters are parts of their accumulators.
    """
    job = step.job
    axes = job.data_axes if key == "stages" else (job.axis, *job.data_axes)
    return sum(
        gradient_bytes(job, leaf)
        for leaf, plan in _planned(tree, job.plans[key])
        if not (plan.frozen or plan.gathers)
        and gradient_bytes(job, leaf) <= most
        and math.prod(job.mesh.shape[name] for name in plan.whole_axes(axes)) > 1
    )


def _gathered(step: Step, params: Mapping[str, PyTree]) -> int:
    job, stages = step.job, params["stages"]
    trees = [(params.get(key, ()), job.plans[key], False) for key in ("first", "last", "shared")]
    for chunk in range(step.code.program.schedule.num_chunks):
        held = min(chunk, len(stages) - 1)
        # A chunk that another device owns is a copy.
        trees.append((stages[held], job.plans["stages"][held], chunk > held))
    return sum(
        _whole_bytes(step, leaf, plan)
        for tree, plans, is_copy in trees
        for leaf, plan in _planned(tree, plans)
        if plan.gathers or is_copy
    )


def _whole_bytes(step: Step, leaf: Any, plan: LeafPlan) -> int:
    """Bytes of a parameter gathered over its manual axes, and of its accumulator."""
    share = math.prod(step.job.mesh.shape[name] for name, _ in plan.gathers)
    return share * (local_bytes(leaf) + (0 if plan.frozen else gradient_bytes(step.job, leaf)))


def hoisted_bytes(
    step: Step, consts: int, jaxpr: core.Jaxpr, specs: Sequence[PartitionSpec]
) -> int:
    """Bytes of values that are computed from parameters with these splits once a step."""
    if not jaxpr.outvars:
        return 0
    splits = [*(PartitionSpec() for _ in range(consts)), *specs]
    group = list(zip([v.aval for v in jaxpr.invars], splits, strict=True))
    compiled = compiled_alone(step.job, lambda values: run(jaxpr, *values), group)
    return int(getattr(compiled.memory_analysis(), "output_size_in_bytes", 0))


def _hoisted(step: Step) -> int:
    """Bytes of hoisted values of every chunk of a device, and of first and last."""
    job, code = step.job, step.code
    kinds = [
        hoisted_bytes(step, len(kind.consts), kind.hoist, entries.parameters)
        for kind, entries in zip(code.kinds, step.entries, strict=True)
    ]
    stages_of = code.program.schedule.placement.stages_of
    held = {(v, code.kind_of[s]) for stages in stages_of for v, s in enumerate(stages)}
    ends = {"first": code.first} | ({} if code.last is None else {"last": code.last})
    return sum(kinds[kind] for _, kind in held) + sum(
        hoisted_bytes(step, len(end.consts), end.hoist, outer_specs(job, key))
        for key, end in ends.items()
    )
