"""Write docs/compile_report.md: what `jp.inspect.report` says of the whole catalogue.

Run: JAX_PLATFORMS=cpu python -m docs.make_compile_report
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe.inspect import step_report as report_module
from jaxpipe.lowering.plan import plan_of
from jaxpipe.schedules.registry import describe
from tests.gpu.programs import LAYERS, ROWS, TIME, WIDTH, first, gpu_mesh, last, shapes, stage

PAGE = Path(__file__).with_name("compile_report.md")
DEVICES, MICROBATCHES = 4, 16
KIB = 1024


def catalogue() -> list[jp.Schedule]:
    """Every schedule at its natural number of chunks."""
    return [
        jp.schedules.build(
            name, devices=DEVICES, microbatches=MICROBATCHES, chunks=describe(name).chunks.natural
        )
        for name in jp.schedules.names()
        if name != "no_pipelining"
    ]


def compile_report(schedule: jp.Schedule) -> dict[str, Any]:
    """Of the small model of tests/gpu on as many described H100s."""
    mesh = gpu_mesh((schedule.num_devices,), ("pipe",))
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last), schedule, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = {
        "tokens": jax.ShapeDtypeStruct(
            (schedule.num_microbatches * ROWS, TIME), jnp.int32, sharding=everywhere
        )
    }
    return jp.inspect.report(pipe, pipe.place(shapes(schedule.num_stages)), batch)


PROGRAM = (
    "schedule",
    "V",
    "ticks",
    "segments",
    "blocks",
    "table_makespan",
    "makespan",
    "late transfers",
)


def plan_row(schedule: jp.Schedule) -> tuple[str, ...]:
    """What the plan alone tells: the first table's columns, found without compiling."""
    plan = plan_of(schedule)
    return (
        schedule.name,
        str(schedule.num_chunks),
        str(plan.ticks.num_ticks),
        str(len(plan.segments)),
        str(sum(segment.size for segment in plan.segments)),
        f"{jp.simulate(schedule, jp.Costs()).makespan:g}",
        f"{plan.makespan:g}",
        "/".join(map(str, plan.late_transfers)),
    )


def program_row(schedule: jp.Schedule, found: dict[str, Any]) -> tuple[str, ...]:
    """The same of a report."""
    return (
        schedule.name,
        str(schedule.num_chunks),
        str(found["ticks"]),
        str(found["num_segments"]),
        str(found["blocks"]),
        *(f"{found[key]:g}" for key in ("table_makespan", "makespan")),
        "/".join(map(str, found["late_transfers"])),
    )


MEMORY = (
    *(
        "schedule",
        "V",
        "table_transfers",
        "transfers",
        "slots x/I/W/c/st",
        "pools",
        "transfer",
        "temp",
        "argument",
        "output",
    ),
    *("waits", "beside"),
)


def memory_row(schedule: jp.Schedule, found: dict[str, Any]) -> tuple[str, ...]:
    """Transfers, slots, and bytes in KiB."""
    slots = found["slots"]
    held = (slots.x, slots.residual_input, slots.residual_weight, slots.cotangent, slots.stash)
    sizes = (
        sum(found["pool_bytes"].values()),
        *(found[f"{key}_bytes"] for key in ("transfer", "temp", "argument", "output")),
    )
    return (
        schedule.name,
        str(schedule.num_chunks),
        str(found["table_transfers"]),
        str(found["transfers"]),
        "/".join(map(str, held)),
        *(f"{size / KIB:.0f}" for size in sizes),
        str(found["host_waits"]),
        "/".join(map(str, found["permutes_with_slack_beside_compute"])),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, numbers to the right."""
    align = ["---", *["--:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, align, *rows)]


def page() -> str:
    """The whole page."""
    schedules = catalogue()
    reports = [compile_report(schedule) for schedule in schedules]
    example = next(
        found for schedule, found in zip(schedules, reports, strict=True) if schedule.name == "1f1b"
    )
    lines = [
        "# What the report says of each schedule",
        "",
        "Written by `docs/make_compile_report.py`. `jp.inspect.report(pipe, params, batch)` "
        "compiles the step, for shapes alone if you",
        f"like, and runs nothing. Here: {DEVICES} H100s that are only described, {MICROBATCHES} "
        f"microbatches, {LAYERS} layers a stage of",
        f"width {WIDTH} in bfloat16, {ROWS} rows of {TIME} tokens a microbatch.",
        "",
        "## The program",
        "",
        *table(PROGRAM, [program_row(s, r) for s, r in zip(schedules, reports, strict=True)]),
        "",
        "Makespans have F = I = W = 1 and B = 2; only the two ends of a transfer wait for each "
        "other. late transfers: of those of the",
        "table that are needed no sooner than a tick after the one that makes them, those that "
        "the program awaits in a later tick, so",
        "that a block runs beside them.",
        "",
        "## Memory and transfers of a device",
        "",
        *table(MEMORY, [memory_row(s, r) for s, r in zip(schedules, reports, strict=True)]),
        "",
        "Sizes are KiB. slots: stage inputs, residuals that only I needs, residuals that W "
        "needs, cotangents, what I leaves for W.",
        "transfers: what the table sends, and where ticks share permutes, more. waits: how often "
        "the host waits in a step. beside: of the",
        "permutes that are awaited in a later tick, those with compute issued between start and "
        "done.",
        "",
        "## The segments of 1F1B",
        "",
        '`report["segments"]` prints each piece of code: blocks of stage code (kind and chunk; '
        "`^` first stage, `$` last stage, `~` handed",
        "on to this device, `?` under a predicate), then the permutes; in braces the choices of "
        "a tick, `-` for none.",
        "",
        "```text",
        *"\n".join(example["segments"]).splitlines(),
        "```",
        "",
        "## The keys",
        "",
        "```text",
        *(report_module.__doc__ or "").strip().splitlines()[2:],
        "```",
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
