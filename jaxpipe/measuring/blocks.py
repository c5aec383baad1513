"""The blocks of a step, traced on one coordinate of the pipe and data axes, each compiled alone as the step would."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, Mesh, PartitionSpec

from ..arrays import PyTree
from ..model.param_layout import with_outer
from ..pipeline import Pipeline
from ..spmd.body import prepare
from ..spmd.entries import compiled_alone
from ..stage.code import run
from ..stage.job import Job
from ..stage.model_code import ModelCode, trace_model

_BLOCKS = ("F", "B", "I", "W")


def traced(pipe: Pipeline, params: dict[str, PyTree], batch: PyTree, rng: Any, state: Any) -> tuple[Job, ModelCode]:
    """The step's job, and the model's code on one coordinate of the pipe and data axes."""
    jobs: list[Job] = []
    jax.eval_shape(lambda p, b: pipe._step(p, b, rng, state, lambda job, *_: jobs.append(job)), params, batch)
    return jobs[0], _retraced(one_coordinate(pipe), *_local_shapes(pipe, jobs[0], with_outer(params), batch, rng, state))


def _local_shapes(pipe: Pipeline, job: Job, params: dict[str, PyTree], batch: PyTree, rng: Any, state: Any) -> tuple[Job, tuple[Any, ...]]:
    """The job, told the sizes of what is cut, and what one device starts from, as shapes: the arguments of `trace_model`."""
    found: list[tuple[Job, tuple[Any, ...]]] = []

    def look(p: PyTree, b: PyTree, r: Any, s: Any) -> tuple[()]:
        given = prepare(job, p, b, r, s)
        parts = (given.owned, given.kept, given.shared, given.first, given.last, given.batch, given.rng)
        told = job.told({key: job.cuts.sizes(key, p[key]) for key in job.cuts.dims})
        found.append((told, jax.tree.map(shape_of, parts)))
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


def jaxprs_of(code: ModelCode) -> dict[str, core.Jaxpr]:
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


def one_coordinate(pipe: Pipeline) -> Mesh:
    """The mesh at one coordinate of the pipe and data axes, where a stage runs; axes that the partitioner has stay whole."""
    manual = (pipe.axis, *pipe.data_axes)
    at = tuple(slice(0, 1) if name in manual else slice(None) for name in pipe.mesh.axis_names)
    return Mesh(pipe.mesh.devices[at], pipe.mesh.axis_names, axis_types=(AxisType.Auto,) * len(at))


def compile_block(job: Job, mesh: Mesh, jaxpr: core.Jaxpr) -> Any:
    """A block compiled by itself, split as the partitioner likes."""
    return compiled_alone(job, mesh, lambda values: run(jaxpr, *values), [(var.aval, PartitionSpec()) for var in jaxpr.invars])


def shape_of(leaf: Any) -> Any:
    """Its shape and dtype alone."""
    return jax.ShapeDtypeStruct(np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf))
