"""The memory of one device in a step by purpose, predicted from the program, its pools, and the
work space of each block: what it has besides its inputs, stored values and results, read off the
block compiled alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import Leaves, Params, PyTree, accumulator_dtype
from ..jaxprs.entry import Destination, Entry, Slot, Total
from ..jaxprs.equations import nbytes, tiled_bytes
from ..jaxprs.slots import InSlots, run_in_slots
from ..lowering.target import RunsOn
from ..model.batch import map_rows
from ..model.packed import stacks_of_layers
from ..model.param_layout import OUTER, with_outer
from ..model.partition import PART, LeafPlan, leaf_plans, trained
from ..model.settings import outside_contexts, with_sharding
from ..pipeline import Pipeline
from ..planner.layer_cost import STACKED, Sizes, memory_of
from ..program.ir import POOL_OF, Program
from ..program.segments import Payload
from ..spmd.block import empty, while_once, without_weak_types
from ..spmd.emit import TracedStep
from ..spmd.pools import Buffers, StageEntries, shared_buffers
from ..spmd.xla import SplitLeaves, compiled_alone, outer_specs
from ..stage.code import COTANGENTS, INPUTS, RESIDUALS, RESULTS, StageCode, inexact, run
from ..stage.model_code import ModelCode
from ..stage.setup import Setup
from ..table.effects import Place
from ..table.kinds import Kind
from .programs import heap_bytes

_WHOLE = PartitionSpec()
# Values that stay in their slots.
_POOLED = (*RESIDUALS, Place.STASH, Place.BUFFER, Place.BUFFER_GRADIENT)


class SizedValue(NamedTuple):
    """An input or an output of a block."""

    spec: PartitionSpec | None = None  # None: left to the partitioner
    place: Place | None = None  # of outputs that are added to accumulators, STAGE_GRADIENTS
    number: int = 0  # in its place
    entry: Entry = Entry(())  # in a pool


@dataclass(frozen=True)
class Region:
    """A piece of code, with the split and the place of each input and output."""

    name: str
    jaxpr: core.Jaxpr
    inputs: tuple[SizedValue, ...]
    outputs: tuple[SizedValue, ...]

    @property
    def gradients(self) -> list[int]:
        """The outputs that are added to accumulators."""
        return [i for i, v in enumerate(self.outputs) if v.place is Place.STAGE_GRADIENTS]

    @cached_property
    def changes(self) -> list[int]:
        """The outputs that are in slots or accumulators."""
        changed = (*_POOLED, Place.STAGE_GRADIENTS)
        return [i for i, v in enumerate(self.outputs) if v.place in changed]

    @cached_property
    def updates(self) -> dict[int, int]:
        """Inputs that are in one slot before and after the block, with that output."""
        after = {self.outputs[i]: i for i in self.changes}
        return {i: after[v] for i, v in enumerate(self.inputs) if v in after}

    def dropping(self, outputs: Sequence[int]) -> Region:
        """The block without some of its results."""
        left = [i for i in range(len(self.outputs)) if i not in outputs]
        jaxpr = self.jaxpr.replace(outvars=[self.jaxpr.outvars[i] for i in left])
        return replace(self, jaxpr=jaxpr, outputs=tuple(self.outputs[i] for i in left))

    def in_slots(self, at: Any, inputs: Leaves, outputs: Leaves, *, split: bool) -> InSlots:
        """The block on the slots `at` of its pools, which are among its outputs.  With `split`,
        accumulators are as the parameters are split.
        """
        pools = {i: outputs[i] for i in self.changes}
        arguments = [
            Slot(pools[self.updates[i]] if i in self.updates else leaf, at, value.entry)
            if value.place in _POOLED or i in self.updates
            else leaf
            for i, (leaf, value) in enumerate(zip(inputs, self.inputs, strict=True))
        ]
        targets: dict[int, Destination] = {}
        for i, leaf in pools.items():
            value = self.outputs[i]
            is_total = value.place is Place.STAGE_GRADIENTS
            own = value.spec if split else None
            targets[i] = Total(leaf, own) if is_total else Slot(leaf, at, value.entry)
        return InSlots(self.jaxpr, arguments, targets)


def entry_bytes(step: TracedStep, kind: int) -> dict[str, int]:
    """Bytes on one device of a kind of stage's values of one microbatch, by pool."""
    buffers = shared_buffers([step.code.kinds[kind]], [step.entries[kind]])
    return {place.value: buffer.nbytes for place, buffer in buffers.items()}


def boundary_bytes(step: TracedStep, kind: int) -> int:
    """Bytes on one device of a kind of stage's output."""
    code = step.code.kinds[kind]
    split = zip(code.avals[Place.SENT_X], output_entries(code, step.entries[kind]), strict=True)
    return sum(nbytes(aval) // entry.local_share for aval, entry in split)


def work_space(step: TracedStep) -> dict[str, int]:
    """Bytes on one device of each block's own arrays, by block.

    The blocks are those of the step's table: "F", "B", "I", "W", "R", and "B with F" of
    overlapped pairs, which run as one, each of the kind of stage that needs most; "first",
    "first gradient" and "last".

    One block runs at a time, so the step needs the largest of these.  Each block is compiled.
    """
    program, table = step.program, step.program.schedule.encoded
    kinds = {kind.name for kind in table.kinds}
    joined = (program.pairs & (program.ticks.backward.kind == Kind.W)).any()
    runs: list[tuple[Region, ...]] = [(block,) for block in outer_blocks(step)]
    for kind, entries in zip(step.code.kinds, step.entries, strict=True):
        of_kind = stage_blocks(kind, entries)
        runs += [(block,) for name, block in of_kind.items() if name in kinds]
        runs += [(of_kind["B"], of_kind["F"])] if len(table.pairs) and "B" in kinds else []
        runs += [(of_kind["W"], of_kind["F"])] if joined else []
    found: dict[str, int] = {}
    for blocks in runs:
        name = " with ".join(block.name for block in blocks)
        found[name] = max(found.get(name, 0), temp(step, *blocks))
    return found


def temp(step: TracedStep, *blocks: Region) -> int:
    """Bytes besides inputs and outputs, of blocks that run as one."""
    return temp_of(step, compile_blocks(step, *blocks))


def temp_of(step: TracedStep, compiled: jax.stages.Compiled) -> int:
    """Bytes of a program of this mesh on one device besides inputs and outputs."""
    memory = compiled.memory_analysis()
    if step.setup.target.on_tpus:
        return heap_bytes(memory)
    return int(getattr(memory, "temp_size_in_bytes", 0))


def compile_blocks(step: TracedStep, *blocks: Region) -> Any:
    """Compile blocks that run as one; they read and write slots as in the step, in a loop of at
    most one trip.

    XLA:GPU copies a layer's weights out of their stack in loops only.
    """
    split = step.setup.target.on_tpus

    def guarded(flags: Leaves, *groups: Leaves) -> Leaves:
        runs, index = flags

        def once(state: list[Leaves]) -> list[Leaves]:
            parts = zip(blocks, groups[::2], state, strict=True)
            found = run_in_slots(
                *(block.in_slots(index, *leaves, split=split) for block, *leaves in parts)
            )
            return list(map(without_weak_types, found))

        start = [empty([var.aval for var in block.jaxpr.outvars]) for block in blocks]
        for block, outputs, changed in zip(blocks, start, groups[1::2], strict=True):
            for i, pool in zip(block.changes, changed, strict=True):
                outputs[i] = pool
        return jax.tree.leaves(while_once(runs, once, start)[1])

    # Pools and accumulators are changed in place.  As outputs of their own they would lend
    # their room to the block's arrays.
    donated = [2 + 2 * k for k in range(len(blocks))]
    flags: SplitLeaves = [(jax.ShapeDtypeStruct((), d), _WHOLE) for d in (jnp.bool_, jnp.int32)]
    groups = [group for block in blocks for group in _groups(step, block)]
    return compiled_alone(step.setup, guarded, flags, *groups, donated=donated)


def _groups(step: TracedStep, block: Region) -> tuple[SplitLeaves, SplitLeaves]:
    """The inputs of a block, and the pools and accumulators that it changes."""
    inputs = enumerate(zip(block.inputs, block.jaxpr.invars, strict=True))
    outputs, outvars = block.outputs, block.jaxpr.outvars
    return (
        [
            (var.aval, value.spec) if i in block.updates else _room(step, value, var.aval)
            for i, (value, var) in inputs
        ],
        [_room(step, outputs[i], outvars[i].aval) for i in block.changes],
    )


def _room(step: TracedStep, value: SizedValue, aval: Any) -> tuple[Any, PartitionSpec | None]:
    """Where a value lies, and its split: in an accumulator, by itself, or in a pool of two
    slots; of one, where the step has one: XLA copies no slot of an only one.
    """
    if value.place is Place.STAGE_GRADIENTS:
        dtype = accumulator_dtype(aval.dtype, step.setup.accumulate)
        return jax.ShapeDtypeStruct(aval.shape, dtype), value.spec
    if value.place not in _POOLED:
        return aval, value.spec
    slots = max(1, min(2, getattr(step.program.slots, value.place.value)))
    shape = (slots, *value.entry.kept)
    return jax.ShapeDtypeStruct(shape, aval.dtype), value.entry.pool_spec


def stage_blocks(code: StageCode, entries: StageEntries) -> dict[str, Region]:
    """The blocks of a kind of stage, by name."""

    values = {place: _free(len(avals)) for place, avals in code.avals.items()}
    for place, own in entries.stored.items():
        values[place] = [SizedValue(entry.spec, place, n, entry) for n, entry in enumerate(own)]
    uses = zip(entries.parameters, code.uses, strict=True)
    values[Place.STAGE_GRADIENTS] = _gradients(spec for spec, use in uses if use.trained)

    def at(*places: Place) -> list[SizedValue]:
        return [value for place in places for value in values[place]]

    start = [SizedValue(_WHOLE) for _ in code.consts] + [
        SizedValue(spec) for spec in entries.parameters
    ]
    start += at(*INPUTS)
    start += _free(len(code.forward.invars) - len(start))  # extra and once
    seeds = [SizedValue(_WHOLE) for _ in code.avals[Place.LOSSES]]
    late = [*start, *at(*RESIDUALS, *COTANGENTS), *seeds]
    blocks = {}
    for kind, places in RESULTS.items():
        inputs = start if kind in (Kind.F, Kind.R) else late
        inputs = inputs + at(Place.STASH) if kind is Kind.W else inputs
        blocks[kind.name] = Region(kind.name, code.of(kind), tuple(inputs), tuple(at(*places)))
    return blocks


def _free(count: int) -> list[SizedValue]:
    """Values that are left to the partitioner, or results that have no place."""
    return [SizedValue() for _ in range(count)]


def _gradients(specs: Iterable[PartitionSpec]) -> list[SizedValue]:
    """Gradients of parameters with these splits."""
    return [SizedValue(spec, Place.STAGE_GRADIENTS) for spec in specs]


def outer_blocks(step: TracedStep) -> list[Region]:
    """`first`, its gradient, `last` with its gradient."""
    setup, free = step.setup, SizedValue(None if step.setup.partition.auto_axes else _WHOLE)

    def block(name: str, jaxpr: core.Jaxpr, code: Any, before: int | None = None) -> Region:
        """A block with gradients of parameters after so many results; None: without gradients."""
        key = name.split()[0]
        specs = outer_specs(setup, key)
        start = [*(SizedValue(_WHOLE) for _ in code.consts), *map(SizedValue, specs)]
        inputs = (*start, *(free for _ in range(len(jaxpr.invars) - len(start))))
        plans = [*leaf_plans(setup.plans[key]), *leaf_plans(setup.plans["shared"])]
        own = [] if before is None else [*_free(before), *_gradients(trained(specs, plans))]
        return Region(name, jaxpr, inputs, (*own, *_free(len(jaxpr.outvars) - len(own))))

    first, last = step.code.first, step.code.last
    found = [block("first", first.forward, first)]
    if first.avals[Place.STAGE_GRADIENTS]:
        found.append(block("first gradient", first.backward, first, 0))
    if last is not None:
        # The loss and what comes with it are before the gradients.
        found.append(block("last", last.backward, last, 1 + len(last.avals[Place.AUX])))
    return found


def output_entries(code: StageCode, entries: StageEntries) -> Iterator[Entry]:
    """The split of each leaf of a stage's output: that of its cotangent, where it has one."""
    cotangents = iter(entries.stored[Place.COTANGENT])
    for aval in code.avals[Place.SENT_X]:
        yield next(cotangents) if inexact(aval) else Entry(tuple(aval.shape))


@outside_contexts
def memory(
    pipe: Pipeline, params: Params, batch: PyTree, *, rng: jax.Array | None = None, state: Any = ()
) -> dict[str, int]:
    """Bytes that a step takes on one device by purpose, and their "total".

    Takes what `pipe.lower` takes.  The step is traced, and each block of it compiled alone; the
    step itself is not compiled.

        parameters, batch   what the step is given, and the copy of the batch that is cut into
                            slices
        gradients           what it returns
        state               the stages' own state, as it is given and as it is returned
        pools               the slots that the program has, each as large as a device's part of what
                            it holds
        host                what waits in the host's memory (`offload`); not in the total
        gathered            whole parameters and accumulators where only parts are given and
                            returned (fsdp, outer, DualPipe's copies)
        hoisted             what is computed from parameters once a step
        stacked             what results of gradients take besides the accumulators of single layers
        sent                what is to be sent next, what of it is under way while the next is made,
                            and what arrives beside a block
        raveled             copies of what a pool that unlike stages share holds raveled
        work                of the block that needs most, its own arrays
        summed              results of sums of gradients over CPU devices, but for what lies in
                            their room before, and of small ones on TPUs; all other sums are
                            in place

    On TPUs all have the padding of tiles.

    Raises:
        PipelineError: as `value_and_grad` does.
    """
    traced = pipe.trace(params, batch, rng=rng, state=state)
    return facts(traced, step_sizes(traced, placed_shapes(traced.setup, params), batch, state))


def facts(traced: TracedStep, sizes: Sizes) -> dict[str, int]:
    """The result of `memory`."""
    found = memory_of(traced.program.slots, sizes)
    parts = {name: int(size) for name, size in found.facts().items() if name != "optimizer"}
    return {**parts, "total": int(found.total)}


def placed_shapes(setup: Setup, params: Params) -> dict[str, PyTree]:
    """Parameters as shapes, with the shardings that a step has."""
    found: dict[str, PyTree] = jax.tree.map(
        with_sharding, with_outer(params), setup.partition.shardings(setup.plans)
    )
    return found


def step_sizes(step: TracedStep, params: dict[str, PyTree], batch: PyTree, state: PyTree) -> Sizes:
    """Sizes of a traced model on one device, from `placed_shapes` of its parameters."""
    setup, code, program = step.setup, step.code, step.program
    buffers = shared_buffers(code.kinds, step.entries)
    splits = bool(program.schedule.encoded.of_kinds((Kind.I,)).any())
    entry = dict.fromkeys(vars(program.slots), 0)
    entry |= {place.value: buffer.nbytes for place, buffer in buffers.items()}
    for place, avals in code.outer_pools.items():
        entry[place.value] = sum(map(nbytes, avals))
    entry["stash"] *= splits
    entry["host"] = (entry["residual_input"] + entry["residual_weight"]) * bool(program.slots.host)
    work, kept = work_space(step), NamedSharding(setup.mesh, PartitionSpec(setup.axis))
    return Sizes(
        **held(setup, params, setup.plans),
        batch=_batch_bytes(setup, batch),
        state=2 * sum(local_bytes(with_sharding(leaf, kept)) for leaf in jax.tree.leaves(state)),
        gathered=_gathered(step, params),
        hoisted=_hoisted(step),
        stacked=STACKED * _of_layers(step, params["stages"]),
        entry=entry,
        sent=_sent_bytes(program, buffers, work),
        raveled=_raveled(buffers, code, splits=splits),
        work=max(work.values(), default=0),
        **_summed(step, params, work),
    )


def _batch_bytes(setup: Setup, batch: PyTree) -> int:
    """Bytes of one device's part of a batch, and of the copy of it that is cut into slices."""
    split, whole = (
        partial(setup.functions.split, count=setup.num_microbatches),
        setup.functions.whole,
    )
    batch = jax.eval_shape(lambda tree: tree, batch)  # leaves without rows may be plain numbers
    rows = map_rows(lambda leaf: leaf, batch, whole, lambda _: None)
    copy = jax.eval_shape(split, rows) if setup.functions.slices > 1 else ()
    every, own, cut = (sum(map(nbytes, jax.tree.leaves(of))) for of in (batch, rows, copy))
    return (own + cut) // setup.data_size + every - own


def _of_layers(step: TracedStep, stages: Sequence[PyTree]) -> float:
    """Bytes of the gradients of stacks of which each layer has an accumulator of its own."""
    setup, code, found = step.setup, step.code, 0.0
    for v, chunk in enumerate(stages):
        own = {s for of in setup.layout.placement.stages_of for s in of[v : v + 1]}
        kinds = [(s, code.kinds[code.kind_of[s]]) for s in own]
        places = [p for s, kind in kinds for p in kind.places(setup.layout.held(s, stages).places)]
        leaves, plans = jax.tree.leaves(chunk), leaf_plans(setup.plans["stages"][v])
        numbers = [n for n in stacks_of_layers(places) if not plans[n].frozen]
        found += sum(gradient_bytes(setup, leaves[n]) for n in numbers)
    return found


def _planned(tree: PyTree, plans: PyTree) -> Iterator[tuple[Any, LeafPlan]]:
    """Each leaf of parameters with its plan."""
    return zip(jax.tree.leaves(tree), leaf_plans(plans), strict=True)


def held(setup: Setup, params: PyTree, plans: PyTree) -> dict[str, Any]:
    """Bytes of parameters and of their gradients on one device."""
    leaves, has = jax.tree.leaves(params), trained(jax.tree.leaves(params), leaf_plans(plans))
    return {
        "parameters": sum(map(local_bytes, leaves)),
        "gradients": sum(gradient_bytes(setup, leaf) for leaf in has),
    }


def _sent_bytes(program: Program, buffers: Buffers, work: Mapping[str, int]) -> int:
    """Bytes of the values to send, twice where a permute is awaited in a later tick, after the next
    value is computed; and what a block with the arrivals during it needs beyond the largest block.
    """
    size = {payload: buffers[POOL_OF[payload]].nbytes for payload in Payload}
    templates = [t for segment in program.segments for t in segment.templates]
    late = {permute.payload for t in templates for permute in t.permutes if permute.delay}
    largest = most = max(work.values(), default=0)
    for segment in program.segments:
        for j, *_ in segment.emitted:
            for place, use in enumerate(segment.templates[j].blocks):
                arriving = sum(
                    size[t.permute.payload]
                    for t in segment.transits
                    if t.issued <= (j, place) < t.written
                )
                most = max(most, work.get(use.block.kind.name, 0) + arriving)
    return sum(size.values()) + sum(size[payload] for payload in late) + most - largest


def _raveled(buffers: Buffers, code: ModelCode, *, splits: bool) -> int:
    """Copies of values that have another shape in their pool, on which no block works in place.
    Copies of one block exist at a time.
    """

    kept = (*RESIDUALS, *((Place.STASH,) if splits else ()))

    def copies(avals: Mapping[Place, Sequence[Any]]) -> int:
        return sum(
            nbytes(aval)
            for pool in kept
            for aval, place in zip(avals[pool], buffers[pool].of_kind(avals[pool]), strict=True)
            if place.flat
        )

    return max(copies(kind.avals) for kind in code.kinds)


def local_bytes(leaf: Any) -> int:
    """Bytes of one device's part of an array, or of a shape, with a sharding; with the padding of
    tiles.
    """
    own, tile = leaf.sharding.shard_shape(leaf.shape), RunsOn.of(leaf.sharding.mesh).tile
    return tiled_bytes(own, leaf.dtype.itemsize, tile)


def gradient_bytes(setup: Setup, leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's part of its accumulator."""
    wide = accumulator_dtype(leaf.dtype, setup.accumulate).itemsize
    return int(local_bytes(leaf) // leaf.dtype.itemsize * wide)


def _summed(
    step: TracedStep, params: Mapping[str, PyTree], work: Mapping[str, int]
) -> dict[str, Any]:
    """Room for the results of sums of gradients, where they are arrays of their own: on CPU
    devices, and on TPUs small ones, whose accumulators of the ticks have room too.

    On CPU devices the room of the ticks' values is free by then.  XLA reuses it for the largest
    result that fits: the gradient of the own parameters of `last`.
    """
    target, most = step.setup.target, max(work.values(), default=0)
    if not target.on_cpus:
        small = (_summed_bytes(step, key, params[key], most=PART) for key in params)
        return {"ends": (sum(small),)} if target.on_tpus else {}
    sizes = {key: _summed_bytes(step, key, params[key]) for key in params}
    ends: tuple[int, ...] = ()
    if any(size for key, size in sizes.items() if key != "stages"):
        # "first gradient" and "last", without the gradients of their parameters
        ends = tuple(
            min(temp(step, block.dropping(block.gradients)), most)
            + sizes[block.name.removesuffix(" gradient")]
            + sizes["shared"]
            - most
            for block in outer_blocks(step)
            if block.gradients
        )
    return {"summed": sum(sizes.values()), "ends": ends}


def _summed_bytes(step: TracedStep, key: str, tree: PyTree, most: float = math.inf) -> int:
    """Bytes of gradients, of at most `most` each, that are summed whole over devices; gradients of
    gathered parameters are parts of their accumulators.
    """
    setup = step.setup
    axes = setup.data_axes if key == "stages" else (setup.axis, *setup.data_axes)
    return sum(
        gradient_bytes(setup, leaf)
        for leaf, plan in _planned(tree, setup.plans[key])
        if not (plan.frozen or plan.gathers)
        and gradient_bytes(setup, leaf) <= most
        and math.prod(setup.mesh.shape[name] for name in plan.whole_axes(axes)) > 1
    )


def _gathered(step: TracedStep, params: Mapping[str, PyTree]) -> int:
    """Bytes of parameters that are gathered over their manual axes, and of their accumulators."""
    setup, stages = step.setup, params["stages"]
    trees = [(params[key], setup.plans[key], False) for key in OUTER]
    for chunk in range(step.program.schedule.num_chunks):
        held = min(chunk, len(stages) - 1)
        # A chunk that another device owns is a copy.
        trees.append((stages[held], setup.plans["stages"][held], chunk > held))
    found = 0
    for tree, plans, is_copy in trees:
        for leaf, plan in _planned(tree, plans):
            if plan.gathers or is_copy:
                share = math.prod(setup.mesh.shape[name] for name, _ in plan.gathers)
                own = 0 if plan.frozen else gradient_bytes(setup, leaf)
                found += share * (local_bytes(leaf) + own)
    return found


def hoisted_bytes(step: TracedStep, code: Any, specs: Sequence[PartitionSpec]) -> int:
    """Bytes of the values that a stage, `first` or `last` computes once a step from parameters with
    these splits.
    """
    jaxpr = code.hoist
    if not jaxpr.outvars:
        return 0
    splits = [*(_WHOLE for _ in code.consts), *specs]
    group = list(zip([v.aval for v in jaxpr.invars], splits, strict=True))
    compiled = compiled_alone(step.setup, lambda values: run(jaxpr, *values), group)
    return int(getattr(compiled.memory_analysis(), "output_size_in_bytes", 0))


def _hoisted(step: TracedStep) -> int:
    """Bytes of hoisted values of every chunk of a device, and of first and last."""
    code = step.code
    pairs = zip(code.kinds, step.entries, strict=True)
    kinds = [hoisted_bytes(step, kind, entries.parameters) for kind, entries in pairs]
    stages_of = step.program.schedule.placement.stages_of
    held = {(v, code.kind_of[s]) for stages in stages_of for v, s in enumerate(stages)}
    ends = {"first": code.first} | ({} if code.last is None else {"last": code.last})
    return sum(kinds[kind] for _, kind in held) + sum(
        hoisted_bytes(step, end, outer_specs(step.setup, key)) for key, end in ends.items()
    )
