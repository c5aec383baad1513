"""The memory of one device in a step by purpose, predicted from the program, its pools, and the
work space of each block: what it has besides its inputs, stored values and results, read off the
block compiled alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, count, product, zip_longest
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..arrays import Avals, Params, PyTree, accumulator_dtype
from ..jaxprs.equations import nbytes, tiled_bytes
from ..lowering.target import RunsOn
from ..model.batch import map_rows
from ..model.layers import OUTER, with_outer
from ..model.settings import with_sharding
from ..planner.memory import Sizes, memory_of
from ..program.ir import POOL_OF, Program
from ..program.segments import Payload
from ..spmd.pools import Buffers, shared_buffers
from ..spmd.traced import TracedStep
from ..spmd.xla import compiled_alone, hoisted_from, outer_specs
from ..stage.code import RESIDUALS, StageCode, run
from ..stage.codes import ModelCode
from ..stage.setup import Setup
from ..storage.plan import PART, LeafPlan, leaf_plans
from ..storage.table import Home, Places, stacks_of_layers
from ..table.effects import Place
from ..table.kinds import Kind
from .blocks import Region, compile_blocks, outer_blocks, output_entries, stage_blocks, temp_of


def entry_bytes(step: TracedStep, kind: int) -> dict[str, int]:
    """Bytes on one device of a kind of stage's values of one microbatch, by pool."""
    buffers = shared_buffers([step.code.kinds[kind]], [step.entries[kind]], {})
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
    for of_kind in map(partial(stage_blocks, step), range(len(step.code.kinds))):
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


def facts(traced: TracedStep, sizes: Sizes) -> dict[str, int]:
    """The result of `memory`."""
    found = memory_of(traced.program.slots, sizes)
    parts = {name: int(size) for name, size in found.facts().items() if name != "optimizer"}
    return {**parts, "total": int(found.total)}


def placed_shapes(setup: Setup, params: Params) -> Params:
    """Parameters as shapes, with the shardings that a step has."""
    found: Params = jax.tree.map(
        with_sharding, with_outer(params), setup.partition.shardings(setup.plans)
    )
    return found


def step_sizes(step: TracedStep, params: Params, batch: PyTree, state: PyTree) -> Sizes:
    """Sizes of a traced model on one device."""
    params = placed_shapes(step.setup, params)
    setup, code, program = step.setup, step.code, step.program
    buffers = step.buffers
    splits = bool(program.schedule.encoded.of_kinds((Kind.I,)).any())
    entry = dict.fromkeys(vars(program.slots), 0)
    entry |= {place.value: buffer.nbytes for place, buffer in buffers.items()}
    entry["stash"] *= splits
    entry["host"] = (entry["residual_input"] + entry["residual_weight"]) * bool(program.slots.host)
    work, kept = work_space(step), NamedSharding(setup.mesh, PartitionSpec(setup.axis))
    apart, late = _made_late(step, params)
    summed, ends = _summed(step, params, work)
    stages = held_bytes(held_leaves(setup, params["stages"], setup.plans["stages"]))
    return Sizes(
        **held_bytes(held_leaves(setup, params, setup.plans)),
        batch=_batch_bytes(setup, batch),
        state=2 * sum(local_bytes(with_sharding(leaf, kept)) for leaf in jax.tree.leaves(state)),
        gathered=_gathered(step, params),
        hoisted=_hoisted(step),
        # Where stages take turns, reductions add to parts during the step.
        accumulators=stages["gradients"] if program.num_rooms else apart,
        late=late * setup.target.on_gpus,
        entry=entry,
        sent=_sent_bytes(program, buffers, work),
        raveled=_raveled(buffers, code, splits=splits),
        work=max(work.values(), default=0),
        summed=summed,
        ends=ends,
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


def _made_late(step: TracedStep, params: Params) -> tuple[int, int]:
    """Bytes of the gradients of stacks of which each layer has an accumulator of its own, and of
    all that are made after the ticks: those, and what is reduced to parts.
    """
    setup, places = step.setup, defaultdict[int, list[Home]](list)
    for v, _, own in _in_chunks(step, params["stages"]):
        places[v] += own
    every, apart = held_leaves(setup, params, setup.plans), 0
    for v, chunk in enumerate(params["stages"]):
        leaves = held_leaves(setup, chunk, setup.plans["stages"][v])
        stacks = (leaves[number] for number in stacks_of_layers(places[v]))
        apart += sum(leaf.gradient for leaf in stacks if not leaf.plan.gathers)
    return apart, apart + sum(leaf.gradient for leaf in every if leaf.plan.gathers)


class HeldLeaf(NamedTuple):
    """A parameter on one device: its plan, and bytes."""

    plan: LeafPlan
    size: int
    gradient: int  # of its accumulator


def held_leaves(setup: Setup, params: PyTree, plans: PyTree) -> list[HeldLeaf]:
    """The parameters of placed shapes."""
    found = []
    for leaf, plan in zip(jax.tree.leaves(params), leaf_plans(plans), strict=True):
        size, own = local_bytes(leaf), leaf.dtype.itemsize
        wide = accumulator_dtype(leaf.dtype, setup.accumulate).itemsize
        found.append(HeldLeaf(plan, size, 0 if plan.frozen else size // own * wide))
    return found


def held_bytes(leaves: Sequence[HeldLeaf]) -> dict[str, Any]:
    """Bytes of parameters and of their gradients on one device."""
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "gradients": sum(leaf.gradient for leaf in leaves),
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

    def copies(avals: Mapping[Place, Avals]) -> int:
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


def _summed(
    step: TracedStep, params: Params, work: Mapping[str, int]
) -> tuple[int, tuple[int, ...]]:
    """`Sizes.summed` and `.ends`: room for the results of sums of gradients, where they are arrays
    of their own: on CPU devices, and on TPUs small ones, whose accumulators of the ticks have room
    too.

    On CPU devices the room of the ticks' values is free by then.  XLA reuses it for the largest
    result that fits: the gradient of the own parameters of `last`.
    """
    target, most = step.setup.target, max(work.values(), default=0)
    if not target.on_cpus:
        small = (_summed_bytes(step, key, params[key], most=PART) for key in params)
        return 0, (sum(small),) if target.on_tpus else ()
    sizes = {key: _summed_bytes(step, key, params[key]) for key in params}
    ends: tuple[int, ...] = ()
    if any(size for key, size in sizes.items() if key != "stages"):
        # "first gradient" and "last", without the gradients of their parameters
        ends = tuple(
            min(temp(step, block.without_gradients), most)
            + sizes[block.name.removesuffix(" gradient")]
            + sizes["shared"]
            - most
            for block in outer_blocks(step)
            if block.changes
        )
    return sum(sizes.values()), ends


def _summed_bytes(step: TracedStep, key: str, tree: PyTree, most: float = math.inf) -> int:
    """Bytes of gradients, of at most `most` each, that are summed whole over devices; gradients of
    gathered parameters are parts of their accumulators.
    """
    setup = step.setup
    axes = setup.data_axes if key == "stages" else (setup.axis, *setup.data_axes)
    return sum(
        leaf.gradient
        for leaf in held_leaves(setup, tree, setup.plans[key])
        if not leaf.plan.gathers
        and leaf.gradient <= most
        and math.prod(setup.mesh.shape[name] for name in leaf.plan.whole_axes(axes)) > 1
    )


def _gathered(step: TracedStep, params: Params) -> int:
    """Bytes of parameters that are gathered over their manual axes, and of their accumulators; of
    stages, those that the rooms hold where they take turns in them.
    """
    setup, stages, read = step.setup, params["stages"], _read_in_ticks(step, params)
    trees = [(params[key], setup.plans[key], False, read[key]) for key in OUTER]
    for chunk in range(step.program.num_rooms or step.program.schedule.num_chunks):
        held = min(chunk, len(stages) - 1)
        # A chunk that another device owns is a copy, and so is what a room holds.
        is_copy = chunk > held or step.program.num_rooms > 0
        trees.append((stages[held], setup.plans["stages"][held], is_copy, read[chunk]))
    found = 0
    for tree, plans, is_copy, numbers in trees:
        for number, leaf in enumerate(held_leaves(setup, tree, plans)):
            if leaf.plan.gathers or is_copy:
                share = math.prod(setup.mesh.shape[name] for name, _ in leaf.plan.gathers)
                # XLA gathers what is only cast, after the cast.
                found += share * (leaf.size * (number in numbers) + leaf.gradient)
    return found


def _read_in_ticks(step: TracedStep, params: Params) -> dict[str | int, set[int]]:
    """By part of the model, or chunk: the arrays of parameters that blocks read, and not only what
    is hoisted from them.
    """
    code = step.code
    found = defaultdict[str | int, set[int]](set)
    for key, end in (("first", code.first), ("last", code.last)):
        own = len(jax.tree.leaves(params[key]))
        read = [] if end is None else [*compress(count(), end.read)]
        found[key] |= {n for n in read if n < own}
        found["shared"] |= {n - own for n in read if n >= own}
    for chunk, kind, places in _in_chunks(step, params["stages"]):
        found[chunk] |= {place.at for place in compress(places, kind.read)}
        found["shared"] |= {*compress(count(), kind.read[len(places) :])}
    return found


def _in_chunks(
    step: TracedStep, stages: Sequence[PyTree]
) -> Iterator[tuple[int, StageCode, Places]]:
    """Of each stage: its chunk, its code, and the places of its parameters."""
    code, layout = step.code, step.setup.layout
    for chunk, held in enumerate(zip_longest(*layout.placement.stages_of)):
        for stage in {*held} - {None}:
            kind = code.kinds[code.kind_of[stage]]
            yield chunk, kind, kind.places(layout.held(stage, stages).places)


def hoisted_bytes(step: TracedStep, code: StageCode, specs: Sequence[PartitionSpec]) -> int:
    """Bytes of the values that a stage, `first` or `last` computes once a step from parameters with
    these splits.
    """
    jaxpr = code.hoist
    if not jaxpr.outvars:
        return 0
    inputs = hoisted_from(code, specs)
    compiled = compiled_alone(step.setup, lambda values: run(jaxpr, *values), inputs)
    return int(getattr(compiled.memory_analysis(), "output_size_in_bytes", 0))


def _hoisted(step: TracedStep) -> int:
    """Bytes of hoisted values of every chunk or room of a device, and of first and last."""
    code = step.code
    pairs = zip(code.kinds, step.entries, strict=True)
    kinds = [hoisted_bytes(step, kind, entries.parameters) for kind, entries in pairs]
    stages_of = step.program.schedule.placement.stages_of
    held = {(v, code.kind_of[s]) for stages in stages_of for v, s in enumerate(stages)}
    if rooms := step.program.num_rooms:
        held = {*product(range(rooms), code.kind_of)}
    ends = {"first": code.first} | ({} if code.last is None else {"last": code.last})
    return sum(kinds[kind] for _, kind in held) + sum(
        hoisted_bytes(step, end, outer_specs(step.setup, key)) for key, end in ends.items()
    )
