"""The memory of a plan's step, from its traced and separately compiled blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree
from ..inspect import memory
from ..model.model import Model
from ..planner.result import PipelinePlan
from .blocks import refuse_layers, shape_of


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

        return memory(pipe, pipe.place(shapes), jax.tree.map(rows, microbatch))

    return found
