"""The program of a plan on its target, and the seconds of a step there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..engine.costs import Costs
from ..lowering.cost_model import cost_matrix, cost_parts, program_makespan
from ..lowering.plan import Plan, plan_of
from ..lowering.target import RunsOn, Target
from ..program.segments import Permute, Segment
from ..table.schedule import Schedule


def program_of(target: Target, schedule: Schedule, costs: Costs) -> Plan:
    """The plan of the program that `Pipeline(costs=)` makes."""
    return plan_of(schedule, costs=costs, overheads=target.overheads)


def step_seconds(target: Target, plan: Plan, costs: Costs) -> float:
    """Seconds of a step: the program simulated for these costs, with a hop's seconds for each
    transfer of a device.

    On GPUs and TPUs predicates take time too (`Overheads`), and transfers overlap compute.  On CPU
    devices a transfer is awaited where it is issued: by its two ends, or by all virtual devices of
    one process.
    """
    hop = float(np.max(costs.transfer))
    if target.overlaps:
        return program_makespan(
            cost_parts(plan.ticks, costs), plan.segments, replace(target.overheads, hop=hop)
        )
    by_all = target.runs_on is RunsOn.ONE_CPU_PROCESS
    return awaited_at_once(cost_matrix(plan.ticks, costs), plan.segments, hop, by_all=by_all)


def awaited_at_once(
    costs: NDArray[np.float64], segments: Sequence[Segment], hop: float, *, by_all: bool
) -> float:
    """The makespan where a device that issues a transfer waits for its partners or for all devices:
    XLA:CPU blocks in a permute.

    The emitter lets no block of the device run meanwhile (`spmd.exchange.permuted`).
    """
    time = np.zeros(costs.shape[1])
    for segment in segments:
        for tick in range(segment.start, segment.stop):
            time = time + costs[tick]
            exchange = segment.template(tick).permutes
            if exchange and by_all:
                time = np.full_like(time, time.max() + len(exchange) * hop)
            elif exchange:
                time = _met(time, exchange, hop)
    return float(time.max(initial=0.0))


def _met(time: NDArray[np.float64], exchange: Sequence[Permute], hop: float) -> NDArray[np.float64]:
    """Device times after each device has waited for its partners."""
    met = time.copy()
    for permute in exchange:
        ends = np.array(permute.pairs).T
        for mine, other in (ends, ends[::-1]):
            np.maximum.at(met, mine, time[other])
    for permute in exchange:
        met[sorted({d for pair in permute.pairs for d in pair})] += hop
    return met
