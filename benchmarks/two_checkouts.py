"""The pipelined step of this checkout against that of another one, in turns: what a change costs or
saves.

    git worktree add ../before 82c3bf4
    python -m benchmarks.two_checkouts ../before -o benchmarks/results/two_checkouts.txt

Each checkout has a process of its own with the contenders of its own `benchmarks.step_time`.  One
step runs at a time, the two checkouts' right after each other and in changing order, so that
whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import commit, describe
from benchmarks.output import Command, Result, Row, told

ROOT = Path(__file__).resolve().parent.parent
# Runs in either checkout.  Says what it has, then runs the contender whose number it reads and
# answers with wall and CPU seconds.
WORKER = """
import sys
import jax
from benchmarks import step_time
tiny, count, only = sys.argv[1] == "tiny", int(sys.argv[2]), sys.argv[3:]
jax.config.update("jax_num_cpu_devices", step_time.DEVICES)
smallest = dict(layers=8, width=32, heads=2, context=16, vocab=32, rows=1)
sizes = step_time.Sizes(**(smallest if tiny else {}))
found = {c.name: c for c in step_time._ours(sizes, count) if not only or c.name in only}
for contender in found.values():
    contender.measure()
print(";".join(found), flush=True)
for line in sys.stdin:
    print(*found[line.strip()].measure(), flush=True)
"""
NOTES = (
    "this / other: medians of the ratios within a turn, and their middle half.  CPU: processor "
    "time of all threads.",
    "plain: gradient accumulation without a pipeline, which is the same code in both: what it "
    "differs from 1 by is the noise.",
)


@dataclass(frozen=True)
class Turn:
    """Seconds of a step of this checkout and of the other one."""

    wall: tuple[float, float]
    cpu: tuple[float, float]


class Worker:
    """A process that runs the steps of one checkout when it is told to."""

    def __init__(self, root: Path, size: str, count: int, only: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", WORKER, size, str(count), *only]
        self._process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names = self._line().split(";")

    def measure(self, name: str) -> tuple[float, float]:
        """Wall and CPU seconds of one step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        wall, cpu = map(float, self._line().split())
        return wall, cpu

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a checkout's process ended; its error is above")
        return line.strip()


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    machine = describe()
    other = args.other.resolve()
    rows = told(row for count in args.microbatches for row in _rows(other, args, count))
    Result(
        f"A step of this checkout / of {commit(other)}, P = 4 ({args.starts} starts of "
        f"{args.repeats} turns)",
        machine,
        (
            "contender",
            "M",
            "wall s",
            "other",
            "this / other",
            "",
            "CPU s",
            "other",
            "this / other",
            "",
        ),
        rows,
        NOTES,
    ).write(args.output)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Command(__doc__)
    parser.add_argument("other", type=Path, help="the root of the other checkout")
    parser.option("--microbatches", [8, 16], "M")
    parser.option("--repeats", 5, "N", "turns of each start that are timed")
    parser.option("--starts", 3, "N", "how often processes start again")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these contenders")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model that takes no time, to see that everything runs",
    )
    return parser.parse_args(argv)


def _rows(other: Path, args: argparse.Namespace, count: int) -> Iterator[Row]:
    """A line a contender: medians over the turns of all starts."""
    turns: dict[str, list[Turn]] = {}
    for _ in range(args.starts):
        workers = [
            Worker(root, "tiny" if args.tiny else "full", count, args.only)
            for root in (ROOT, other)
        ]
        for name in (n for n in workers[0].names if n in workers[1].names):
            turns.setdefault(name, []).extend(
                _turn(workers, name, first=number % 2) for number in range(args.repeats)
            )
        for worker in workers:
            worker.close()
    for name, samples in turns.items():
        sides = ([turn.wall for turn in samples], [turn.cpu for turn in samples])
        yield (name, str(count), *(text for side in sides for text in _compared(side)))


def _compared(pairs: Sequence[tuple[float, float]]) -> tuple[str, str, str, str]:
    """Median of this checkout and of the other one, of their ratios, and the middle half
    of these.
    """
    ratios = sorted(mine / others for mine, others in pairs)
    mine, others = (statistics.median(side) for side in zip(*pairs, strict=True))
    quarter = len(ratios) // 4
    middle = f"[{ratios[quarter]:.3f}, {ratios[-1 - quarter]:.3f}]"
    return f"{mine:.3f}", f"{others:.3f}", f"{statistics.median(ratios):.3f}", middle


def _turn(workers: Sequence[Worker], name: str, *, first: int) -> Turn:
    """One step of each; `first` begins."""
    seconds = {w: workers[w].measure(name) for w in (first, 1 - first)}
    (wall, cpu), (other_wall, other_cpu) = seconds[0], seconds[1]
    return Turn((wall, other_wall), (cpu, other_cpu))


if __name__ == "__main__":
    main()
