"""What one device holds in a step, by what it is for: predicted from the program, its pools, and
each block compiled alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ..arrays import PyTree
from ..jaxprs.sizes import nbytes
from ..model.leaf_plan import LeafPlan, leaf_plans, trained
from ..program.ir import Program
from ..program.pools import UNDER_WAY
from ..program.templates import Payload
from ..stage.code import run
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.kinds import Kind
from .body import accumulator_dtype
from .entries import StageEntries, compiled_alone, outer_specs
from .operands import SharedBuffers
from .shared_buffers import SharedBuffer
from .work_space import work_space, work_without_gradients


def predicted_memory(
    job: Job,
    mesh: Mesh,
    code: ModelCode,
    entries: Sequence[StageEntries] | None,
    params: Mapping[str, PyTree],
    batch: PyTree,
) -> dict[str, int]:
    """Bytes of one device, by what they are for, and their "total"; `params` are placed, with
    shardings.

    parameters, batch   what the step is given
    gradients           what it returns
    pools               the slots that the program has, each as large as a device's part of what it
    holds host                what waits in the host's memory (`offload`); not in the total gathered
    whole parameters and accumulators where only parts are given and returned (fsdp, outer,
    DualPipe's copies) hoisted             what is computed from parameters once a step sent
    what is to be sent next, what of it is under way while the next is made, and what arrives beside
    a block raveled             copies of what lies raveled in a pool that unlike stages share work
    of the block that needs most, its own arrays summed              results of sums of gradients
    over CPU devices, but for what lies in their room before; GPUs sum in place
    """
    buffers = SharedBuffers.of(code.kinds, entries)
    slots = code.program.slots
    splits = bool(code.program.schedule.encoded.of_kinds((Kind.I,)).any())
    names = ("x", "cotangent", "residual_input", "residual_weight", *(("stash",) if splits else ()))
    pools = {name: getattr(slots, name) * getattr(buffers, name).nbytes for name in names}
    for place, avals in code.outer_pools.items():
        pools[place.value] = getattr(slots, place.value) * sum(map(nbytes, avals))
    residuals = buffers.residual_input.nbytes + buffers.residual_weight.nbytes if slots.host else 0
    work = work_space(job, mesh, code, entries)
    most = max(work.values(), default=0)
    found = {
        "parameters": sum(map(local_bytes, jax.tree.leaves(dict(params)))),
        "batch": sum(nbytes(leaf) for leaf in jax.tree.leaves(batch)) // job.data_size,
        "gradients": sum(
            _gradient_bytes(job, leaf)
            for leaf in trained(jax.tree.leaves(dict(params)), leaf_plans(job.plans))
        ),
        "pools": sum(pools.values()) + UNDER_WAY * residuals,
        "gathered": _gathered(job, mesh, code, params),
        "hoisted": _hoisted(job, mesh, code, entries),
        "sent": _sent_bytes(code.program, buffers)
        + _with_arrivals(code.program, buffers, work)
        - most,
        "raveled": _raveled(buffers, code, splits=splits),
        "work": most,
    }
    if {device.platform for device in mesh.devices.flat} == {"cpu"}:
        ticks = sum(found[name] for name in ("pools", "hoisted", "sent", "raveled"))
        found["summed"] = _summed(job, mesh, code, entries, params, ticks=ticks, work=most)
    return {**found, "host": (slots.host + 1) * residuals, "total": sum(found.values())}


def _sent_bytes(program: Program, buffers: SharedBuffers) -> int:
    """What is to be sent, of each payload, and once more where permutes of it are awaited in a
    later tick, when the next is there.
    """
    late = {
        p.payload
        for segment in program.segments
        for template in segment.templates
        for p in template.permutes
        if p.delay
    }
    return sum((1 + (payload in late)) * buffers.sent(payload).nbytes for payload in Payload)


def _with_arrivals(program: Program, buffers: SharedBuffers, work: Mapping[str, int]) -> int:
    """The most that a block needs with what arrives while it runs."""
    most = max(work.values(), default=0)
    for segment in program.segments:
        for j, *_ in segment.emitted:
            for place, use in enumerate(segment.templates[j].blocks):
                beside = [
                    t.permute.payload
                    for t in segment.transits
                    if t.issued <= (j, place) < t.written
                ]
                arriving = sum(buffers.sent(payload).nbytes for payload in beside)
                most = max(most, work.get(use.block.kind.name, 0) + arriving)
    return most


def _raveled(buffers: SharedBuffers, code: ModelCode, *, splits: bool) -> int:
    """Copies of what has another shape in its pool, so that no block works on it in place; those of
    one block are there at a time.
    """

    def copies(buffer: SharedBuffer, avals: Sequence[Any]) -> int:
        return sum(
            nbytes(aval)
            for aval, place in zip(avals, buffer.of_kind(avals), strict=True)
            if place.flat
        )

    kept = [
        copies(buffers.residual_input, k.residual_input)
        + copies(buffers.residual_weight, k.residual_weight)
        for k in code.kinds
    ]
    left = [copies(buffers.stash, kind.stash) if splits else 0 for kind in code.kinds]
    return max(one + other for one, other in zip(kept, left, strict=True))


def local_bytes(leaf: Any) -> int:
    """Bytes of one device's part of an array, or of a shape with a sharding."""
    return int(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)


def _gradient_bytes(job: Job, leaf: Any) -> int:
    return int(
        local_bytes(leaf)
        // leaf.dtype.itemsize
        * accumulator_dtype(leaf.dtype, job.accumulate).itemsize
    )


def _summed(
    job: Job,
    mesh: Mesh,
    code: ModelCode,
    entries: Sequence[StageEntries] | None,
    params: Mapping[str, PyTree],
    *,
    ticks: int,
    work: int,
) -> int:
    """Room that the results of sums need beside what the ticks do: they are no accumulators there,
    but outputs of their own.

    What the ticks hold may lie there before.  XLA puts the largest of it there that fits: of
    `last`, the gradient of its own parameters.
    """
    sizes = {key: _summed_bytes(job, mesh, key, params[key]) for key in params}
    found = [0, sum(sizes.values()) - ticks - work]
    if any(size for key, size in sizes.items() if key != "stages"):
        for name, rest in work_without_gradients(job, mesh, code, entries).items():
            found.append(
                min(rest, work) + sizes[name.removesuffix(" gradient")] + sizes["shared"] - work
            )
    return max(found)


def _summed_bytes(job: Job, mesh: Mesh, key: str, tree: PyTree) -> int:
    """Of gradients that are summed over devices as they are; those of gathered parameters are parts
    of their accumulators.
    """
    axes = job.data_axes if key == "stages" else (job.axis, *job.data_axes)
    leaves = zip(jax.tree.leaves(tree), leaf_plans(job.plans[key]), strict=True)
    whole = [
        (leaf, plan.whole_axes(axes)) for leaf, plan in leaves if not (plan.frozen or plan.gathers)
    ]
    return sum(
        _gradient_bytes(job, leaf)
        for leaf, names in whole
        if math.prod(mesh.shape[name] for name in names) > 1
    )


def _gathered(job: Job, mesh: Mesh, code: ModelCode, params: Mapping[str, PyTree]) -> int:
    total = 0
    for key in ("first", "last", "shared"):
        pairs = zip(jax.tree.leaves(params.get(key, ())), leaf_plans(job.plans[key]), strict=True)
        total += sum(_whole_bytes(job, mesh, leaf, plan) for leaf, plan in pairs if plan.gathers)
    chunks = params["stages"]
    for chunk in range(code.program.schedule.num_chunks):
        held = min(chunk, len(chunks) - 1)
        for leaf, plan in zip(
            jax.tree.leaves(chunks[held]), leaf_plans(job.plans["stages"][held]), strict=True
        ):
            # A chunk that another device owns is a copy.
            total += (
                _whole_bytes(job, mesh, leaf, plan) if plan.gathers or chunk >= len(chunks) else 0
            )
    return total


def _whole_bytes(job: Job, mesh: Mesh, leaf: Any, plan: LeafPlan) -> int:
    """A parameter with what its manual axes split brought together, and its accumulator."""
    whole = local_bytes(leaf) * math.prod(mesh.shape[name] for name, _ in plan.gathers)
    if plan.frozen:
        return int(whole)
    return int(
        whole
        + whole // leaf.dtype.itemsize * accumulator_dtype(leaf.dtype, job.accumulate).itemsize
    )


def hoisted_bytes(
    job: Job, mesh: Mesh, consts: int, jaxpr: core.Jaxpr, specs: Iterable[PartitionSpec]
) -> int:
    """Of what is computed from parameters that are split so, once a step."""
    if not jaxpr.outvars:
        return 0
    group = list(
        zip(
            [v.aval for v in jaxpr.invars],
            [*(PartitionSpec() for _ in range(consts)), *specs],
            strict=True,
        )
    )
    memory = compiled_alone(job, mesh, lambda values: run(jaxpr, *values), group).memory_analysis()
    return int(getattr(memory, "output_size_in_bytes", 0))


def _hoisted(job: Job, mesh: Mesh, code: ModelCode, entries: Sequence[StageEntries] | None) -> int:
    """Of every chunk of a device, and of first and last."""
    specs = (
        [[PartitionSpec()] * kind.num_params for kind in code.kinds]
        if entries is None
        else [each.parameters for each in entries]
    )
    kinds = [
        hoisted_bytes(job, mesh, len(kind.consts), kind.hoist, each)
        for kind, each in zip(code.kinds, specs, strict=True)
    ]
    held = {
        (v, code.kind_of[s])
        for stages in code.program.schedule.placement.stages_of
        for v, s in enumerate(stages)
    }
    outer = hoisted_bytes(
        job, mesh, len(code.first.consts), code.first.hoist, outer_specs(job, "first")
    )
    outer += (
        0
        if code.last is None
        else hoisted_bytes(
            job, mesh, len(code.last.consts), code.last.hoist, outer_specs(job, "last")
        )
    )
    return sum(kinds[kind] for _, kind in held) + outer
