"""How long tables take, ours and torch's side by side: generate, check, add transfers, simulate.

python -m benchmarks.table_speed [-o FILE] [--sizes P,V,M ...] [--repeats N] [--peer-repeats N]

Processor seconds of one process.  torch's counterparts are the generator of its
`ScheduleInterleaved1F1B`, `_validate_schedule`, `_add_send_recv` and `_simulate_comms_compute`; the
last counts steps of the table with transfers, so ours does that too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed.pipelining.schedules as peer

import jaxpipe as jp

from .machine import describe
from .output import Command, Result
from .torch_tables import torch_rows

STEPS = (
    "generate",
    "check",
    "add transfers",
    "simulate",
    "together",
    "check with transfers",
    "count steps",
)
Times = dict[str, float]


def timed(times: Times, step: str, work: Callable[[], Any]) -> Any:
    """Do some work and note its processor seconds."""
    begin = time.process_time()
    result = work()
    times[step] = time.process_time() - begin
    return result


def ours(devices: int, chunks: int, microbatches: int) -> tuple[Times, int]:
    """Times of one run of ours, every step on a fresh table; and the steps counted."""
    times: Times = {}
    size = {"devices": devices, "chunks": chunks, "microbatches": microbatches}
    table = timed(times, "generate", lambda: jp.schedules.build("interleaved_1f1b", **size))
    timed(times, "check", lambda: jp.check(table))
    whole = timed(times, "add transfers", lambda: jp.add_transfers(table))
    timed(times, "simulate", lambda: jp.simulate(table).makespan)
    times["together"] = sum(times.values())
    timed(times, "check with transfers", lambda: jp.check(whole))
    return times, len(timed(times, "count steps", lambda: jp.engine.simulate_steps(whole)))


def torchs(devices: int, chunks: int, microbatches: int) -> tuple[Times, int]:
    """Times of one run of torch's; "together" has its own simulation, of the table
    with transfers.
    """
    times: Times = {}
    stages = devices * chunks
    rows = timed(
        times, "generate", lambda: torch_rows("interleaved_1f1b", devices, chunks, microbatches)
    )
    actions = dict(enumerate(rows))
    timed(times, "check", lambda: peer._validate_schedule(actions, devices, stages, microbatches))
    bare = {rank: [a for a in row if a is not None] for rank, row in actions.items()}
    whole = timed(
        times, "add transfers", lambda: peer._add_send_recv(bare, lambda s: s % devices, stages)
    )
    steps = timed(
        times,
        "count steps",
        lambda: peer._simulate_comms_compute(whole, lambda s: s % devices, stages),
    )
    times["together"] = sum(times.values())
    return times, max(map(len, steps.values()))


def median_of(
    run: Callable[[int, int, int], tuple[Times, int]], size: tuple[int, int, int], repeats: int
) -> tuple[Times, int]:
    """The median of each step's times over a few runs."""
    runs = []
    for _ in range(repeats):
        gc.collect()
        runs.append(run(*size))
    return {step: statistics.median(times[step] for times, _ in runs) for step in runs[0][0]}, runs[
        0
    ][1]


def rows_of(size: tuple[int, int, int], repeats: int, peer_repeats: int) -> list[tuple[str, ...]]:
    """The lines of one size."""
    mine, my_steps = median_of(ours, size, repeats)
    theirs, their_steps = median_of(torchs, size, peer_repeats)
    name = f"P={size[0]} V={size[1]} M={size[2]}"
    lines = []
    for step in STEPS:
        other = theirs.get(step)
        ratio = "" if other is None else f"{other / mine[step]:.1f}x"
        lines.append(
            (name, step, f"{mine[step]:.3f}", "" if other is None else f"{other:.3f}", ratio)
        )
        name = ""
    return [*lines, ("", "steps with transfers", str(my_steps), str(their_steps), "")]


def main() -> None:
    """Run and print."""
    parser = Command(__doc__)
    parser.option("--sizes", ["8,2,64", "32,4,512", "64,2,1024"], "P,V,M")
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of ours, of which the median is shown"
    )
    parser.add_argument("--peer-repeats", type=int, default=3, help="runs of torch's")
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for text in arguments.sizes:
        devices, chunks, microbatches = map(int, text.split(","))
        rows += rows_of((devices, chunks, microbatches), arguments.repeats, arguments.peer_repeats)
    notes = (
        f"Medians of {arguments.repeats} runs of ours and {arguments.peer_repeats} of torch's, "
        "in seconds of processor time.",
        "together: generate, check, add transfers and simulate; torch's simulation is the count "
        "of steps.",
    )
    columns = "interleaved 1F1B  step  jaxpipe  torch  torch / jaxpipe"
    Result("Speed of tables", describe("torch"), columns, rows, notes).write(arguments.output)


if __name__ == "__main__":
    main()
