"""The costs of stages and layers, and the memory of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import inspect
from ..arrays import Params, PyTree
from ..engine.costs import Costs
from ..errors import PipelineError, quoted
from ..inspect.step_memory import gradient_bytes, hoisted_bytes, local_bytes
from ..jaxprs.equations import nbytes
from ..model.arguments import under_policies
from ..model.leaf_plan import leaf_plans, trained
from ..model.model import Model
from ..model.settings import Memory, Sharding
from ..pipeline import Pipeline
from ..planner.layer_cost import FIRST, LAST, Ends, Kept, LayerCost
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
    """What a model costs for one microbatch, in seconds and bytes: `Costs` with an entry for each
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
    rows = jax.tree.map(shape_of, microbatch)
    settings: dict[str, Any] = {"sharding": sharding, "memory": memory}
    if wrong := [name for name in policies if not hasattr(jax.checkpoint_policies, name)]:
        raise PipelineError(
            f"policies holds {', '.join(map(quoted, wrong))}; give names of "
            "jax.checkpoint_policies, such as 'dots_with_no_batch_dims_saveable'"
        )
    if model.is_layered:
        letters = "".join(letter for letter in model.stages if letter not in (FIRST, LAST))
        refuse_layers(model.stages, params)
        ends = [letter if letter in model.stages else "" for letter in (FIRST, LAST)]
        one = model.changed(layers=ends[0] + letters + ends[1])
        schedule = build("no_pipelining", devices=1, microbatches=1, chunks=len(letters))
        at = _mesh(1, sharding.pipe) if mesh is None else mesh
        layout = ends[0] + "|".join(letters) + ends[1]

        def under(policies: Mapping[str, str]) -> dict[str, LayerCost]:
            own = under_policies(one, policies)
            pipe = Pipeline(own, schedule, at, layout=layout, **settings)
            return layer_costs(pipe, letters, params, rows, repeats, peak)

        found = under({})
        each = {name: under(dict.fromkeys(letters, name)) for name in policies}
        return found | {letter: _with_policies(letter, found, each) for letter in letters}
    if policies:
        raise PipelineError("policies are of the letters of layers; the model is given by stages")
    stages = _count(model, params)
    if mesh is None:
        mesh = _mesh(
            max(d for d in range(1, len(jax.devices()) + 1) if stages % d == 0), sharding.pipe
        )
    devices = dict(mesh.shape).get(sharding.pipe, 1)
    name, chunks = ("no_pipelining" if devices == 1 else "looped_bfs"), max(1, stages // devices)
    schedule = build(name, devices=devices, microbatches=devices, chunks=chunks)
    pipe = Pipeline(model, schedule, mesh, **settings)
    placed = pipe.place(jax.tree.map(shape_of, dict(params)))
    shards = pipe.schedule.num_microbatches * pipe.partition.data_size

    def whole(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.shape[0] * shards, *leaf.shape[1:]), leaf.dtype)

    if state:
        state = pipe.place_state(state)
    return measure_stages(
        pipe, placed, jax.tree.map(whole, rows), rng=rng, state=state, repeats=repeats, peak=peak
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
    """What each stage of a pipeline costs for one microbatch, as `measure` says of a model.

    Args:
        pipe: the pipeline, whose schedule does not matter.
        params: placed parameters, or shapes (see `place`); values are not used.
        batch: as for `value_and_grad`; arrays or shapes.
        rng, state: as for `value_and_grad`.
        repeats, peak: as for `measure`.

    Raises:
        PipelineError: as `value_and_grad` does, and for repeats below 1.
    """
    found = measure_blocks(pipe, params, batch, rng, state, repeats, peak)
    code, functions, final = (
        found.step.code,
        found.step.job.functions,
        len(found.step.code.kind_of) - 1,
    )
    # Names of the blocks that run with a stage; a spread `first` or `last` does not.
    first, first_gradient = ("", "") if functions.spreads_first else ("first", "first gradient")
    last = "" if functions.spreads_last else "last"

    def times(block: str, at_first: str = "", at_last: str = "") -> tuple[float, ...]:
        more = {0: found.seconds.get(at_first, 0.0)}
        more[final] = more.get(final, 0.0) + found.seconds.get(at_last, 0.0)
        return tuple(
            found.seconds[f"{block} {kind}"] + more.get(s, 0.0)
            for s, kind in enumerate(code.kind_of)
        )

    entries = [found.step.entry(kind) for kind in code.kind_of]
    return Costs(
        forward=times("F", first, last),
        input_grad=times("I", first_gradient),
        weight_grad=times("W"),
        backward=times("B", first_gradient),
        transfer=found.seconds["hop"],
        recompute=times("F"),
        activation=tuple(kept(entry) + entry["x"] for entry in entries),
        checkpoint=tuple(entry["x"] for entry in entries),
        first=found.seconds["first"] if functions.spreads_first else None,
        first_grad=found.seconds.get("first gradient", 0.0) if functions.spreads_first else None,
        last=found.seconds["last"] if functions.spreads_last else None,
        unit=found.unit,
    )


def layer_costs(
    pipe: Pipeline,
    letters: str,
    params: Mapping[str, PyTree],
    microbatch: PyTree,
    repeats: int,
    peak: Peak | None,
) -> dict[str, LayerCost]:
    """What a layer of each letter costs, by a pipeline in which each is a stage of its own."""
    one = {
        **params,
        "stages": {
            letter: jax.tree.map(_first_layer, tree) for letter, tree in params["stages"].items()
        },
    }
    placed = pipe.place(jax.tree.map(shape_of, one))
    batch = jax.tree.map(shape_of, microbatch)
    measured = measure_blocks(pipe, placed, batch, None, (), repeats, peak)
    found = {letter: _stage_cost(measured, stage, placed) for stage, letter in enumerate(letters)}
    rows, reader = (
        sum(map(nbytes, jax.tree.leaves(batch))),
        LAST if pipe.model.last is not None else FIRST,
    )
    for letter in (FIRST, LAST):
        if letter in pipe.model.stages:
            found[letter] = _end_cost(
                measured, letter, placed, rows if letter == reader else 0, shared=letter == reader
            )
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
    step, seconds = measured.step, measured.seconds
    number = step.code.kind_of[stage]
    kind, entries, entry = step.code.kinds[number], step.entries[number], step.entry(number)
    return LayerCost(
        forward=seconds[f"F {number}"],
        input_grad=seconds[f"I {number}"],
        weight_grad=seconds[f"W {number}"],
        backward=seconds[f"B {number}"],
        **_held(measured, (placed["stages"][stage], step.job.plans["stages"][stage])),
        residuals=kept(entry),
        boundary=step.boundary(number),
        stash=entry["stash"],
        workspace=max(measured.temp[f"{name} {number}"] for name in BLOCKS),
        hoisted=hoisted_bytes(step, len(kind.consts), kind.hoist, entries.parameters),
    )


def _end_cost(
    measured: Measured, letter: str, placed: Mapping[str, PyTree], rows: int, *, shared: bool
) -> LayerCost:
    """The cost of `first` or `last`; forward and gradient of `last` are one block of the program.

    With the bytes of the `shared` parameters, which every device has too.
    """
    key, forward, backward = (
        ("first", "first", "first gradient") if letter == FIRST else ("last", "last", "")
    )
    step, keys = measured.step, (key, "shared") if shared else (key,)
    functions = step.job.functions
    spread = functions.spreads_first if letter == FIRST else functions.spreads_last
    return LayerCost(
        ends=Ends.ALL if spread else Ends.ONE,
        batch=rows,
        forward=measured.seconds[forward],
        input_grad=0.0,
        weight_grad=measured.seconds.get(backward, 0.0),
        **_held(measured, *((placed.get(name, ()), step.job.plans[name]) for name in keys)),
        boundary=step.entry(step.code.kind_of[0])["x"] if letter == FIRST else 0,
        workspace=max(measured.temp[forward], measured.temp.get(backward, 0)),
    )


def kept(entry: Mapping[str, int]) -> int:
    """Bytes that a forward keeps for the backward of a microbatch, its input not counted."""
    return entry["residual_input"] + entry["residual_weight"]


def _with_policies(
    letter: str,
    plain: Mapping[str, LayerCost],
    under: Mapping[str, Mapping[str, LayerCost]],
) -> LayerCost:
    """The cost of a layer, with what it keeps and computes again under each policy."""
    own = plain[letter]
    policies = {
        name: Kept(
            found[letter].residuals,
            max(0.0, found[letter].backward_seconds - own.backward_seconds),
            found[letter].stash,
        )
        for name, found in under.items()
    }
    return replace(own, policies=policies)


def _first_layer(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)


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
    shapes = jax.tree.map(shape_of, dict(params))

    def found(plan: PipelinePlan) -> dict[str, int]:
        pipe = plan.pipeline(model, mesh, **options)
        count = plan.schedule.num_microbatches

        def rows(leaf: Any) -> Any:
            whole = NamedSharding(pipe.mesh, PartitionSpec())
            return jax.ShapeDtypeStruct(
                (count * np.shape(leaf)[0], *np.shape(leaf)[1:]),
                shape_of(leaf).dtype,
                sharding=whole,
            )

        return inspect.memory(pipe, pipe.place(shapes), jax.tree.map(rows, microbatch))

    return found
