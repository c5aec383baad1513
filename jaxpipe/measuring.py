"""What stages and layers cost, in seconds and bytes: each block of the step compiled alone and timed, or estimated from its flops."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .arrays import Leaves, PyTree
from .errors import PipelineError, quoted
from .jaxprs.sizes import nbytes
from .jaxprs.work import count_work
from .model.param_layout import with_outer
from .pipeline import Pipeline
from .planner.layer_cost import FIRST, LAST, LayerCost
from .planner.result import PipelinePlan
from .schedules import build
from .simulation.costs import Costs
from .spmd.body import accumulator_dtype, prepare
from .spmd.entries import compiled_alone
from .spmd.work_space import stage_work_space
from .stage.code import run
from .stage.job import Job
from .stage.model_code import ModelCode, trace_model

_BLOCKS = ("F", "B", "I", "W")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What a device can do at most, for estimates by roofline (Williams et al. 2009): a block takes the longer of compute and memory.

    Args:
        flops: floating point operations a second.
        bandwidth: bytes of memory a second.
        link: bytes a second to the next device of the pipeline; transfers take no time where it is None.
        latency: seconds of a transfer besides.
    """

    flops: float
    bandwidth: float
    link: float | None = None
    latency: float = 0.0

    def seconds(self, jaxpr: core.Jaxpr, devices: int) -> float:
        """Of a block that so many devices share."""
        work = count_work(jaxpr)
        return max(work.flops / self.flops, work.bytes / self.bandwidth) / devices

    def hop(self, size: int) -> float:
        """Of a transfer of so many bytes."""
        return 0.0 if self.link is None else self.latency + size / self.link


def measure(
    pipe: Pipeline,
    params: dict[str, PyTree],
    batch: PyTree,
    *,
    rng: Any = None,
    state: Any = (),
    repeats: int = 10,
    peak: Peak | None = None,
) -> Costs:
    """What each stage of a pipeline costs for one microbatch, in seconds and bytes: costs for `simulate`, `build` and `lower_bound`.

    F (with what it keeps written to memory), B, I and W of every kind of stage, `first`, its gradient, `last` with its gradient and a hop
    to the next device are compiled as the step would, each alone, and run in turn on one coordinate of the pipe and data axes; the median
    of `repeats` rounds counts.  `first` is in F of the first stage and its gradient in B and I, `last` in F of the last one.

    Args:
        pipe: the pipeline, whose schedule does not matter.
        params: placed parameters, or shapes (see `place`); values are not used.
        batch: as for `value_and_grad`; arrays or shapes.
        rng, state: as for `value_and_grad`.
        repeats: rounds of timed runs.
        peak: where it is given nothing is run: seconds are estimated from the blocks' flops and bytes, and `unit` says so.

    Raises:
        PipelineError: as `value_and_grad` does, and for repeats below 1.
    """
    found = _measured(pipe, params, batch, rng, state, repeats, peak)
    code, last = found.code, len(found.code.kind_of) - 1

    def times(block: str, at_first: str = "", at_last: str = "") -> tuple[float, ...]:
        more = {0: found.seconds.get(at_first, 0.0)}
        more[last] = more.get(last, 0.0) + found.seconds.get(at_last, 0.0)
        return tuple(found.seconds[f"{block} {kind}"] + more.get(s, 0.0) for s, kind in enumerate(code.kind_of))

    kept = [sum(map(nbytes, (*kind.residual_input, *kind.residual_weight))) for kind in code.kinds]
    taken = [sum(map(nbytes, kind.x_avals)) for kind in code.kinds]
    return Costs(
        forward=times("F", "first", "last"),
        input_grad=times("I", "first gradient"),
        weight_grad=times("W"),
        backward=times("B", "first gradient"),
        transfer=found.seconds["hop"],
        recompute=times("F"),
        activation=tuple(kept[kind] + taken[kind] for kind in code.kind_of),
        checkpoint=tuple(taken[kind] for kind in code.kind_of),
        unit=found.unit,
    )


def measure_layers(
    layers: Mapping[str, Callable[..., Any]],
    params: Mapping[str, PyTree],
    microbatch: PyTree,
    *,
    mesh: Mesh | None = None,
    repeats: int = 10,
    peak: Peak | None = None,
    **options: Any,
) -> dict[str, LayerCost]:
    """What a layer of each letter costs, for `plan`: each is a stage of its own, traced, compiled and timed as `measure` does.

    Args:
        layers: a function for each letter, as `Pipeline` takes them; "E" is `first`, "L" is `last`.
        params: canonical parameters (arrays or shapes): {"first", "stages": {letter: leaves [layers, ...]}, "last"}.
        microbatch: the rows of one microbatch, arrays or shapes.
        mesh: one device, or a mesh whose axis "pipe" has one coordinate; the first device where it is None.
        repeats, peak: as for `measure`.
        options: further ones of `Pipeline` (`has_metrics`, `specs`, ...).

    Raises:
        PipelineError: as `Pipeline` does.

    >>> import jax, jax.numpy as jnp
    >>> params = {"stages": {"t": jnp.ones((6, 8, 8), jnp.float32)}, "last": {}}
    >>> layers = {"t": lambda w, x: jnp.tanh(x @ w), "L": lambda p, x, mb: jnp.mean(x**2)}
    >>> found = measure_layers(layers, params, {"x": jnp.ones((4, 8), jnp.float32)}, repeats=1)
    >>> found["t"].parameters, found["t"].boundary, found["t"].forward > 0
    (256, 128, True)
    """
    letters = "".join(letter for letter in layers if letter not in (FIRST, LAST))
    layout = "|".join(letters)
    layout = (FIRST if FIRST in layers else "") + layout + (LAST if LAST in layers else "")
    mesh = jax.make_mesh((1,), ("pipe",), devices=jax.devices()[:1]) if mesh is None else mesh
    pipe = Pipeline(
        layers=layers,
        layout=layout,
        schedule=build("no_pipelining", devices=1, microbatches=1, chunks=len(letters)),
        mesh=mesh,
        **options,
    )
    one = {**params, "stages": {letter: jax.tree.map(_first_layer, tree) for letter, tree in params["stages"].items()}}
    placed = pipe.place(jax.tree.map(_shape, one))
    batch = jax.tree.map(_shape, microbatch)
    measured = _measured(pipe, placed, batch, None, (), repeats, peak)
    code, seconds, temp = measured.code, measured.seconds, measured.temp
    work = _work_spaces(pipe, measured)
    found = {}
    for stage, letter in enumerate(letters):
        number = code.kind_of[stage]
        kind = code.kinds[number]
        found[letter] = LayerCost(
            forward=seconds[f"F {number}"],
            input_grad=seconds[f"I {number}"],
            weight_grad=seconds[f"W {number}"],
            backward=seconds[f"B {number}"],
            parameters=_bytes(one["stages"][letter]),
            gradients=_gradient_bytes(measured.job, one["stages"][letter]),
            residuals=sum(map(nbytes, (*kind.residual_input, *kind.residual_weight))),
            boundary=sum(map(nbytes, kind.y_avals)),
            stash=sum(map(nbytes, kind.stash)),
            workspace=work[number],
            hoisted=sum(map(nbytes, kind.once_avals)),
        )
    rows, reader = _bytes(batch), LAST if LAST in layers else FIRST
    # `last` and its gradient are one block of the program, whose parts are not apart.
    for letter, key, forward, backward in ((FIRST, "first", "first", "first gradient"), (LAST, "last", "last", "")):
        if letter in layers:
            found[letter] = LayerCost(
                batch=rows if letter == reader else 0,
                forward=seconds[forward],
                input_grad=0.0,
                weight_grad=seconds.get(backward, 0.0),
                parameters=_bytes(params[key]),
                gradients=_gradient_bytes(measured.job, params[key]),
                boundary=sum(map(nbytes, code.first.y_avals)) if letter == FIRST else 0,
                workspace=max(temp[forward], temp.get(backward, 0)),
            )
    return found


def traced_memory(
    layers: Mapping[str, Callable[..., Any]], params: Mapping[str, PyTree], microbatch: PyTree, *, mesh: Mesh, **options: Any
) -> Callable[[PipelinePlan], dict[str, int]]:
    """A function from a plan to the memory of its step by what it is for, for `plan(traced=)`.

    The plan's pipeline is traced, and each of its blocks compiled alone for the mesh, whose devices may be described ones: nothing runs,
    and the step itself is not compiled (`Pipeline.predict_memory`).

    Args:
        layers, params, microbatch, options: as for `measure_layers`.
        mesh: of the pipeline.
    """
    shapes = jax.tree.map(_shape, dict(params))

    def found(plan: PipelinePlan) -> dict[str, int]:
        pipe = plan.pipeline(layers, mesh=mesh, **options)
        count = plan.schedule.num_microbatches

        def rows(leaf: Any) -> Any:
            whole = NamedSharding(pipe.mesh, PartitionSpec())
            return jax.ShapeDtypeStruct((count * np.shape(leaf)[0], *np.shape(leaf)[1:]), _shape(leaf).dtype, sharding=whole)

        memory: dict[str, int] = pipe.predict_memory(pipe.place(shapes), jax.tree.map(rows, microbatch))
        return memory

    return found


def _work_spaces(pipe: Pipeline, measured: _Measured) -> list[int]:
    """Of each kind of stage, bytes of the arrays of the block that needs most."""
    mesh = _one_coordinate(pipe)
    return [max(stage_work_space(measured.job, mesh, kind).values()) for kind in measured.code.kinds]


@dataclass(frozen=True)
class _Measured:
    """Seconds of each block by name ("F 0" of kind 0, "first", "first gradient", "last", "hop"), and bytes of its own arrays."""

    job: Job
    code: ModelCode
    seconds: Mapping[str, float]
    temp: Mapping[str, int]
    unit: str


def _measured(pipe: Pipeline, params: dict[str, PyTree], batch: PyTree, rng: Any, state: Any, repeats: int, peak: Peak | None) -> _Measured:
    """Trace the step, compile every block of it alone, and time or estimate each."""
    if repeats < 1:
        raise PipelineError(f"repeats must be at least 1, not {quoted(repeats)}")
    (job, code), mesh = _traced(pipe, params, batch, rng, state), _one_coordinate(pipe)
    blocks = {name: (_compiled(job, mesh, jaxpr), jaxpr) for name, jaxpr in _jaxprs(code).items()}
    temp = {name: int(getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)) for name, (compiled, _) in blocks.items()}
    if peak is not None:
        seconds = {name: peak.seconds(jaxpr, mesh.size) for name, (_, jaxpr) in blocks.items()}
        boundary = max((sum(map(nbytes, kind.y_avals)) for kind in code.kinds), default=0)
        unit = f"seconds, estimated for {peak.flops:.3g} flops and {peak.bandwidth:.3g} bytes a second"
        return _Measured(job, code, {**seconds, "hop": peak.hop(boundary) if pipe.schedule.num_devices > 1 else 0.0}, temp, unit)
    runs = {name: _call(compiled, jaxpr) for name, (compiled, jaxpr) in blocks.items()}
    seconds = _timed(runs, repeats)
    seconds["hop"] = _hop_seconds(pipe, code, repeats)
    device = pipe.mesh.devices.flat[0]
    return _Measured(job, code, seconds, temp, f"seconds, measured on {device.device_kind}")


def _traced(pipe: Pipeline, params: dict[str, PyTree], batch: PyTree, rng: Any, state: Any) -> tuple[Job, ModelCode]:
    """The step's job, and the model's code on one coordinate of the pipe and data axes."""
    jobs: list[Job] = []
    jax.eval_shape(lambda p, b: pipe._step(p, b, rng, state, lambda job, *_: jobs.append(job)), params, batch)
    return jobs[0], _retraced(_one_coordinate(pipe), *_local_shapes(pipe, jobs[0], with_outer(params), batch, rng, state))


def _local_shapes(pipe: Pipeline, job: Job, params: dict[str, PyTree], batch: PyTree, rng: Any, state: Any) -> tuple[Job, tuple[Any, ...]]:
    """The job, told the sizes of what is cut, and what one device starts from, as shapes: the arguments of `trace_model`."""
    found: list[tuple[Job, tuple[Any, ...]]] = []

    def look(p: PyTree, b: PyTree, r: Any, s: Any) -> tuple[()]:
        given = prepare(job, p, b, r, s)
        parts = (given.owned, given.kept, given.shared, given.first, given.last, given.batch, given.rng)
        told = job.told({key: job.cuts.sizes(key, p[key]) for key in job.cuts.dims})
        found.append((told, jax.tree.map(_shape, parts)))
        return ()

    rows, kept, whole = PartitionSpec(job.data_axes or None), PartitionSpec(job.axis), PartitionSpec()
    specs = (pipe.partition.manual_specs(params), rows, whole, kept)
    axes = {job.axis, *job.data_axes}
    mapped = jax.shard_map(look, mesh=pipe.mesh, in_specs=specs, out_specs=whole, axis_names=axes, check_vma=False)
    jax.eval_shape(mapped, params, batch, rng, state)
    return found[0]


def _retraced(mesh: Mesh, job: Job, shapes: tuple[Any, ...]) -> ModelCode:
    """The model's code for a mesh of one coordinate: a traced program remembers the size of its mesh."""
    found: list[ModelCode] = []

    def look(given: tuple[Any, ...]) -> tuple[()]:
        found.append(trace_model(job, *given))
        return ()

    whole = PartitionSpec()
    axes = {job.axis, *job.data_axes}
    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=whole, out_specs=whole, axis_names=axes, check_vma=False), shapes)
    return found[0]


def _jaxprs(code: ModelCode) -> dict[str, core.Jaxpr]:
    """Every block by name."""
    found: dict[str, core.Jaxpr] = {}
    for number, kind in enumerate(code.kinds):
        pieces = zip(_BLOCKS, (kind.forward, kind.backward, kind.input_grad, kind.weight_grad), strict=True)
        found |= {f"{name} {number}": jaxpr for name, jaxpr in pieces}
    found["first"] = code.first.forward
    if code.first.num_params:
        found["first gradient"] = code.first.backward
    if code.last is not None:
        found["last"] = code.last.train
    return found


def _one_coordinate(pipe: Pipeline) -> Mesh:
    """The mesh at one coordinate of the pipe and data axes, where a stage runs; axes that the partitioner has stay whole."""
    manual = (pipe.axis, *pipe.data_axes)
    at = tuple(slice(0, 1) if name in manual else slice(None) for name in pipe.mesh.axis_names)
    return Mesh(pipe.mesh.devices[at], pipe.mesh.axis_names, axis_types=(AxisType.Auto,) * len(at))


def _compiled(job: Job, mesh: Mesh, jaxpr: core.Jaxpr) -> Any:
    """A block compiled by itself, split as the partitioner likes."""
    return compiled_alone(job, mesh, lambda values: run(jaxpr, *values), [(var.aval, PartitionSpec()) for var in jaxpr.invars])


def _call(compiled: Any, jaxpr: core.Jaxpr) -> Callable[[], Any]:
    """Run a compiled block on arguments of its shapes."""
    (shardings,), _ = compiled.input_shardings
    values = [jax.device_put(_value(var.aval), sharding) for var, sharding in zip(jaxpr.invars, shardings, strict=True)]
    return lambda: jax.block_until_ready(compiled(values))


def _value(aval: Any) -> Any:
    """Ordinary numbers (zeros and denormals can be faster or slower than those of a model); zeros for what is not floating."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(aval.dtype._impl.name)), aval.shape)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.zeros(aval.shape, aval.dtype)
    numbers = np.random.default_rng(0).standard_normal(aval.shape, np.float32) * 0.1
    return jnp.asarray(numbers, aval.dtype)


def _timed(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turn, so that what else the machine does meets all alike; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, call in runs.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def _hop_seconds(pipe: Pipeline, code: ModelCode, repeats: int) -> float:
    """Of a stage's output to the next device of the pipe axis, less the time of the same call that sends nothing."""
    count = pipe.schedule.num_devices
    if count == 1:
        return 0.0
    avals = max((kind.y_avals for kind in code.kinds), key=lambda avals: sum(map(nbytes, avals)))
    mesh = Mesh(pipe.mesh.devices, pipe.mesh.axis_names, axis_types=(AxisType.Auto,) * len(pipe.mesh.axis_names))
    # Two devices exchange, as neighbours do; the others take no part.
    pairs = [(0, 1), (1, 0)]

    def call(sends: bool) -> Callable[[], Any]:
        def body(values: Leaves) -> Leaves:
            return [lax.ppermute(value, pipe.axis, pairs) if sends else value + 0 for value in values]

        spec = PartitionSpec(pipe.axis)
        mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        where = jax.sharding.NamedSharding(mesh, spec)
        values = [jax.device_put(jnp.zeros((count, *aval.shape), aval.dtype), where) for aval in avals]
        return lambda: jax.block_until_ready(mapped(values))

    found = _timed({"hop": call(True), "nothing": call(False)}, repeats)
    return max(0.0, found["hop"] - found["nothing"])


def _first_layer(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf))


def _bytes(tree: PyTree) -> int:
    return sum(int(np.prod(np.shape(leaf))) * jnp.result_type(leaf).itemsize for leaf in jax.tree.leaves(tree))


def _gradient_bytes(job: Job, tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(np.shape(leaf))) * accumulator_dtype(jnp.result_type(leaf), job.accumulate).itemsize for leaf in leaves)
