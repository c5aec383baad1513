"""The largest distance of a schedule from the optimum, and the proof of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import ScheduleError, quoted
from .typed import set_typed


class Objective(Enum):
    """The time that a schedule makes short: the whole step, or the time of a microbatch in its
    steady state.
    """

    MAKESPAN = "makespan"
    PERIOD = "period"


class Proof(Enum):
    """The source of a bound."""

    RELAXATION = "relaxations, for any schedule"
    SOLVER = "CP-SAT, for any schedule"


@dataclass(frozen=True)
class Certificate:
    """Facts of a result of `build("auto", ...)`: its makespan or period, and a bound that no
    schedule goes below.

    Args:
        objective: what `value` and `bound` are.
        value: of the schedule, in the unit of its costs.
        bound: no schedule for these costs, this placement (a loop and a V, where none was given)
            and this cap is below it, whether its backwards are whole, split or in overlapped pairs.
            Under a cap, tables with R are not meant: they hold less and compute more.
        proof: where the bound comes from.
        max_activations: the cap that it holds for; None for any memory.

    >>> print(Certificate(Objective.MAKESPAN, 57, 54, Proof.RELAXATION, max_activations=3))
    makespan 57, at most 5.56% above the optimum for 3 activations a device without R (bound 54:
    relaxations, for any schedule)
    """

    objective: Objective
    value: float
    bound: float
    proof: Proof
    max_activations: int | None = None

    def __post_init__(self) -> None:
        """ScheduleError for a value of another type."""
        set_typed(self, ScheduleError)

    @property
    def gap(self) -> float:
        """By what fraction of the bound the value is above it, at most."""
        if not self.bound:
            return float(self.value > 0)
        return max(0.0, self.value / self.bound - 1)

    @property
    def is_optimal(self) -> bool:
        """Whether the value is the bound, up to the rounding of sums of floats."""
        return self.gap < 1e-9

    def __str__(self) -> str:
        cap, proof = quoted(self.max_activations), self.proof.value
        memory = f"{cap} activations a device without R"
        if self.max_activations is None:
            memory = "any memory"
        above = "the optimum"
        if not self.is_optimal:
            above = f"at most {self.gap:.2%} above {above}"
        head = f"{self.objective.value} {self.value:g}, {above} for {memory}"
        return f"{head} (bound {self.bound:g}: {proof})"
