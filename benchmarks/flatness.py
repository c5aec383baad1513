"""Program size and compile time against the number of microbatches, of devices and of chunks.

    JAX_PLATFORMS=cpu python -m benchmarks.flatness -o benchmarks/results/flatness.txt

Blocks and permutes are counted in the plans of the whole catalogue, which takes no compiler.  Of
some tables the small model of tests/gpu is compiled for H100s that are only described, and the
instructions of the optimised program are counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from jaxpipe.lowering.plan import plan_of
from jaxpipe.schedules.registry import describe as describe_schedule
from tests.gpu.programs import compile_step, operations, require_gpu_compiler

FEW, MORE, MANY = 8, 64, 512
# Microbatches that lie in the steady state: what so many more of them send is what a steady state
# sends.
SHORT, LONG = 96, 192
COLUMNS = "schedule  P  V  M = 8  512  worst  sent  HLO: 8  512  ratio  CPU s: 8  512  ratio"
NOTES = (
    "M = 8, 512: blocks of stage code + permutes that are compiled;",
    "worst: the most of M = 64 and 512 over M = 8, of blocks, or of blocks and a tenth of the "
    "permutes (with 35 instructions in these",
    "programs, where a block has 400 and more).",
    "sent: what 96 microbatches more send over what they send in the table.",
    "8 microbatches have little steady state, so code grows until about M = 32 and no further.",
    "HLO: instructions of the program that XLA has optimised for H100s.  CPU s: to trace and "
    "compile it, of all threads.",
)


@dataclass(frozen=True)
class Table:
    """A schedule of the catalogue at a size."""

    name: str
    devices: int
    chunks: int

    @classmethod
    def parse(cls, text: str) -> Table:
        """NAME:P:V."""
        name, devices, chunks = text.split(":")
        return cls(name, int(devices), int(chunks))

    def build(self, microbatches: int) -> jp.Schedule:
        """With so many microbatches."""
        return jp.schedules.build(
            self.name, devices=self.devices, microbatches=microbatches, chunks=self.chunks
        )


@cache
def size(table: Table, microbatches: int) -> tuple[int, int]:
    """Blocks of stage code and permutes of its program."""
    plan = plan_of(table.build(microbatches))
    return sum(s.size for s in plan.segments), sum(s.permutes for s in plan.segments)


def worst(table: Table) -> float:
    """The most that 64 or 512 microbatches take over 8."""
    found = []
    few = size(table, FEW)
    for microbatches in (MORE, MANY):
        many = size(table, microbatches)
        found += [many[0] / few[0], (many[0] + 0.1 * many[1]) / (few[0] + 0.1 * few[1])]
    return max(found)


def sent(table: Table) -> float:
    """What is sent in the steady state over what the table sends there."""
    plans = [plan_of(table.build(m)) for m in (SHORT, LONG)]
    program = [sum(s.num_sends for s in plan.segments) for plan in plans]
    own = [int(np.sum(plan.ticks.schedule.encoded.crosses)) for plan in plans]
    return (program[1] - program[0]) / (own[1] - own[0])


def compiled(table: Table, microbatches: int) -> tuple[int, float]:
    """Instructions, and CPU seconds to trace and compile."""
    schedule = table.build(microbatches)
    begin = time.process_time()
    text = compile_step(schedule).as_text()
    return len(operations(text)), time.process_time() - begin


def tables(names: Sequence[str], devices: Sequence[int]) -> Iterator[Table]:
    """Every schedule with each number of chunks up to four that it takes."""
    for name in names:
        for chunks in (1, 2, 3, 4):
            if describe_schedule(name).chunks.nearest(chunks) == chunks:
                yield from (Table(name, p, chunks) for p in devices)


def line(table: Table, *, compile_it: bool) -> tuple[str, ...]:
    """A line of the table of results."""
    cells = [table.name, str(table.devices), str(table.chunks)]
    cells += ["{}+{}".format(*size(table, m)) for m in (FEW, MANY)]
    cells += [f"{worst(table):.2f}", f"{sent(table):.2f}"]
    if not compile_it:
        return (*cells, *[""] * 6)
    (few, few_seconds), (many, many_seconds) = compiled(table, FEW), compiled(table, MANY)
    cells += [str(few), str(many), f"{many / few:.2f}"]
    return (
        *cells,
        f"{few_seconds:.1f}",
        f"{many_seconds:.1f}",
        f"{many_seconds / few_seconds:.2f}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    catalogue = [name for name in jp.schedules.names() if name != "no_pipelining"]
    parser = Command(__doc__)
    parser.option("--schedules", catalogue, "NAME")
    parser.option("--devices", [4, 8], "P")
    parser.add_argument(
        "--compile",
        nargs="*",
        metavar="NAME:P:V",
        help="tables to compile (default: those of the usual number of chunks)",
    )
    args = parser.parse_args(argv)
    machine = describe()
    everything = list(tables(args.schedules, args.devices))
    usual = {t for t in everything if t.chunks == describe_schedule(t.name).chunks.natural}
    chosen = usual if args.compile is None else {Table.parse(text) for text in args.compile}
    if chosen:  # --compile without a table chooses none
        require_gpu_compiler(parser)
    rows = [line(table, compile_it=table in chosen) for table in everything]
    Result("Program size and compile time", machine, COLUMNS, rows, NOTES).write(args.output)


if __name__ == "__main__":
    main()
