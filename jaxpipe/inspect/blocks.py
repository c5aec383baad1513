"""The memory that a block needs while it runs, besides what it reads, stores and hands on: read off
each block compiled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ..arrays import Leaves
from ..jaxprs import Entry, InSlots, Slot, Target, Total, run_both_in_slots, run_in_slots
from ..model.leaf_plan import leaf_plans
from ..spmd.body import accumulator_dtype
from ..spmd.entries import Group, StageEntries, compiled_alone, outer_specs
from ..stage.code import StageCode
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.kinds import RECOMPUTE, Kind

_WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Block:
    """A piece of code, how its inputs are split, and which inputs and outputs lie in slots or
    accumulators.
    """

    name: str
    jaxpr: core.Jaxpr
    specs: tuple[PartitionSpec | None, ...]
    reads: tuple[tuple[int, Entry], ...] = ()
    writes: tuple[tuple[int, Entry], ...] = ()
    # of the outputs that are added to accumulators, as the parameters are split
    parameters: tuple[PartitionSpec, ...] = ()
    totals_at: int = 0  # the first of those outputs


def work_space(
    job: Job, mesh: Mesh, code: ModelCode, entries: Sequence[StageEntries] | None
) -> dict[str, int]:
    """Bytes on one device of each block's own arrays, by block.

    The blocks are "F", "B", "I", "W", "R", and "B with F" of overlapped pairs, each of the kind of
    stage that needs most; "first", "first gradient" and "last".

    Of the blocks of a tick one runs at a time, so the largest of these is what the step needs.
    Takes a compilation of each block.
    """
    found: dict[str, int] = {}
    for run in step_blocks(job, code, entries):
        name = " with ".join(block.name for block in run)
        found[name] = max(found.get(name, 0), _temp(job, mesh, run))
    return found


def step_blocks(
    job: Job, code: ModelCode, entries: Sequence[StageEntries] | None
) -> list[tuple[Block, ...]]:
    """The blocks of a training step, those together that are run as one."""
    table = code.program.schedule
    kinds = {
        kind.name
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        if table.encoded.of_kinds((kind,)).any()
    }
    kinds |= {"R"} if table.encoded.of_kinds(RECOMPUTE).any() else set()
    runs: list[tuple[Block, ...]] = [
        (block,) for block in outer_blocks(job, code, split=entries is not None)
    ]
    for number, kind in enumerate(code.kinds):
        blocks = stage_blocks(kind, whole_entries(kind) if entries is None else entries[number])
        runs += [(block,) for name, block in blocks.items() if name in kinds]
        runs += [(blocks["B"], blocks["F"])] if len(table.encoded.pairs) and "B" in kinds else []
    return runs


def partitioner_permutes(
    job: Job, mesh: Mesh, code: ModelCode, entries: Sequence[StageEntries]
) -> bool:
    """Whether the partitioner puts a permute into a block of a training step: read off each,
    compiled alone.

    What is spread does not count: all devices run it at once.
    """
    spread = {"first", "first gradient"} if job.functions.spreads_first else set()
    spread |= {"last"} if job.functions.spreads_last else set()
    alone = [run for run in step_blocks(job, code, entries) if run[0].name not in spread]
    return any(
        " collective-permute" in compiled_blocks(job, mesh, run, asked=True).as_text()
        for run in alone
    )


def work_without_gradients(
    job: Job, mesh: Mesh, code: ModelCode, entries: Sequence[StageEntries] | None
) -> dict[str, int]:
    """The same of "first gradient" and "last", their gradients of parameters left out."""
    found = {}
    for block in outer_blocks(job, code, split=entries is not None):
        if block.parameters:
            rest = (
                block.jaxpr.outvars[: block.totals_at]
                + block.jaxpr.outvars[block.totals_at + len(block.parameters) :]
            )
            bare = replace(block, jaxpr=block.jaxpr.replace(outvars=rest), parameters=())
            found[block.name] = _temp(job, mesh, (bare,))
    return found


def stage_work_space(
    job: Job, mesh: Mesh, code: StageCode, entries: StageEntries
) -> dict[str, int]:
    """The same for the blocks "F", "B", "I" and "W" of one kind of stage."""
    return {
        name: _temp(job, mesh, (block,))
        for name, block in stage_blocks(code, entries).items()
        if name != "R"
    }


def _temp(job: Job, mesh: Mesh, blocks: Sequence[Block]) -> int:
    """Bytes besides inputs and outputs, of blocks that run as one."""
    return int(
        getattr(compiled_blocks(job, mesh, blocks).memory_analysis(), "temp_size_in_bytes", 0)
    )


def compiled_blocks(job: Job, mesh: Mesh, blocks: Sequence[Block], *, asked: bool = False) -> Any:
    """Blocks that run as one, compiled alone; they read and write slots as in the step."""
    parts = [_part(job, block) for block in blocks]
    count = len(parts)

    def run(*groups: Leaves) -> Leaves:
        codes = [part.code(*groups[3 * k : 3 * k + 3]) for k, part in enumerate(parts)]
        if count == 1:
            return run_in_slots(
                codes[0].jaxpr, codes[0].arguments, reads=codes[0].reads, writes=codes[0].writes
            )
        return [leaf for outs in run_both_in_slots(codes[0], codes[1]) for leaf in outs]

    # Pools and accumulators are changed in place: were they outputs of their own, these would be
    # room for the block's arrays.
    donated = [3 * k + group for k in range(count) for group in (1, 2)]
    groups = [group for part in parts for group in part.groups]
    return compiled_alone(job, mesh, run, *groups, donated=donated, asked=asked)


@dataclass(frozen=True)
class _Part:
    """A block's inputs, pools and accumulators, and its code once they are arrays."""

    groups: tuple[Group, Group, Group]
    code: Callable[[Leaves, Leaves, Leaves], InSlots]


def _part(job: Job, block: Block) -> _Part:
    invars: list[Any] = [var.aval for var in block.jaxpr.invars]
    outvars: list[Any] = [var.aval for var in block.jaxpr.outvars]
    lazily = dict(block.reads)
    inputs: Group = [
        (lazily[i].pool(1, aval.dtype), lazily[i].pool_spec) if i in lazily else (aval, spec)
        for i, (aval, spec) in enumerate(zip(invars, block.specs, strict=True))
    ]
    pools: Group = [(entry.pool(1, outvars[i].dtype), entry.pool_spec) for i, entry in block.writes]
    added = range(block.totals_at, block.totals_at + len(block.parameters))
    wide = [
        jax.ShapeDtypeStruct(outvars[i].shape, accumulator_dtype(outvars[i].dtype, job.accumulate))
        for i in added
    ]
    totals: Group = list(zip(wide, block.parameters, strict=True))

    def code(values: Leaves, pools: Leaves, totals: Leaves) -> InSlots:
        at = jnp.int32(0)
        writes: dict[int, Target] = {i: Total(leaf) for i, leaf in zip(added, totals, strict=True)}
        writes |= {
            i: Slot(pool, at, entry) for (i, entry), pool in zip(block.writes, pools, strict=True)
        }
        return InSlots(
            block.jaxpr, values, {i: Slot(values[i], at, entry) for i, entry in block.reads}, writes
        )

    return _Part((inputs, pools, totals), code)


def whole_entries(code: StageCode) -> StageEntries:
    """No axis is left to the partitioner."""

    def plain(avals: Sequence[Any]) -> tuple[Entry, ...]:
        return tuple(Entry(tuple(aval.shape)) for aval in avals)

    stored = (code.x_avals, code.dy_avals, code.residual_input, code.residual_weight, code.stash)
    return StageEntries((_WHOLE,) * code.num_params, *map(plain, stored))


def stage_blocks(code: StageCode, entries: StageEntries) -> dict[str, Block]:
    """The blocks of a kind of stage, by name."""
    before = [
        *(_WHOLE for _ in code.consts),
        *entries.parameters,
        *(entry.spec for entry in entries.x),
    ]
    free = len(code.forward.invars) - len(before)  # extra and once: left to the partitioner
    start = (*before, *(None for _ in range(free)))
    kept = (*entries.residual_input, *entries.residual_weight)
    dy = [*(entry.spec for entry in entries.cotangent), *([] if code.loss is None else [_WHOLE])]
    late = (*start, *(entry.spec for entry in kept), *dy)
    read = tuple((len(start) + i, entry) for i, entry in enumerate(kept))
    stash = tuple((len(late) + i, entry) for i, entry in enumerate(entries.stash))

    def written(first: int, those: Sequence[Entry]) -> tuple[tuple[int, Entry], ...]:
        return tuple((first + i, entry) for i, entry in enumerate(those))

    trained = tuple(spec for spec, has in zip(entries.parameters, code.trained, strict=True) if has)
    every = (*late, *(entry.spec for entry in entries.stash))
    blocks = (
        Block("F", code.forward, start, writes=written(code.num_outputs, kept)),
        Block("R", code.recompute, start, writes=written(0, kept)),
        Block("B", code.backward, late, read, parameters=trained),
        Block("I", code.input_grad, late, read, written(sum(code.x_wanted), entries.stash)),
        Block("W", code.weight_grad, every, (*read, *stash), parameters=trained),
    )
    return {block.name: block for block in blocks}


def outer_blocks(job: Job, code: ModelCode, *, split: bool) -> list[Block]:
    """`first`, its gradient, `last` with its gradient."""

    def specs(key: str, consts: int, jaxpr: core.Jaxpr) -> tuple[PartitionSpec | None, ...]:
        start = [*(_WHOLE for _ in range(consts)), *outer_specs(job, key)]
        return (*start, *(None if split else _WHOLE for _ in range(len(jaxpr.invars) - len(start))))

    def trained(key: str) -> tuple[PartitionSpec, ...]:
        plans = [*leaf_plans(job.plans[key]), *leaf_plans(job.plans["shared"])]
        return tuple(
            spec for spec, plan in zip(outer_specs(job, key), plans, strict=True) if not plan.frozen
        )

    first, last = code.first, code.last
    found = [Block("first", first.forward, specs("first", len(first.consts), first.forward))]
    if first.num_trained:
        start = specs("first", len(first.consts), first.backward)
        found.append(Block("first gradient", first.backward, start, parameters=trained("first")))
    if last is not None:
        # The loss and what comes with it are before the gradients.
        start, before = specs("last", len(last.consts), last.train), 1 + len(last.aux_avals)
        found.append(Block("last", last.train, start, parameters=trained("last"), totals_at=before))
    return found
