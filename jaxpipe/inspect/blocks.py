"""The work space of each block, besides its inputs, stored values and results, read off the block
compiled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ..arrays import Leaves
from ..jaxprs.entry import Entry
from ..jaxprs.equations import reads
from ..jaxprs.eval_in_slots import run_in_slots
from ..jaxprs.sizes import nbytes
from ..jaxprs.slots import InSlots, Slot, Target, Total
from ..lowering.target import RunsOn
from ..model.leaf_plan import leaf_plans
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


@dataclass(frozen=True)
class Block:
    """A piece of code, the splits of its inputs, and the inputs and outputs in slots or
    accumulators.
    """

    name: str
    jaxpr: core.Jaxpr
    specs: tuple[PartitionSpec | None, ...]
    reads: tuple[tuple[int, Entry], ...] = ()
    writes: tuple[tuple[int, Entry], ...] = ()
    # (input, output, entry) of what is in one slot before and after
    updates: tuple[tuple[int, int, Entry], ...] = ()
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
        """Compile blocks that run as one; they read and write slots as in the step."""
        on_tpus = RunsOn.of(self.job.mesh) is RunsOn.TPUS
        parts = [_part(self.job, block, in_order=on_tpus) for block in blocks]

        def run(index: Leaves, *groups: Leaves) -> Leaves:
            codes = [code(*index, *groups[3 * k : 3 * k + 3]) for k, (_, code) in enumerate(parts)]
            return [leaf for outs in run_in_slots(*codes) for leaf in outs]

        # Pools and accumulators are changed in place.  As outputs of their own they would lend
        # their room to the block's arrays.
        donated = [1 + 3 * k + group for k in range(len(parts)) for group in (1, 2)]
        groups = [group for own, _ in parts for group in own]
        index: Group = [(jax.ShapeDtypeStruct((), jnp.int32), _WHOLE)]
        return compiled_alone(self.job, run, index, *groups, donated=donated, unrun=unrun)


def temp_bytes(compiled: Any, mesh: Mesh) -> int:
    """Bytes of a program on one device besides inputs and outputs."""
    memory = compiled.memory_analysis()
    if RunsOn.of(mesh) is RunsOn.TPUS:
        return heap_bytes(memory)
    return int(getattr(memory, "temp_size_in_bytes", 0))


# A function of a slot's index and a block's inputs, pools and accumulators that returns its code.
_Code: TypeAlias = "Callable[[Any, Leaves, Leaves, Leaves], InSlots]"


def _part(job: Job, block: Block, *, in_order: bool) -> tuple[tuple[Group, Group, Group], _Code]:
    """A block's inputs, pools and accumulators as shapes, and the function that makes its code.

    Pools have two slots: XLA copies no slot of an only one, but in the step it may.
    """
    invars: list[Any] = [var.aval for var in block.jaxpr.invars]
    outvars: list[Any] = [var.aval for var in block.jaxpr.outvars]
    lazily = dict(block.reads)
    inputs: Group = [
        (lazily[i].pool(2, aval.dtype), lazily[i].pool_spec) if i in lazily else (aval, spec)
        for i, (aval, spec) in enumerate(zip(invars, block.specs, strict=True))
    ]
    stored = [*block.writes, *((i, entry) for _, i, entry in block.updates)]
    pools: Group = [(entry.pool(2, outvars[i].dtype), entry.pool_spec) for i, entry in stored]
    added = range(block.totals_at, block.totals_at + len(block.parameters))
    wide = [
        jax.ShapeDtypeStruct(outvars[i].shape, accumulator_dtype(outvars[i].dtype, job.accumulate))
        for i in added
    ]
    totals: Group = list(zip(wide, block.parameters, strict=True))

    def code(at: Any, values: Leaves, pools: Leaves, totals: Leaves) -> InSlots:
        splits = block.parameters if in_order else [None for _ in totals]
        writes: dict[int, Target] = {
            i: Total(leaf, split) for i, leaf, split in zip(added, totals, splits, strict=True)
        }
        slots = {i: Slot(pool, at, entry) for (i, entry), pool in zip(stored, pools, strict=True)}
        reads = {i: Slot(values[i], at, entry) for i, entry in block.reads}
        reads |= {before: slots[after] for before, after, _ in block.updates}
        return InSlots(block.jaxpr, values, reads, writes | slots)

    return (inputs, pools, totals), code


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
    updates = tuple((begin + i, after + i, entry) for i, entry in enumerate(stored(Place.BUFFER)))
    late = (*start, *(entry.spec for entry in kept), *dy)
    read = tuple((len(start) + i, entry) for i, entry in enumerate(kept))
    read += tuple((begin + i, entry) for i, entry in enumerate(stored(Place.BUFFER)))
    rows, count = stored(Place.BUFFER_GRADIENT), len(late) - (code.loss is not None)

    def returned(first: int) -> tuple[tuple[int, int, Entry], ...]:
        """Gradients of rows, which a backward adds to in place."""
        first += code.num_dx - len(rows)
        return tuple((count - len(rows) + i, first + i, entry) for i, entry in enumerate(rows))

    stash = tuple((len(late) + i, entry) for i, entry in enumerate(stored(Place.STASH)))

    def written(first: int, those: Sequence[Entry]) -> tuple[tuple[int, Entry], ...]:
        return tuple((first + i, entry) for i, entry in enumerate(those))

    trained = tuple(spec for spec, has in zip(entries.parameters, code.trained, strict=True) if has)
    every = (*late, *(entry.spec for entry in stored(Place.STASH)))
    blocks = (
        Block("F", code.forward, start, writes=written(code.num_outputs, kept), updates=updates),
        Block("R", code.recompute, start, writes=written(0, kept)),
        Block("B", code.backward, late, read, (), returned(code.num_trained), trained),
        Block(
            "I",
            code.input_grad,
            late,
            read,
            written(code.num_dx, stored(Place.STASH)),
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
