"""The blocks of a step, each a piece of code that is compiled and run alone, as the step would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from ..arrays import Leaf, Leaves, accumulator_dtype
from ..jaxprs.entry import Alone, Destination, Entry, Slot, Total
from ..jaxprs.slots import InSlots, run_in_slots
from ..spmd.block import empty, while_once, without_weak_types
from ..spmd.pools import StageEntries
from ..spmd.traced import TracedStep
from ..spmd.xla import SplitLeaves, compiled_alone, hoisted_specs, outer_specs
from ..stage.code import INPUTS, RESIDUALS, RESULTS, StageCode, inexact, signature
from ..storage.plan import leaf_plans, trained
from ..table.effects import TOGETHER, Place
from ..table.kinds import By
from .programs import heap_bytes

_WHOLE = PartitionSpec()
# Values that stay in their slots, and those that a block reads from theirs.
_POOLED = (
    *(Place.X, Place.COTANGENT, *RESIDUALS, Place.STASH),
    *(Place.BUFFER, Place.BUFFER_GRADIENT),
)


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

    @property
    def without_gradients(self) -> Region:
        """The block without the results that are added to accumulators."""
        left = [i for i, v in enumerate(self.outputs) if v.place is not Place.STAGE_GRADIENTS]
        jaxpr = self.jaxpr.replace(outvars=[self.jaxpr.outvars[i] for i in left])
        return replace(self, jaxpr=jaxpr, outputs=tuple(self.outputs[i] for i in left))

    def in_slots(self, step: TracedStep, at: jax.Array, inputs: Leaves, outputs: Leaves) -> InSlots:
        """The block on the slots `at` of its pools, which are among its outputs.  On TPUs
        accumulators are as the parameters are split.
        """
        split, alone = step.setup.target.on_tpus, _alone(step)

        def slot(leaf: jax.Array, value: SizedValue) -> Slot | Alone:
            return Alone(leaf) if value.place in alone else Slot(leaf, at, value.entry)

        pools = {i: outputs[i] for i in self.changes}
        arguments = [
            slot(pools[self.updates[i]] if i in self.updates else leaf, value)
            if value.place in _POOLED or i in self.updates
            else leaf
            for i, (leaf, value) in enumerate(zip(inputs, self.inputs, strict=True))
        ]
        targets: dict[int, Destination] = {}
        for i, leaf in pools.items():
            value = self.outputs[i]
            is_total = value.place is Place.STAGE_GRADIENTS
            own = value.spec if split else None
            targets[i] = Total(leaf, own) if is_total else slot(leaf, value)
        return InSlots(self.jaxpr, arguments, targets)


def stage_blocks(step: TracedStep, kind: int) -> dict[str, Region]:
    """The blocks of a kind of stage, by name."""
    code, entries = step.code.kinds[kind], step.entries[kind]
    values = {place: _free(len(avals)) for place, avals in code.avals.items()}
    for place, own in entries.stored.items():
        values[place] = [SizedValue(entry.spec, place, n, entry) for n, entry in enumerate(own)]
    uses = zip(entries.parameters, code.uses, strict=True)
    values[Place.STAGE_GRADIENTS] = _gradients(spec for spec, use in uses if use.trained)
    values[Place.SHARED_GRADIENTS] = []  # they are among these

    def at(*places: Place) -> list[SizedValue]:
        return [value for place in places for value in values[place]]

    start = [SizedValue(_WHOLE) for _ in code.consts] + [
        SizedValue(spec) for spec in entries.parameters
    ]
    start += at(*INPUTS)
    start += _free(code.num_inputs - len(start))  # extra
    start += map(SizedValue, hoisted_specs(step.setup, code, entries.parameters))
    seeds = [SizedValue(_WHOLE) for _ in code.avals[Place.LOSSES]]
    blocks = {}
    for kind in RESULTS:
        called = signature(code, By.STAGE, kind, keeps=True, defers=False)
        takes = [v for p in called.takes for v in (seeds if p is Place.LOSSES else values[p])]
        returns = tuple(at(*called.returns))
        blocks[kind.name] = Region(kind.name, called.jaxpr, (*start, *takes), returns)
    return blocks


def outer_blocks(step: TracedStep) -> list[Region]:
    """`first`, its gradient, `last` with its gradient."""
    setup, free = step.setup, SizedValue(None if step.setup.partition.auto_axes else _WHOLE)

    def block(name: str, jaxpr: core.Jaxpr, code: StageCode, before: int | None = None) -> Region:
        """A block with gradients of parameters after so many results; None: without gradients."""
        key = name.split()[0]
        specs = outer_specs(setup, key)
        start = [*(SizedValue(_WHOLE) for _ in code.consts), *map(SizedValue, specs)]
        start += (free for _ in range(code.num_inputs - len(start)))
        start += map(SizedValue, hoisted_specs(setup, code, specs))
        inputs = (*start, *(free for _ in range(len(jaxpr.invars) - len(start))))
        plans = [*leaf_plans(setup.plans[key]), *leaf_plans(setup.plans["shared"])]
        own = [] if before is None else [*_free(before), *_gradients(trained(specs, plans))]
        return Region(name, jaxpr, inputs, (*own, *_free(len(jaxpr.outvars) - len(own))))

    first, last = step.code.first, step.code.last
    found = [block("first", first.forward, first)]
    if first.avals[Place.FIRST_GRADIENTS] or first.avals[Place.SHARED_GRADIENTS]:
        found.append(block("first gradient", first.backward, first, 0))
    if last is not None:
        # The loss and what comes with it are before the gradients.
        found.append(block("last", last.backward, last, 1 + len(last.avals[Place.AUX])))
    return found


def _free(count: int) -> list[SizedValue]:
    """Values that are left to the partitioner, or results that have no place."""
    return [SizedValue() for _ in range(count)]


def _gradients(specs: Iterable[PartitionSpec]) -> list[SizedValue]:
    """Gradients of parameters with these splits."""
    return [SizedValue(spec, Place.STAGE_GRADIENTS) for spec in specs]


def output_entries(code: StageCode, entries: StageEntries) -> Iterator[Entry]:
    """The split of each leaf of a stage's output: that of its cotangent, where it has one."""
    cotangents = iter(entries.stored[Place.COTANGENT])
    for aval in code.avals[Place.SENT_X]:
        yield next(cotangents) if inexact(aval) else Entry(tuple(aval.shape))


def compile_blocks(step: TracedStep, *blocks: Region) -> jax.stages.Compiled:
    """Compile blocks that run as one; they read and write slots as in the step, in a loop of at
    most one trip.

    XLA:GPU copies a layer's weights out of their stack in loops only.
    """

    def guarded(flags: Leaves, *groups: Leaves) -> Leaves:
        runs, index = flags

        def once(state: list[Leaves]) -> list[Leaves]:
            parts = zip(blocks, groups[::2], state, strict=True)
            codes = (block.in_slots(step, index, *leaves) for block, *leaves in parts)
            return list(map(without_weak_types, run_in_slots(*codes)))

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


def _alone(step: TracedStep) -> Set[Place]:
    """The places of which the step's slots are arrays of their own."""
    return frozenset(TOGETHER if step.program.together else ())


def _room(step: TracedStep, value: SizedValue, aval: Any) -> tuple[Leaf, PartitionSpec | None]:
    """Where a value lies, and its split: in an accumulator, by itself, or in a pool of two
    slots; of one, where the step has one: XLA copies no slot of an only one.
    """
    if value.place is Place.STAGE_GRADIENTS:
        dtype = accumulator_dtype(aval.dtype, step.setup.accumulate)
        return jax.ShapeDtypeStruct(aval.shape, dtype), value.spec
    if value.place not in _POOLED or value.place in _alone(step):
        return aval, value.spec
    slots = max(1, min(2, getattr(step.program.slots, value.place.value)))
    shape = (slots, *value.entry.kept)
    return jax.ShapeDtypeStruct(shape, aval.dtype), value.entry.pool_spec


def temp_of(step: TracedStep, compiled: jax.stages.Compiled) -> int:
    """Bytes of a program of this mesh on one device besides inputs and outputs."""
    memory = compiled.memory_analysis()
    if step.setup.target.on_tpus:
        return heap_bytes(memory)
    return int(getattr(memory, "temp_size_in_bytes", 0))
