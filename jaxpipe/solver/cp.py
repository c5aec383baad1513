"""OR-tools' CP-SAT, where it is installed, and whole numbers of ticks for its times."""

from __future__ import annotations

from fractions import Fraction
from math import lcm

from ..engine.costs import StageCosts

try:
    from ortools.sat.python import cp_model as cp_model
except ImportError as error:
    raise ImportError(
        "search= needs OR-tools, which is not installed: pip install 'jaxpipe[solver]'"
    ) from error

_FINEST = 4096  # ticks that the longest action takes where times are no small fractions


def tick_scale(costs: StageCosts) -> tuple[float, bool]:
    """Ticks of a unit of cost, and whether times are whole numbers of them, as fractions of small
    denominators are.
    """
    times = [*costs.forward, *costs.input_grad, *costs.weight_grad, *costs.transfer]
    fractions = [Fraction(t).limit_denominator(1000) for t in times]
    exact = all(
        abs(float(f) - t) <= 1e-12 * max(1.0, abs(t)) for f, t in zip(fractions, times, strict=True)
    )
    unit = lcm(*(f.denominator for f in fractions))
    longest = max(times)
    if exact and longest * unit <= _FINEST:
        return float(unit), True
    return (_FINEST / longest if longest else 1.0), False
