"""Makespan of the lowered program / makespan of the table, for the whole catalogue.

    python -m benchmarks.program_makespan -o benchmarks/results/program_makespan.txt

Nothing runs: the ticks, blocks and transfers that `Pipeline` emits are simulated.  Only the two
ends of a transfer wait for each other.  Transfers take no time.  The program is planned with F = I
= W = 1 and B = 2; "measured" prices the same program, and the table, with a GPT stage's real costs
(`benchmarks.stage_costs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from benchmarks.stage_costs import Sizes, StageCosts, measure
from jaxpipe.lowering.plan import Plan, cost_parts, plan_of, program_makespan
from jaxpipe.schedules.registry import describe as describe_schedule

UNIT = StageCosts(backward=2, input_grad=1, weight_grad=1)
COLUMNS = "schedule  P  V  M  unit  measured  blocks  why"


def ratio(plan: Plan, stage_costs: StageCosts) -> float:
    """Program over table, at these costs."""
    schedule = plan.ticks.schedule
    costs = stage_costs.of(schedule.num_stages)
    return program_makespan(cost_parts(plan.ticks, costs), plan.segments) / float(
        jp.simulate(schedule, costs).makespan
    )


def tables(devices: Sequence[int], microbatches: Sequence[int]) -> Iterator[jp.Schedule]:
    """Every schedule of the catalogue at its natural number of chunks, and at four where it takes
    any.
    """
    for name in jp.schedules.names():
        chunks = describe_schedule(name).chunks
        if name == "no_pipelining":
            continue
        for p in devices:
            for v in dict.fromkeys((chunks.natural, chunks.nearest(4))):
                for m in microbatches:
                    yield jp.schedules.build(name, devices=p, microbatches=m, chunks=v)


def reasons(unit: float, measured: float) -> str:
    """Letters for why a ratio is above 1.00, as NOTES explains them."""
    found = "r" if unit >= SHOWN else ""
    return found + ("u" if measured >= max(SHOWN, unit + 1e-3) else "")


SHOWN = 1.0005  # prints as more than 1.000
NOTES = (
    "blocks: pieces of stage code that are compiled.  why a ratio is above 1.00:",
    "r: in the ramps some devices run an overlapped pair while their neighbours run one action, "
    "and wait for it (dualpipe, dualpipev);",
    "u: with these costs actions are not equally long (B is not 2 F, W is longer than F, the "
    "last stage has the loss besides), and devices",
    "that meet in a tick wait for the longer one.  Most in the zero-bubble tables, where F, I "
    "and W of neighbours share each tick.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--devices", [4, 8], "P")
    parser.option("--microbatches", [8, 32], "M")
    parser.add_argument(
        "--costs",
        metavar="B,I,W[,F,B,L]",
        help="in units of F, instead of measuring a stage; the last three: what first adds to F "
        "and to B, and last to F",
    )
    args = parser.parse_args(argv)
    machine = describe()
    measured = (
        StageCosts(*map(float, args.costs.split(",")))
        if args.costs
        else measure(Sizes(), repeats=50)[0]
    )
    rows = []
    for schedule in tables(args.devices, args.microbatches):
        plan = plan_of(schedule)
        shape = (
            schedule.num_devices,
            schedule.num_stages // schedule.num_devices,
            schedule.num_microbatches,
        )
        blocks = sum(segment.size for segment in plan.segments)
        unit, real = ratio(plan, UNIT), ratio(plan, measured)
        rows.append(
            (
                schedule.name,
                *map(str, shape),
                f"{unit:.3f}",
                f"{real:.3f}",
                str(blocks),
                reasons(unit, real),
            )
        )
    costs = f"{'given' if args.costs else 'measured'}, in units of F: {measured.describe()}"
    title = "Makespan of the lowered program / makespan of its table"
    Result(title, machine, COLUMNS, rows, (costs, *NOTES)).write(args.output)


if __name__ == "__main__":
    main()
