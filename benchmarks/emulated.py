"""How close a step comes to its table's makespan, on emulated devices: stages that hold their
device for a given time.

    python -m benchmarks.emulated -o benchmarks/results/emulated.txt

F, I and W hold a device for one unit and B for two; nothing is computed, so any number of devices
run side by side on few cores.  Each case runs with all devices in one process (XLA:CPU, where a
transfer waits for every device) and with processes of one or two devices that talk over gloo (where
it waits for its pairs).  "empty" is the same step with holds of no time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import jaxpipe as jp
from benchmarks.emulated_worker import MARK, Case, Group
from benchmarks.machine import describe
from benchmarks.output import Command, Result, Row, told
from jaxpipe.lowering.plan import Plan, plan_of

SCHEDULES = (
    "gpipe:1",
    "1f1b:1",
    "1f1b_overlap:1",
    "interleaved_1f1b:2",
    "interleaved_1f1b_overlap:2",
    "zb_h1:1",
    "zb_h2:1",
)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    machine = describe()
    rows = sorted(told(_rows(args)), key=lambda row: row[-1])
    Result(
        "Emulated devices: wall time of a step / makespan of its table (medians of "
        f"{args.repeats}; F, I, W = {args.unit * 1e3:g} ms)",
        machine,
        "schedule  P  V  M  processes  ideal s  wall/ideal  (least)  program  empty ms/mb",
        [row[:-1] for row in rows],
        NOTES,
    ).write(args.output)


NOTES = (
    "processes: 1 x 4 is one process with four devices; 4 x 1 is four processes over gloo.",
    "program: the simulated makespan of the lowered program / that of the table, where a "
    "transfer holds up the two devices of each pair,",
    "as between processes of one device and on GPUs.  In one process of CPU devices every "
    "transfer holds up all devices: wall / ideal is",
    "then larger where neighbours do F and B in turn.",
    "empty: milliseconds a microbatch of the same step with holds of no time: dispatch, loops, "
    "transfers, reductions.",
)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Command(__doc__)
    parser.option("--schedules", SCHEDULES, "NAME:V", "schedules with their chunks a device")
    parser.option("--devices", [4, 8], "P")
    parser.option("--microbatches", [8, 32], "M")
    parser.add_argument(
        "--processes",
        nargs="+",
        type=int,
        metavar="N",
        help="process counts (default: 1 and P, and 2 for P = 4)",
    )
    parser.option("--unit", 0.01, "SECONDS", "how long F, I and W hold a device")
    parser.option("--repeats", 5, "N", "steps that are timed")
    return parser.parse_args(argv)


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of all groups of processes, with keys to sort them by."""
    for devices in args.devices:
        named = [text.partition(":") for text in args.schedules]
        cases = tuple(
            Case(name, devices, int(chunks or 1), count)
            for (name, _, chunks), count in product(named, args.microbatches)
        )
        for processes in _process_counts(args.processes, devices):
            for result in run_group(Group(0, processes, 0, args.unit, args.repeats, cases)):
                yield _row(result, processes, args.unit)


def plan_for(case: Case) -> Plan:
    """The plan that `Pipeline` makes."""
    return plan_of(case.build())


def _process_counts(asked: Sequence[int] | None, devices: int) -> Iterable[int]:
    counts = asked or ((1, 2, 4) if devices == 4 else (1, devices))
    return [n for n in dict.fromkeys(counts) if devices % n == 0]


def run_group(group: Group) -> Iterator[dict[str, Any]]:
    """Start the processes of a group and yield what process 0 prints, case by case; all are ended
    if one fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ExitStack() as stack:
        workers = []
        for process in range(group.processes):
            worker = _start(dataclasses.replace(group, process=process, port=port))
            stack.callback(_end, worker)
            workers.append(worker)
        # Where one fails the others wait for it for ever, so whoever fails first ends process 0,
        # and with it the loop below.
        for worker in workers[1:]:
            threading.Thread(target=_end_if_failed, args=(worker, workers[0]), daemon=True).start()
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            if line.startswith(MARK):  # gloo prints to standard output too
                yield json.loads(line.removeprefix(MARK))
        if workers[0].wait():
            raise SystemExit(f"one of {group.processes} processes failed; its message is above")


def _start(group: Group) -> subprocess.Popen[str]:
    """One process; it ends when its standard input does, so none outlives this one."""
    command = [sys.executable, "-m", "benchmarks.emulated_worker", group.to_json()]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.PIPE if group.process == 0 else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, text=True, env=environment)


def _end_if_failed(worker: subprocess.Popen[str], first: subprocess.Popen[str]) -> None:
    if worker.wait():
        first.kill()


def _end(worker: subprocess.Popen[str]) -> None:
    # Killed, not terminated: jax.distributed takes SIGTERM for a notice of preemption and goes on.
    worker.kill()
    worker.wait()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            stream.close()


def _row(result: dict[str, Any], processes: int, unit: float) -> tuple[str, ...]:
    """One line, and a key to sort lines by."""
    case = Case(**result["case"])
    table = float(jp.simulate(case.build()).makespan)
    program = plan_for(case).makespan / table
    ideal = table * unit
    return (
        case.schedule,
        str(case.devices),
        str(case.chunks),
        str(case.microbatches),
        f"{processes} x {case.devices // processes}",
        f"{ideal:.3f}",
        f"{result['step'] / ideal:.3f}",
        f"{min(result['steps']) / ideal:.3f}",
        f"{program:.3f}",
        f"{result['empty'] / case.microbatches * 1e3:.2f}",
        f"{case.devices:3d} {case.schedule} {case.chunks} {case.microbatches:4d} {processes:3d}",
    )


if __name__ == "__main__":
    main()
