"""The costs of stages and layers, and the memory of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import Params, PyTree
from ..engine.costs import Costs
from ..errors import PipelineError, is_whole, quoted
from ..inspect.step_memory import memory as step_memory
from ..layouts.layout import Layout
from ..model.arguments import under_policies
from ..model.model import Model
from ..model.settings import Memory, Sharding, outside_contexts
from ..pipeline import Pipeline
from ..planner.candidate import PipelinePlan
from ..planner.layer_cost import FIRST, LAST, Ends, Kept, LayerCost, Remat, stage_costs
from ..schedules import build
from .blocks import Peak, kept, measured_blocks, shape_of


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
    named = [name for name in policies if not hasattr(jax.checkpoint_policies, name)]
    is_model = isinstance(model, Model)
    _refuse(
        repeats,
        peak,
        {
            f"model must be a jaxpipe.Model, not {quoted(model)}": is_model,
            f"policies holds {', '.join(map(quoted, named))}; give names of "
            "jax.checkpoint_policies, such as 'dots_with_no_batch_dims_saveable'": not named,
            "policies are of the letters of layers; the model is given by stages": not policies
            or not is_model
            or model.layers is not None,
        },
    )
    rows = jax.tree.map(shape_of, microbatch)
    settings: dict[str, Any] = {"sharding": sharding, "memory": memory}
    if model.layers is None:
        pipe = _of_stages(model, params, mesh, **settings)
        return measure_stages(
            pipe,
            _placed(pipe, params),
            _microbatches(rows, pipe.schedule.num_microbatches * pipe.partition.data_size),
            rng=rng,
            state=pipe.place_state(state) if state else state,
            repeats=repeats,
            peak=peak,
        )
    refuse_layers(model, params)
    settings["mesh"] = mesh or _mesh(1, sharding.pipe)
    letters = [letter for letter in model.stages if letter not in (FIRST, LAST)]

    def costs(own: Model) -> dict[str, LayerCost]:
        pipe, placed = _of_letters(own, letters, params, **settings)
        measured = measured_blocks(pipe, placed, rows, None, (), repeats=repeats, peak=peak)
        return measured.costs(letters, placed, rows)

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
    model: Model, params: Mapping[str, PyTree], mesh: Mesh | None, **options: Any
) -> Pipeline:
    """A pipeline of a model that is given by stages."""
    sharding: Sharding = options["sharding"]
    leaves = jax.tree.leaves(params.get("stages"))
    if not callable(model.stages):
        stages = len(model.stages)
    elif leaves and leaves[0].shape:
        stages = int(leaves[0].shape[0])
    else:
        raise PipelineError(
            'params["stages"] has no leaves with a leading axis of stages; give canonical '
            "parameters, as for Pipeline.place"
        )
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
    model: Model, letters: Sequence[str], params: Mapping[str, PyTree], **options: Any
) -> tuple[Pipeline, dict[str, PyTree]]:
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
def _placed(pipe: Pipeline, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The placed shapes of parameters: the pipeline's mesh may be another than the caller's."""
    return pipe.place(jax.tree.map(shape_of, dict(params)))


def _microbatches(rows: PyTree, count: int, sharding: NamedSharding | None = None) -> PyTree:
    """Shapes of a batch of so many microbatches."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (count * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=sharding
        ),
        rows,
    )


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
    is_pipe = isinstance(pipe, Pipeline)
    _refuse(repeats, peak, {f"pipe must be a jaxpipe.Pipeline, not {quoted(pipe)}": is_pipe})
    measured = measured_blocks(pipe, params, batch, rng, state, repeats=repeats, peak=peak)
    step, kinds = measured.step, measured.step.code.kind_of
    letters = [chr(256 + kind) for kind in kinds]
    costs = {
        letter: LayerCost(**measured.stage_times(kind))
        for letter, kind in zip(letters, kinds, strict=True)
    }
    for end, spread in measured.ends.items():
        own = Ends.SHARE if spread else Ends.ONE
        costs[end] = LayerCost(**measured.end_times(end), ends=own)
    letters[0] = FIRST + letters[0]
    letters[-1] += LAST if LAST in costs else ""
    layout, hop = Layout(tuple(letters), 1), measured.seconds["hop"]
    entries = [step.entry(kind) for kind in kinds]
    return replace(
        stage_costs(layout, costs, remat=Remat.STAGES, transfer=hop),
        activation=tuple(kept(entry) + entry["x"] for entry in entries),
        checkpoint=tuple(entry["x"] for entry in entries),
        unit=measured.unit,
    )


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
    refuse_layers(model, params)
    shapes, rows = (jax.tree.map(shape_of, each) for each in (dict(params), microbatch))

    def found(plan: PipelinePlan) -> dict[str, int]:
        pipe = plan.pipeline(model, mesh, **options)
        whole = NamedSharding(pipe.mesh, PartitionSpec())
        batch = _microbatches(rows, plan.schedule.num_microbatches, whole)
        return step_memory(pipe, pipe.place(shapes), batch)

    return found


def refuse_layers(model: Model, params: Any) -> None:
    """PipelineError for a model and parameters that are not by letter."""
    stages = params.get("stages") if isinstance(params, Mapping) else None
    if model.layers is None or not isinstance(stages, Mapping):
        raise PipelineError(
            "the model must be given by the letters of its layers, and params must be a mapping "
            "with 'stages', itself one from letters to parameters, not "
            f"{quoted(params)}"
        )
    keys = {FIRST: "first", LAST: "last"}
    missing = [
        letter
        for letter in model.stages
        if (keys[letter] not in params if letter in keys else letter not in stages)
    ]
    if missing:
        raise PipelineError(
            f"params have nothing for the layers {', '.join(missing)}; give {{}} to those "
            "without parameters"
        )


def _refuse(repeats: Any, peak: Any, checks: Mapping[str, bool]) -> None:
    """PipelineError that lists each fault whose check fails."""
    is_peak, is_count = peak is None or isinstance(peak, Peak), is_whole(repeats) and repeats >= 1
    own = {
        f"repeats must be at least 1, not {quoted(repeats)}": is_count,
        f"peak must be a jaxpipe.measuring.Peak, or None, not {quoted(peak)}": is_peak,
    }
    faults = [fault for fault, is_right in {**checks, **own}.items() if not is_right]
    PipelineError.refuse("this cannot be measured", faults)
