"""How long the lowered program takes: its ticks and transfers simulated as a mesh would run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..program.segments import Exchange, Permute, Segment
from ..simulation.costs import Costs
from ..simulation.simulate import action_durations
from ..table.kinds import TOGETHER
from .assign_ticks import Ticks
from .limits import Prices
from .requirements import Edge, Requirements

# (delay, partners of each device, how long the permutes of each device last)
_Meetings: TypeAlias = "list[tuple[int, NDArray[np.intp], NDArray[np.float64]]]"


def cost_matrix(ticks: Ticks, costs: Costs | None = None) -> NDArray[np.float64]:
    """`[tick, device]` durations; F, I and W take 1 and B takes 2 where no costs are given."""
    table = ticks.schedule.encoded
    found = np.zeros((ticks.num_ticks, table.num_devices))
    np.add.at(found, (ticks.when, table.device), action_durations(table, (costs or Costs()).for_stages(table.num_stages)))
    return found


def program_price(makespan: float, segments: Sequence[Segment], num_devices: int, prices: Prices) -> float:
    """A makespan in which waiting has its price (`priced_makespan`), with that of traffic, and of the code to compile."""
    traffic = prices.traffic * sum(segment.num_sends for segment in segments) / num_devices
    predicates = sum(prices.block_predicate * segment.num_predicates + prices.arm * segment.num_arms for segment in segments)
    predicates += prices.meeting * sum(segment.num_meeting_predicates for segment in segments)
    return (makespan + traffic + predicates) * (
        1 + sum(prices.block * segment.stage_size + prices.permute * segment.permutes for segment in segments)
    )


def program_makespan(costs: NDArray[np.float64], segments: Sequence[Segment], *, transfer: float = 0.0) -> float:
    """Simulate the program: a device runs its ticks in order; where it awaits a transfer it waits until all partners have issued it.

    `costs[tick, device]` are durations; the result has their unit.  Each permute that a device takes part in lasts `transfer`.
    """
    time = np.zeros(costs.shape[1])
    for segment in segments:
        time = advance(time, costs, segment, transfer=transfer)
    return float(time.max(initial=0.0))


def priced_makespan(costs: NDArray[np.float64], segments: Sequence[Segment], prices: Prices) -> float:
    """The makespan in which permutes and predicates last as long as their prices say."""
    time = np.zeros(costs.shape[1])
    for segment in segments:
        time = advance(time, asking(costs, segment, prices), segment, transfer=prices.transfer)
    return float(time.max(initial=0.0))


def asking(costs: NDArray[np.float64], segment: Segment, prices: Prices) -> NDArray[np.float64]:
    """The costs with what a segment's predicates take: all devices are asked all of them; those of a block taken inside of it too."""
    if not (prices.asked or prices.taken or prices.gate):
        return costs
    found = costs.copy()
    for j, template in enumerate(segment.templates):
        ticks = slice(segment.start + j, segment.stop, segment.period)
        inside = max((use.num_nested for use in template.blocks), default=0)
        guarded = prices.taken if template.num_predicates else 0.0
        found[ticks] += prices.asked * template.num_predicates + prices.gate * (len(template.exchanges) > 1)
        found[ticks] += np.where(costs[ticks] > 0, guarded + prices.asked * inside, 0.0)
    return found


def advance(time: NDArray[np.float64], costs: NDArray[np.float64], segment: Segment, *, transfer: float = 0.0) -> NDArray[np.float64]:
    """Device times after a segment, from device times before it."""
    num_devices = costs.shape[1]
    meetings = [[_meetings(e, num_devices, transfer) for e in p.exchanges] for p in segment.templates]
    rows = costs[segment.start : segment.stop].reshape(segment.repeats, segment.period, num_devices)
    together = [any(use.block.kind in TOGETHER for use in p.blocks) for p in segment.templates]
    same = _equal_ahead(np.concatenate([rows, segment.chosen[..., None]], axis=2))
    # Beside the devices' times, when each transfer that the trip leaves to the next is over.
    delays = [delay for delay, *_ in meetings[-1][0] if delay] if segment.in_flight else []
    times = np.stack([time, *([np.full(num_devices, -np.inf)] * len(delays))])
    trip, growth = 0, None
    while trip < segment.repeats:
        before = times
        made = [options[c] for options, c in zip(meetings, segment.chosen[trip].tolist(), strict=True)]
        times = _one_trip(times, rows[trip], made, together, delays)
        # Trips of equal costs that moved every device by the same time will go on doing so.
        moved = times - before
        settled = growth is not None and np.array_equal(moved, growth) and np.ptp(growth) == 0
        growth = moved if trip or not delays else None
        trip += 1
        if settled and trip < segment.repeats and (ahead := int(same[trip - 1])):
            times = times + moved * ahead
            trip, growth = trip + ahead, None
    done: NDArray[np.float64] = times.max(axis=0)
    return done


def _one_trip(
    times: NDArray[np.float64], rows: NDArray[np.float64], meetings: Sequence[_Meetings], together: Sequence[bool], delays: Sequence[int]
) -> NDArray[np.float64]:
    """Device times after one trip, then when each transfer in flight is over.

    `together`: the ticks that no device begins before the others; `delays`: of the transfers in flight from trip to trip.
    """
    time, *flying = times
    awaited: dict[int, list[NDArray[np.float64]]] = {}
    for delay, done in zip(delays, flying, strict=True):
        awaited.setdefault(delay - 1, []).append(done)
    for j, meets in enumerate(meetings):
        time = (time.max() if together[j] else time) + rows[j]
        for delay, met, lasts in meets:
            awaited.setdefault(j + delay, []).append(time[met].max(axis=1) + lasts)
        for done in awaited.pop(j, ()):
            time = np.maximum(time, done)
    last = len(meetings) - 1
    return np.stack([time, *(done for delay in delays for done in awaited[last + delay])])


def _equal_ahead(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each trip, how many trips after it have the same costs and exchanges as it, without a gap."""
    breaks = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=(1, 2)))
    last = np.append(breaks, len(rows) - 1)  # the last trip of each run of equal ones
    trips = np.arange(len(rows))
    return last[np.searchsorted(last, trips)] - trips


def _meetings(exchange: Exchange, num_devices: int, transfer: float) -> _Meetings:
    """One entry for each delay that an exchange's permutes have."""
    found = []
    for delay in sorted({p.delay for p in exchange}):
        permutes = [p for p in exchange if p.delay == delay]
        lasts = np.zeros(num_devices)
        for permute in permutes:
            lasts[sorted({d for pair in permute.pairs for d in pair})] += transfer
        found.append((delay, _partners(permutes, num_devices), lasts))
    return found


def _partners(permutes: Sequence[Permute], num_devices: int) -> NDArray[np.intp]:
    """`[device, k]`: each device and the devices it meets at these permutes, padded with the device itself."""
    met: list[list[int]] = [[d] for d in range(num_devices)]
    for permute in permutes:
        for source, target in permute.pairs:
            met[source].append(target)
            met[target].append(source)
    width = max(len(m) for m in met)
    return np.array([m + [d] * (width - len(m)) for d, m in enumerate(met)], dtype=np.intp)


def least_makespan(requirements: Requirements, costs: NDArray[np.float64]) -> float:
    """What no choice of segments can go below for these ticks: a transfer is awaited only by its two ends, and only when needed."""
    time = np.zeros(requirements.num_devices)
    due: dict[int, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
    transfers = [_by_slack(kind.slack) for kind in requirements.kinds]
    for tick, (code, row) in enumerate(zip(requirements.codes.tolist(), costs, strict=True)):
        if requirements.kinds[code].together:
            time[:] = time.max()
        time += row
        for room, ends in transfers[code]:
            due.setdefault(tick + room, []).append((ends, time[ends].max(axis=0)))
        for ends, met in due.pop(tick, ()):
            for end in ends:
                np.maximum.at(time, end, met)
    return float(time.max(initial=0.0))


def _by_slack(slack: Mapping[Edge, int]) -> list[tuple[int, NDArray[np.int64]]]:
    """(slack, [2, transfer] their sources and their targets) of each slack that occurs."""
    found: dict[int, list[tuple[int, int]]] = {}
    for (_, source, target), room in slack.items():
        found.setdefault(room, []).append((source, target))
    return [(room, np.array(pairs).T) for room, pairs in found.items()]
