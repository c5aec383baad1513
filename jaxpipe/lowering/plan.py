"""From a table to the ticks and segments of its program: of a fixed list of ways to emit it, the
cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..program.ir import Program
from ..program.segments import Segment
from ..table.effects import Liveness, Offload
from ..table.schedule import Schedule
from .assign_ticks import (
    NO_TRANSFER,
    Edge,
    Ticks,
    assign_ticks,
    collect,
    joined_ticks,
    joins_shares,
    joins_weights,
    modulo_ticks,
)
from .candidates import segments_of, span_candidates
from .cost_model import cost_parts, program_makespan, program_price
from .prices import FORWARD, GUESSED, NO_OVERHEADS, Overheads
from .slots import assign_slots
from .target import Target

# A program this much longer than another is as good.
KEEPS = 1.005


@dataclass(frozen=True)
class Plan:
    """A schedule with its ticks and segments; its program follows once the stage's liveness is
    known.
    """

    ticks: Ticks
    segments: tuple[Segment, ...]
    offload: Offload = Offload.NOTHING

    @cached_property
    def makespan(self) -> float:
        """How long the program takes with F = I = W = 1 and B = 2."""
        return program_makespan(cost_parts(self.ticks, hides=False), self.segments)

    @property
    def collectives(self) -> int:
        """Predicates around collective actions, in a step."""
        return sum(segment.num_collective_predicates for segment in self.segments)

    def makespan_of(self, costs: Costs | None, overheads: Overheads = NO_OVERHEADS) -> float:
        """How long the program takes with these costs and the longest of their transfers, in their
        unit.
        """
        return program_makespan(
            cost_parts(self.ticks, costs), self.segments, _with_hop(overheads, costs)
        )

    def price(self, costs: Costs | None, overheads: Overheads) -> float:
        """The makespan with overheads and a little for each block of code.  `costs` are in seconds;
        without any F = I = W = 1 and B = 2, where 1 is `FORWARD`.
        """
        own = _with_hop(overheads.in_unit(FORWARD) if costs is None else overheads, costs)
        devices = self.ticks.schedule.num_devices
        return program_price(self.makespan_of(costs, own), self.segments, devices, own)

    def seconds(self, target: Target, costs: Costs) -> float:
        """Seconds of a step: the program simulated for these costs, with a hop's seconds for each
        transfer of a device.  Predicates take time on GPUs and TPUs.
        """
        overheads = replace(target.overheads if target.overlaps else NO_OVERHEADS, hop=0.0)
        return program_makespan(
            cost_parts(self.ticks, costs),
            self.segments,
            _with_hop(overheads, costs),
            target.runs_on.awaits,
        )

    @cached_property
    def late_transfers(self) -> tuple[int, int]:
        """Of the transfers that the table gives a tick or more, those that the program awaits later
        than it issues them; and all.
        """
        requirements = collect(self.ticks)
        having = (requirements.slack > 0) & (requirements.slack < NO_TRANSFER)
        late = np.zeros_like(having)
        for segment in self.segments:
            for transit in (t for t in segment.transits if t.is_late):
                ticks = np.arange(segment.start + transit.tick, segment.stop, segment.period)
                # Transfers in flight after the last trip are awaited at once.
                ticks = ticks[: segment.repeats - transit.from_before]
                ends = {Edge(transit.permute.payload, *pair) for pair in transit.permute.pairs}
                edges = np.flatnonzero([edge in ends for edge in requirements.edges])
                late[np.ix_(ticks, edges)] = True
        return int((late & having).sum()), int(having.sum())

    def program(self, liveness: Liveness | None = None) -> Program:
        """Assign slots; the longest liveness where none is given."""
        return assign_slots(self.ticks, self.segments, liveness=liveness, offload=self.offload)


def _with_hop(overheads: Overheads, costs: Costs | None) -> Overheads:
    """The overheads with the longest transfer of these costs, if there is any."""
    hop = 0.0 if costs is None else float(np.max(costs.transfer))
    return replace(overheads, hop=hop or overheads.hop)


def plans_of(ticks: Ticks) -> Iterator[Plan]:
    """The plans of one way to assign ticks."""
    for spans in span_candidates(ticks):
        yield Plan(ticks, segments_of(spans, collect(ticks)))


@lru_cache(maxsize=64)
def plan_of(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    overheads: Overheads = GUESSED,
    as_one: bool = False,
) -> Plan:
    """Run the passes that need no stage; equal schedules share the plan.

    The ways to assign ticks keep the order of every row; with `as_one` a W and the F of its tick
    may be one block.  Of all plans that keep the table's makespan, or the least that there is, it
    is the cheapest.  Those with the fewest predicates around collective actions come first: no CUDA
    graph holds a collective, so the host waits.
    """
    ways = [assign_ticks(schedule), modulo_ticks(schedule), modulo_ticks(schedule, shift=1)]
    if joins_weights(schedule).any() or joins_shares(schedule).any():
        ways += [joined_ticks(schedule), *([joined_ticks(schedule, as_one=True)] if as_one else [])]
    timed = [(plan.makespan_of(costs), plan) for ticks in ways for plan in plans_of(ticks)]
    table = simulate(schedule, Costs() if costs is None else costs).makespan
    enough = KEEPS * max(table, min(makespan for makespan, _ in timed))
    kept = [plan for makespan, plan in timed if makespan <= enough]
    fewest = min(plan.collectives for plan in kept)
    cheapest = [plan for plan in kept if plan.collectives == fewest]
    return min(cheapest, key=lambda plan: plan.price(costs, overheads))
