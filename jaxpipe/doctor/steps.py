"""Check whole steps: memory, speed on one device, and time against a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .. import inspect
from ..arrays import PyTree
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..errors import PipelineError
from ..lowering.target import Target
from ..measuring import measure_stages
from ..measuring.blocks import timed
from ..model.functions import split_batch
from ..model.model import Model
from ..model.settings import Memory
from ..pipeline import Pipeline
from ..schedules.registry import build
from .run import Findings, Line, Scope, at, judged, not_tried, timed_line
from .times import call_of, filled

# bfloat16 matmuls a second without sparsity, from NVIDIA's data sheets; TPUs are in `Chip`.
GPU_FLOPS: Mapping[str, float] = {
    "V100": 1.25e14,
    "A100": 3.12e14,
    "H100 PCIe": 7.56e14,
    "H100": 9.89e14,
    "H200": 9.89e14,
    "GH200": 9.89e14,
    "B200": 2.25e15,
    "GB200": 2.5e15,
}
_REPORT = "take options that change collectives out of XLA_FLAGS, and try another jaxlib"
_MEMORY, _SPEED, _PLAN = 1.25, 1.15, 1.3  # limits, as multiples of the expected figure


def _block(stage: Any, x: Any) -> Any:
    """MLPs with a residual."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    return lax.scan(layer, x, stage)[0]


def _loss(_: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(x - microbatch["y"]).astype(jnp.float32))


MODEL = Model(_block, last=_loss)
MICROBATCHES = 8


class Step(NamedTuple):
    """A pipeline, the shapes of its canonical parameters, and a batch."""

    pipe: Pipeline
    weights: PyTree
    batch: dict[str, Any]


def step_of(mesh: Mesh, *, layers: int = 1, chunks: int = 1, costs: Costs | None = None) -> Step:
    """A step of 1F1B.  Layers have width 2048 and 34 million parameters each; small ones are on
    CPU devices.
    """
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    width, own, rows = (128, 1, 64) if on_cpus else (2048, 2, 4096)
    dtype = jnp.float32 if on_cpus else jnp.bfloat16
    lead = (mesh.size * chunks, own * layers // chunks)
    shapes = {"up": (*lead, width, 4 * width), "down": (*lead, 4 * width, width)}
    weights = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    x = np.full((MICROBATCHES * rows, width), 0.1, dtype)
    schedule = build(
        "1f1b" if chunks == 1 else "interleaved_1f1b",
        devices=mesh.size,
        microbatches=MICROBATCHES,
        chunks=chunks,
    )
    memory = Memory(accumulate=jnp.float32)
    pipe = Pipeline(MODEL, schedule, mesh, memory=memory, costs=costs)
    return Step(pipe, {"stages": weights, "last": {}}, {"x": x, "y": x})


def memory(scope: Scope, mesh: Mesh) -> Findings:
    """A step's bytes: predicted, by XLA, and as the device reports them."""
    pipe, weights, batch = step_of(mesh)
    shapes = pipe.place(weights)
    at("the prediction of memory")
    predicted = inspect.memory(pipe, shapes, batch)["total"]
    at("compiling the step")
    compiled = pipe.lower(shapes, batch).compile()
    sizes = compiled.memory_analysis()
    by_xla = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    by_xla += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    if Target.of(mesh, ()).on_tpus:
        by_xla = sizes.peak_memory_in_bytes
    at("running the step")
    jax.block_until_ready(compiled(filled(shapes), batch))
    stats = jax.local_devices()[0].memory_stats() or {}
    lines = (
        judge_memory(predicted, int(by_xla), stats.get("peak_bytes_in_use")),
        collectives(compiled, mesh),
    )
    return Findings(lines)


def collectives(compiled: Any, mesh: Mesh) -> Line:
    """A line about collectives that can hang, read in the compiled step."""
    item, (axis,) = "collectives", mesh.axis_names
    if mesh.devices.flat[0].platform == "cpu" or mesh.size == 1:
        return not_tried(item, "programs of several GPUs or TPUs are read")
    try:
        inspect.check_collectives(compiled, mesh, axis=axis)
    except PipelineError as error:
        return judged(item, "; ".join(error.faults), "none that can hang", _REPORT, wrong=True)
    return judged(item, "none can hang", "none that can hang")


def judge_memory(predicted: int, by_xla: int, reported: int | None) -> Line:
    """A line about memory; the device may report none."""
    most = max(by_xla, reported or 0)
    text = f"XLA {by_xla / 2**20:.1f} MiB, device "
    text += "reports none" if reported is None else f"{reported / 2**20:.1f} MiB at its peak"
    return judged(
        "memory",
        text,
        f"{predicted / 2**20:.1f} MiB (predicted)",
        "plans of jaxpipe plan need more room here: plan with a smaller --memory",
        wrong=most > _MEMORY * predicted + 2**20,
    )


def speed(scope: Scope, mesh: Mesh) -> Findings:
    """Compare one device with 1 and 4 chunks with plain accumulation: as a ratio, and as MFU."""
    one = Mesh(np.array(jax.local_devices()[:1]), mesh.axis_names)
    device = one.devices.flat[0]
    calls: dict[str, Callable[[], Any]] = {}
    for chunks in (4, 1):
        at(f"compiling {chunks} chunks")
        pipe, weights, batch = step_of(one, layers=4, chunks=chunks)
        params, batch = filled(pipe.place(weights)), jax.device_put(batch, device)
        calls[f"V = {chunks}"] = call_of(pipe.value_and_grad, params, batch)
    at("compiling plain accumulation")
    calls["plain"] = call_of(jax.jit(_accumulated), filled(weights), batch)
    at("steps in turn")
    seconds = timed(calls, scope.repeats)
    flops = 6.0 * sum(leaf.size for leaf in jax.tree.leaves(weights)) * len(batch["x"])
    rate = peak_flops(str(device.device_kind), Target.of(one, ()))
    return Findings(judge_speed(seconds, flops, rate))


def _accumulated(params: PyTree, batch: PyTree) -> Any:
    """Gradients of one microbatch after the other, summed in float32."""

    def one(total: PyTree, microbatch: PyTree) -> tuple[PyTree, Any]:
        loss, grads = jax.value_and_grad(MODEL.loss)(params, microbatch)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads), loss

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    return lax.scan(one, zeros, split_batch(batch, MICROBATCHES))


def peak_flops(kind: str, target: Target) -> float | None:
    """The peak of one device in operations a second; None if its kind is not known."""
    if target.chip is not None:
        return target.chip.flops
    names = [name for name in GPU_FLOPS if all(part in kind for part in name.split())]
    return GPU_FLOPS[max(names, key=len)] if names else None


def judge_speed(seconds: Mapping[str, float], flops: float, peak: float | None) -> tuple[Line, ...]:
    """Lines about one device: each pipeline's time over that of plain accumulation."""
    lines = []
    for name, each in seconds.items():
        mfu = "" if peak is None else f", MFU {flops / each / peak:.1%}"
        ratio = each / seconds["plain"]
        line = judged(
            f"speed of one device, {name}",
            f"{ratio:.3f} of plain accumulation's time{mfu}",
            f"at most {_SPEED}",
            "look at predicates above; prefer fewer chunks",
            slow=ratio > _SPEED,
        )
        lines += [line] if name != "plain" else []
    return tuple(lines)


def plan(scope: Scope, mesh: Mesh) -> Findings:
    """Compare a step on several devices with its planned time, and find lost time."""
    item = "a step against its plan"
    if mesh.size == 1:
        return Findings((not_tried(item, "there is one device; give --devices 2 or more"),))
    pipe, weights, batch = step_of(mesh)
    params = filled(pipe.place(weights))
    at("the times of stages")
    costs = measure_stages(pipe, params, batch, repeats=scope.repeats)
    pipe = step_of(mesh, costs=costs).pipe
    target = Target.of(mesh, ())
    planned = pipe.trace(params, batch).job.plan.seconds(target, costs)
    if target.on_cpus:  # virtual devices share the cores
        planned *= max(1.0, mesh.size / (os.cpu_count() or 1))
    at("the step")
    step = call_of(pipe.value_and_grad, params, batch)
    seconds = timed({"step": step}, scope.repeats)["step"]
    at("the profile of a step")
    try:
        ran = inspect.profile(pipe, params, batch, repeats=1)
        where = str(ran.over(simulate(pipe.schedule, costs))).splitlines()[0]
    except (PipelineError, jax.errors.JaxRuntimeError) as error:
        where = f"no profile: {str(error).splitlines()[0]}"
    return Findings((judge_plan(item, seconds, planned, where),))


def judge_plan(item: str, seconds: float, planned: float, where: str) -> Line:
    """A line about a step's time."""
    advice = "see hops and predicates"
    line = timed_line(item, seconds, planned, unit="ms", factor=_PLAN, advice=advice)
    return replace(line, measured=f"{line.measured}: {where}")
