"""From a table to the ticks and segments of its program: of a fixed list of ways to emit it, the
cheapest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

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


class Candidate(NamedTuple):
    """Ticks and segments, and what they cost."""

    ticks: Ticks
    segments: tuple[Segment, ...]
    makespan: float  # of the program with the transfers of its costs alone, in their unit
    costs: Costs | None
    overheads: Overheads

    @property
    def price(self) -> float:
        """The makespan with overheads and a little for each block of code."""
        durations, devices = cost_parts(self.ticks, self.costs), self.ticks.schedule.num_devices
        own = self.overheads.in_unit(FORWARD) if self.costs is None else self.overheads
        own = replace(own, hop=_hop(self.costs) or own.hop)
        return program_price(
            program_makespan(durations, self.segments, own), self.segments, devices, own
        )

    @property
    def collectives(self) -> int:
        """Predicates around collective actions, in a step."""
        return sum(segment.num_collective_predicates for segment in self.segments)

    @classmethod
    def of(
        cls, ticks: Ticks, segments: tuple[Segment, ...], costs: Costs | None, overheads: Overheads
    ) -> Candidate:
        """Time the segments."""
        transfers = replace(NO_OVERHEADS, hop=_hop(costs))
        makespan = program_makespan(cost_parts(ticks, costs), segments, transfers)
        return cls(ticks, segments, makespan, costs, overheads)


def _hop(costs: Costs | None) -> float:
    """The longest transfer of these costs; 0 without costs."""
    return 0.0 if costs is None else float(np.max(costs.transfer))


def candidates(
    schedule: Schedule, costs: Costs | None, overheads: Overheads, *, as_one: bool
) -> tuple[Candidate, ...]:
    """Every way to emit a table: the ways to assign ticks, and each of their lists of spans.

    All keep the order of every row.  `costs` are in seconds; without any F = I = W = 1 and B = 2,
    where 1 is `FORWARD`.  With `as_one` a W and the F of its tick may be one block.
    """
    ways = [assign_ticks(schedule), modulo_ticks(schedule), modulo_ticks(schedule, shift=1)]
    if joins_weights(schedule).any() or joins_shares(schedule).any():
        ways += [joined_ticks(schedule), *([joined_ticks(schedule, as_one=True)] if as_one else [])]
    return tuple(each for ticks in ways for each in candidates_of(ticks, costs, overheads))


def candidates_of(ticks: Ticks, costs: Costs | None, overheads: Overheads) -> Iterator[Candidate]:
    """Those of one way to assign ticks."""
    for spans in span_candidates(ticks):
        yield Candidate.of(ticks, segments_of(spans, collect(ticks)), costs, overheads)


def choose_candidate(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    overheads: Overheads = GUESSED,
    as_one: bool = False,
) -> Candidate:
    """Of those that keep the table's makespan, or the least that there is, the cheapest.

    Those with the fewest predicates around collective actions come first: no CUDA graph holds a
    collective, so the host waits.
    """
    found = candidates(schedule, costs, overheads, as_one=as_one)
    table = simulate(schedule, Costs() if costs is None else costs).makespan
    enough = KEEPS * max(table, min(each.makespan for each in found))
    kept = [each for each in found if each.makespan <= enough]
    fewest = min(each.collectives for each in kept)
    return min((each for each in kept if each.collectives == fewest), key=lambda each: each.price)


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

    def seconds(self, target: Target, costs: Costs) -> float:
        """Seconds of a step: the program simulated for these costs, with a hop's seconds for each
        transfer of a device.  Predicates take time on GPUs and TPUs.
        """
        overheads = target.overheads if target.overlaps else NO_OVERHEADS
        return program_makespan(
            cost_parts(self.ticks, costs),
            self.segments,
            replace(overheads, hop=_hop(costs)),
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
                # What is in flight after the last trip is awaited at once.
                ticks = ticks[: segment.repeats - transit.from_before]
                ends = {Edge(transit.permute.payload, *pair) for pair in transit.permute.pairs}
                edges = np.flatnonzero([edge in ends for edge in requirements.edges])
                late[np.ix_(ticks, edges)] = True
        return int((late & having).sum()), int(having.sum())

    def program(self, liveness: Liveness | None = None) -> Program:
        """Assign slots; the longest liveness where none is given."""
        return assign_slots(self.ticks, self.segments, liveness=liveness, offload=self.offload)


@lru_cache(maxsize=64)
def plan_of(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    overheads: Overheads = GUESSED,
    as_one: bool = False,
) -> Plan:
    """Run the passes that need no stage (`choose_candidate`); equal schedules share the plan."""
    chosen = choose_candidate(schedule, costs=costs, overheads=overheads, as_one=as_one)
    return Plan(chosen.ticks, chosen.segments)
