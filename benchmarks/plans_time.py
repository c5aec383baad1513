"""A planned pipeline against hand-made ones, on emulated devices: layers that hold their device for
a given time.

    python -m benchmarks.plans_time --processes 4 --unit 0.04 --repeats 3
        -o benchmarks/results/plans_time.txt

The model is unbalanced: a cheap embedding, layers, and a head with its loss that costs as much as a
few layers.  Devices are virtual ones of one process, where every transfer waits for all of them, or
(`--processes P`) each has a process of its own, over gloo, where a transfer is awaited by its two
ends.  Each contender's steps run one after the other in one job; medians.  "predicted" is what
`jp.plan` says: the time of the lowered program for the same times of layers and such devices,
before anything is run; transfers take no time in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import jaxpipe as jp
from benchmarks.emulated import run_group
from benchmarks.emulated_worker import Case, Group
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.target import RunsOn, Target

UNITS = (("E", 0.2, 0.0, 0.2), ("t", 1.0, 1.0, 1.0), ("L", 2.5, 2.5, 2.5))
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")


def layer_costs(unit: float) -> dict[str, jp.LayerCost]:
    """The holds, in seconds."""
    return {
        c: jp.LayerCost(forward=unit * f, input_grad=unit * i, weight_grad=unit * w, boundary=4096)
        for c, f, i, w in UNITS
    }


def by_count(letters: str, stages: int) -> str:
    """As many letters for each stage, embedding and head counted as layers."""
    cuts = [round(k * len(letters) / stages) for k in range(stages + 1)]
    return "|".join(letters[a:b] for a, b in pairwise(cuts))


def even(layers: int, stages: int) -> str:
    """As many layers for each stage; embedding and head with the first and the last."""
    return "E" + "|".join(["t" * (layers // stages)] * stages) + "L"


def contenders(
    layers: int,
    devices: int,
    microbatches: int,
    unit: float,
    runs_on: RunsOn,
    schedules: Sequence[str] = SCHEDULES,
) -> list[tuple[str, Case, float]]:
    """Name, case, and predicted seconds."""
    letters = "E" + "t" * layers + "L"
    found = [
        ("even, 1f1b", "1f1b", 1, even(layers, devices)),
        ("even, interleaved", "interleaved_1f1b", 2, even(layers, 2 * devices)),
        ("by count, 1f1b", "1f1b", 1, by_count(letters, devices)),
    ]
    options = {
        "devices": devices,
        "microbatches": microbatches,
        "schedules": schedules,
        "chunks": (1, 2),
        "remat": (None,),
        "most": 2,
    }
    plans = jp.plan(letters, layer_costs(unit), mesh=runs_on, **options)
    found += [
        (f"plan {i + 1}", p.schedule.name, p.schedule.num_chunks, p.layout)
        for i, p in enumerate(plans)
    ]
    cases = [
        (name, Case(table, devices, chunks, microbatches, layout=layout, units=UNITS))
        for name, table, chunks, layout in found
    ]
    # One choice each besides those of the tables above.
    shape = {"chunks": 1, "layout": even(layers, devices), "units": UNITS}
    shape |= {"devices": devices, "microbatches": microbatches}
    cases += [
        ("spread L, 1f1b", Case("1f1b", **shape, spread=True)),
        ("spread L, zb_h1", Case("zb_h1", **shape, spread=True)),
        ("nothing_saveable, 1f1b", Case("1f1b", **shape, again=True)),
        ("nothing_saveable, zb_h1", Case("zb_h1", **shape, again=True)),
        ("offload, 1f1b", Case("1f1b", **shape, offload=True)),
        ("B, I and W, auto", Case("auto", **shape, whole=0.95)),
    ]
    return [(name, case, predicted(case, unit, runs_on)) for name, case in cases]


def predicted(case: Case, unit: float, runs_on: RunsOn) -> float:
    """Seconds of the program that is run, as `plan` has them of its own."""
    costs = case.stage_costs(unit)
    target = Target(runs_on)
    return plan_of(case.build(), costs=costs, overheads=target.overheads).seconds(target, costs)


COLUMNS = "pipeline  schedule  V  layout  predicted s  wall s  predicted / wall  against the plan"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.option("--devices", 4, "P")
    parser.option("--microbatches", 12, "M")
    parser.option("--unit", 0.01, "SECONDS", "how long F of a layer holds its device")
    parser.option("--schedules", SCHEDULES, "NAME", "that the plan chooses among")
    parser.option("--processes", 1, "N", "1, or one a device")
    parser.option("--repeats", 5, "N")
    args = parser.parse_args(argv)
    machine = describe()
    if args.layers % (2 * args.devices):
        parser.error(
            f"--layers must be a multiple of {2 * args.devices}, so that they can be cut evenly"
        )
    if args.processes not in (1, args.devices):
        parser.error(f"--processes must be 1 or {args.devices}")
    runs_on = RunsOn.ONE_CPU_PROCESS if args.processes == 1 else RunsOn.CPU_PROCESSES
    every = contenders(
        args.layers, args.devices, args.microbatches, args.unit, runs_on, args.schedules
    )
    group = Group(
        0, args.processes, 0, args.unit, args.repeats, tuple(case for _, case, _ in every)
    )
    walls = []
    for result in run_group(group):
        walls.append(result["step"])
        print(every[len(walls) - 1][0], result["steps"], file=sys.stderr, flush=True)
    planned = next(
        wall for (name, _, _), wall in zip(every, walls, strict=True) if name == "plan 1"
    )
    rows = [
        (
            name,
            c.schedule,
            str(c.chunks),
            c.layout,
            f"{time:.3f}",
            f"{wall:.3f}",
            f"{time / wall:.3f}",
            f"{wall / planned:.3f}",
        )
        for (name, c, time), wall in zip(every, walls, strict=True)
    ]
    where = f"P = {args.devices} ({runs_on.value})"
    title = (
        f"{args.layers} layers, {where}, M = {args.microbatches}: planned against hand-made, "
        f"medians of {args.repeats}"
    )
    times = ", ".join(f"{c}: F {f:g}, I {i:g}, W {w:g}" for c, f, i, w in UNITS)
    notes = (
        f"{times} times {args.unit * 1e3:g} ms.",
        "against the plan: wall time over that of plan 1, the one that `jp.plan` puts first.",
    )
    Result(title, machine, COLUMNS, rows, notes).write(args.output)


if __name__ == "__main__":
    main()
