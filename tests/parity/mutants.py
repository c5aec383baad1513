"""Ten thousand mutations of valid tables: each is refused by `check`, or runs in time and agrees.

python -m tests.parity.mutants               draw them, run those that are accepted, and keep what
came of it in out/ python -m tests.parity.mutants --most 100    at most so many runs now; the next
call goes on

Everything accepted runs in torch_ref, and in jaxpipe's compiled program in the order of a shuffle,
in processes of its own with a time limit that turns a hang into a failure.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .grid import virtual_devices
from .results import MUTATIONS, ROOT, keep, load

if TYPE_CHECKING:
    import jaxpipe as jp

SEED, COUNT = 11, 10_000
SECONDS = 240


@dataclass(frozen=True)
class Mutant:
    """A mutation that `check` accepts, with its number among the distinct ones."""

    number: int
    schedule: jp.Schedule

    def __str__(self) -> str:
        return f"mutant {self.number}"


@dataclass(frozen=True)
class Drawn:
    """What came of drawing: how many were refused, by rule; how many were the table itself or
    another mutant; the others.
    """

    count: int
    refused: int
    rules: dict[str, int]
    unchanged: int
    doubled: int
    accepted: tuple[jp.Schedule, ...]


def tables(rng: random.Random) -> list[jp.Schedule]:
    """What is mutated: random tables, and every named one on two and on four devices."""
    import jaxpipe as jp

    sys.path.insert(0, str(ROOT / "tests"))
    from strategies import random_schedule

    named = [
        jp.schedules.build(name, devices=devices, microbatches=4)
        for name in jp.schedules.names()
        for devices in (2, 4)
    ]
    return [random_schedule(rng) for _ in range(150)] + named


def draw(rng: random.Random, valid: Sequence[jp.Schedule], count: int) -> Drawn:
    """Mutate `count` times; `check` must raise for every table that has violations."""
    import jaxpipe as jp

    from .mutations import mutated

    rules: Counter[str] = Counter()
    refused = unchanged = doubled = 0
    accepted: dict[str, jp.Schedule] = {}
    for _ in range(count):
        table = rng.choice(valid)
        other = mutated(rng, table)
        try:
            jp.check(other)
        except jp.ScheduleError as error:
            refused += 1
            rules.update({str(violation.rule) for violation in error.violations})
            continue
        text = _without_idles(other)
        if text == _without_idles(table):
            unchanged += 1
        elif text in accepted:
            doubled += 1
        else:
            accepted[text] = other
    return Drawn(count, refused, dict(rules), unchanged, doubled, tuple(accepted.values()))


def _without_idles(table: jp.Schedule) -> str:
    return (
        f"{table.placement} "
        f"{[[str(cell) for cell in row if cell is not None] for row in table.rows]}"
    )


def error_of(mutant: Mutant) -> float:
    """jaxpipe's error."""
    from .any_table import jaxpipe_error

    return jaxpipe_error(mutant.schedule)


def main() -> int:
    """Draw and run; 1 if anything hung or was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=None, help="run at most so many in jaxpipe")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    virtual_devices()
    from rich.progress import track

    from .any_table import torch_error
    from .tolerance import FLOAT64
    from .workers import run_all

    rng = random.Random(SEED)
    drawn = draw(rng, tables(rng), COUNT)
    mutants = [Mutant(number, schedule) for number, schedule in enumerate(drawn.accepted)]
    random.Random(SEED).shuffle(mutants)
    if "torch_ref" not in load(MUTATIONS):
        worst = [_torch(m, torch_error) for m in track(mutants, description="torch_ref")]
        wrong = sum(error > FLOAT64 for error in worst)
        keep(MUTATIONS, "torch_ref", ran=len(worst), wrong=wrong, error=max(worst))
    keep(
        MUTATIONS,
        "drawn",
        **{k: v for k, v in vars(drawn).items() if k != "accepted"},
        accepted=len(mutants),
    )
    left = [m for m in mutants if str(m) not in load(MUTATIONS)][: options.most]
    for done in track(
        run_all(error_of, left, workers=options.workers, seconds=SECONDS),
        total=len(left),
        description="jaxpipe",
    ):
        passed = done.result is not None and done.result <= FLOAT64
        keep(
            MUTATIONS,
            str(done.case),
            error=done.result,
            passed=passed,
            fault=done.fault,
            seconds=round(done.seconds, 1),
        )
    return _faults(load(MUTATIONS))


def _torch(mutant: Mutant, torch_error: Any) -> float:
    """torch_ref's error; a table that it cannot run is infinitely wrong."""
    from torch_ref import TorchRefError

    try:
        return float(torch_error(mutant.schedule))
    except TorchRefError as error:
        print(f"FAILED {mutant}: {error}\n{mutant.schedule}")
        return float("inf")


def _faults(found: dict[str, dict[str, Any]]) -> int:
    failed = {
        case: entry
        for case, entry in found.items()
        if not entry.get("passed", True) or entry.get("wrong")
    }
    for case, entry in failed.items():
        print(f"FAILED {case}: {entry}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
