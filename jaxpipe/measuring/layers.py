"""What a layer of each letter costs, for the planner."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any

import jax

from ..arrays import PyTree
from ..inspect.blocks import stage_work_space
from ..inspect.step_memory import hoisted_bytes
from ..jaxprs.sizes import nbytes
from ..model.leaf_plan import leaf_plans
from ..pipeline import Pipeline
from ..planner.layer_cost import FIRST, LAST, LayerCost
from ..spmd.entries import outer_specs
from .blocks import shape_of
from .measured import Measured, measure_blocks
from .peak import Peak
from .sizes import gradient_bytes, parameter_bytes


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
    found = {
        letter: _stage_cost(measured, stage, one["stages"][letter])
        for stage, letter in enumerate(letters)
    }
    rows, reader = (
        sum(map(nbytes, jax.tree.leaves(batch))),
        LAST if pipe.model.last is not None else FIRST,
    )
    for letter in (FIRST, LAST):
        if letter in pipe.model.stages:
            found[letter] = _end_cost(
                measured, letter, params, rows if letter == reader else 0, shared=letter == reader
            )
    return found


def _stage_cost(measured: Measured, stage: int, params: PyTree) -> LayerCost:
    """Of a stage that is one layer."""
    step, seconds = measured.step, measured.seconds
    number, leaves = step.code.kind_of[stage], jax.tree.leaves(params)
    has = step.code.kinds[number].trained[: len(leaves)]
    kind, entries, size = step.code.kinds[number], step.entries[number], measured.sizes[number]
    specs = entries.parameters[: len(leaves)]  # the shared ones come after its own
    return LayerCost(
        forward=seconds[f"F {number}"],
        input_grad=seconds[f"I {number}"],
        weight_grad=seconds[f"W {number}"],
        backward=seconds[f"B {number}"],
        parameters=parameter_bytes(step.mesh, leaves, specs),
        gradients=gradient_bytes(
            step.mesh, compress(leaves, has), compress(specs, has), step.job.accumulate
        ),
        residuals=size.kept,
        boundary=size.boundary,
        stash=size.stash,
        workspace=max(stage_work_space(step.job, step.mesh, kind, entries).values()),
        hoisted=hoisted_bytes(step.job, step.mesh, len(kind.consts), kind.hoist, entries.parameters)
        if step.is_shared
        else sum(map(nbytes, kind.once_avals)),
    )


def _end_cost(
    measured: Measured, letter: str, params: Mapping[str, PyTree], rows: int, *, shared: bool
) -> LayerCost:
    """Of `first` or `last`; of the latter forward and gradient are one block of the program, whose
    parts are not apart.

    With the bytes of the `shared` parameters, which every device has too.
    """
    key, forward, backward = (
        ("first", "first", "first gradient") if letter == FIRST else ("last", "last", "")
    )
    step, keys = measured.step, (key, "shared") if shared else (key,)
    leaves = [shape_of(leaf) for name in keys for leaf in jax.tree.leaves(params.get(name, ()))]
    specs = outer_specs(step.job, key)[: len(leaves)]
    has = [not plan.frozen for name in keys for plan in leaf_plans(step.job.plans[name])]
    return LayerCost(
        batch=rows,
        forward=measured.seconds[forward],
        input_grad=0.0,
        weight_grad=measured.seconds.get(backward, 0.0),
        parameters=parameter_bytes(step.mesh, leaves, specs),
        gradients=gradient_bytes(
            step.mesh, compress(leaves, has), compress(specs, has), step.job.accumulate
        ),
        boundary=measured.sizes[step.code.kind_of[0]].taken if letter == FIRST else 0,
        workspace=max(measured.temp[forward], measured.temp.get(backward, 0)),
    )


def _first_layer(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)
