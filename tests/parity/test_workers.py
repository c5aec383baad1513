"""A worker's death is its case's fault, and the other cases go on."""

import os
import signal
from dataclasses import dataclass

from tests.parity.workers import run_all


def run(case: int) -> int:
    """Even numbers are answered."""
    if case % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return case


@dataclass(frozen=True)
class Unreadable:
    """Ends the process that unpickles it: before that has read its case."""

    def __reduce__(self):
        return os._exit, (3,)

    def __call__(self, case: int) -> int:
        raise AssertionError("nobody lives to call it")


def test_a_death_is_a_finding():
    found = [
        (done.case, done.result, done.fault)
        for done in run_all(run, [0, 1, 2], workers=1, seconds=60)
    ]
    assert found[0] == (0, 0, "")
    assert found[1][:2] == (1, None)
    assert "exit code -9" in found[1][2]
    assert found[2] == (2, 2, "")


def test_a_death_before_the_case_is_read_is_a_finding():
    done = next(run_all(Unreadable(), ["case" * 1000], workers=1, seconds=60))
    assert done.result is None
    assert "exit code 3" in done.fault
