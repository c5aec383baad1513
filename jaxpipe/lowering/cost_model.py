"""How long the lowered program takes: its ticks and transfers simulated as a mesh would run them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.segments import Segment
from ..program.templates import PART_OF, Part, Payload, parts_in_order
from ..simulation.costs import Costs
from ..simulation.simulate import action_durations
from ..table.kinds import RUNS_FORWARD, Kind
from .assign_ticks import Ticks
from .limits import LIMITS, Prices
from .requirements import NO_TRANSFER, Requirements
from .trips import Durations, Passage


def cost_matrix(ticks: Ticks, costs: Costs | None = None) -> NDArray[np.float64]:
    """`[tick, device]` durations; F, I and W take 1 and B takes 2 where no costs are given."""
    table = ticks.schedule.encoded
    return _durations(ticks, costs, (ticks.when, table.device), (ticks.num_ticks, table.num_devices))


def cost_parts(ticks: Ticks, costs: Costs | None = None) -> NDArray[np.float64]:
    """`[tick, part, device]`: the same by the parts of a tick (`Part`), in the order in which it has them."""
    table = ticks.schedule.encoded
    order = parts_in_order(ticks.forward_first)
    place = np.array([order.index(Part.of(kind)) for kind in Kind])[table.kind]
    ahead, back = (np.zeros((ticks.num_ticks, table.num_devices), bool) for _ in range(2))
    for mine, kinds in ((ahead, RUNS_FORWARD), (back, (Kind.B,))):
        runs = table.of_kinds(kinds)
        mine[ticks.when[runs], table.device[runs]] = True
    place[(ahead & back)[ticks.when, table.device]] = 0  # a pair is one block, and the first
    return _durations(ticks, costs, (ticks.when, place, table.device), (ticks.num_ticks, len(order), table.num_devices))


@lru_cache(maxsize=4)  # asked for to bound a candidate, to cut it into segments and to price it
def tick_durations(ticks: Ticks, costs: Costs | None = None) -> Durations:
    """The same, where ticks that last equally long share one entry."""
    return Durations.from_rows(cost_parts(ticks, costs))


def _durations(ticks: Ticks, costs: Costs | None, cells: tuple[NDArray[np.int64], ...], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """How long the actions of each cell take together; `cells`: where each action is."""
    table = ticks.schedule.encoded
    durations = action_durations(table, (costs or Costs()).for_stages(table.num_stages))
    return np.asarray(np.bincount(np.ravel_multi_index(cells, shape), durations, math.prod(shape)), np.float64).reshape(shape)


class CodeCounts(NamedTuple):
    """What a program has besides its makespan; that of segments that follow each other adds up."""

    sends: int = 0  # values sent from one device to another
    made: int = 0  # permutes, one tick after the other
    predicates: int = 0  # of blocks, that devices are asked one tick after the other
    meetings: int = 0  # those of them that are around what all devices do together
    arms: int = 0  # exchanges among which ticks choose, one tick after the other
    blocks: int = 0  # of stage code
    permutes: int = 0

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> CodeCounts:
        """That of these segments."""
        each = (
            (s.num_sends, s.num_made, s.num_predicates, s.num_meeting_predicates, s.num_arms, s.stage_size, s.permutes) for s in segments
        )
        return cls(*map(sum, zip(cls(), *each, strict=True)))

    def surcharge(self, num_devices: int, prices: Prices) -> tuple[float, float]:
        """(time, factor): the price of the program is `(makespan + time) * factor`."""
        time = prices.traffic * self.sends / num_devices + prices.block_predicate * self.predicates + prices.arm * self.arms
        time += prices.meeting * self.meetings + prices.made * self.made
        blocks = self.blocks + LIMITS.times_many * max(0, self.blocks - LIMITS.many_blocks)
        return time, 1 + prices.block * blocks + prices.permute * self.permutes


def program_price(makespan: float, segments: Sequence[Segment], num_devices: int, prices: Prices) -> float:
    """A makespan in which waiting has its price (`priced_makespan`), with that of traffic, and of the code to compile."""
    time, factor = CodeCounts.of(segments).surcharge(num_devices, prices)
    return (makespan + time) * factor


def program_makespan(costs: Durations | NDArray[np.float64], segments: Sequence[Segment], *, transfer: float = 0.0) -> float:
    """Simulate the program: a device runs its ticks in order; where it awaits a transfer it waits until all partners have issued it.

    `costs[tick, device]` or `[tick, part, device]` are durations; the result has their unit.  Each permute that a device takes part in
    lasts `transfer`.  Without parts, what is awaited within a tick is awaited before it.
    """
    durations = costs if isinstance(costs, Durations) else Durations.from_rows(costs)
    time = np.zeros(durations.of.shape[-1])
    for segment in segments:
        time = Passage.of(segment, durations, transfer=transfer).after(time)
    return float(time.max(initial=0.0))


def priced_makespan(costs: Durations | NDArray[np.float64], segments: Sequence[Segment], prices: Prices) -> float:
    """The makespan in which permutes and predicates last as long as their prices say."""
    durations = costs if isinstance(costs, Durations) else Durations.from_rows(costs)
    time = np.zeros(durations.of.shape[-1])
    for segment in segments:
        time = Passage.of(segment, durations, transfer=prices.transfer, prices=prices).after(time)
    return float(time.max(initial=0.0))


def least_makespan(requirements: Requirements, costs: NDArray[np.float64], *, beside: bool = False) -> float:
    """What no choice of segments can go below for these ticks: a transfer is awaited only by its two ends, and only when needed.

    `costs[tick, device]` or `[tick, part, device]` are durations.  With `beside` a transfer's source may go on; then without parts it is
    an estimate, since a program with several blocks in a tick may issue a transfer, or await one, between them.
    """
    parts = costs[:, None] if costs.ndim == 2 else costs
    order = parts_in_order(requirements.forward_first)
    place = {payload: order.index(PART_OF[payload]) if parts.shape[1] > 1 else 0 for payload in Payload}
    time = np.zeros(requirements.num_devices)
    due: dict[tuple[int, int], list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
    edges = np.array(requirements.edges, np.int64).reshape(-1, 3).T
    transfers = [_by_slack(row, edges) for row in requirements.slack]
    together, paired = (each[requirements.codes].tolist() for each in (requirements.together, requirements.paired))
    for tick, (code, row) in enumerate(zip(requirements.codes.tolist(), parts, strict=True)):
        for part, lasting in enumerate(row):
            for ends, met in due.pop((tick, part), ()):
                for end in ends[beside:]:
                    np.maximum.at(time, end, met)
            if part == 0 and together[tick]:
                time[:] = time.max()
            time += lasting
            for payload, room, ends in transfers[code]:
                if place[payload] == part:
                    needed = tick + room + 1
                    at = (needed, 0 if paired[needed] else place[payload])
                    due.setdefault(at, []).append((ends, time[ends].max(axis=0)))
    return float(time.max(initial=0.0))


def _by_slack(slack: NDArray[np.int32], edges: NDArray[np.int64]) -> list[tuple[Payload, int, NDArray[np.int64]]]:
    """(payload, slack, [2, transfer] their sources and their targets) of each payload and slack that occurs in a tick."""
    here = slack < NO_TRANSFER
    occurring = sorted(set(zip(edges[0, here].tolist(), slack[here].tolist(), strict=True)))
    return [(Payload(p), room, edges[1:, (edges[0] == p) & (slack == room)]) for p, room in occurring]
