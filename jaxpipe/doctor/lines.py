"""The findings of a check: lines with a verdict, and prices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(Enum):
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

    def facts(self) -> dict[str, str]:
        """The values for JSON."""
        return {**vars(self), "verdict": self.verdict.value}

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> Line:
        """The line that `facts` describe."""
        texts = {name: text for name, text in facts.items() if name != "verdict"}
        return cls(verdict=Verdict(facts["verdict"]), **texts)


@dataclass(frozen=True)
class Found:
    """The lines of a check, and the prices that it measured, in seconds by name."""

    lines: tuple[Line, ...]
    prices: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""  # of the devices

    def text(self) -> str:
        """As one line of JSON."""
        lines = [line.facts() for line in self.lines]
        return json.dumps({"lines": lines, "prices": dict(self.prices), "kind": self.kind})

    @classmethod
    def read(cls, text: str) -> Found:
        """Read the result of `text`."""
        facts: dict[str, Any] = json.loads(text)
        return cls(tuple(map(Line.of, facts["lines"])), facts["prices"], facts["kind"])


def judged(
    item: str, measured: float, expected: float, *, unit: str = "us", factor: float, advice: str
) -> Line:
    """A line about seconds, slow where they are more than `factor` times the expected ones."""
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    slow = measured > factor * expected
    return Line(
        item,
        Verdict.SLOW if slow else Verdict.OK,
        f"{measured * scale:.3g} {unit}",
        f"{expected * scale:.3g} {unit}",
        advice if slow else "",
    )


def not_tried(item: str, why: str) -> Line:
    """A line about a check that was left out."""
    return Line(item, Verdict.NOT_TRIED, advice=why)
