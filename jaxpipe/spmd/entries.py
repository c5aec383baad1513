"""Axes that are left to the partitioner: functions mapped over the others, and the form of pool
entries that it splits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.passmanager import PassManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import Leaves, PyTree
from ..jaxprs.collectives import Reductions
from ..jaxprs.entry import Entry, Part
from ..lowering.target import Target
from ..model.leaf_plan import leaf_plans
from ..stage.code import StageCode, inexact, run
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.effects import Place
from .compiler_options import options_for, options_unrun


def mapped(
    function: Callable[..., Any], mesh: Mesh, axes: Set[str], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """`jax.shard_map` of the function, with reductions in a form that XLA compiles."""
    alone = {name for name, size in mesh.shape.items() if size == 1}
    changes = Reductions(alone, widen=on_cpus(mesh))

    def call(*arguments: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        changed = core.ClosedJaxpr(changes.within(closed.jaxpr), closed.consts)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), core.jaxpr_as_fun(changed)(*jax.tree.leaves(arguments))
        )

    wanted = axes != set(mesh.axis_names) and (changes.widen or bool(alone & axes))
    return jax.shard_map(
        call if wanted else function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def on_cpus(mesh: Mesh) -> bool:
    """Whether the devices are CPUs."""
    return any(device.platform == "cpu" for device in mesh.devices.flat)


# Values, and the split of each; None leaves it to the partitioner.
Group: TypeAlias = "Sequence[tuple[Any, PartitionSpec | None]]"
_WHOLE = PartitionSpec()


@dataclass(frozen=True)
class StageEntries:
    """For one kind of stage, the entry of each stored leaf, and the splits of its parameters and
    the shared ones.
    """

    parameters: tuple[PartitionSpec, ...]
    stored: Mapping[Place, tuple[Entry, ...]]


def whole_entries(code: StageCode, target: Target) -> StageEntries:
    """The entries where no axis is left to the partitioner."""
    stored = {
        place: tuple(_whole(aval, target) for aval in avals) for place, avals in code.stored.items()
    }
    return StageEntries((_WHOLE,) * code.num_params, stored)


def _whole(aval: Any, target: Target) -> Entry:
    return Entry(tuple(aval.shape), tile=_tile(aval, target))


def _tile(aval: Any, target: Target) -> tuple[int, ...]:
    """The shape of tiles; keys of random numbers have none."""
    return () if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else target.tile


def split_entries(job: Job, code: ModelCode, owned: Sequence[PyTree]) -> tuple[StageEntries, ...]:
    """Read how the partitioner splits the stored values of each kind of stage: off its forward and
    its I, each alone.

    `owned` are the parameters of a device's stages.  The partitioner decides from a whole program,
    and its decisions inside the loop cannot be read.  The model's parameters and constraints
    determine nearly all of them.  Where the partitioner would decide otherwise, it moves that value
    to the split that is chosen here.
    """
    if not job.partition.auto_axes:
        return tuple(whole_entries(kind, job.target) for kind in code.kinds)
    kinds = range(len(code.kinds))
    return tuple(
        _of_kind(job, code.kinds[kind], param_specs(job, code.kind_of.index(kind), owned))
        for kind in kinds
    )


def _of_kind(job: Job, code: StageCode, specs: Sequence[PartitionSpec]) -> StageEntries:
    own = len(code.consts) + code.num_params
    inputs = [var.aval for var in code.forward.invars]
    parameters: Group = list(
        zip(inputs[:own], [*(_WHOLE for _ in code.consts), *specs], strict=True)
    )
    taken = (*code.x_avals, *code.passed)
    x: Group = [(aval, None) for aval in taken]
    extra: Group = [
        (aval, None) for aval in inputs[own + len(taken) : len(inputs) - len(code.once_avals)]
    ]

    def forward(parameters: Leaves, x: Leaves, extra: Leaves) -> Leaves:
        return run(code.forward, *parameters, *x, *extra, *run(code.hoist, *parameters))

    def input_grad(
        parameters: Leaves, x: Leaves, extra: Leaves, kept: Leaves, dy: Leaves
    ) -> Leaves:
        return run(
            code.input_grad, *parameters, *x, *extra, *run(code.hoist, *parameters), *kept, *dy
        )

    found = _output_specs(job, forward, parameters, x, extra)
    y, residuals = found[: len(code.y_avals)], found[code.num_outputs :]
    kept: Group = list(zip((*code.residual_input, *code.residual_weight), residuals, strict=True))
    cotangent = [spec for spec, wanted in zip(y, code.y_wanted, strict=True) if wanted]
    passed = list(zip(code.passed, found[len(y) : len(y) + len(code.passed)], strict=True))
    carry, buffers = passed[: len(code.carry)], passed[len(code.carry) :]
    later = [[each for each in those if inexact(each[0])] for those in (carry, buffers)]
    dy: Group = [
        *zip(code.dy_avals, cotangent, strict=True),
        *later[0],
        *later[1],
        *([] if code.loss is None else [(code.loss, _WHOLE)]),
    ]
    stash = _output_specs(job, input_grad, parameters, x, extra, kept, dy)[code.num_dx :]

    target = job.target
    early = len(code.residual_input)
    alike = [(a.shape, a.dtype) for a in code.x_avals] == [(a.shape, a.dtype) for a in code.y_avals]
    specs_of = {
        # An arriving value is split as the previous stage left it.  A stage that returns the form
        # of its input leaves it alike.
        Place.X: y if alike else None,
        Place.COTANGENT: cotangent,
        Place.RESIDUAL_INPUT: residuals[:early],
        Place.RESIDUAL_WEIGHT: residuals[early:],
        Place.STASH: stash,
        Place.CARRY: [spec for _, spec in carry],
        Place.CARRY_GRADIENT: [spec for _, spec in later[0]],
        Place.BUFFER: [spec for _, spec in buffers],
        Place.BUFFER_GRADIENT: [spec for _, spec in later[1]],
    }
    stored = whole_entries(code, target).stored
    split = {
        place: tuple(
            _entry(job.mesh, aval, spec, _tile(aval, target))
            for aval, spec in zip(code.stored[place], own, strict=True)
        )
        for place, own in specs_of.items()
        if own is not None
    }
    return StageEntries(tuple(specs), {**stored, **split})


def param_specs(job: Job, stage: int, owned: Sequence[PyTree]) -> list[PartitionSpec]:
    """How the partitioner splits a stage's own parameters and the shared ones."""
    chunk, _ = job.layout.where(stage)
    own = _split_as(job.plans["stages"][chunk])
    places = job.layout.places(stage, owned)
    own = [place.entry.spec if place.flat else own[place.at] for place in places]
    return [*own, *_split_as(job.plans["shared"])]


def outer_specs(job: Job, key: str) -> list[PartitionSpec]:
    """How the partitioner splits the parameters that `first` or `last` takes: its own, then the
    shared ones.
    """
    return [*_split_as(job.plans[key]), *_split_as(job.plans["shared"])]


def _split_as(plans: PyTree) -> list[PartitionSpec]:
    return [PartitionSpec(*plan.auto) for plan in leaf_plans(plans)]


def _output_specs(job: Job, function: Callable[..., Leaves], *groups: Group) -> list[PartitionSpec]:
    """The splits of a function's outputs, from those of its inputs.

    The partitioner's propagation is the first pass of XLA.  It runs alone, so nothing is compiled.
    """
    module = _lowered_alone(job, function, groups).compiler_ir("stablehlo")
    with module.context:
        PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
    results: Any = ir.SymbolTable(module.operation)["main"].attributes["res_attrs"]
    return [
        _spec_of(sdy.TensorShardingAttr(found["sdy.sharding"]))
        if "sdy.sharding" in found
        else _WHOLE
        for found in results
    ]


def _spec_of(sharding: Any) -> PartitionSpec:
    """A split as JAX has it; whole where a dim is split over a part of an axis."""
    dims = map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
    axes = [[sdy.AxisRefAttr(axis) for axis in dim.axes] for dim in dims]
    if any(axis.sub_axis_info is not None for dim in axes for axis in dim):
        return _WHOLE
    return PartitionSpec(*(tuple(axis.name for axis in dim) or None for dim in axes))


def compiled_alone(
    job: Job,
    function: Callable[..., Leaves],
    *groups: Group,
    donated: Sequence[int] = (),
    unrun: bool = False,
) -> Any:
    """A piece of a device's program compiled by itself for the job's mesh: it takes a list for each
    group and returns one.

    Outputs take the room of the `donated` groups, as pools and accumulators are updated in place in
    the step.  An `unrun` program is only read: it is neither run nor measured.
    """
    options = options_for(job.target) | (options_unrun(job.target) if unrun else {})
    return _lowered_alone(job, function, groups, donated).compile(compiler_options=options)


def _lowered_alone(
    job: Job,
    function: Callable[..., Leaves],
    groups: Sequence[Group],
    donated: Sequence[int] = (),
) -> Any:
    mesh = job.mesh
    alone = mapped(function, mesh, job.axes, in_specs=_WHOLE, out_specs=_WHOLE)

    def shape(aval: Any, spec: PartitionSpec | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=None if spec is None else NamedSharding(mesh, spec)
        )

    return jax.jit(alone, donate_argnums=tuple(donated)).lower(
        *([shape(*each) for each in group] for group in groups)
    )


def _entry(mesh: Mesh, aval: Any, spec: PartitionSpec, tile: tuple[int, ...]) -> Entry:
    shape, parts = tuple(aval.shape), []
    for dim, entry in enumerate(spec):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        count = math.prod(mesh.shape[name] for name in names)
        if count > 1 and shape[dim] % count:
            return Entry(shape, tile=tile)  # padded parts: left to the partitioner
        if count > 1:
            parts.append(Part(dim, names, count))
    return Entry(shape, tuple(parts), pinned=True, tile=tile)
