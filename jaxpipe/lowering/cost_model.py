"""How long the lowered program takes: its ticks and transfers simulated as a mesh would run them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..program.segments import PART_OF, BlockUse, Part, Payload, Permute, Point, Segment, parts_in_order
from ..simulation.costs import Costs
from ..simulation.simulate import action_durations
from ..table.kinds import RUNS_FORWARD, TOGETHER, Kind
from .assign_ticks import Ticks
from .limits import LIMITS, Prices
from .requirements import Edge, Requirements

# Partners of each device, and how long the permutes of each device last.
_Meeting: TypeAlias = "tuple[NDArray[np.intp], NDArray[np.float64]]"


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


def _durations(ticks: Ticks, costs: Costs | None, cells: tuple[NDArray[np.int64], ...], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """How long the actions of each cell take together; `cells`: where each action is."""
    table = ticks.schedule.encoded
    durations = action_durations(table, (costs or Costs()).for_stages(table.num_stages))
    return np.asarray(np.bincount(np.ravel_multi_index(cells, shape), durations, math.prod(shape)), np.float64).reshape(shape)


def program_price(makespan: float, segments: Sequence[Segment], num_devices: int, prices: Prices) -> float:
    """A makespan in which waiting has its price (`priced_makespan`), with that of traffic, and of the code to compile."""
    traffic = prices.traffic * sum(segment.num_sends for segment in segments) / num_devices
    predicates = sum(prices.block_predicate * segment.num_predicates + prices.arm * segment.num_arms for segment in segments)
    predicates += prices.meeting * sum(segment.num_meeting_predicates for segment in segments)
    blocks = sum(segment.stage_size for segment in segments)
    blocks += LIMITS.times_many * max(0, blocks - LIMITS.many_blocks)
    return (makespan + traffic + predicates) * (1 + prices.block * blocks + prices.permute * sum(segment.permutes for segment in segments))


def program_makespan(costs: NDArray[np.float64], segments: Sequence[Segment], *, transfer: float = 0.0) -> float:
    """Simulate the program: a device runs its ticks in order; where it awaits a transfer it waits until all partners have issued it.

    `costs[tick, device]` or `[tick, part, device]` are durations; the result has their unit.  Each permute that a device takes part in
    lasts `transfer`.  Without parts, what is awaited within a tick is awaited before it.
    """
    time = np.zeros(costs.shape[-1])
    for segment in segments:
        time = advance(time, costs, segment, transfer=transfer)
    return float(time.max(initial=0.0))


def priced_makespan(costs: NDArray[np.float64], segments: Sequence[Segment], prices: Prices) -> float:
    """The makespan in which permutes and predicates last as long as their prices say."""
    time = np.zeros(costs.shape[-1])
    for segment in segments:
        time = advance(time, asking(costs, segment, prices), segment, transfer=prices.transfer)
    return float(time.max(initial=0.0))


def asking(costs: NDArray[np.float64], segment: Segment, prices: Prices) -> NDArray[np.float64]:
    """The costs with what a segment's predicates take: all devices are asked all of them; those of a block taken inside of it too."""
    if not (prices.asked or prices.taken or prices.gate):
        return costs
    found = costs.copy()
    parts = found[:, None] if costs.ndim == 2 else found
    for j, template in enumerate(segment.templates):
        ticks = slice(segment.start + j, segment.stop, segment.period)
        inside = max((use.num_nested for use in template.blocks), default=0)
        guarded = prices.taken if template.num_predicates else 0.0
        parts[ticks] += np.where(parts[ticks] > 0, guarded + prices.asked * inside, 0.0)
        parts[ticks, 0] += prices.asked * template.num_predicates + prices.gate * (len(template.exchanges) > 1)
    return found


def advance(time: NDArray[np.float64], costs: NDArray[np.float64], segment: Segment, *, transfer: float = 0.0) -> NDArray[np.float64]:
    """Device times after a segment, from device times before it."""
    parts = costs[:, None] if costs.ndim == 2 else costs
    _, num_parts, num_devices = parts.shape
    rows = parts[segment.start : segment.stop].reshape(segment.repeats, segment.period, num_parts, num_devices)
    code = _Code.of(segment, num_parts, num_devices, transfer)
    work = [rows[:, step.tick, step.parts].sum(axis=1) if step.runs else None for step in code.steps]
    same = _equal_ahead(np.concatenate([rows.reshape(*rows.shape[:2], -1), segment.chosen[..., None]], axis=2))
    flies = bool(segment.in_flight)
    trip, begun = 0, 0  # the next trip, and the first after those that were skipped
    before = earlier = time
    while trip < segment.repeats:
        earlier, before = before, time
        durations = [None if each is None else each[trip] for each in work]
        time = code.trip(time, durations, segment.chosen[trip].tolist(), is_first=trip == 0)
        trip += 1
        # Trips of equal costs that moved every device by the same time will go on doing so; the first of all begins with nothing in flight.
        seen = trip - begun - (flies and begun == 0)
        if seen < 2 or trip == segment.repeats or not (ahead := int(same[trip - 1])):
            continue
        moved, growth = time - before, before - earlier
        if np.ptp(growth) == 0 and np.array_equal(moved, growth):
            time = time + moved * ahead
            trip, begun = trip + ahead, trip + ahead
    return code.land(time)


class _Issue(NamedTuple):
    """Permutes that are issued together, and awaited together."""

    number: int
    from_before: bool
    meeting: _Meeting


class _Step(NamedTuple):
    """What a trip does at a point, then the parts of a tick that it runs from there on."""

    issues: tuple[_Issue, ...]
    awaits: tuple[int, ...]  # numbers of issues
    tick: int
    parts: slice  # of that tick
    chosen: tuple[_Meeting, ...]  # exchanges to choose among, when these parts are over

    @property
    def runs(self) -> bool:
        """Whether it runs anything."""
        return bool(self.parts.stop > self.parts.start)


class _Code(NamedTuple):
    """One trip as steps."""

    steps: tuple[_Step, ...]
    together: tuple[bool, ...]  # the ticks that no device begins before the others

    @classmethod
    def of(cls, segment: Segment, num_parts: int, num_devices: int, transfer: float) -> _Code:
        """The steps of a segment's trips."""
        groups: dict[tuple[Point, Point, bool], list[Permute]] = {}
        for transit in segment.transits:
            begin = Point(0, 0) if transit.from_before else _point(segment, transit.issued, num_parts)
            ends = (begin, _point(segment, transit.written, num_parts), transit.from_before)
            groups.setdefault(ends, []).append(transit.permute)
        issues = [
            (ends, _Issue(n, ends[2], _meeting(permutes, num_devices, transfer))) for n, (ends, permutes) in enumerate(groups.items())
        ]
        steps: list[_Step] = []
        for j, template in enumerate(segment.templates):
            exchanges = template.exchanges if len(template.exchanges) > 1 else ()
            options = tuple(_meeting(exchange, num_devices, transfer) for exchange in exchanges)
            busy = {p.block for ends, _ in issues for p in ends[:2] if p.tick == j}
            marks = sorted({0, *busy, num_parts})
            for start, stop in zip(marks, [*marks[1:], num_parts], strict=True):
                at = Point(j, start)
                here = tuple(issue for ends, issue in issues if ends[0] == at)
                awaits = tuple(issue.number for ends, issue in issues if ends[1] == at)
                if start < stop or here or awaits:
                    steps.append(_Step(here, awaits, j, slice(start, stop), options if stop == num_parts and start < stop else ()))
        return cls(tuple(steps), tuple(any(use.block.kind in TOGETHER for use in p.blocks) for p in segment.templates))

    def trip(
        self, time: NDArray[np.float64], work: Sequence[NDArray[np.float64] | None], chosen: Sequence[int], *, is_first: bool
    ) -> NDArray[np.float64]:
        """Device times after it; `work`: how long devices run in each step.  Nothing is in flight before the first trip."""
        done: dict[int, NDArray[np.float64]] = {}
        for step, lasting in zip(self.steps, work, strict=True):
            for number, from_before, meeting in step.issues:
                if not (is_first and from_before):
                    done[number] = _over(time, meeting)
            for number in step.awaits:
                if number in done:
                    time = np.maximum(time, done.pop(number))
            if step.parts.start == 0 and self.together[step.tick]:
                time = np.full_like(time, time.max())
            if lasting is not None:
                time = time + lasting
            if step.chosen:
                time = _over(time, step.chosen[chosen[step.tick]])
        return time

    def land(self, time: NDArray[np.float64]) -> NDArray[np.float64]:
        """Device times when what the last trip left in flight is over."""
        flying = [_over(time, issue.meeting) for step in self.steps for issue in step.issues if issue.from_before]
        latest: NDArray[np.float64] = np.max([time, *flying], axis=0)
        return latest


def _over(time: NDArray[np.float64], meeting: _Meeting) -> NDArray[np.float64]:
    """When each device has met its partners."""
    partners, lasts = meeting
    latest: NDArray[np.float64] = np.maximum.reduce(time[partners], axis=0)
    return latest + lasts


def _point(segment: Segment, point: Point, num_parts: int) -> Point:
    """The same by parts instead of by blocks."""
    blocks = segment.templates[point.tick].blocks
    if point.block >= len(blocks):
        return Point(point.tick, num_parts)
    order = parts_in_order(_forward_first(blocks))
    return Point(point.tick, order.index(Part.of(blocks[point.block].block.kind)) if num_parts > 1 else 0)


def _forward_first(blocks: Sequence[BlockUse]) -> bool:
    """Whether these blocks are in the order that has forwards first; where they are of one part, that which has it first."""
    first, last = Part.of(blocks[0].block.kind), Part.of(blocks[-1].block.kind)
    return first > last or first is Part.FORWARD


def _equal_ahead(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each trip, how many trips after it have the same costs and exchanges as it, without a gap."""
    breaks = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=(1, 2)))
    last = np.append(breaks, len(rows) - 1)  # the last trip of each run of equal ones
    trips = np.arange(len(rows))
    return last[np.searchsorted(last, trips)] - trips


def _meeting(permutes: Sequence[Permute], num_devices: int, transfer: float) -> _Meeting:
    """Who meets whom at permutes that are awaited together."""
    lasts = np.zeros(num_devices)
    for permute in permutes:
        lasts[sorted({d for pair in permute.pairs for d in pair})] += transfer
    return _partners(permutes, num_devices), lasts


def _partners(permutes: Sequence[Permute], num_devices: int) -> NDArray[np.intp]:
    """`[k, device]`: each device and the devices it meets at these permutes, padded with the device itself."""
    met: list[list[int]] = [[d] for d in range(num_devices)]
    for permute in permutes:
        for source, target in permute.pairs:
            met[source].append(target)
            met[target].append(source)
    width = max(len(m) for m in met)
    return np.array([m + [d] * (width - len(m)) for d, m in enumerate(met)], dtype=np.intp).T.copy()


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
    transfers = [_by_slack(kind.slack) for kind in requirements.kinds]
    kinds = [requirements.kinds[code] for code in requirements.codes.tolist()]
    for tick, (code, row) in enumerate(zip(requirements.codes.tolist(), parts, strict=True)):
        for part, lasting in enumerate(row):
            for ends, met in due.pop((tick, part), ()):
                for end in ends[beside:]:
                    np.maximum.at(time, end, met)
            if part == 0 and kinds[tick].together:
                time[:] = time.max()
            time += lasting
            for payload, room, ends in transfers[code]:
                if place[payload] == part:
                    needed = tick + room + 1
                    at = (needed, 0 if kinds[needed].paired else place[payload])
                    due.setdefault(at, []).append((ends, time[ends].max(axis=0)))
    return float(time.max(initial=0.0))


def _by_slack(slack: Mapping[Edge, int]) -> list[tuple[Payload, int, NDArray[np.int64]]]:
    """(payload, slack, [2, transfer] their sources and their targets) of each payload and slack that occurs."""
    found: dict[tuple[Payload, int], list[tuple[int, int]]] = {}
    for (payload, source, target), room in slack.items():
        found.setdefault((Payload(payload), room), []).append((source, target))
    return [(payload, room, np.array(pairs).T) for (payload, room), pairs in found.items()]
