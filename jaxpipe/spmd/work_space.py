"""The memory that a block needs while it runs, besides what it reads, stores and hands on: read off each block compiled alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ..arrays import Leaves
from ..jaxprs import Entry, Slot, Total, run_in_slots
from ..model.partition import leaf_plans
from ..stage.code import StageCode
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.kinds import RECOMPUTE, Kind
from .body import accumulator_dtype
from .entries import Group, StageEntries, compiled_alone

_WHOLE = PartitionSpec()


@dataclass(frozen=True)
class _Block:
    """A piece of code, how its inputs are split, and which inputs and outputs lie in slots or accumulators."""

    name: str
    jaxpr: core.Jaxpr
    specs: tuple[PartitionSpec | None, ...]
    reads: tuple[tuple[int, Entry], ...] = ()
    writes: tuple[tuple[int, Entry], ...] = ()
    totals: int = 0  # of the first outputs, as the parameters are split
    parameters: tuple[PartitionSpec, ...] = ()


def work_space(job: Job, mesh: Mesh, code: ModelCode, entries: Sequence[StageEntries] | None) -> dict[str, int]:
    """Bytes on one device of each block's own arrays, by block: "F", "B", "I", "W", "R" (of the kind of stage that needs most), "first",
    "first gradient", "last".

    Of the blocks of a tick one runs at a time, so the largest of these is what the step needs.  Takes a compilation of each block.
    """
    splits = bool(code.program.schedule.encoded.of_kinds((Kind.I,)).any())
    again = bool(code.program.schedule.encoded.of_kinds(RECOMPUTE).any())
    blocks = [
        block
        for number, kind in enumerate(code.kinds)
        for block in _stage_blocks(kind, _entries(kind) if entries is None else entries[number], splits=splits, again=again)
    ]
    found: dict[str, int] = {}
    for block in [*blocks, *_outer_blocks(job, code, split=entries is not None)]:
        found[block.name] = max(found.get(block.name, 0), _temp(job, mesh, block))
    return found


def _temp(job: Job, mesh: Mesh, block: _Block) -> int:
    """Bytes besides inputs and outputs, of a block that reads and writes slots of pools as it does in the step."""
    invars: list[Any] = [var.aval for var in block.jaxpr.invars]
    outvars: list[Any] = [var.aval for var in block.jaxpr.outvars]
    lazily = dict(block.reads)
    inputs: Group = [
        (lazily[i].pool(1, aval.dtype), lazily[i].pool_spec) if i in lazily else (aval, spec)
        for i, (aval, spec) in enumerate(zip(invars, block.specs, strict=True))
    ]
    pools: Group = [(entry.pool(1, outvars[i].dtype), entry.pool_spec) for i, entry in block.writes]
    wide = [jax.ShapeDtypeStruct(aval.shape, accumulator_dtype(aval.dtype, job.accumulate)) for aval in outvars[: block.totals]]
    totals: Group = list(zip(wide, block.parameters, strict=True))

    def run(values: Leaves, pools: Leaves, totals: Leaves) -> Leaves:
        at = jnp.int32(0)
        writes: dict[int, Slot | Total] = {i: Total(leaf) for i, leaf in enumerate(totals)}
        writes |= {i: Slot(pool, at, entry) for (i, entry), pool in zip(block.writes, pools, strict=True)}
        return run_in_slots(block.jaxpr, values, reads={i: Slot(values[i], at, entry) for i, entry in block.reads}, writes=writes)

    memory = compiled_alone(job, mesh, run, inputs, pools, totals).memory_analysis()
    return int(getattr(memory, "temp_size_in_bytes", 0))


def _entries(code: StageCode) -> StageEntries:
    """No axis is left to the partitioner."""

    def plain(avals: Sequence[Any]) -> tuple[Entry, ...]:
        return tuple(Entry(tuple(aval.shape)) for aval in avals)

    stored = (code.x_avals, code.dy_avals, code.residual_input, code.residual_weight, code.stash)
    return StageEntries((_WHOLE,) * code.num_params, *map(plain, stored))


def _stage_blocks(code: StageCode, entries: StageEntries, *, splits: bool, again: bool) -> list[_Block]:
    """The blocks of a kind of stage."""
    before = [*(_WHOLE for _ in code.consts), *entries.parameters, *(entry.spec for entry in entries.x)]
    free = len(code.forward.invars) - len(before)  # extra and once: left to the partitioner
    start = (*before, *(None for _ in range(free)))
    kept = (*entries.residual_input, *entries.residual_weight)
    dy = [*(entry.spec for entry in entries.cotangent), *([] if code.loss is None else [_WHOLE])]
    late = (*start, *(entry.spec for entry in kept), *dy)
    read = tuple((len(start) + i, entry) for i, entry in enumerate(kept))
    stash = tuple((len(late) + i, entry) for i, entry in enumerate(entries.stash))

    def written(first: int, those: Sequence[Entry]) -> tuple[tuple[int, Entry], ...]:
        return tuple((first + i, entry) for i, entry in enumerate(those))

    found = [_Block("F", code.forward, start, writes=written(code.num_outputs, kept))]
    found += [_Block("R", code.recompute, start, writes=written(0, kept))] if again else []
    trained = tuple(spec for spec, has in zip(entries.parameters, code.trained, strict=True) if has)
    if not splits:
        return [*found, _Block("B", code.backward, late, read, totals=code.num_trained, parameters=trained)]
    dx = sum(code.x_wanted)
    return [
        *found,
        _Block("I", code.input_grad, late, read, written(dx, entries.stash)),
        _Block(
            "W",
            code.weight_grad,
            (*late, *(entry.spec for entry in entries.stash)),
            (*read, *stash),
            totals=code.num_trained,
            parameters=trained,
        ),
    ]


def _outer_blocks(job: Job, code: ModelCode, *, split: bool) -> list[_Block]:
    """`first`, its gradient, and `last` with its gradient."""

    def specs(key: str, consts: int, jaxpr: core.Jaxpr) -> tuple[PartitionSpec | None, ...]:
        own = [PartitionSpec(*plan.auto) for name in (key, "shared") for plan in leaf_plans(job.plans[name])]
        start = [*(_WHOLE for _ in range(consts)), *own]
        return (*start, *(None if split else _WHOLE for _ in range(len(jaxpr.invars) - len(start))))

    first, last = code.first, code.last
    found = [_Block("first", first.forward, specs("first", len(first.consts), first.forward))]
    if first.num_trained:
        found.append(_Block("first gradient", first.backward, specs("first", len(first.consts), first.backward)))
    if last is not None:
        found.append(_Block("last", last.train, specs("last", len(last.consts), last.train)))
    return found
