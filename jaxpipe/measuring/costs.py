"""The costs of stages and layers, and the memory of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import inspect
from ..arrays import Params, PyTree
from ..engine.costs import Costs
from ..errors import PipelineError, quoted
from ..inspect.step_memory import Step, gradient_bytes, hoisted_bytes, local_bytes
from ..jaxprs.equations import nbytes
from ..layouts.layout import Layout
from ..model.arguments import under_policies
from ..model.leaf_plan import leaf_plans, trained
from ..model.model import Model
from ..model.settings import Memory, Sharding
from ..pipeline import Pipeline
from ..planner.layer_cost import FIRST, LAST, Ends, Kept, LayerCost, Remat, stage_costs
from ..planner.result import PipelinePlan
from ..schedules import build
from .blocks import BLOCKS, Measured, Peak, measure_blocks, refuse_layers, shape_of


def measure(
    model: Model,
    params: Mapping[str, PyTree],
    microbatch: PyTree,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding = Sharding(),  # noqa: B008  it is frozen
    memory: Memory = Memory(),  # noqa: B008
    rng: Any = None,
    state: Any = (),
    repeats: int = 10,
    peak: Peak | None = None,
    policies: Sequence[str] = (),
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
        PipelineError: as `Pipeline` does, for repeats below 1, and for names of no policy.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> layers = {"t": lambda w, x: jnp.tanh(x @ w), "L": lambda p, x, mb: jnp.mean(x**2)}
        >>> params = {"stages": {"t": jnp.ones((6, 8, 8), jnp.float32)}, "last": {}}
        >>> model = jp.Model(layers, layers="t*6L")
        >>> found = jp.measure(model, params, {"x": jnp.ones((4, 8), jnp.float32)}, repeats=1)
        >>> found["t"].parameters, found["t"].boundary, found["t"].forward > 0
        (256, 128, True)
    """
    if not isinstance(model, Model):
        raise PipelineError(f"model must be a jaxpipe.Model, not {quoted(model)}")
    if wrong := [name for name in policies if not hasattr(jax.checkpoint_policies, name)]:
        raise PipelineError(
            f"policies holds {', '.join(map(quoted, wrong))}; give names of "
            "jax.checkpoint_policies, such as 'dots_with_no_batch_dims_saveable'"
        )
    if policies and not model.is_layered:
        raise PipelineError("policies are of the letters of layers; the model is given by stages")
    rows = jax.tree.map(shape_of, microbatch)
    settings: dict[str, Any] = {"sharding": sharding, "memory": memory}
    if not model.is_layered:
        pipe = _of_stages(model, params, mesh, **settings)
        batch = _microbatches(rows, pipe.schedule.num_microbatches * pipe.partition.data_size)
        return measure_stages(
            pipe,
            pipe.place(jax.tree.map(shape_of, dict(params))),
            batch,
            rng=rng,
            state=pipe.place_state(state) if state else state,
            repeats=repeats,
            peak=peak,
        )
    refuse_layers(model.stages, params)
    letters, at = _inner(model), mesh or _mesh(1, sharding.pipe)

    def costs(own: Model) -> dict[str, LayerCost]:
        return layer_costs(own, params, rows, repeats, peak, mesh=at, **settings)

    named = {name: under_policies(model, dict.fromkeys(letters, name)) for name in policies}
    found, under = costs(model), {name: costs(own) for name, own in named.items()}
    return found | {letter: _with_policies(letter, found[letter], under) for letter in letters}


def _of_stages(
    model: Model,
    params: Mapping[str, PyTree],
    mesh: Mesh | None,
    *,
    sharding: Sharding,
    **memory: Any,
) -> Pipeline:
    """A pipeline of a model that is given by stages."""
    stages = _count(model, params)
    if mesh is None:
        devices = max(d for d in range(1, len(jax.devices()) + 1) if stages % d == 0)
        mesh = _mesh(devices, sharding.pipe)
    devices = dict(mesh.shape).get(sharding.pipe, 1)
    name, chunks = ("no_pipelining" if devices == 1 else "looped_bfs"), max(1, stages // devices)
    schedule = build(name, devices=devices, microbatches=devices, chunks=chunks)
    return Pipeline(model, schedule, mesh, sharding=sharding, **memory)


def _inner(model: Model) -> str:
    """The letters of the layers that are neither `first` nor `last`."""
    return "".join(letter for letter in model.stages if letter not in (FIRST, LAST))


def _microbatches(rows: PyTree, count: int, sharding: NamedSharding | None = None) -> PyTree:
    """Shapes of a batch of so many microbatches."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (count * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=sharding
        ),
        rows,
    )


def _mesh(devices: int, axis: str) -> Mesh:
    """A mesh of the first local devices."""
    return jax.make_mesh((devices,), (axis,), devices=jax.devices()[:devices])


def _count(model: Model, params: Mapping[str, PyTree]) -> int:
    """The number of stages of canonical parameters."""
    if not callable(model.stages):
        return len(model.stages)
    leaves = jax.tree.leaves(params.get("stages"))
    if not leaves or not leaves[0].shape:
        raise PipelineError(
            'params["stages"] has no leaves with a leading axis of stages; give canonical '
            "parameters, as for Pipeline.place"
        )
    return int(leaves[0].shape[0])


def measure_stages(
    pipe: Pipeline,
    params: Params,
    batch: PyTree,
    *,
    rng: Any = None,
    state: Any = (),
    repeats: int = 10,
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
    measured = measure_blocks(pipe, params, batch, rng, state, repeats, peak)
    step, kinds = measured.step, measured.step.code.kind_of
    letters = [chr(256 + kind) for kind in kinds]
    costs = {c: LayerCost(**_times(measured, kind)) for c, kind in zip(letters, kinds, strict=True)}
    for end, spread in _ends(step).items():
        costs[end] = LayerCost(
            **_times_of_end(measured, end), ends=Ends.SHARE if spread else Ends.ONE
        )
    letters[0] = FIRST + letters[0]
    letters[-1] += LAST if LAST in costs else ""
    found = stage_costs(
        Layout(tuple(letters), 1),
        costs,
        remat=Remat.STAGES,
        transfer=measured.seconds["hop"],
    )
    entries = [step.entry(kind) for kind in kinds]
    return replace(
        found,
        activation=tuple(kept(entry) + entry["x"] for entry in entries),
        checkpoint=tuple(entry["x"] for entry in entries),
        unit=measured.unit,
    )


def _times(measured: Measured, kind: int) -> dict[str, Any]:
    """Seconds of a kind of stage."""
    names = {"forward": "F", "input_grad": "I", "weight_grad": "W", "backward": "B"}
    return {name: measured.seconds[f"{block} {kind}"] for name, block in names.items()}


def _times_of_end(measured: Measured, end: str) -> dict[str, Any]:
    """Seconds of `first` or `last`; forward and gradient of `last` are one block of the program."""
    seconds = measured.seconds
    if end == LAST:
        return {"forward": seconds["last"], "input_grad": 0.0, "weight_grad": 0.0}
    gradient = seconds.get("first gradient", 0.0)
    return {"forward": seconds["first"], "input_grad": 0.0, "weight_grad": gradient}


def _ends(step: Step) -> dict[str, bool]:
    """The ends of a model that have blocks, and whether they are spread."""
    functions = step.job.functions
    found = {FIRST: functions.spreads_first}
    return found | ({} if step.code.last is None else {LAST: functions.spreads_last})


def layer_costs(
    model: Model,
    params: Mapping[str, PyTree],
    microbatch: PyTree,
    repeats: int,
    peak: Peak | None,
    **options: Any,
) -> dict[str, LayerCost]:
    """The cost of a layer of each letter, by a pipeline in which each is a stage of its own.

    Options are those of `Pipeline`.
    """
    letters = _inner(model)
    first, last = (letter if letter in model.stages else "" for letter in (FIRST, LAST))
    pipe = Pipeline(
        model.changed(layers=first + letters + last),
        build("no_pipelining", devices=1, microbatches=1, chunks=len(letters)),
        layout=first + "|".join(letters) + last,
        **options,
    )
    one = {
        letter: jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), tree
        )
        for letter, tree in params["stages"].items()
    }
    placed = pipe.place(jax.tree.map(shape_of, {**params, "stages": one}))
    measured = measure_blocks(pipe, placed, microbatch, None, (), repeats, peak)
    found = {letter: _stage_cost(measured, stage, placed) for stage, letter in enumerate(letters)}
    rows = sum(map(nbytes, jax.tree.leaves(microbatch)))
    reader = LAST if model.last is not None else FIRST
    for end, spread in _ends(measured.step).items():
        if end in model.stages:
            found[end] = _end_cost(measured, end, placed, rows, shared=end == reader, spread=spread)
    return found


def _held(measured: Measured, *trees: tuple[PyTree, PyTree]) -> dict[str, Any]:
    """Bytes of placed parameters and of their gradients, from shapes and plans."""
    leaves = [leaf for tree, _ in trees for leaf in jax.tree.leaves(tree)]
    has = trained(leaves, [plan for _, plans in trees for plan in leaf_plans(plans)])
    return {
        "parameters": sum(map(local_bytes, leaves)),
        "gradients": sum(gradient_bytes(measured.step.job, leaf) for leaf in has),
    }


def _stage_cost(measured: Measured, stage: int, placed: Mapping[str, PyTree]) -> LayerCost:
    """Of a stage that is one layer."""
    step = measured.step
    number = step.code.kind_of[stage]
    kind, entries, entry = step.code.kinds[number], step.entries[number], step.entry(number)
    return LayerCost(
        **_times(measured, number),
        **_held(measured, (placed["stages"][stage], step.job.plans["stages"][stage])),
        residuals=kept(entry),
        boundary=step.boundary(number),
        stash=entry["stash"],
        workspace=max(measured.temp[f"{name} {number}"] for name in BLOCKS),
        hoisted=hoisted_bytes(step, kind, entries.parameters),
    )


def _end_cost(
    measured: Measured,
    end: str,
    placed: Mapping[str, PyTree],
    rows: int,
    *,
    shared: bool,
    spread: bool,
) -> LayerCost:
    """The cost of `first` or `last`; with the bytes of the `shared` parameters, which every device
    has too, and of the batch's rows.
    """
    key = "first" if end == FIRST else "last"
    step, keys = measured.step, (key, "shared") if shared else (key,)
    return LayerCost(
        **_times_of_end(measured, end),
        **_held(measured, *((placed.get(name, ()), step.job.plans[name]) for name in keys)),
        ends=Ends.ALL if spread else Ends.ONE,
        batch=rows if shared else 0,
        boundary=step.entry(step.code.kind_of[0])["x"] if end == FIRST else 0,
        workspace=max(measured.temp.get(name, 0) for name in (key, f"{key} gradient")),
    )


def kept(entry: Mapping[str, int]) -> int:
    """Bytes that a forward keeps for the backward of a microbatch, its input not counted."""
    return entry["residual_input"] + entry["residual_weight"]


def _with_policies(
    letter: str, own: LayerCost, under: Mapping[str, Mapping[str, LayerCost]]
) -> LayerCost:
    """The cost of a layer, with what it keeps and computes again under each policy."""
    costs = {name: found[letter] for name, found in under.items()}
    policies = {
        name: Kept(c.residuals, max(0.0, c.backward_seconds - own.backward_seconds), c.stash)
        for name, c in costs.items()
    }
    return replace(own, policies=policies)


def traced_memory(
    model: Model,
    params: Mapping[str, PyTree],
    microbatch: PyTree,
    *,
    mesh: Mesh,
    **options: Any,
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
    refuse_layers(model.stages, params)
    shapes, rows = (jax.tree.map(shape_of, each) for each in (dict(params), microbatch))

    def found(plan: PipelinePlan) -> dict[str, int]:
        pipe = plan.pipeline(model, mesh, **options)
        whole = NamedSharding(pipe.mesh, PartitionSpec())
        batch = _microbatches(rows, plan.schedule.num_microbatches, whole)
        return inspect.memory(pipe, pipe.place(shapes), batch)

    return found
