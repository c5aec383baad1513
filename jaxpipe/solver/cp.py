"""OR-tools' CP-SAT, where it is installed, and whole numbers of ticks for its times."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, lcm
from typing import Any

from ..engine.costs import Costs, StageCosts

try:
    from ortools.sat.python import cp_model as cp_model
except ImportError as error:
    raise ImportError(
        "search= needs OR-tools, which is not installed: pip install 'jaxpipe[solver]'"
    ) from error

_TIMES = ("forward", "input_grad", "weight_grad", "transfer")
_FINEST = 4096  # ticks that the longest action takes where times are no small fractions


def in_ticks(times: StageCosts) -> tuple[Costs, float, bool]:
    """Times of F, I, W and transfers in whole ticks, each rounded up; the ticks of a unit of cost;
    and whether all are whole numbers of ticks, as fractions of small denominators are.
    """
    given = {name: getattr(times, name) for name in _TIMES}
    every = [time for values in given.values() for time in values]
    fractions = [Fraction(t).limit_denominator(1000) for t in every]
    unit = lcm(*(f.denominator for f in fractions))
    longest = max(every)
    exact = longest * unit <= _FINEST and all(
        abs(float(f) - t) <= 1e-12 * max(1.0, abs(t)) for f, t in zip(fractions, every, strict=True)
    )
    scale = float(unit) if exact else _FINEST / longest if longest else 1.0
    ticks: dict[str, Any] = {
        name: tuple(ceil(time * scale - 1e-9) for time in values) for name, values in given.items()
    }
    return Costs(**ticks), scale, exact


def solved(model: Any, *, seconds: float, seed: int) -> tuple[Any, Any]:
    """The solver after its search, and its status; the same for the same arguments."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # the result then depends on the seed alone
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = seconds
    return solver, solver.solve(model)
