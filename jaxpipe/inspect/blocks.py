"""The work space of each block, besides its inputs, stored values and results, read off the block
compiled alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ..arrays import Leaves
from ..jaxprs.entry import Entry
from ..jaxprs.equations import nbytes, reads
from ..jaxprs.eval_in_slots import run_in_slots
from ..jaxprs.slots import InSlots, Slot, Target, Total
from ..lowering.target import RunsOn
from ..model.leaf_plan import leaf_plans
from ..spmd.block import empty, while_once, without_weak_types
from ..spmd.executor import TracedStep
from ..spmd.pools import shared_buffers
from ..spmd.step import accumulator_dtype
from ..spmd.xla import Group, StageEntries, compiled_alone, outer_specs
from ..stage.code import COTANGENTS, INPUTS, RESIDUALS, RESULTS, StageCode, inexact
from ..stage.model_code import Job, ModelCode
from ..table.effects import Place
from ..table.kinds import RECOMPUTE, Kind
from .programs import heap_bytes

_WHOLE = PartitionSpec()
_COPIED = (Place.CARRY, Place.CARRY_GRADIENT)  # out of a slot, or into it
_READ = (*RESIDUALS, Place.STASH, Place.BUFFER)  # inputs that stay in their slots
_WRITTEN = (*_READ, Place.BUFFER_GRADIENT)


class Value(NamedTuple):
    """An input or an output of a block."""

    spec: PartitionSpec | None = None  # None: left to the partitioner
    place: Place | None = None  # of outputs that are added to accumulators, STAGE_GRADIENTS
    number: int = 0  # in its place
    entry: Entry = Entry(())  # in a pool


@dataclass(frozen=True)
class Block:
    """A piece of code, with the split and the place of each input and output."""

    name: str
    jaxpr: core.Jaxpr
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def gradients(self) -> list[int]:
        """The outputs that are added to accumulators."""
        return [i for i, v in enumerate(self.outputs) if v.place is Place.STAGE_GRADIENTS]

    @cached_property
    def changes(self) -> list[int]:
        """The outputs that are in slots or accumulators."""
        stored = [i for i, v in enumerate(self.outputs) if v.place in _WRITTEN]
        return [*stored, *self.gradients]

    @cached_property
    def updates(self) -> dict[int, int]:
        """Inputs that are in one slot before and after the block, with that output."""
        after = {self.outputs[i]: i for i in self.changes}
        return {i: after[v] for i, v in enumerate(self.inputs) if v in after}

    @property
    def passed(self) -> int:
        """Bytes on one device of what passes between slices and is copied out of its slot, or into
        it.
        """
        pairs = zip(self.jaxpr.invars, self.inputs, strict=True)
        copied: list[tuple[Any, Value]] = [
            pair for pair, read in zip(pairs, reads(self.jaxpr), strict=True) if read
        ]
        copied += zip(self.jaxpr.outvars, self.outputs, strict=True)
        return sum(
            nbytes(atom.aval) // value.entry.local_share
            for atom, value in copied
            if value.place in _COPIED
        )

    def dropping(self, outputs: Sequence[int]) -> Block:
        """The block without some of its results."""
        left = [i for i in range(len(self.outputs)) if i not in outputs]
        jaxpr = self.jaxpr.replace(outvars=[self.jaxpr.outvars[i] for i in left])
        return replace(self, jaxpr=jaxpr, outputs=tuple(self.outputs[i] for i in left))

    def in_slots(self, at: Any, inputs: Leaves, changed: Leaves, *, split: bool) -> InSlots:
        """The block on the slots `at` of its pools.  With `split`, accumulators are as the
        parameters are split.
        """
        pools = dict(zip(self.changes, changed, strict=True))
        slots = {
            i: Slot(pools[self.updates[i]] if i in self.updates else leaf, at, value.entry)
            for i, (leaf, value) in enumerate(zip(inputs, self.inputs, strict=True))
            if value.place in _READ or i in self.updates
        }
        targets: dict[int, Target] = {}
        for i, leaf in pools.items():
            value = self.outputs[i]
            is_total = value.place is Place.STAGE_GRADIENTS
            own = value.spec if split else None
            targets[i] = Total(leaf, own) if is_total else Slot(leaf, at, value.entry)
        return InSlots(self.jaxpr, inputs, slots, targets)


@dataclass(frozen=True)
class Step:
    """A traced step.  `entries` has for each kind of stage the splits of its parameters
    and stored values over the axes that are left to the partitioner.
    """

    job: Job
    code: ModelCode
    entries: tuple[StageEntries, ...]

    @classmethod
    def of(cls, traced: TracedStep) -> Step:
        """The traced step of a pipeline."""
        return cls(traced.job, traced.code, traced.entries)

    @property
    def is_shared(self) -> bool:
        """Whether several devices share a stage."""
        return bool(self.job.partition.auto_axes)

    def entry(self, kind: int) -> dict[str, int]:
        """Bytes on one device of a kind of stage's values of one microbatch, by pool."""
        buffers = shared_buffers([self.code.kinds[kind]], [self.entries[kind]])
        return {place.value: buffer.nbytes for place, buffer in buffers.items()}

    def boundary(self, kind: int) -> int:
        """Bytes on one device of a kind of stage's output."""
        code = self.code.kinds[kind]
        split = output_entries(code, self.entries[kind])
        return sum(
            nbytes(a) // e.local_share for a, e in zip(code.avals[Place.SENT_X], split, strict=True)
        )

    @property
    def runs(self) -> list[tuple[Block, ...]]:
        """The blocks of the step's table, in groups that run as one."""
        table = self.code.program.schedule.encoded
        program = self.code.program
        own = {k.name: (k,) for k in (Kind.F, Kind.B, Kind.I, Kind.W)} | {"R": RECOMPUTE}
        kinds = {name for name, those in own.items() if table.of_kinds(those).any()}
        joined = bool((program.pairs & (program.ticks.backward.kind == Kind.W)).any())
        found: list[tuple[Block, ...]] = [(block,) for block in outer_blocks(self)]
        for kind, entries in zip(self.code.kinds, self.entries, strict=True):
            blocks = stage_blocks(kind, entries)
            found += [(block,) for name, block in blocks.items() if name in kinds]
            found += [(blocks["B"], blocks["F"])] if len(table.pairs) and "B" in kinds else []
            found += [(blocks["W"], blocks["F"])] if joined else []
        return found

    def work_space(self) -> dict[str, int]:
        """Bytes on one device of each block's own arrays, by block.

        The blocks are "F", "B", "I", "W", "R", and "B with F" of overlapped pairs, each of the kind
        of stage that needs most; "first", "first gradient" and "last".

        One block runs at a time, so the step needs the largest of these.  Each block is compiled.
        """
        found: dict[str, int] = {}
        for run in self.runs:
            name = " with ".join(block.name for block in run)
            passed = sum(block.passed for block in run)
            found[name] = max(found.get(name, 0), self.temp(*run) + passed)
        return found

    def work_without_gradients(self) -> dict[str, int]:
        """The same of "first gradient" and "last", without their gradients of parameters."""
        return {
            block.name: self.temp(block.dropping(block.gradients))
            for block in outer_blocks(self)
            if block.gradients
        }

    def permutes(self) -> bool:
        """Whether the partitioner puts a permute into a block, read off each block compiled alone.

        Spread blocks do not count: all devices run them at once.
        """
        functions = self.job.functions
        spread = {"first", "first gradient"} if functions.spreads_first else set()
        spread |= {"last"} if functions.spreads_last else set()
        return any(
            " collective-permute" in self.compiled(*run, unrun=True).as_text()
            for run in self.runs
            if run[0].name not in spread
        )

    def temp(self, *blocks: Block) -> int:
        """Bytes besides inputs and outputs, of blocks that run as one."""
        return temp_bytes(self.compiled(*blocks), self.job.mesh)

    def compiled(self, *blocks: Block, unrun: bool = False) -> Any:
        """Compile blocks that run as one; they read and write slots as in the step, in a loop of at
        most one trip.

        XLA:GPU copies a layer's weights out of their stack in loops only.
        """
        others = [block.dropping(block.changes).jaxpr.outvars for block in blocks]
        split = self.job.target.on_tpus

        def run(flags: Leaves, *groups: Leaves) -> Leaves:
            runs, index = flags

            def once(state: tuple[list[Leaves], list[Leaves]]) -> tuple[list[Leaves], list[Leaves]]:
                parts = zip(blocks, groups[::2], state[0], strict=True)
                found = run_in_slots(
                    *(block.in_slots(index, *leaves, split=split) for block, *leaves in parts)
                )
                changed, rest = [], []
                for block, outs in zip(blocks, found, strict=True):
                    changed.append([outs[i] for i in block.changes])
                    rest.append([out for i, out in enumerate(outs) if i not in block.changes])
                return changed, [without_weak_types(outs) for outs in rest]

            start = (list(groups[1::2]), [empty([var.aval for var in own]) for own in others])
            return jax.tree.leaves(while_once(runs, once, start)[1])

        # Pools and accumulators are changed in place.  As outputs of their own they would lend
        # their room to the block's arrays.
        donated = [2 + 2 * k for k in range(len(blocks))]
        groups = [
            group for block in blocks for group in (self._inputs(block), self._changed(block))
        ]
        flags: Group = [(jax.ShapeDtypeStruct((), d), _WHOLE) for d in (jnp.bool_, jnp.int32)]
        return compiled_alone(self.job, run, flags, *groups, donated=donated, unrun=unrun)

    def _inputs(self, block: Block) -> Group:
        """The inputs of a block: pools, and values."""
        return [
            self._pool(value, var.aval)
            if value.place in _READ and i not in block.updates
            else (var.aval, value.spec)
            for i, (var, value) in enumerate(zip(block.jaxpr.invars, block.inputs, strict=True))
        ]

    def _changed(self, block: Block) -> Group:
        """The pools and accumulators that a block changes."""

        def changed(value: Value, aval: Any) -> tuple[jax.ShapeDtypeStruct, PartitionSpec | None]:
            if value.place is not Place.STAGE_GRADIENTS:
                return self._pool(value, aval)
            dtype = accumulator_dtype(aval.dtype, self.job.accumulate)
            return jax.ShapeDtypeStruct(aval.shape, dtype), value.spec

        return [changed(block.outputs[i], block.jaxpr.outvars[i].aval) for i in block.changes]

    def _pool(self, value: Value, aval: Any) -> tuple[jax.ShapeDtypeStruct, PartitionSpec]:
        """A pool of two slots, and its split; of one, where the step has one: XLA copies no slot
        of an only one.
        """
        assert value.place is not None
        slots = min(2, getattr(self.code.program.slots, value.place.value))
        return value.entry.pool(max(slots, 1), aval.dtype), value.entry.pool_spec


def temp_bytes(compiled: Any, mesh: Mesh) -> int:
    """Bytes of a program on one device besides inputs and outputs."""
    memory = compiled.memory_analysis()
    if RunsOn.of(mesh) is RunsOn.TPUS:
        return heap_bytes(memory)
    return int(getattr(memory, "temp_size_in_bytes", 0))


def stage_blocks(code: StageCode, entries: StageEntries) -> dict[str, Block]:
    """The blocks of a kind of stage, by name."""

    values = {
        place: [Value(entry.spec, place, number, entry) for number, entry in enumerate(own)]
        for place, own in entries.stored.items()
    }
    trained = zip(entries.parameters, code.uses, strict=True)
    values[Place.STAGE_GRADIENTS] = _gradients(spec for spec, use in trained if use.trained)

    def at(*places: Place) -> list[Value]:
        return [value for place in places for value in values[place]]

    start = [Value(_WHOLE) for _ in code.consts] + [Value(spec) for spec in entries.parameters]
    start += at(*INPUTS)
    start += _free(len(code.forward.invars) - len(start))  # extra and once
    late = [
        *start,
        *at(*RESIDUALS, *COTANGENTS),
        *([Value(_WHOLE)] if code.avals[Place.LOSSES] else []),
    ]
    blocks = {}
    for kind, places in RESULTS.items():
        inputs = start if kind in (Kind.F, Kind.R) else late
        stash = at(Place.STASH) if kind is Kind.W else []
        outputs = [
            value
            for place in places
            for value in values.get(place) or _free(len(code.avals[place]))
        ]
        blocks[kind.name] = Block(kind.name, code.of(kind), (*inputs, *stash), tuple(outputs))
    return blocks


def _free(count: int) -> list[Value]:
    """Values that are left to the partitioner, or results that have no place."""
    return [Value() for _ in range(count)]


def _gradients(specs: Iterable[PartitionSpec]) -> list[Value]:
    """Gradients of parameters with these splits."""
    return [Value(spec, Place.STAGE_GRADIENTS) for spec in specs]


def outer_blocks(step: Step) -> list[Block]:
    """`first`, its gradient, `last` with its gradient."""
    job, free = step.job, Value(None if step.is_shared else _WHOLE)

    def block(name: str, jaxpr: core.Jaxpr, code: Any, before: int | None = None) -> Block:
        """A block with gradients of parameters after so many results; None: without gradients."""
        key = name.split()[0]
        specs = outer_specs(job, key)
        start = [*(Value(_WHOLE) for _ in code.consts), *map(Value, specs)]
        inputs = (*start, *(free for _ in range(len(jaxpr.invars) - len(start))))
        plans = [*leaf_plans(job.plans[key]), *leaf_plans(job.plans["shared"])]
        trained = [spec for spec, plan in zip(specs, plans, strict=True) if not plan.frozen]
        own = [] if before is None else [*_free(before), *_gradients(trained)]
        return Block(name, jaxpr, inputs, (*own, *_free(len(jaxpr.outvars) - len(own))))

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
