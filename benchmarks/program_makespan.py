"""Makespan of the lowered program / makespan of the table, for the whole catalogue.

    python -m benchmarks.program_makespan -o benchmarks/results/program_makespan.txt

Nothing runs: the ticks, blocks and transfers that `Pipeline` emits are simulated.  Either only the two ends of a transfer wait for each
other (GPUs, processes), or all devices do at every transfer (virtual CPU devices of one process); for each the program is the one
that `Pipeline` chooses there.  Transfers take no time.  The program is planned with F = I = W = 1 and B = 2 in either case; "measured"
prices the same program, and the table, with a GPT stage's real costs (`benchmarks.stage_costs`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Result, add_output
from benchmarks.stage_costs import Sizes, StageCosts, measure
from jaxpipe.lowering.cost_model import Sync, cost_matrix, program_makespan
from jaxpipe.lowering.plan import Plan, Prefer, plan_of
from jaxpipe.schedules.registry import describe as describe_schedule

UNIT = StageCosts(backward=2, input_grad=1, weight_grad=1)
COLUMNS = (
    "schedule",
    "P",
    "V",
    "M",
    "pairs",
    "everybody",
    "and speed",
    "measured: pairs",
    "everybody",
    "and speed",
    "blocks",
    "why",
)


@dataclass(frozen=True)
class Case:
    """A table and the three programs made of it."""

    schedule: jp.Schedule
    pairs: Plan
    everybody: Plan
    speed: Plan

    @classmethod
    def of(cls, schedule: jp.Schedule) -> Case:
        """As `Pipeline` plans them."""
        lock_step = [plan_of(schedule, Sync.EVERYBODY, prefer) for prefer in (Prefer.MEMORY, Prefer.SPEED)]
        return cls(schedule, plan_of(schedule, Sync.PAIRS, Prefer.MEMORY), *lock_step)

    def ratios(self, stage_costs: StageCosts) -> tuple[float, float, float]:
        """Program over table: pairs, everybody, everybody with prefer="speed"."""
        costs = stage_costs.of(self.schedule.num_stages)
        table = jp.simulate(self.schedule, costs).makespan
        plans = ((self.pairs, Sync.PAIRS), (self.everybody, Sync.EVERYBODY), (self.speed, Sync.EVERYBODY))
        first, second, third = (makespan(plan, costs, sync) / table for plan, sync in plans)
        return first, second, third


def makespan(plan: Plan, costs: jp.Costs, sync: Sync) -> float:
    """Of a program, at these costs."""
    return program_makespan(cost_matrix(plan.ticks, costs), plan.segments, sync=sync)


def tables(devices: Sequence[int], microbatches: Sequence[int]) -> Iterator[jp.Schedule]:
    """Every schedule of the catalogue at its natural number of chunks, and at four where it takes any."""
    for name in jp.schedules.names():
        chunks = describe_schedule(name).chunks
        if name == "no_pipelining":
            continue
        for p in devices:
            for v in dict.fromkeys((chunks.natural, chunks.nearest(4))):
                for m in microbatches:
                    yield jp.schedules.build(name, devices=p, microbatches=m, chunks=v)


def reasons(unit: tuple[float, float, float], measured: tuple[float, float, float]) -> str:
    """Letters for why a ratio is above 1.00, as NOTES explains them."""
    found = ""
    if unit[0] >= SHOWN:
        found += "r"
    if max(unit[1:]) >= max(SHOWN, unit[0] + 1e-3):
        found += "l"
    if any(many >= max(SHOWN, one + 1e-3) for one, many in zip(unit, measured, strict=True)):
        found += "u"
    return found


SHOWN = 1.0005  # prints as more than 1.000
NOTES = (
    "pairs: only the two ends of a transfer wait for each other.  everybody: all devices wait at every transfer.  and speed: so too,",
    'with prefer="speed" in place of "memory".  blocks: pieces of stage code that are compiled (pairs).  why a ratio is above 1.00:',
    "r: in the ramps some devices run an overlapped pair while their neighbours run one action, and wait for it (dualpipe, dualpipev);",
    "l: in lock-step a tick lasts as long as the longest action in it.  1f1b's neighbours do F and B in turn, so every tick is a B where",
    "memory is 1F1B's; more microbatches in flight (speed) let a tick hold an F and a B;",
    "u: with these costs actions are not equally long (B is not 2 F, W is longer than F, the last stage has the loss besides), and devices",
    "that meet in a tick wait for the longer one.  Most in the zero-bubble tables, where F, I and W of neighbours share each tick.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8], metavar="P")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 32], metavar="M")
    parser.add_argument(
        "--costs",
        metavar="B,I,W[,F,B,L]",
        help="in units of F, instead of measuring a stage; the last three: what first adds to F and to B, and last to F",
    )
    add_output(parser)
    args = parser.parse_args(argv)
    machine = describe()
    measured = StageCosts(*map(float, args.costs.split(","))) if args.costs else measure(Sizes(), repeats=50)[0]
    rows = []
    for schedule in tables(args.devices, args.microbatches):
        case = Case.of(schedule)
        shape = (schedule.num_devices, schedule.num_stages // schedule.num_devices, schedule.num_microbatches)
        blocks = sum(segment.size for segment in case.pairs.segments)
        unit, real = case.ratios(UNIT), case.ratios(measured)
        rows.append((schedule.name, *map(str, shape), *(f"{r:.3f}" for r in (*unit, *real)), str(blocks), reasons(unit, real)))
    costs = f"{'given' if args.costs else 'measured'}, in units of F: {measured.describe()}"
    Result("Makespan of the lowered program / makespan of its table", machine, COLUMNS, rows, (costs, *NOTES)).write(args.output)


if __name__ == "__main__":
    main()
