"""Check whole steps: that six schedules give the numbers of a plain function in every run; memory,
speed on one device, and time against a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..arrays import Params, PyTree
from ..cli.checks import Findings, Line, Scope, at, judged, not_tried, one_device
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..errors import PipelineError, ScheduleError
from ..inspect.profiling import profile
from ..inspect.programs import check_collectives, program_of
from ..inspect.step_report import memory as predicted_memory
from ..inspect.timing import timed
from ..lowering.target import Target
from ..measuring import measure_stages
from ..model.batch import split_batch
from ..model.model import Model
from ..model.settings import Memory
from ..pipeline import Pipeline
from ..prices import read_prices
from ..schedules.registry import build
from ..spmd.xla import NO_GRAPHS
from ..vocabulary import VocabEmbedding, VocabHead

Batch: TypeAlias = dict[str, np.ndarray]
Result: TypeAlias = tuple[jax.Array, Params]  # the loss, and gradients
WIDTH, WORDS, TOKENS = 16, 32, 8
ROWS = 2  # of a microbatch
TOLERANCE = 1e-4  # float32, sums of some hundred numbers in another order


def numbers(
    scope: Scope,
    mesh: Mesh,
    name: str,
    chunks: int | None = None,
    spread: bool = False,
    offload: str | None = None,
    note: str = "",
) -> Findings:
    """The pipeline of a schedule against `Model.loss`; on GPUs with CUDA graphs and without them.

    On a GPU the sum of a scatter, as in the gradient of a spread embedding, has no fixed order: its
    bits are not compared.

    Args:
        scope: the number of runs.
        mesh: the devices.
        name: of the schedule.
        chunks: a device.
        spread: the ends are spread over all devices.
        offload: as `Memory` takes it.
        note: behind the title.
    """
    item = f"numbers: {name}{', spread ends' * spread}{', offload' * bool(offload)}{note}"
    count = mesh.size
    if offload and count == 1:
        return Findings((not_tried(item, "one device: no residual waits on the host"),))
    try:
        schedule = build(name, devices=count, microbatches=2 * max(count, 2), chunks=chunks)
    except ScheduleError as error:
        return Findings((not_tried(item, f"{count} devices: {error}"),))
    microbatches = schedule.num_microbatches
    model, weights = small_model(schedule.num_stages, spread=spread)
    pipe = Pipeline(model, schedule, mesh, memory=Memory(offload=offload))
    batches = [_batch(microbatches, seed) for seed in (1, 2)]
    with jax.default_matmul_precision("highest"):
        at(f"{item}: the plain function")
        plain = jax.jit(jax.value_and_grad(model.loss), static_argnames="microbatches")
        wanted = [plain(weights, batch, microbatches=microbatches) for batch in batches]
        expected = [(loss, pipe.place(jax.tree.map(np.asarray, grads))) for loss, grads in wanted]
        programs, on_gpus = {item: pipe.compiler_options}, Target.of(mesh, ()).on_gpus
        if on_gpus:
            programs[f"{item}, without graphs"] = {**pipe.compiler_options, **NO_GRAPHS}
        params = pipe.place(weights)
        lines = []
        for title, options in programs.items():
            step = jax.jit(pipe.value_and_grad, compiler_options=options or None)
            close = ("first",) if spread and on_gpus else ()
            lines.append(judge(title, step, params, batches, expected, scope.steps, close))
        return Findings(tuple(lines))


def judge(
    item: str,
    step: Callable[[Params, Batch], Result],
    params: Params,
    batches: Sequence[Batch],
    expected: Sequence[Result],
    count: int,
    close: Sequence[str] = (),
) -> Line:
    """Run a step with batches in turn.  Compare the first results with the plain ones, and later
    results with the first: bit by bit, but the gradients of the parts `close` within the tolerance.
    """
    bound = f"below {TOLERANCE:g} of the plain function, equal bits in {count} runs"
    at(item)
    same = partial(_same, close=tuple(close))
    first = [step(params, batch) for batch in batches]
    worst = float(np.max([_distance(*pair) for pair in zip(first, expected, strict=True)]))
    measured, advice = f"{worst:.1g}, equal bits in {count} runs", ""
    if not worst <= TOLERANCE:
        count, measured = 0, f"{worst:.2g} from the plain function"
        advice = "do not train with this: see known faults above, and try another version of jaxlib"
    for number in range(count):
        run, which = number + len(batches) + 1, number % len(batches)
        at(f"{item}, run {run}")
        if not bool(same(step(params, batches[which]), first[which])):
            measured = f"{worst:.1g} at first, other bits in run {run}"
            advice = (
                "the same program gives other numbers: try "
                "XLA_FLAGS=--xla_gpu_enable_command_buffer= and look for faulty memory"
            )
            break
    return judged(item, measured, bound, advice, wrong=advice)


@jax.jit
def _distance(result: PyTree, expected: PyTree) -> jax.Array:
    """The largest difference of a leaf, relative to the leaf's largest number."""
    each = jax.tree.map(
        lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30),
        result,
        expected,
    )
    return jnp.max(jnp.stack(jax.tree.leaves(each)))


@partial(jax.jit, static_argnames="close")
def _same(result: Result, expected: Result, *, close: tuple[str, ...]) -> jax.Array:
    (loss, grads), (expected_loss, expected_grads) = result, expected
    each = [loss == expected_loss]
    for part, own in grads.items():
        pair = own, expected_grads[part]
        equal = jax.tree.map(lambda a, b: jnp.all(a == b), *pair)
        each += [_distance(*pair) <= TOLERANCE] if part in close else jax.tree.leaves(equal)
    return jnp.all(jnp.stack(each))


def small_model(stages: int, *, spread: bool) -> tuple[Model, Params]:
    """Two layers a stage, an embedding and a head, with canonical parameters."""
    draw = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return np.asarray(0.3 * draw.standard_normal(shape), np.float32)

    def block(p: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    weights = {
        "first": {"table": numbers(WORDS, WIDTH)},
        "stages": {"up": numbers(stages, WIDTH, WIDTH), "down": numbers(stages, WIDTH, WIDTH)},
        "last": {"table": numbers(WORDS, WIDTH)},
    }
    if spread:
        return Model(block, first=VocabEmbedding(), last=VocabHead()), weights

    def embed(p: jax.Array, microbatch: dict[str, jax.Array]) -> jax.Array:
        # no scatter in the gradient, so sums have a fixed order
        return jax.nn.one_hot(microbatch["tokens"], WORDS, dtype=jnp.float32) @ p["table"]

    def head(p: jax.Array, x: jax.Array, microbatch: dict[str, jax.Array]) -> jax.Array:
        logits = x @ p["table"].T
        target = jax.nn.one_hot(microbatch["targets"], WORDS, dtype=logits.dtype)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * target, -1))

    return Model(block, first=embed, last=head), weights


def _batch(microbatches: int, seed: int) -> Batch:
    """Rows without repeated words in a microbatch, so that no sum depends on an order."""
    draw = np.random.default_rng(seed)
    each = [draw.permutation(WORDS)[: ROWS * TOKENS] for _ in range(microbatches)]
    words = np.stack(each).reshape(-1, TOKENS).astype(np.int32)
    return {"tokens": words, "targets": draw.permuted(words, axis=1)}


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


def _block(stage: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """MLPs with a residual."""

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    return lax.scan(layer, x, stage)[0]


def _loss(_: object, x: jax.Array, microbatch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(jnp.square(x - microbatch["y"]).astype(jnp.float32))


MODEL = Model(_block, last=_loss)
MICROBATCHES = 8


def step_of(
    mesh: Mesh, *, layers: int = 1, chunks: int = 1, costs: Costs | None = None
) -> tuple[Pipeline, Params, Batch]:
    """A step of 1F1B: the pipeline, the shapes of its parameters, and a batch.  Layers have width
    2048 and 34 million parameters each; small ones are on CPU devices.
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
    pipe = Pipeline(MODEL, schedule, mesh, costs=costs)
    return pipe, {"stages": weights, "last": {}}, {"x": x, "y": x}


def memory(scope: Scope, mesh: Mesh) -> Findings:
    """A step's bytes: predicted, by XLA, and as the device reports them."""
    pipe, weights, batch = step_of(mesh)
    shapes = pipe.place(weights)
    at("the prediction of memory")
    predicted = predicted_memory(pipe, shapes, batch)["total"]
    at("compiling the step")
    compiled = pipe.lower(shapes, batch).compile()
    by_xla = program_of(compiled, Target.of(mesh, ())).total_bytes
    at("running the step")
    jax.block_until_ready(compiled(filled(shapes), batch))
    stats = jax.local_devices()[0].memory_stats() or {}
    line = judge_memory(predicted, by_xla, stats.get("peak_bytes_in_use"))
    return Findings((line, collectives(compiled, mesh)))


def collectives(compiled: jax.stages.Compiled, mesh: Mesh) -> Line:
    """A line about collectives that can hang, read in the compiled step."""
    item, (axis,) = "collectives", mesh.axis_names
    if mesh.devices.flat[0].platform == "cpu" or mesh.size == 1:
        return not_tried(item, "programs of several GPUs or TPUs are read")
    faults: tuple[str, ...] = ()
    try:
        check_collectives(compiled, mesh, axis=axis)
    except PipelineError as error:
        faults = error.faults
    text = "; ".join(faults) or "none can hang"
    return judged(item, text, "none that can hang", _REPORT, wrong=faults)


def judge_memory(predicted: int, by_xla: int, reported: int | None) -> Line:
    """A line about memory; the device may report none."""
    most = max(by_xla, reported or 0)
    device = "reports none" if reported is None else f"{_mib(reported)} at its peak"
    return judged(
        "memory",
        f"XLA {_mib(by_xla)}, device {device}",
        f"{_mib(predicted)} (predicted)",
        "plans of jaxpipe plan need more room here: plan with a smaller --memory",
        wrong=most > _MEMORY * predicted + 2**20,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def speed(scope: Scope, mesh: Mesh) -> Findings:
    """Compare one device with 1 and 4 chunks with plain accumulation: as a ratio, and as MFU."""
    one = Mesh(np.array(jax.local_devices()[:1]), mesh.axis_names)
    device = one.devices.flat[0]
    calls: dict[str, Callable[[], object]] = {}
    for chunks in (4, 1):
        at(f"compiling {chunks} chunks")
        pipe, weights, batch = step_of(one, layers=4, chunks=chunks)
        params, batch = filled(pipe.place(weights)), jax.device_put(batch, device)
        calls[f"V = {chunks}"] = partial(pipe.value_and_grad, params, batch)
    at("compiling plain accumulation")
    calls["plain"] = partial(jax.jit(_accumulated), filled(weights), batch)
    at("steps in turn")
    seconds = timed(calls, scope.repeats)
    flops = 6.0 * sum(leaf.size for leaf in jax.tree.leaves(weights)) * len(batch["x"])
    rate = peak_flops(str(device.device_kind), Target.of(one, ()))
    return Findings(judge_speed(seconds, flops, rate))


def filled(shapes: Params) -> Any:
    """Arrays of these shapes and shardings."""
    return jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype, device=s.sharding), shapes)


def _accumulated(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
    """Gradients of one microbatch after the other, summed in float32."""

    def one(total: Params, microbatch: Batch) -> tuple[Params, jax.Array]:
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

    def line(name: str) -> Line:
        mfu = "" if peak is None else f", MFU {flops / seconds[name] / peak:.1%}"
        ratio = seconds[name] / seconds["plain"]
        text = f"{ratio:.3f} of plain accumulation's time{mfu}"
        advice = "look at predicates above; prefer fewer chunks"
        item, limit = f"speed of one device, {name}", f"at most {_SPEED}"
        return judged(item, text, limit, advice, slow=ratio > _SPEED)

    return tuple(line(name) for name in seconds if name != "plain")


def plan(scope: Scope, mesh: Mesh) -> Findings:
    """Compare a step on several devices with its planned time, and find lost time."""
    item = "a step against its plan"
    if mesh.size == 1:
        return one_device(item, on_gpus=Target.of(mesh, ()).on_gpus)
    pipe, weights, batch = step_of(mesh)
    params = filled(pipe.place(weights))
    at("the times of stages")
    costs = measure_stages(pipe, params, batch, repeats=scope.repeats)
    pipe, _, _ = step_of(mesh, costs=costs)
    target = Target.of(mesh, (), read_prices())
    planned = pipe._steps.plan.seconds(target, costs)
    if target.on_cpus:  # virtual devices share the cores
        planned *= max(1.0, mesh.size / (os.cpu_count() or 1))
    at("the step")
    step = partial(pipe.value_and_grad, params, batch)
    seconds = timed({"step": step}, scope.repeats)["step"]
    at("the profile of a step")
    try:
        ran = profile(pipe, params, batch, repeats=1)
        where = str(ran.over(simulate(pipe.schedule, costs))).splitlines()[0]
    except (PipelineError, jax.errors.JaxRuntimeError) as error:
        where = f"no profile: {str(error).splitlines()[0]}"
    return Findings((judge_plan(item, seconds, planned, where),))


def judge_plan(item: str, seconds: float, planned: float, where: str) -> Line:
    """A line about a step's time."""
    text, bound = f"{seconds * 1e3:.3g} ms: {where}", f"{planned * 1e3:.3g} ms"
    return judged(item, text, bound, "see hops and predicates", slow=seconds > _PLAN * planned)
