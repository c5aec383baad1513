"""The settings of a run of checks, and the findings of each: lines with a verdict, and prices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

AT = "doctor-at: "


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Settings of a run of the doctor, the same for every check.

    Args:
        devices: of the pipe axis; None takes all that there are.
        steps: of each program whose results are compared.
        repeats: of timed calls.
        coordinator, processes, process: as `jax.distributed.initialize` takes them, where this is
            one of several processes.
    """

    devices: int | None = None
    steps: int = 200
    repeats: int = 5
    coordinator: str | None = None
    processes: int = 1
    process: int = 0


def at(what: str) -> None:
    """Print the begin of a part, so that a hang can be located."""
    print(f"{AT}{what}", file=sys.stderr, flush=True)


class Verdict(StrEnum):
    """The verdict of a line."""

    OK = "ok"
    SLOW = "slow"
    WRONG = "wrong"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Line:
    """One item: the measured figure, the expected one, and advice."""

    item: str
    verdict: Verdict
    measured: str = ""
    expected: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        """A verdict that was read from JSON is a text."""
        object.__setattr__(self, "verdict", Verdict(self.verdict))


@dataclass(frozen=True)
class Found:
    """The lines of a check, and the prices that it measured, in seconds by name."""

    lines: tuple[Line, ...]
    prices: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""  # of the devices


def judged(
    item: str,
    measured: str,
    expected: str,
    advice: str = "",
    *,
    slow: object = False,
    wrong: object = False,
) -> Line:
    """A line with the verdict; advice only where it is not good."""
    verdict = Verdict.WRONG if wrong else Verdict.SLOW if slow else Verdict.OK
    return Line(item, verdict, measured, expected, "" if verdict is Verdict.OK else advice)


def timed_line(
    item: str, measured: float, expected: float, *, unit: str = "us", factor: float, advice: str
) -> Line:
    """A line about seconds, slow where they are more than `factor` times the expected ones."""
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    found, wanted = (f"{seconds * scale:.3g} {unit}" for seconds in (measured, expected))
    return judged(item, found, wanted, advice, slow=measured > factor * expected)


def not_tried(item: str, why: str) -> Line:
    """A line about a check that was left out."""
    return Line(item, Verdict.NOT_TRIED, advice=why)
