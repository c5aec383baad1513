"""XLA: its options for a pipeline's program, functions mapped over the mesh axes that are not left
to its partitioner, and how the partitioner splits values that pools keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import compress
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.passmanager import PassManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import Leaf, Leaves, PyTree, is_key, zeros_of
from ..jaxprs.entry import Entry
from ..jaxprs.equations import Reductions, traced_once
from ..known_faults import Feature, faults_for
from ..lowering.target import Target
from ..stage.code import GRADIENT_OF, STORED, StageCode, inexact, run, signature
from ..stage.codes import ModelCode
from ..stage.setup import Setup
from ..storage.partition import parts_of
from ..storage.plan import leaf_plans
from ..storage.table import Home
from ..table.effects import Place
from ..table.kinds import By, Kind
from .pools import StageEntries

Options: TypeAlias = dict[str, str | bool]
# Values, and the split of each; None leaves it to the partitioner.
SplitLeaves: TypeAlias = "Sequence[tuple[Any, PartitionSpec | None]]"
_WHOLE = PartitionSpec()

# Operations that may be in a CUDA graph: XLA's default and WHILE.  With WHILE a block under a
# predicate is a node of a graph, and the host does not wait for its predicate.  COLLECTIVES is left
# out: CUDA allows no communication in a conditional node's body.  The list has all other types that
# this XLA accepts, because a block is a node only if all of its operations may be in a graph.
_IN_GRAPHS = (
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONVOLUTION,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
)
_ZERO_INIT = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
_GPU: Options = {
    "xla_gpu_enable_command_buffer": _IN_GRAPHS,
    "xla_gpu_graph_min_graph_size": "1",  # a predicate is one operation of its own
    # Stacks that a scan fills from zero are not filled with zeros first.
    _ZERO_INIT: True,
    # Several collectives are in flight at a time: transfers of both payloads up and down the model,
    # or those of both halves of a pair.  With one at a time, an awaited transfer keeps all others
    # from running during compute.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
    # Transfers are not merged.  In a vee placement, activations of one half and cotangents of the
    # other have the same direction.  A merged permute would be awaited before the first backward,
    # and could not run during it.
    "xla_gpu_collective_permute_combine_threshold_bytes": "0",
    # Matmuls of one operand are not merged.  XLA merges small ones.  If autotuning gives the merged
    # one to cuBLAS, its concatenated operand is written in every trip: more than half of the bytes
    # that the loops of a small model move.
    "xla_gpu_dot_merger_threshold_mb": "0",
}


# Where blocks communicate, over axes that are left to the partitioner.
_BLOCKS_COMMUNICATE: Options = {
    # The gathers of the two halves of an overlapped pair are not merged: a merged gather would
    # overlap no matmul.  XLA may merge scatters: without that, more of a layer is in memory at a
    # time.
    "xla_gpu_all_gather_combine_threshold_bytes": "0",
    # A transfer is in flight during a whole block with all of its collectives.  With a limit of
    # four, XLA would issue the transfer after the block.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "16",
}


# The host decides every predicate.
NO_GRAPHS: Options = {"xla_gpu_enable_command_buffer": ""}


def options_for(target: Target) -> Options:
    """The options for a target; none except on NVIDIA GPUs.

    The list of commands is explicit: this interface refuses the form with "+", though XLA_FLAGS
    takes it.
    """
    if not target.on_gpus:
        return {}
    options = _GPU | _BLOCKS_COMMUNICATE if target.communicates else dict(_GPU)
    if faults_for(target.platform, {Feature.ZERO_INIT}):
        del options[_ZERO_INIT]
    return options


_MANY = 8  # devices of a node


def features_of(target: Target, mesh: Mesh) -> frozenset[Feature]:
    """The features of a pipeline's program that known faults depend on."""
    devices = list(mesh.devices.flat)
    pipes = any(size > 1 for size in mesh.shape.values())
    # Described devices run nothing.
    runs = type(devices[0].client).__name__ != "CompileOnlyPyClient"
    used = {
        Feature.GRAPHS: target.on_gpus,
        Feature.ZERO_INIT: target.on_gpus,
        Feature.SEVERAL_DEVICES: pipes and runs,
        Feature.LARGE_CLIQUES: len(devices) > _MANY and jax.process_count() > 1,
        Feature.SEVERAL_PROCESSES: jax.process_count() > 1,
    }
    return frozenset(feature for feature, is_used in used.items() if is_used)


def mapped[T](
    function: Callable[..., T], mesh: Mesh, axes: Set[str], in_specs: object, out_specs: object
) -> Callable[..., T]:
    """`jax.shard_map` of the function, with reductions in a form that XLA compiles."""
    single = {name for name, size in mesh.shape.items() if size == 1}
    on_cpus = any(device.platform == "cpu" for device in mesh.devices.flat)
    changes = Reductions(single, widen=on_cpus)

    def call(*arguments: object) -> T:
        return traced_once(function, *arguments, change=changes.within)(*arguments)

    is_changed = axes != set(mesh.axis_names) and (changes.widen or bool(single & axes))
    return jax.shard_map(
        call if is_changed else function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def without_empty[A, T](
    mesh: Mesh, function: Callable[[A], T], argument: A, specs: A
) -> tuple[Callable[..., T], object, object]:
    """The function, its argument and the splits of this, without the leaves that have no elements:
    XLA of jaxlib 0.11 aborts where such a leaf is split over devices.
    """
    leaves, tree = jax.tree.flatten(argument)
    is_there = [0 not in jnp.shape(leaf) for leaf in leaves]
    if all(is_there):
        return function, argument, specs
    every = jax.tree.leaves(jax.tree.broadcast(specs, argument))
    shapes = [
        jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(leaf.shape), leaf.dtype)
        for leaf, spec, is_in in zip(leaves, every, is_there, strict=True)
        if not is_in
    ]

    def call(values: Leaves) -> T:
        there, made = iter(values), iter(zeros_of(shapes))
        whole = [next(there if is_in else made) for is_in in is_there]
        return function(jax.tree.unflatten(tree, whole))

    return call, list(compress(leaves, is_there)), list(compress(every, is_there))


def _stored(
    setup: Setup, code: StageCode, specs: Mapping[Place, Sequence[PartitionSpec | None]]
) -> dict[Place, tuple[Entry, ...]]:
    """The entry of each stored leaf, whole at places without specs."""
    found = {}
    for place in STORED:
        avals = code.avals[place]
        pairs = zip(avals, specs.get(place, [None] * len(avals)), strict=True)
        found[place] = tuple(_entry(setup, *pair) for pair in pairs)
    return found


def split_entries(
    setup: Setup, code: ModelCode, owned: Sequence[PyTree]
) -> tuple[StageEntries, ...]:
    """Read how the partitioner splits the stored values of each kind of stage: off its forward and
    its I, each alone.  They are whole where no axis is left to the partitioner.

    `owned` are the parameters of a device's stages.  The partitioner decides from a whole program,
    and its decisions inside the loop cannot be read.  The model's parameters and constraints
    determine nearly all of them.  Where the partitioner would decide otherwise, it moves that value
    to the split that is chosen here.
    """
    return tuple(
        _of_kind(setup, kind, param_specs(setup, kind, code.kind_of.index(number), owned))
        for number, kind in enumerate(code.kinds)
    )


def _of_kind(setup: Setup, code: StageCode, specs: Sequence[PartitionSpec]) -> StageEntries:
    if not (setup.partition.auto_axes and setup.training):
        return StageEntries(tuple(specs), _stored(setup, code, {}))
    avals, own = [var.aval for var in code.forward.invars], len(code.known)
    parameters: SplitLeaves = [
        *((aval, _WHOLE) for aval in avals[: len(code.consts)]),
        *zip(avals[len(code.consts) : own], specs, strict=True),
    ]
    free: SplitLeaves = [(aval, None) for aval in avals[own : code.num_inputs]]  # x and extra

    specs_of: dict[Place, list[PartitionSpec]] = {}

    def specs_from(kind: Kind) -> dict[Place, list[PartitionSpec]]:
        """The splits of the results of a kind of action."""
        called = signature(code, By.STAGE, kind, keeps=True, defers=False)
        late: SplitLeaves = [
            pair
            for place in called.takes
            for pair in zip(code.avals[place], specs_of[place], strict=True)
        ]

        def whole(parameters: Leaves, free: Leaves, late: Leaves) -> Leaves:
            once = run(code.hoist, *parameters)
            return run(called.jaxpr, *parameters, *free, *once, *late)

        return code.results(called.returns, _output_specs(setup, whole, parameters, free, late))

    specs_of |= specs_from(Kind.F)
    for gradient, place in GRADIENT_OF.items():
        pairs = zip(code.avals[place], specs_of.get(place, ()), strict=False)
        specs_of[gradient] = [spec for aval, spec in pairs if inexact(aval)]
    specs_of[Place.LOSSES] = [_WHOLE for _ in code.avals[Place.LOSSES]]  # their cotangents
    specs_of[Place.STASH] = specs_from(Kind.I)[Place.STASH]
    x, y = ([(a.shape, a.dtype) for a in code.avals[p]] for p in (Place.X, Place.SENT_X))
    if x == y:
        # An arriving value is split as the previous stage left it.  A stage that returns the form
        # of its input leaves it alike.
        specs_of[Place.X] = specs_of[Place.SENT_X]
    return StageEntries(tuple(specs), _stored(setup, code, specs_of))


def hoisted_specs(
    setup: Setup, code: StageCode, specs: Sequence[PartitionSpec]
) -> list[PartitionSpec]:
    """How the partitioner splits what is computed once a step from parameters with these splits."""
    if not setup.partition.auto_axes:
        return [_WHOLE for _ in code.hoist.outvars]
    inputs = hoisted_from(code, specs)
    return _output_specs(setup, lambda values: run(code.hoist, *values), inputs)


def hoisted_from(code: StageCode, specs: Sequence[PartitionSpec]) -> SplitLeaves:
    """What it is computed from."""
    splits = [*(_WHOLE for _ in code.consts), *specs]
    return list(zip([v.aval for v in code.hoist.invars], splits, strict=True))


def param_specs(
    setup: Setup, code: StageCode, stage: int, owned: Sequence[PyTree]
) -> list[PartitionSpec]:
    """How the partitioner splits a stage's own parameters and the shared ones."""
    chunk, _ = setup.layout.where(stage)
    own = _split_as(setup.plans["stages"][chunk])

    def split(place: Home) -> PartitionSpec:
        if place.flat:
            return place.entry.spec
        whole = own[place.at]
        return whole if place.row is None else PartitionSpec(*whole[1:])

    own = list(map(split, code.places(setup.layout.held(stage, owned).places)))
    return [*own, *_split_as(setup.plans["shared"])]


def outer_specs(setup: Setup, key: str) -> list[PartitionSpec]:
    """How the partitioner splits the parameters that `first` or `last` takes: its own, then the
    shared ones.
    """
    return [*_split_as(setup.plans[key]), *_split_as(setup.plans["shared"])]


def _split_as(plans: PyTree) -> list[PartitionSpec]:
    return [PartitionSpec(*plan.auto) for plan in leaf_plans(plans)]


def _output_specs(
    setup: Setup, function: Callable[..., Leaves], *groups: SplitLeaves
) -> list[PartitionSpec]:
    """The splits of a function's outputs, from those of its inputs.

    The partitioner's propagation is the first pass of XLA.  It runs alone, so nothing is compiled.
    """
    module: Any = _lowered_alone(setup, function, groups).compiler_ir("stablehlo")
    with module.context:
        PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
    results: Any = ir.SymbolTable(module.operation)["main"].attributes["res_attrs"]
    return [
        _spec_of(sdy.TensorShardingAttr(found["sdy.sharding"]))
        if "sdy.sharding" in found
        else _WHOLE
        for found in results
    ]


def _spec_of(sharding: sdy.TensorShardingAttr) -> PartitionSpec:
    """A split as JAX has it; whole where a dim is split over a part of an axis."""
    dims = map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
    axes = [[sdy.AxisRefAttr(axis) for axis in dim.axes] for dim in dims]
    if any(axis.sub_axis_info is not None for dim in axes for axis in dim):
        return _WHOLE
    return PartitionSpec(*(tuple(axis.name for axis in dim) or None for dim in axes))


def compiled_alone(
    setup: Setup, function: Callable[..., Leaves], *groups: SplitLeaves, donated: Sequence[int] = ()
) -> jax.stages.Compiled:
    """A piece of a device's program compiled by itself for the step's mesh: it takes a list for
    each group and returns one.

    Outputs take the room of the `donated` groups, as pools and accumulators are updated in place in
    the step.
    """
    lowered = _lowered_alone(setup, function, groups, donated)
    return lowered.compile(compiler_options=options_for(setup.target))


def _lowered_alone(
    setup: Setup,
    function: Callable[..., Leaves],
    groups: Sequence[SplitLeaves],
    donated: Sequence[int] = (),
) -> jax.stages.Lowered:
    mesh = setup.mesh
    program = mapped(function, mesh, setup.axes, in_specs=_WHOLE, out_specs=_WHOLE)

    def shape(aval: Leaf, spec: PartitionSpec | None) -> jax.ShapeDtypeStruct:
        split = None if spec is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=split)

    return jax.jit(program, donate_argnums=tuple(donated)).lower(
        *([shape(*each) for each in group] for group in groups)
    )


def _entry(setup: Setup, aval: Leaf, spec: PartitionSpec | None) -> Entry:
    """The entry of a leaf, whole without a split.  Keys of random numbers have no tiles."""
    whole = Entry(tuple(aval.shape), tile=() if is_key(aval) else setup.target.runs_on.tile)
    parts = parts_of(spec, setup.mesh)
    if any(whole.shape[part.dim] % part.count for part in parts):
        return whole  # padded parts: left to the partitioner
    return whole if spec is None else replace(whole, parts=parts, pinned=True)
