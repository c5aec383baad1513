"""The costs of stages and layers in seconds and bytes, and the memory of a plan: each block of the
step, traced on one coordinate of the pipe and data axes, is compiled alone as the step would, and
run or estimated from its flops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeAlias

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .arrays import Params, PyTree, Rng, shape_of, words_of
from .engine.costs import Costs
from .errors import Count, Fits, PipelineError, typed
from .inspect.blocks import (
    compile_blocks,
    outer_blocks,
    output_entries,
    stage_blocks,
    temp_of,
)
from .inspect.step_memory import (
    boundary_bytes,
    entry_bytes,
    facts,
    held_bytes,
    held_leaves,
    hoisted_bytes,
    step_sizes,
)
from .inspect.timing import call_of, exchange, timed
from .jaxprs.equations import count_work, nbytes
from .layouts.layout import Layout
from .lowering.target import CHIPS, Chip
from .model.arguments import StepArguments, under_policies
from .model.batch import map_rows
from .model.layers import with_outer
from .model.model import Model
from .model.settings import Memory, Sharding, automatic, outside_contexts
from .pipeline import Pipeline
from .planner.candidate import PipelinePlan
from .planner.layer_cost import FIRST, LAST, Ends, Kept, LayerCost, Remat, stage_costs
from .schedules.registry import build
from .spmd.traced import TracedStep
from .spmd.xla import split_entries
from .stage.model_code import lower, trace
from .steps import Call

__all__ = ["Peak", "measure", "measure_stages", "traced_memory"]

BLOCKS = ("F", "B", "I", "W")


CanonicalParams: TypeAlias = Annotated[
    Mapping[str, PyTree], Fits("a mapping with 'stages'", lambda params: "stages" in params)
]


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

    step: TracedStep
    seconds: Mapping[str, float]
    temp: Mapping[str, int]
    unit: str

    def layers(
        self, letters: Sequence[str], params: Params, microbatch: PyTree
    ) -> dict[str, LayerCost]:
        """The cost of a layer of each letter, each of them a stage, and of the ends.

        The last end has the bytes of the shared parameters, which every device has too, and of the
        batch's rows and other leaves.
        """
        step, plans, placed = self.step, self.step.setup.plans, with_outer(params)
        found = {}
        for stage, letter in enumerate(letters):
            number = step.code.kind_of[stage]
            code, specs = step.code.kinds[number], step.entries[number].parameters
            entry = entry_bytes(step, number)
            leaves = held_leaves(step.setup, placed["stages"][stage], plans["stages"][stage])
            fsdp = step.setup.partition.sharding.fsdp
            found[letter] = replace(
                self.stage_times(number),
                **held_bytes(leaves),
                # split over the fsdp axis and never gathered
                local=sum(leaf.size for leaf in leaves if fsdp in dict(leaf.plan.held)),
                residuals=kept(entry),
                boundary=boundary_bytes(step, number),
                stash=entry["stash"],
                workspace=max(self.temp[f"{name} {number}"] for name in BLOCKS),
                hoisted=hoisted_bytes(step, code, specs),
            )
        functions = step.setup.functions
        with_rows = map_rows(lambda leaf: leaf, microbatch, functions.whole, lambda _: None)
        every, rows = (sum(map(nbytes, jax.tree.leaves(of))) for of in (microbatch, with_rows))
        ends = {FIRST: "first"} if functions.first is not None else {}
        ends |= {LAST: "last"} if functions.last is not None else {}
        for end, name in ends.items():
            is_last = end == LAST or functions.last is None
            held, own = (
                [tree[key] for key in ((name, "shared") if is_last else (name,))]
                for tree in (placed, plans)
            )
            found[end] = replace(
                self.end_times(end, Ends.ALL),
                **held_bytes(held_leaves(step.setup, held, own)),
                batch=rows if is_last else 0,
                hoisted=every - rows if is_last else 0,
                workspace=max(self.temp.get(block, 0) for block in (name, f"{name} gradient")),
            )
        if FIRST in found:
            entry = entry_bytes(step, step.code.kind_of[0])
            found[FIRST] = replace(found[FIRST], boundary=entry["x"])
        return found

    def stage_times(self, kind: int) -> LayerCost:
        """Seconds of a kind of stage."""
        forward, backward, input_grad, weight_grad = (
            self.seconds[f"{block} {kind}"] for block in BLOCKS
        )
        return LayerCost(
            forward=forward, input_grad=input_grad, weight_grad=weight_grad, backward=backward
        )

    def end_times(self, end: str, where_spread: Ends) -> LayerCost:
        """Seconds of `first` or `last`; forward and gradient of `last` are one block of the
        program.
        """
        functions, name = self.step.setup.functions, "first" if end == FIRST else "last"
        spread = functions.spreads(name)
        return LayerCost(
            forward=self.seconds[name],
            input_grad=0.0,
            weight_grad=self.seconds.get(f"{name} gradient", 0.0),
            ends=where_spread if spread else Ends.ONE,
        )


def kept(entry: Mapping[str, int]) -> int:
    """Bytes that a forward keeps for the backward of a microbatch, its input not counted."""
    return entry["residual_input"] + entry["residual_weight"]


def traced(pipe: Pipeline, params: Params, batch: PyTree, rng: Rng, state: PyTree) -> TracedStep:
    """Trace the step on one coordinate of the pipe and data axes, and ask the partitioner where
    axes are left to it.
    """
    with pipe._arguments(params, batch, rng, state) as arguments:
        setup = pipe._steps.prepare(Call.STEP, arguments).setup
    shapes = setup.shapes(StepArguments(with_outer(params), batch, rng, state))
    manual = (pipe.axis, *pipe.data_axes)
    at = tuple(slice(0, 1) if name in manual else slice(None) for name in pipe.mesh.axis_names)
    one = automatic(Mesh(pipe.mesh.devices[at], pipe.mesh.axis_names))
    setup = replace(setup, partition=replace(setup.partition, mesh=one))
    # A traced program remembers the size of its mesh.
    code = trace(setup, shapes)
    return TracedStep(setup, code, lower(setup, code), split_entries(setup, code, shapes.owned))


@outside_contexts
def measured_blocks(
    pipe: Pipeline, *arguments: PyTree, repeats: int, peak: Peak | None
) -> Measured:
    """Every block of a step of these arguments, compiled alone, and timed or estimated."""
    step = traced(pipe, *arguments)
    blocks = {block.name: block for block in outer_blocks(step)}
    for number in range(len(step.code.kinds)):
        pieces = stage_blocks(step, number)
        blocks |= {f"{name} {number}": pieces[name] for name in BLOCKS}
    compiled = {name: compile_blocks(step, block) for name, block in blocks.items()}
    temp = {name: temp_of(step, each) for name, each in compiled.items()}
    largest = max(range(len(step.code.kinds)), key=partial(boundary_bytes, step))
    hops = pipe.schedule.num_devices > 1
    if peak is None:
        seconds = timed(
            {name: call_of(each, blocks[name].changes) for name, each in compiled.items()}, repeats
        )
        hop = hop_seconds(pipe, step, largest, repeats) if hops else 0.0
        unit = f"seconds, measured on {pipe.mesh.devices.flat[0].device_kind}"
    else:
        size = step.setup.mesh.size
        seconds = {name: peak.seconds(block.jaxpr, size) for name, block in blocks.items()}
        hop = peak.hop(boundary_bytes(step, largest)) if hops else 0.0
        rates = f"{peak.flops:.3g} flops and {peak.bandwidth:.3g} bytes a second"
        unit = f"seconds, estimated for {rates}"
    return Measured(step, {**seconds, "hop": hop}, temp, unit)


def hop_seconds(pipe: Pipeline, step: TracedStep, kind: int, repeats: int) -> float:
    """Of the output of a kind of stage to the next device of the pipe axis, less the time of the
    same call that sends nothing.
    """
    code = step.code.kinds[kind]
    splits = output_entries(code, step.entries[kind])
    every = zip(map(words_of, jax.tree.leaves(code.y)), splits, strict=True)
    moved = [(aval, entry) for aval, entry in every if 0 not in aval.shape]
    if not moved:
        return 0.0
    sent = [aval for aval, _ in moved]
    specs = [PartitionSpec(pipe.axis, *entry.spec) for _, entry in moved]
    # Two devices exchange, as neighbours do; the others take no part.
    pairs = ((0, 1), (1, 0))
    calls = {
        name: exchange(automatic(pipe.mesh), pipe.axis, those, sent, specs)
        for name, those in (("hop", pairs), ("nothing", ()))
    }
    found = timed(calls, repeats)
    return max(0.0, found["hop"] - found["nothing"])


_PolicyNames: TypeAlias = Annotated[
    Sequence[str],
    Fits(
        "names of jax.checkpoint_policies, such as 'dots_with_no_batch_dims_saveable'",
        lambda names: all(hasattr(jax.checkpoint_policies, name) for name in names),
    ),
]


@typed(PipelineError)
def measure(
    model: Model,
    params: CanonicalParams,
    microbatch: PyTree,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding = Sharding(),  # noqa: B008  it is frozen
    memory: Memory = Memory(),  # noqa: B008
    rng: object = None,
    state: PyTree = (),
    repeats: Count = 10,
    peak: Peak | None = None,
    policies: _PolicyNames = (),
) -> Costs | dict[str, LayerCost]:
    """The costs of a model for one microbatch, in seconds and bytes: `Costs` with an entry for each
    stage, or a `LayerCost` for each letter of a model that is given by letters.

    F (with what it keeps written to memory), B, I and W of every kind of stage, `first`, its
    gradient, `last` with its gradient and a hop to the next device are compiled as the step would,
    each alone, and run in turn on one coordinate of the pipe and data axes.  The median of
    `repeats` rounds counts.  In `Costs`, `first` is in F of the first stage and its gradient in B
    and I, and `last` is in F of the last one.  Where they are spread, a device's share is
    `Costs.last`, `first` and `first_grad` instead, without the time of its collectives over the
    pipe axis.  Devices that share a stage, along axes that are left to the partitioner, run it
    together; bytes are those of one of them.  Bytes of shared parameters are counted with those of
    letter "L" ("E" where there is no "L").

    Args:
        model: the model, by stages or by letters.
        params: canonical parameters (arrays or shapes); values are not used.
        microbatch: the rows of one microbatch on each data shard, arrays or shapes.
        mesh: the mesh of the pipeline; for letters its pipe axis has one coordinate.  None takes
            local devices: one for letters, and as many as divide the stages otherwise.
        sharding, memory: as for `Pipeline`.
        rng, state: as for `Pipeline.value_and_grad`.
        repeats: rounds of timed runs.
        peak: where it is given nothing is run: seconds are estimated from the blocks' flops and
            bytes, and `unit` says so.
        policies: names of `jax.checkpoint_policies` under which layers are measured too
            (`LayerCost.policies`), so that `plan` can choose among them; for letters alone.

    Raises:
        PipelineError: as `Pipeline` does, and for arguments of other types or bounds.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> layers = {"t": lambda w, x: jnp.tanh(x @ w), "L": lambda p, x, mb: jnp.mean(x**2)}
        >>> params = {"stages": {"t": jnp.ones((6, 8, 8), jnp.float32)}, "last": {}}
        >>> model = jp.Model(layers, layers="t*6L")
        >>> found = jp.measure(model, params, {"x": jnp.ones((4, 8), jnp.float32)}, repeats=1)
        >>> found["t"].parameters, found["t"].boundary, found["t"].forward > 0
        (256, 128, True)
    """
    if policies and model.layers is None:
        raise PipelineError(
            "policies are of the letters of layers; leave them out where a model is given by stages"
        )
    rows = jax.tree.map(shape_of, microbatch)
    settings: dict[str, Any] = {"sharding": sharding, "memory": memory}
    if model.layers is None:
        pipe = _of_stages(model, params, mesh, **settings)
        return measure_stages(
            pipe,
            _placed(pipe, params),
            batch_shapes(model, rows, pipe.schedule.num_microbatches * pipe.partition.data_size),
            rng=rng,
            state=pipe.place_state(state) if state else state,
            repeats=repeats,
            peak=peak,
        )
    settings["mesh"] = mesh or _mesh(1, sharding.pipe)
    letters = [letter for letter in model.stages if letter not in (FIRST, LAST)]

    def costs(own: Model) -> dict[str, LayerCost]:
        pipe, placed = _of_letters(own, letters, params, **settings)
        measured = measured_blocks(pipe, placed, rows, None, (), repeats=repeats, peak=peak)
        return measured.layers(letters, placed, rows)

    found = costs(model)
    for name in policies:
        under = costs(under_policies(model, dict.fromkeys(letters, name)))
        for letter in letters:
            own, changed = found[letter], under[letter]
            again = max(0.0, changed.backward_seconds - own.backward_seconds)
            kept = {name: Kept(changed.residuals, again, changed.stash)}
            found[letter] = replace(own, policies={**own.policies, **kept})
    return found


def _of_stages(
    model: Model, params: CanonicalParams, mesh: Mesh | None, **options: Any
) -> Pipeline:
    """A pipeline of a model that is given by stages."""
    sharding: Sharding = options["sharding"]
    if callable(model.stages):
        shapes = map(np.shape, jax.tree.leaves(params["stages"]))
        stages = next((int(shape[0]) for shape in shapes if shape), 1)
    else:
        stages = len(model.stages)
    if mesh is None:
        devices = max(d for d in range(1, len(jax.devices()) + 1) if stages % d == 0)
        mesh = _mesh(devices, sharding.pipe)
    devices = dict(mesh.shape).get(sharding.pipe, 1)
    name, chunks = ("no_pipelining" if devices == 1 else "looped_bfs"), max(1, stages // devices)
    schedule = build(name, devices=devices, microbatches=devices, chunks=chunks)
    return Pipeline(model, schedule, mesh, **options)


def _mesh(devices: int, axis: str) -> Mesh:
    """A mesh of the first local devices."""
    return jax.make_mesh((devices,), (axis,), devices=jax.devices()[:devices])


def _of_letters(
    model: Model, letters: Sequence[str], params: CanonicalParams, **options: Any
) -> tuple[Pipeline, Params]:
    """A pipeline in which a layer of each letter is a stage of its own, and its placed shapes."""
    first, last = (letter if letter in model.stages else "" for letter in (FIRST, LAST))
    pipe = Pipeline(
        model.changed(layers=first + "".join(letters) + last),
        build("no_pipelining", devices=1, microbatches=1, chunks=len(letters)),
        layout=first + "|".join(letters) + last,
        **options,
    )
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), params["stages"]
    )
    return pipe, _placed(pipe, {**params, "stages": one})


@outside_contexts
def _placed(pipe: Pipeline, params: CanonicalParams) -> Params:
    """The placed shapes of parameters: the pipeline's mesh may be another than the caller's."""
    return pipe.place(jax.tree.map(shape_of, dict(params)))


@typed(PipelineError)
def measure_stages(
    pipe: Pipeline,
    params: Params,
    batch: PyTree,
    *,
    rng: object = None,
    state: PyTree = (),
    repeats: Count = 10,
    peak: Peak | None = None,
) -> Costs:
    """The costs of each stage of a pipeline for one microbatch, as `measure` has them for a model.

    Args:
        pipe: the pipeline, whose schedule does not matter.
        params: placed parameters, or shapes (see `place`); values are not used.
        batch: as for `value_and_grad`; arrays or shapes.
        rng, state: as for `value_and_grad`.
        repeats, peak: as for `measure`.

    Raises:
        PipelineError: as `value_and_grad` does, and for repeats below 1.
    """
    measured = measured_blocks(pipe, params, batch, rng, state, repeats=repeats, peak=peak)
    step, kinds = measured.step, measured.step.code.kind_of
    letters = [chr(256 + kind) for kind in kinds]
    costs = {chr(256 + kind): measured.stage_times(kind) for kind in kinds}
    for end in (FIRST,) if step.code.last is None else (FIRST, LAST):
        costs[end] = measured.end_times(end, Ends.SHARE)
    letters[0] = FIRST + letters[0]
    letters[-1] += LAST if LAST in costs else ""
    layout, hop = Layout(tuple(letters), 1), measured.seconds["hop"]
    entries = [entry_bytes(step, kind) for kind in kinds]
    return replace(
        stage_costs(layout, costs, remat=Remat.STAGES, transfer=hop),
        activation=tuple(kept(entry) + entry["x"] for entry in entries),
        checkpoint=tuple(entry["x"] for entry in entries),
        unit=measured.unit,
    )


def batch_shapes(
    model: Model, rows: PyTree, count: int, sharding: NamedSharding | None = None
) -> PyTree:
    """Shapes of a batch of so many microbatches."""

    def shape(leaf: jax.Array | jax.ShapeDtypeStruct, *rows: int) -> jax.ShapeDtypeStruct:
        own = (*rows, *leaf.shape[len(rows) :])
        kind = {"sharding": sharding, "weak_type": leaf.weak_type}
        return jax.ShapeDtypeStruct(own, leaf.dtype, **kind)

    return map_rows(lambda leaf: shape(leaf, count * leaf.shape[0]), rows, model.whole, shape)


@typed(PipelineError)
def traced_memory(
    model: Model,
    params: CanonicalParams,
    microbatch: PyTree,
    *,
    mesh: Mesh,
    **options: object,
) -> Callable[[PipelinePlan], dict[str, int]]:
    """A function from a plan to the memory of its step by what it is for, for `plan(traced=)`.

    The plan's pipeline is traced, and each of its blocks compiled alone for the mesh, whose devices
    may be described ones: nothing runs, and the step itself is not compiled
    (`jaxpipe.inspect.memory`).

    Args:
        model, params, microbatch: as for `measure`.
        mesh: of the pipeline.
        options: further ones of `Pipeline`, `sharding` for instance.
    """
    if model.layers is None:
        raise PipelineError("the model must be given by the letters of its layers")
    shapes, rows = (jax.tree.map(shape_of, each) for each in (dict(params), microbatch))

    @outside_contexts
    def of_pipe(pipe: Pipeline, microbatches: int) -> dict[str, int]:
        placed, whole = pipe.place(shapes), NamedSharding(pipe.mesh, PartitionSpec())
        batch = batch_shapes(model, rows, microbatches, whole)
        step = pipe.trace(placed, batch)
        return facts(step, step_sizes(step, placed, batch, ()))

    return lambda plan: of_pipe(
        plan.pipeline(model, mesh, **options), plan.schedule.num_microbatches
    )
