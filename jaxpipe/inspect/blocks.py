"""The work space of each block, besides its inputs, stored values and results, read off the block
compiled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from ..spmd.body import TracedStep, accumulator_dtype
from ..spmd.entries import Group, StageEntries, compiled_alone, outer_specs
from ..spmd.shared_buffers import shared_buffers
from ..stage.code import StageCode
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.effects import Place
from ..table.kinds import RECOMPUTE, Kind
from .tpu_program import heap_bytes

_WHOLE = PartitionSpec()


class Kept(NamedTuple):
    """An input or output of a block that is in a pool."""

    at: int
    place: Place
    entry: Entry


class Update(NamedTuple):
    """A value that is in one slot before and after a block."""

    before: int  # input
    after: Kept  # output


@dataclass(frozen=True)
class Block:
    """A piece of code, the splits of its inputs, and the inputs and outputs in slots or
    accumulators.
    """

    name: str
    jaxpr: core.Jaxpr
    specs: tuple[PartitionSpec | None, ...]
    reads: tuple[Kept, ...] = ()
    writes: tuple[Kept, ...] = ()
    updates: tuple[Update, ...] = ()
    # of the outputs that are added to accumulators, as the parameters are split
    parameters: tuple[PartitionSpec, ...] = ()
    totals_at: int = 0  # the first of those outputs
    # bytes of what passes between slices and is copied out of its slot, or into it
    passed: int = 0


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
        return sum(nbytes(a) // e.local_share for a, e in zip(code.y_avals, split, strict=True))

    @property
    def runs(self) -> list[tuple[Block, ...]]:
        """The blocks of the step's table, in groups that run as one."""
        table = self.code.program.schedule.encoded
        kinds = {k.name for k in (Kind.F, Kind.B, Kind.I, Kind.W) if table.of_kinds((k,)).any()}
        kinds |= {"R"} if table.of_kinds(RECOMPUTE).any() else set()
        program = self.code.program
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
        found = {}
        for block in outer_blocks(self):
            if block.parameters:
                outs, end = block.jaxpr.outvars, block.totals_at + len(block.parameters)
                rest = block.jaxpr.replace(outvars=outs[: block.totals_at] + outs[end:])
                found[block.name] = self.temp(replace(block, jaxpr=rest, parameters=()))
        return found

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
        parts = [self._part(block) for block in blocks]
        rest = [
            [var.aval for i, var in enumerate(block.jaxpr.outvars) if i not in part.changes]
            for block, part in zip(blocks, parts, strict=True)
        ]

        def run(flags: Leaves, *groups: Leaves) -> Leaves:
            runs, index = flags

            def once(state: tuple[list[Leaves], list[Leaves]]) -> tuple[list[Leaves], list[Leaves]]:
                made = [
                    part.code(index, inputs, changed)
                    for part, inputs, changed in zip(parts, groups[::2], state[0], strict=True)
                ]
                found = list(zip(parts, run_in_slots(*made), strict=True))
                after = [[outs[i] for i in part.changes] for part, outs in found]
                return after, [
                    without_weak_types([o for i, o in enumerate(outs) if i not in part.changes])
                    for part, outs in found
                ]

            start = (list(groups[1::2]), [empty(avals) for avals in rest])
            return jax.tree.leaves(while_once(runs, once, start)[1])

        # Pools and accumulators are changed in place.  As outputs of their own they would lend
        # their room to the block's arrays.
        donated = [2 + 2 * k for k in range(len(parts))]
        groups = [group for part in parts for group in (part.inputs, part.changed)]
        flags: Group = [(jax.ShapeDtypeStruct((), d), _WHOLE) for d in (jnp.bool_, jnp.int32)]
        return compiled_alone(self.job, run, flags, *groups, donated=donated, unrun=unrun)

    def _part(self, block: Block) -> _Part:
        """A block's inputs and what it changes."""
        outvars: list[Any] = [var.aval for var in block.jaxpr.outvars]
        lazily = {kept.at: kept for kept in block.reads}
        inputs: Group = [
            self._pool(lazily[i], var.aval) if i in lazily else (var.aval, spec)
            for i, (var, spec) in enumerate(zip(block.jaxpr.invars, block.specs, strict=True))
        ]
        stored = [*block.writes, *(update.after for update in block.updates)]
        added = range(block.totals_at, block.totals_at + len(block.parameters))
        pools: Group = [self._pool(kept, outvars[kept.at]) for kept in stored]
        totals: Group = [
            (jax.ShapeDtypeStruct(a.shape, accumulator_dtype(a.dtype, self.job.accumulate)), spec)
            for a, spec in zip((outvars[i] for i in added), block.parameters, strict=True)
        ]
        on_tpus = RunsOn.of(self.job.mesh) is RunsOn.TPUS
        splits = block.parameters if on_tpus else [None for _ in added]

        def code(at: Any, values: Leaves, changed: Leaves) -> InSlots:
            pools, totals = changed[: len(stored)], changed[len(stored) :]
            writes: dict[int, Target] = {
                i: Total(leaf, split) for i, leaf, split in zip(added, totals, splits, strict=True)
            }
            slots = {
                kept.at: Slot(pool, at, kept.entry)
                for kept, pool in zip(stored, pools, strict=True)
            }
            reads = {kept.at: Slot(values[kept.at], at, kept.entry) for kept in block.reads}
            reads |= {update.before: slots[update.after.at] for update in block.updates}
            return InSlots(block.jaxpr, values, reads, writes | slots)

        return _Part(inputs, (*pools, *totals), (*(kept.at for kept in stored), *added), code)

    def _pool(self, kept: Kept, aval: Any) -> tuple[jax.ShapeDtypeStruct, PartitionSpec]:
        """A pool of two slots, and its split; of one, where the step has one: XLA copies no slot
        of an only one.
        """
        slots = min(2, getattr(self.code.program.slots, kept.place.value))
        return kept.entry.pool(max(slots, 1), aval.dtype), kept.entry.pool_spec


class _Part(NamedTuple):
    """A block to compile."""

    inputs: Group
    changed: Group  # pools, and accumulators
    changes: tuple[int, ...]  # the outputs that these are
    # of a slot's index, the inputs, and what is changed
    code: Callable[[Any, Leaves, Leaves], InSlots]


def temp_bytes(compiled: Any, mesh: Mesh) -> int:
    """Bytes of a program on one device besides inputs and outputs."""
    memory = compiled.memory_analysis()
    if RunsOn.of(mesh) is RunsOn.TPUS:
        return heap_bytes(memory)
    return int(getattr(memory, "temp_size_in_bytes", 0))


def stage_blocks(code: StageCode, entries: StageEntries) -> dict[str, Block]:
    """The blocks of a kind of stage, by name."""

    def stored(*places: Place) -> list[Entry]:
        return [entry for place in places for entry in entries.stored[place]]

    taken = [entry.spec for entry in stored(Place.X, Place.CARRY, Place.BUFFER)]
    before = [*(_WHOLE for _ in code.consts), *entries.parameters, *taken]
    free = len(code.forward.invars) - len(before)  # extra and once: left to the partitioner
    start = (*before, *(None for _ in range(free)))
    kept = stored(Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT)
    cotangents = stored(Place.COTANGENT, Place.CARRY_GRADIENT, Place.BUFFER_GRADIENT)
    dy = [*(entry.spec for entry in cotangents), *([] if code.loss is None else [_WHOLE])]
    begin, after = len(before) - len(code.buffers), len(code.y_avals) + len(code.carry)
    late = (*start, *(entry.spec for entry in kept), *dy)
    rows, count = stored(Place.BUFFER_GRADIENT), len(late) - (code.loss is not None)

    def pooled(first: int, *places: Place) -> tuple[Kept, ...]:
        """Inputs or outputs from a number on."""
        found = [(place, entry) for place in places for entry in entries.stored[place]]
        return tuple(Kept(first + i, place, entry) for i, (place, entry) in enumerate(found))

    def updated(first: int, after: int, place: Place) -> tuple[Update, ...]:
        return tuple(Update(first + i, each) for i, each in enumerate(pooled(after, place)))

    def returned(first: int) -> tuple[Update, ...]:
        """Gradients of rows, which a backward adds to in place."""
        after = first + code.num_dx - len(rows)
        return updated(count - len(rows), after, Place.BUFFER_GRADIENT)

    residuals = (Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT)
    updates = updated(begin, after, Place.BUFFER)
    read = (*pooled(len(start), *residuals), *pooled(begin, Place.BUFFER))
    stash = pooled(len(late), Place.STASH)
    trained = tuple(spec for spec, has in zip(entries.parameters, code.trained, strict=True) if has)
    every = (*late, *(entry.spec for entry in stored(Place.STASH)))
    blocks = (
        Block(
            "F", code.forward, start, writes=pooled(code.num_outputs, *residuals), updates=updates
        ),
        Block("R", code.recompute, start, writes=pooled(0, *residuals)),
        Block("B", code.backward, late, read, (), returned(code.num_trained), trained),
        Block(
            "I",
            code.input_grad,
            late,
            read,
            pooled(code.num_dx, Place.STASH),
            returned(0),
        ),
        Block("W", code.weight_grad, every, (*read, *stash), parameters=trained),
    )
    return {block.name: replace(block, passed=_passed(code, entries, block)) for block in blocks}


def _passed(code: StageCode, entries: StageEntries, block: Block) -> int:
    """Bytes on one device of carries and their gradients that a block reads and returns."""

    def sizes(place: Place) -> list[int]:
        pairs = zip(code.stored[place], entries.stored[place], strict=True)
        return [nbytes(aval) // entry.local_share for aval, entry in pairs]

    own, later = sizes(Place.CARRY), sizes(Place.CARRY_GRADIENT)
    is_read, passed = reads(block.jaxpr), own
    begin = len(code.consts) + code.num_params + len(code.x_avals)
    found = sum(size for size, used in zip(passed, is_read[begin:], strict=False) if used)
    begin = len(code.forward.invars) + len(code.residual_avals) + len(code.dy_avals)
    found += sum(size for size, used in zip(later, is_read[begin:], strict=False) if used)
    returned = {"F": own, "B": later, "I": later}
    return found + sum(returned.get(block.name, []))


def outer_blocks(step: Step) -> list[Block]:
    """`first`, its gradient, `last` with its gradient."""
    job, free = step.job, None if step.is_shared else _WHOLE

    def specs(key: str, consts: int, jaxpr: core.Jaxpr) -> tuple[PartitionSpec | None, ...]:
        start = [*(_WHOLE for _ in range(consts)), *outer_specs(job, key)]
        return (*start, *(free for _ in range(len(jaxpr.invars) - len(start))))

    def trained(key: str) -> tuple[PartitionSpec, ...]:
        plans = [*leaf_plans(job.plans[key]), *leaf_plans(job.plans["shared"])]
        return tuple(
            spec for spec, plan in zip(outer_specs(job, key), plans, strict=True) if not plan.frozen
        )

    first, last = step.code.first, step.code.last
    found = [Block("first", first.forward, specs("first", len(first.consts), first.forward))]
    if first.num_trained:
        start = specs("first", len(first.consts), first.backward)
        found.append(Block("first gradient", first.backward, start, parameters=trained("first")))
    if last is not None:
        # The loss and what comes with it are before the gradients.
        start, before = specs("last", len(last.consts), last.train), 1 + len(last.aux_avals)
        found.append(Block("last", last.train, start, parameters=trained("last"), totals_at=before))
    return found


def output_entries(code: StageCode, entries: StageEntries) -> Iterator[Entry]:
    """The split of each leaf of a stage's output: that of its cotangent, where it has one."""
    cotangents = iter(entries.stored[Place.COTANGENT])
    for aval, wanted in zip(code.y_avals, code.y_wanted, strict=True):
        yield next(cotangents) if wanted else Entry(tuple(aval.shape))
