"""How long the lowered program takes: its ticks and transfers simulated as a mesh would
run them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..engine.costs import Costs
from ..engine.loop import action_durations
from ..program.segments import Segment
from ..program.templates import Part
from ..table.kinds import RUNS_FORWARD, Kind
from .assign_ticks import Ticks, joins_weights
from .overheads import NO_OVERHEADS, Overheads
from .trips import Durations, after_segment

# Share of a step that one compiled block of stage code is worth, and one permute.  A share, not a
# time: with a time, code would grow with the number of microbatches.
BLOCK, PERMUTE = 1e-3, 5e-5
# Share of a forward that its collectives are assumed to take, where blocks communicate.
COLLECTIVES = 1 / 3


def cost_matrix(ticks: Ticks, costs: Costs | None = None) -> NDArray[np.float64]:
    """`[tick, device]` durations; F, I and W take 1 and B takes 2 where no costs are given."""
    table = ticks.schedule.encoded
    return _durations(
        ticks, costs, (ticks.when, table.device), (ticks.num_ticks, table.num_devices)
    )


def cost_parts(
    ticks: Ticks, costs: Costs | None = None, *, hides: bool = True
) -> NDArray[np.float64]:
    """`[tick, part, device]`: the same by the parts of a tick (`Part`), in the order in which it
    has them.  With `hides`, a W that is one block with an F hides the collectives of the F.
    """
    table = ticks.schedule.encoded
    place = np.array([Part.of(kind) for kind in Kind])[table.kind]
    ahead, back = (np.zeros((ticks.num_ticks, table.num_devices), bool) for _ in range(2))
    for mine, kinds in ((ahead, RUNS_FORWARD), (back, ticks.joint)):
        runs = table.of_kinds(kinds)
        mine[ticks.when[runs], table.device[runs]] = True
    place[(ahead & back)[ticks.when, table.device]] = 0  # a pair is one block, and the first
    return _durations(
        ticks,
        costs,
        (ticks.when, place, table.device),
        (ticks.num_ticks, len(Part), table.num_devices),
        hides=hides,
    )


@lru_cache(maxsize=4)  # asked for to bound a candidate, to cut it into segments and to price it
def tick_durations(ticks: Ticks, costs: Costs | None = None, *, hides: bool = True) -> Durations:
    """The same, where ticks that last equally long share one entry."""
    return Durations.from_rows(cost_parts(ticks, costs, hides=hides))


def _durations(
    ticks: Ticks,
    costs: Costs | None,
    cells: tuple[NDArray[np.int64], ...],
    shape: tuple[int, ...],
    *,
    hides: bool = False,
) -> NDArray[np.float64]:
    """How long the actions of each cell take together; `cells`: where each action is."""
    table = ticks.schedule.encoded
    durations = np.array(action_durations(table, (costs or Costs()).for_stages(table.num_stages)))
    if hides and Kind.W in ticks.joint:
        durations = _less_hidden(ticks, durations, costs)
    return np.asarray(
        np.bincount(np.ravel_multi_index(cells, shape), durations, math.prod(shape)), np.float64
    ).reshape(shape)


def _less_hidden(
    ticks: Ticks, durations: NDArray[np.float64], costs: Costs | None
) -> NDArray[np.float64]:
    """The durations, where each W that is one block with an F hides the collectives of the F.

    Those of a forward take half of what an overlapped pair saves.  Without any costs they take
    `COLLECTIVES` of its time.
    """
    weights = np.flatnonzero(joins_weights(ticks.schedule))
    hidden = COLLECTIVES * durations[weights + 1]
    if costs is not None:
        each = costs.for_stages(ticks.schedule.num_stages)
        apart = np.add(each.forward, each.backward)
        saved = np.maximum(apart - (apart if each.overlap is None else each.overlap), 0)
        hidden = saved[ticks.schedule.encoded.stage[weights + 1]] / 2
    found = durations.astype(np.float64)
    found[weights] -= np.minimum(found[weights], hidden)
    return found


def program_makespan(
    costs: Durations | NDArray[np.float64],
    segments: Sequence[Segment],
    overheads: Overheads = NO_OVERHEADS,
) -> float:
    """Simulate the program.

    A device runs its ticks in order.  Where it awaits a transfer, it waits until all partners have
    issued it. `costs[tick, device]` or `[tick, part, device]` are durations; overheads and result
    have their unit. Without parts, transfers awaited within a tick are awaited before it.
    """
    durations = costs if isinstance(costs, Durations) else Durations.from_rows(costs)
    time = np.zeros(durations.of.shape[-1])
    for segment in segments:
        time = after_segment(time, segment, durations, overheads)
    return float(time.max(initial=0.0))


def program_price(
    makespan: float, segments: Sequence[Segment], num_devices: int, overheads: Overheads
) -> float:
    """A makespan with overheads, the compute time that transfers take, and a share of both for the
    code to compile.
    """
    time = sum(
        overheads.sent * s.num_sends / num_devices
        + overheads.collective * s.num_collective_predicates
        for s in segments
    )
    code = sum(BLOCK * s.stage_size + PERMUTE * s.permutes for s in segments)
    return (makespan + time) * (1 + code)
