"""From a table to the ticks and segments of its program: of several ways to emit it, the fastest for its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ..program.ir import Program
from ..program.liveness import Liveness
from ..program.segments import Segment
from ..simulation.costs import Costs
from ..simulation.simulate import simulate
from ..table.schedule import Schedule
from ..transforms.forward_only import first_microbatches, forward_only
from .assign_ticks import Ticks, assign_ticks, joined_ticks, joins_weights, modulo_ticks
from .balanced_ticks import balanced_ticks
from .cost_model import cost_parts, least_makespan, priced_makespan, program_makespan, program_price, tick_durations
from .limits import LIMITS, LITTLE_CODE, LITTLE_CODE_OF_THREADS, ON_GPUS, Overheads, Prices
from .offload import Offload
from .requirements import collect
from .segments import can_be_cut, find_segments
from .slots import assign_slots


class Prefer(Enum):
    """What the lowering gives up where a table cannot have early transfers and little code at once."""

    MEMORY = "memory"  # compile little code
    SPEED = "speed"  # let transfers run beside compute in the steady state, with more code


class Candidate(NamedTuple):
    """Ticks and segments, and what they cost with F = I = W = 1, B = 2 (the overlapped pair: the sum of its halves)."""

    ticks: Ticks
    segments: tuple[Segment, ...]
    makespan: float  # of the program
    price: float  # the makespan with a little for each transfer and each block of code

    @property
    def chooses(self) -> bool:
        """Whether some ticks choose among exchanges."""
        return any(segment.num_arms for segment in self.segments)


def prices_for(schedule: Schedule, prefer: Prefer, costs: Costs | None, overheads: Overheads) -> Prices:
    """Prices in the unit of the costs: for "speed" what predicates and transfers take on a GPU, else little code first of all."""
    if prefer is Prefer.SPEED:
        return overheads.prices(overheads.forward if costs is None else 1.0)
    forward = 1.0 if costs is None else float(np.mean(costs.for_stages(schedule.num_stages).forward)) or 1.0
    return (LITTLE_CODE_OF_THREADS if overheads.threads else LITTLE_CODE).in_unit(forward)


def choose_candidate(
    schedule: Schedule, *, prefer: Prefer = Prefer.MEMORY, costs: Costs | None = None, overheads: Overheads = ON_GPUS
) -> Candidate:
    """Assign ticks in several ways, find the segments of each, and take the cheapest of those that keep the table's makespan.

    All keep the order of every row: first, for "speed", ticks that a W and an F share; then the fewest ticks and kinds that take turns;
    where none keeps the makespan, balanced ticks.  Where nothing keeps it, the cheapest is taken: a little longer where that is far
    less code.  `costs` are in seconds for "speed".
    """
    prices = prices_for(schedule, prefer, costs, overheads)
    enough = LIMITS.keeps_makespan * simulate(schedule, _alone(costs)).makespan
    found: list[Candidate] = []
    joined = _joined(schedule, costs, enough, beside=prices.beside)
    for candidates in _more_and_more(schedule, joined, beside=prices.beside):
        bounds = [least_makespan(collect(ticks), tick_durations(ticks, costs).rows(), beside=prices.beside) for ticks in candidates]
        worst = max(enough, min(bounds, default=0.0))
        found += [_candidate(ticks, prices, costs) for ticks, bound in zip(candidates, bounds, strict=True) if bound <= worst]
        # Whether a ramp's loss is little depends on how long the steady state is: it does not where the host waits for each choice too.
        # With meetings, other ticks would put predicates around those, which are dearer.
        weighs = prices.beside and not schedule.encoded.meetings
        if any(each.makespan <= enough and not (weighs and each.chooses) for each in found):
            break
    else:
        # With "speed" most ticks make the same permutes, where that costs little; where it does not, some choose among exchanges.
        lost = [ticks for ticks, bound in zip(candidates, bounds, strict=True) if prices.beside and bound <= enough]
        found += [_candidate(ticks, prices, costs, search=prices.makespan_first()) for ticks in lost]
    keeping = [each for each in found if each.makespan <= enough]
    best = min(keeping or found, key=lambda each: each.price)
    if not (prices.beside and best.chooses and can_be_cut(best.ticks)):
        return best
    # The host waits for each choice: ramps are cut into pieces that choose nothing, where that takes no longer.
    cut = _candidate(best.ticks, prices, costs, search=prices.makespan_first(), cuts=True)
    return cut if cut.makespan <= max(enough, best.makespan) and cut.price < best.price else best


def _more_and_more(schedule: Schedule, joined: Sequence[Ticks], *, beside: bool) -> Iterator[Sequence[Ticks]]:
    """Ways to assign ticks, the simple ones first; those that W and F share (`joined`) before all others.

    Where devices meet, shared ticks may come at other intervals between meetings: which are less code is seen with both.  Kinds that take
    turns are no choice there for transfers beside blocks: each trip would ask for each meeting.
    """
    meets = bool(schedule.encoded.meetings)
    if joined and not meets:
        yield joined
    turns = () if beside and meets else (modulo_ticks(schedule), modulo_ticks(schedule, shift=1))
    yield (*(joined if meets else ()), assign_ticks(schedule), *turns)
    yield (balanced_ticks(schedule),)


def _joined(schedule: Schedule, costs: Costs | None, enough: float, *, beside: bool) -> tuple[Ticks, ...]:
    """Where W and F can share ticks and keep the makespan, that way: it has the fewest predicates and the least code."""
    if beside and joins_weights(schedule).any():
        ticks = joined_ticks(schedule)
        if least_makespan(collect(ticks), cost_parts(ticks, costs), beside=True) <= enough:
            return (ticks,)
    return ()


def _alone(costs: Costs | None) -> Costs:
    """The costs of actions alone, as the durations of ticks have them."""
    return Costs() if costs is None else replace(costs, transfer=0)


def _candidate(ticks: Ticks, prices: Prices, costs: Costs | None, *, search: Prices | None = None, cuts: bool = False) -> Candidate:
    """The candidate with the segments that are best by the prices, or by those of a search of its own."""
    segments = find_segments(ticks, costs=costs, prices=search or prices, cuts=cuts)
    durations = tick_durations(ticks, costs)
    makespan = program_makespan(durations, segments)
    priced = priced_makespan(durations, segments, prices)
    return Candidate(ticks, segments, makespan, program_price(priced, segments, ticks.schedule.num_devices, prices))


@dataclass(frozen=True)
class Plan:
    """A schedule with its ticks and segments; its program follows once the stage's liveness is known."""

    ticks: Ticks
    segments: tuple[Segment, ...]
    offload: Offload = Offload.NOTHING

    @classmethod
    def of(cls, schedule: Schedule, prefer: Prefer = Prefer.MEMORY, *, costs: Costs | None = None, overheads: Overheads = ON_GPUS) -> Plan:
        """Run the passes that need no stage (`choose_candidate`)."""
        chosen = choose_candidate(schedule, prefer=prefer, costs=costs, overheads=overheads)
        return cls(chosen.ticks, chosen.segments)

    @cached_property
    def makespan(self) -> float:
        """How long the program takes with F = I = W = 1 and B = 2."""
        return program_makespan(tick_durations(self.ticks), self.segments)

    @cached_property
    def late_transfers(self) -> tuple[int, int]:
        """Of the transfers that the table gives a tick or more, those that the program awaits later than it issues them; and all."""
        requirements, late, all_of_them = collect(self.ticks), 0, 0
        for segment in self.segments:
            awaited = {j: [t for t in segment.transits if t.tick == j and t.is_late] for j in range(segment.period)}
            for tick in range(segment.start, segment.stop):
                trip, j = divmod(tick - segment.start, segment.period)
                lands = trip == segment.repeats - 1  # what is in flight then is awaited at once
                later = {(t.permute.payload, *pair) for t in awaited[j] if not (lands and t.from_before) for pair in t.permute.pairs}
                slack = requirements.kinds[requirements.codes[tick]].slack
                having = [edge for edge, room in slack.items() if room]
                all_of_them += len(having)
                late += sum((edge.payload, edge.source, edge.target) in later for edge in having)
        return late, all_of_them

    def program(self, liveness: Liveness | None = None) -> Program:
        """Assign slots; the longest liveness where none is given."""
        return assign_slots(self.ticks, self.segments, liveness=liveness, offload=self.offload)


@lru_cache(maxsize=64)
def plan_of(schedule: Schedule, prefer: Prefer = Prefer.MEMORY, *, costs: Costs | None = None, overheads: Overheads = ON_GPUS) -> Plan:
    """The plan of a schedule; equal schedules share it."""
    return Plan.of(schedule, prefer, costs=costs, overheads=overheads)


def forward_plan(
    schedule: Schedule, microbatches: int | None = None, *, prefer: Prefer = Prefer.MEMORY, overheads: Overheads = ON_GPUS
) -> Plan:
    """The plan of the schedule's forwards alone, for evaluation; of the first microbatches alone where their number is given."""
    table = schedule if schedule.forward_only else replace(forward_only(schedule), name=schedule.name)
    fewer = microbatches is not None and microbatches < schedule.num_microbatches
    return plan_of(first_microbatches(table, microbatches) if microbatches is not None and fewer else table, prefer, overheads=overheads)
