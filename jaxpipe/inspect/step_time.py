"""The seconds of a step by its plan: stages, predicates and transfers, compared with plain 1F1B."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..engine.costs import Cost, Costs
from ..lowering.cost_model import cost_parts, program_makespan
from ..lowering.overheads import FORWARD, Overheads
from ..lowering.plan import Plan, plan_of
from ..schedules.registry import build
from ..table.schedule import Schedule


class StepTime(NamedTuple):
    """Seconds of a step, simulated from the plan."""

    seconds: float  # with all overheads
    predicates: float  # the part of predicates
    one_f_one_b: float  # seconds of 1F1B with the same layers on as many devices

    @property
    def loses(self) -> bool:
        """Whether 1F1B is faster, and would be slower if predicates took no time."""
        return self.seconds - self.predicates <= self.one_f_one_b < self.seconds

    def __str__(self) -> str:
        text = (
            f"{self.seconds * 1e3:.1f} ms a step, of which predicates take "
            f"{self.predicates * 1e3:.1f} ms"
        )
        return f"{text}: 1F1B would take {self.one_f_one_b * 1e3:.1f} ms" if self.loses else text


def step_time(plan: Plan, overheads: Overheads, costs: Costs | None = None) -> StepTime:
    """Simulate a plan and the plan of 1F1B; `costs` in seconds, without any F = I = W = `FORWARD`.

    >>> import jaxpipe as jp
    >>> overheads = Overheads()
    >>> plan = plan_of(jp.schedules.build("zb_h1", devices=4, microbatches=8))
    >>> step_time(plan, overheads).loses
    False
    """
    schedule = plan.ticks.schedule
    seconds = costs or Costs(forward=FORWARD, input_grad=FORWARD, weight_grad=FORWARD)
    whole = merged(schedule, seconds)
    one_f_one_b = build(
        "1f1b", devices=schedule.num_devices, microbatches=schedule.num_microbatches
    )
    plain = plan_of(one_f_one_b, costs=whole, overheads=overheads)
    mine = _makespan(plan, overheads, seconds)
    without = replace(overheads, predicate=0.0)
    return StepTime(
        mine, mine - _makespan(plan, without, seconds), _makespan(plain, overheads, whole)
    )


def _makespan(plan: Plan, overheads: Overheads, costs: Costs) -> float:
    return program_makespan(cost_parts(plan.ticks, costs), plan.segments, overheads)


def merged(schedule: Schedule, costs: Costs) -> Costs:
    """The costs of one stage a device, with the layers spread evenly."""
    stages = costs.for_stages(schedule.num_stages)
    share = schedule.num_stages / schedule.num_devices

    def mean(values: Cost) -> float:
        return float(np.mean(values)) * share

    return Costs(
        forward=mean(stages.forward),
        input_grad=mean(stages.input_grad),
        weight_grad=mean(stages.weight_grad),
        backward=mean(stages.backward),
        unit=costs.unit,
    )
