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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import Leaves, Params, PyTree
from ..errors import PipelineError
from ..inspect.step_memory import (
    Block,
    Step,
    gradient_bytes,
    hoisted_bytes,
    local_bytes,
    outer_blocks,
    output_entries,
    stage_blocks,
)
from ..jaxprs.equations import count_work, nbytes
from ..lowering.target import CHIPS, Chip
from ..model.param_layout import with_outer
from ..model.partition import leaf_plans, trained
from ..model.settings import automatic, outside_contexts
from ..pipeline import Pipeline
from ..planner.layer_cost import FIRST, LAST, Ends, LayerCost
from ..spmd.executor import look
from ..spmd.xla import inside, split_entries
from ..stage.model_code import trace_model

BLOCKS = ("F", "B", "I", "W")


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


@dataclass(frozen=True)
class Measured:
    """Seconds of each block by name ("F 0" of kind 0, "first", "first gradient", "last", "hop"),
    and bytes of its own arrays.
    """

    step: Step
    seconds: Mapping[str, float]
    temp: Mapping[str, int]
    unit: str

    @property
    def ends(self) -> dict[str, bool]:
        """The ends of the model that have blocks, and whether they are spread."""
        functions = self.step.job.functions
        last = {} if self.step.code.last is None else {LAST: functions.spreads("last")}
        return {FIRST: functions.spreads("first")} | last

    def costs(
        self, letters: Sequence[str], placed: Mapping[str, PyTree], microbatch: PyTree
    ) -> dict[str, LayerCost]:
        """The cost of a layer of each letter, each of them a stage."""
        found = {letter: self.stage_cost(stage, placed) for stage, letter in enumerate(letters)}
        rows = sum(map(nbytes, jax.tree.leaves(microbatch)))
        has = self.step.job.functions
        reader = FIRST if has.last is None else LAST
        for end, function in ((FIRST, has.first), (LAST, has.last)):
            if function is not None:
                found[end] = self.end_cost(end, placed, rows, shared=end == reader)
        return found

    def stage_times(self, kind: int) -> dict[str, Any]:
        """Seconds of a kind of stage."""
        names = {"forward": "F", "input_grad": "I", "weight_grad": "W", "backward": "B"}
        return {name: self.seconds[f"{block} {kind}"] for name, block in names.items()}

    def end_times(self, end: str) -> dict[str, Any]:
        """Seconds of `first` or `last`; forward and gradient of `last` are one block of the
        program.
        """
        if end == LAST:
            return {"forward": self.seconds["last"], "input_grad": 0.0, "weight_grad": 0.0}
        gradient = self.seconds.get("first gradient", 0.0)
        return {"forward": self.seconds["first"], "input_grad": 0.0, "weight_grad": gradient}

    def stage_cost(self, stage: int, placed: Mapping[str, PyTree]) -> LayerCost:
        """Of a stage that is one layer."""
        step = self.step
        number = step.code.kind_of[stage]
        kind, entries, entry = step.code.kinds[number], step.entries[number], step.entry(number)
        return LayerCost(
            **self.stage_times(number),
            **self._held((placed["stages"][stage], step.job.plans["stages"][stage])),
            residuals=kept(entry),
            boundary=step.boundary(number),
            stash=entry["stash"],
            workspace=max(self.temp[f"{name} {number}"] for name in BLOCKS),
            hoisted=hoisted_bytes(step, kind, entries.parameters),
        )

    def end_cost(
        self, end: str, placed: Mapping[str, PyTree], rows: int, *, shared: bool
    ) -> LayerCost:
        """The cost of `first` or `last`; with the bytes of the `shared` parameters, which every
        device has too, and of the batch's rows.
        """
        step, key = self.step, "first" if end == FIRST else "last"
        keys = (key, "shared") if shared else (key,)
        return LayerCost(
            **self.end_times(end),
            **self._held(*((placed.get(name, ()), step.job.plans[name]) for name in keys)),
            ends=Ends.ALL if self.ends[end] else Ends.ONE,
            batch=rows if shared else 0,
            boundary=step.entry(step.code.kind_of[0])["x"] if end == FIRST else 0,
            workspace=max(self.temp.get(name, 0) for name in (key, f"{key} gradient")),
        )

    def _held(self, *trees: tuple[PyTree, PyTree]) -> dict[str, Any]:
        """Bytes of placed parameters and of their gradients, from shapes and plans."""
        leaves = [leaf for tree, _ in trees for leaf in jax.tree.leaves(tree)]
        has = trained(leaves, [plan for _, plans in trees for plan in leaf_plans(plans)])
        return {
            "parameters": sum(map(local_bytes, leaves)),
            "gradients": sum(gradient_bytes(self.step.job, leaf) for leaf in has),
        }


def kept(entry: Mapping[str, int]) -> int:
    """Bytes that a forward keeps for the backward of a microbatch, its input not counted."""
    return entry["residual_input"] + entry["residual_weight"]


@outside_contexts
def measured_blocks(
    pipe: Pipeline, *arguments: PyTree, repeats: int, peak: Peak | None
) -> Measured:
    """Every block of a step of these arguments, compiled alone, and timed or estimated."""
    step = traced(pipe, *arguments)
    blocks = blocks_of(step)
    compiled = {name: step.compiled(block) for name, block in blocks.items()}
    temp = {name: step.temp_of(each) for name, each in compiled.items()}
    largest = max(range(len(step.code.kinds)), key=step.boundary)
    hops = pipe.schedule.num_devices > 1
    if peak is None:
        seconds = timed({name: call_of(each) for name, each in compiled.items()}, repeats)
        hop = hop_seconds(pipe, step, largest, repeats) if hops else 0.0
        unit = f"seconds, measured on {pipe.mesh.devices.flat[0].device_kind}"
    else:
        size = step.job.mesh.size
        seconds = {name: peak.seconds(block.jaxpr, size) for name, block in blocks.items()}
        hop = peak.hop(step.boundary(largest)) if hops else 0.0
        rates = f"{peak.flops:.3g} flops and {peak.bandwidth:.3g} bytes a second"
        unit = f"seconds, estimated for {rates}"
    return Measured(step, {**seconds, "hop": hop}, temp, unit)


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


def hop_seconds(pipe: Pipeline, step: Step, kind: int, repeats: int) -> float:
    """Of the output of a kind of stage to the next device of the pipe axis, less the time of the
    same call that sends nothing.
    """
    code = step.code.kinds[kind]
    splits = output_entries(code, step.entries[kind])
    specs = [PartitionSpec(pipe.axis, *entry.spec) for entry in splits]
    # Two devices exchange, as neighbours do; the others take no part.
    pairs = ((0, 1), (1, 0))
    calls = {
        name: exchange(automatic(pipe.mesh), pipe.axis, those, jax.tree.leaves(code.y), specs)
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
    return automatic(Mesh(pipe.mesh.devices[at], pipe.mesh.axis_names))


def shape_of(leaf: Any) -> Any:
    """The shape and dtype of a leaf."""
    return jax.ShapeDtypeStruct(
        np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    )
