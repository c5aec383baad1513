"""The blocks of a step, traced on one coordinate of the pipe and data axes, each compiled alone as
the step would; their seconds, and those of a hop to the next device, run in turn or estimated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..arrays import Leaves, Params, PyTree
from ..errors import PipelineError, quoted
from ..inspect.blocks import (
    Block,
    Step,
    outer_blocks,
    output_entries,
    stage_blocks,
    temp_bytes,
)
from ..jaxprs.equations import count_work, nbytes
from ..lowering.target import CHIPS, Chip
from ..model.mesh import outside_contexts
from ..model.param_layout import with_outer
from ..pipeline import Pipeline
from ..planner.layer_cost import FIRST, LAST
from ..spmd.executor import look
from ..spmd.xla import inside, split_entries
from ..stage.model_code import trace_model
from ..table.limits import is_whole


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak rates of a device, for estimates by roofline (Williams et al. 2009): a block takes
    the longer of compute and memory.

    Args:
        flops: floating point operations a second.
        bandwidth: bytes of memory a second.
        link: bytes a second to the next device of the pipeline; transfers take no time where it is
            None.
        latency: seconds of a transfer, independent of its size.
    """

    flops: float
    bandwidth: float
    link: float | None = None
    latency: float = 0.0

    @classmethod
    def of(cls, mesh: Mesh) -> Peak:
        """That of a mesh of TPUs of one published kind (v5e, v5p or v6e), also of described ones.

        Raises:
            PipelineError: the mesh has other devices.
        """
        chip = Chip.of(mesh)
        if chip is None:
            kinds = sorted({str(device.device_kind) for device in mesh.devices.flat})
            raise PipelineError(
                f"the peak of {', '.join(kinds)} is not known (known: "
                f"{', '.join(each.kind for each in CHIPS)}); write Peak(flops=, bandwidth=, link=)"
            )
        return cls(flops=chip.flops, bandwidth=chip.bandwidth, link=chip.link)

    def seconds(self, jaxpr: core.Jaxpr, devices: int) -> float:
        """Of a block that so many devices share."""
        work = count_work(jaxpr)
        return max(work.flops / self.flops, work.bytes / self.bandwidth) / devices

    def hop(self, size: int) -> float:
        """Of a transfer of so many bytes."""
        return 0.0 if self.link is None else self.latency + size / self.link


def call_of(compiled: Any) -> Callable[[], Any]:
    """Run a block that is compiled alone (`Step.compiled`) on arguments of its shapes.

    Each run changes the pools and accumulators of the run before it.
    """

    def filled(argument: Any, sharding: Any) -> Any:
        return jax.device_put(_value(argument), sharding)

    (shardings, _), (arguments, _) = compiled.input_shardings, compiled.args_info
    flags, inputs, changed = jax.tree.map(filled, arguments, shardings)
    flags[0] = flags[0] | True  # it runs

    def call() -> None:
        nonlocal changed
        changed = jax.block_until_ready(compiled(flags, inputs, changed))[: len(changed)]

    return call


def _value(aval: Any) -> Any:
    """Ordinary numbers (zeros and denormals can be faster or slower than those of a model); zeros
    for other types.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(aval.dtype._impl.name)), aval.shape)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.zeros(aval.shape, aval.dtype)
    numbers = np.random.default_rng(0).standard_normal(aval.shape, np.float32) * 0.1
    return jnp.asarray(numbers, aval.dtype)


def timed(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turn, so that other work of the machine delays all alike; the
    first round warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, call in runs.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def hop_seconds(pipe: Pipeline, step: Step, repeats: int) -> float:
    """Of a stage's output to the next device of the pipe axis, less the time of the same call that
    sends nothing.
    """
    count = pipe.schedule.num_devices
    if count == 1:
        return 0.0
    number = max(
        range(len(step.code.kinds)),
        key=lambda kind: sum(map(nbytes, jax.tree.leaves(step.code.kinds[kind].y))),
    )
    kind, entries = step.code.kinds[number], step.entries[number]
    specs = [PartitionSpec(pipe.axis, *entry.spec) for entry in output_entries(kind, entries)]
    mesh = Mesh(
        pipe.mesh.devices,
        pipe.mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(pipe.mesh.axis_names),
    )
    # Two devices exchange, as neighbours do; the others take no part.
    pairs = ((0, 1), (1, 0))
    calls = {
        name: exchange(mesh, pipe.axis, those, jax.tree.leaves(kind.y), specs)
        for name, those in (("hop", pairs), ("nothing", ()))
    }
    found = timed(calls, repeats)
    return max(0.0, found["hop"] - found["nothing"])


def exchange(
    mesh: Mesh,
    axis: str,
    pairs: Sequence[tuple[int, int]],
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec] | None = None,
) -> Callable[[], Any]:
    """A call that sends arrays of these shapes between pairs of devices of an axis.

    Without pairs it sends nothing.

    Args:
        mesh: the devices.
        axis: of the mesh.
        pairs: (source, target).
        avals: shapes and dtypes of what each device sends.
        specs: where the arrays [size of the axis, ...] are; cut over the axis where it is None.
    """
    specs = [PartitionSpec(axis)] * len(avals) if specs is None else list(specs)

    def body(values: Leaves) -> Leaves:
        return [lax.ppermute(value, axis, pairs) if pairs else value + 0 for value in values]

    mapped = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    )
    zeros = [jnp.zeros((mesh.shape[axis], *aval.shape), aval.dtype) for aval in avals]
    values = [
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(zeros, specs, strict=True)
    ]
    return lambda: jax.block_until_ready(mapped(values))


BLOCKS = ("F", "B", "I", "W")


def traced(pipe: Pipeline, params: Params, batch: PyTree, rng: Any, state: Any) -> Step:
    """Trace the step on one coordinate of the pipe and data axes, and ask the partitioner where
    axes are left to it.
    """
    job = pipe.trace(params, batch, rng=rng, state=state).job
    job_of_batch, inputs, _ = look(job, with_outer(params), batch, rng, state)
    shapes = jax.tree.map(shape_of, inputs)
    job = replace(job_of_batch, partition=replace(job.partition, mesh=one_coordinate(pipe)))
    # A traced program remembers the size of its mesh.
    code = inside(job, lambda inputs: trace_model(job, inputs), PartitionSpec(), shapes)
    return Step(job, code, split_entries(job, code, shapes.owned))


def blocks_of(step: Step) -> dict[str, Block]:
    """Every block by name."""
    found: dict[str, Block] = {}
    for number, (kind, entries) in enumerate(zip(step.code.kinds, step.entries, strict=True)):
        pieces = stage_blocks(kind, entries)
        found |= {f"{name} {number}": pieces[name] for name in BLOCKS}
    return found | {block.name: block for block in outer_blocks(step)}


def one_coordinate(pipe: Pipeline) -> Mesh:
    """The mesh at one coordinate of the pipe and data axes, where a stage runs; axes that the
    partitioner has stay whole.
    """
    manual = (pipe.axis, *pipe.data_axes)
    at = tuple(slice(0, 1) if name in manual else slice(None) for name in pipe.mesh.axis_names)
    return Mesh(pipe.mesh.devices[at], pipe.mesh.axis_names, axis_types=(AxisType.Auto,) * len(at))


def refuse_layers(layers: Any, params: Any) -> None:
    """PipelineError for layers and parameters that are not by letter."""
    if not isinstance(layers, Mapping) or not all(isinstance(letter, str) for letter in layers):
        raise PipelineError(
            f"layers must be a mapping from letters to functions, not {quoted(layers)}"
        )
    stages = params.get("stages") if isinstance(params, Mapping) else None
    if not isinstance(stages, Mapping):
        raise PipelineError(
            "params must be a mapping with 'stages', itself one from letters to parameters, not "
            f"{quoted(params)}"
        )
    keys = {FIRST: "first", LAST: "last"}
    missing = [
        letter
        for letter in layers
        if (keys[letter] not in params if letter in keys else letter not in stages)
    ]
    if missing:
        raise PipelineError(
            f"params have nothing for the layers {', '.join(missing)}; give {{}} to those "
            "without parameters"
        )


def shape_of(leaf: Any) -> Any:
    """The shape and dtype of a leaf."""
    return jax.ShapeDtypeStruct(
        np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    )


@dataclass(frozen=True)
class Measured:
    """Seconds of each block by name ("F 0" of kind 0, "first", "first gradient", "last", "hop"),
    and bytes of its own arrays.
    """

    step: Step
    seconds: Mapping[str, float]
    temp: Mapping[str, int]
    unit: str


@outside_contexts
def measure_blocks(
    pipe: Pipeline,
    params: Params,
    batch: PyTree,
    rng: Any,
    state: Any,
    repeats: int,
    peak: Peak | None,
) -> Measured:
    """Trace the step, compile every block of it alone, and time or estimate each."""
    is_peak = peak is None or isinstance(peak, Peak)
    checks = (
        (isinstance(pipe, Pipeline), f"pipe must be a jaxpipe.Pipeline, not {quoted(pipe)}"),
        (
            is_whole(repeats) and repeats >= 1,
            f"repeats must be at least 1, not {quoted(repeats)}",
        ),
        (is_peak, f"peak must be a jaxpipe.measuring.Peak, or None, not {quoted(peak)}"),
    )
    faults = [fault for is_right, fault in checks if not is_right]
    PipelineError.refuse("this cannot be measured", faults)
    step = traced(pipe, params, batch, rng, state)
    blocks = blocks_of(step)
    compiled = {name: step.compiled(block) for name, block in blocks.items()}
    temp = {name: temp_bytes(each, step.job.mesh) for name, each in compiled.items()}
    if peak is not None:
        size = step.job.mesh.size
        seconds = {name: peak.seconds(block.jaxpr, size) for name, block in blocks.items()}
        boundary = max(map(step.boundary, range(len(step.code.kinds))), default=0)
        unit = (
            f"seconds, estimated for {peak.flops:.3g} flops and {peak.bandwidth:.3g} bytes a second"
        )
        hop = peak.hop(boundary) if pipe.schedule.num_devices > 1 else 0.0
        return Measured(step, {**seconds, "hop": hop}, temp, unit)
    seconds = timed({name: call_of(each) for name, each in compiled.items()}, repeats)
    seconds["hop"] = hop_seconds(pipe, step, repeats)
    device = pipe.mesh.devices.flat[0]
    return Measured(step, seconds, temp, f"seconds, measured on {device.device_kind}")
