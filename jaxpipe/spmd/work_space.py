"""The memory that a block needs while it runs, besides what it reads, stores and hands on: read off each block compiled alone."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ..jaxprs import Entry
from ..model.partition import leaf_plans
from ..stage.code import StageCode, run
from ..stage.job import Job
from ..stage.model_code import ModelCode
from ..table.kinds import RECOMPUTE, Kind
from .entries import Group, StageEntries, compiled_alone

_WHOLE = PartitionSpec()


def work_space(job: Job, mesh: Mesh, code: ModelCode, entries: Sequence[StageEntries] | None) -> dict[str, int]:
    """Bytes on one device of each block's own arrays, by block: "F", "B", "I", "W", "R" (of the kind of stage that needs most), "first",
    "first gradient", "last".

    Of the blocks of a tick one runs at a time, so the largest of these is what the step needs.  Takes a compilation of each block.
    """
    splits = bool(code.program.schedule.encoded.of_kinds((Kind.I,)).any())
    again = bool(code.program.schedule.encoded.of_kinds(RECOMPUTE).any())
    found: dict[str, int] = {}
    for number, kind in enumerate(code.kinds):
        own = None if entries is None else entries[number]
        for name, jaxpr, groups in _stage_blocks(kind, own, splits=splits, again=again):
            found[name] = max(found.get(name, 0), _temp(job, mesh, jaxpr, groups))
    for name, jaxpr, groups in _outer_blocks(job, code, None if entries is None else entries[0]):
        found[name] = _temp(job, mesh, jaxpr, groups)
    return found


def _temp(job: Job, mesh: Mesh, jaxpr: core.Jaxpr, specs: Sequence[PartitionSpec | None]) -> int:
    group: Group = [(var.aval, spec) for var, spec in zip(jaxpr.invars, specs, strict=True)]
    memory = compiled_alone(job, mesh, lambda values: run(jaxpr, *values), group).memory_analysis()
    return int(getattr(memory, "temp_size_in_bytes", 0))


def _stage_blocks(
    code: StageCode, entries: StageEntries | None, *, splits: bool, again: bool
) -> list[tuple[str, core.Jaxpr, list[PartitionSpec | None]]]:
    """Name, jaxpr, and how its inputs are split."""

    def specs(kept: Sequence[Entry], count: int) -> list[PartitionSpec | None]:
        return [entry.spec for entry in kept] if entries is not None else [_WHOLE] * count

    parameters = [_WHOLE] * code.num_params if entries is None else list(entries.parameters)
    x = specs(entries.x if entries else (), len(code.x_avals))
    before: list[PartitionSpec | None] = [*(_WHOLE for _ in code.consts), *parameters, *x]
    rest = len(code.forward.invars) - len(before)
    free: list[PartitionSpec | None] = [None if entries else _WHOLE] * rest  # extra, once
    kept = [
        *specs(entries.residual_input if entries else (), len(code.residual_input)),
        *specs(entries.residual_weight if entries else (), len(code.residual_weight)),
    ]
    dy = [*specs(entries.cotangent if entries else (), len(code.dy_avals)), *([] if code.loss is None else [_WHOLE])]
    stash = specs(entries.stash if entries else (), len(code.stash))
    late = [*before, *free, *kept, *dy]
    found = [("F", code.forward, [*before, *free])]
    found += [("R", code.recompute, [*before, *free])] if again else []
    if splits:
        return [*found, ("I", code.input_grad, late), ("W", code.weight_grad, [*late, *stash])]
    return [*found, ("B", code.backward, late)]


def _outer_blocks(job: Job, code: ModelCode, entries: StageEntries | None) -> list[tuple[str, core.Jaxpr, list[PartitionSpec | None]]]:
    """The same of `first`, its gradient, and `last` with its gradient."""

    def split(key: str) -> list[PartitionSpec]:
        return [PartitionSpec(*plan.auto) for name in (key, "shared") for plan in leaf_plans(job.plans[name])]

    def padded(start: Sequence[PartitionSpec], jaxpr: core.Jaxpr) -> list[PartitionSpec | None]:
        rest = len(jaxpr.invars) - len(start)
        return [*start, *([None if entries else _WHOLE] * rest)]

    first = [*(_WHOLE for _ in code.first.consts), *split("first")]
    found = [("first", code.first.forward, padded(first, code.first.forward))]
    if code.first.num_params:
        found.append(("first gradient", code.first.backward, padded(first, code.first.backward)))
    if code.last is not None:
        last = [*(_WHOLE for _ in code.last.consts), *split("last")]
        found.append(("last", code.last.train, padded(last, code.last.train)))
    return found
