"""Lower bounds of the makespan of any schedule, for given costs, placement and cap on
activations.

A schedule is a job shop in which every stage works in the order of microbatches (`job_shop`), and
the bounds of job shops hold for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

from ..errors import ScheduleError, quoted
from ..table.certificate import Objective
from ..table.kinds import COLLECTIVES, RECOMPUTE
from ..table.limits import MAX_COUNT, is_whole
from ..table.placement import Placement
from ..table.typed import typed
from .costs import Costs, StageCosts
from .job_shop import JobShop
from .timeline import Timeline

# Pairs of stage and microbatch, and stages, up to which every action has a head and a tail of its
# own.
_MOST_PAIRS, _MOST_STAGES = 1 << 13, 128
_ALMOST = 1 - 1e-12  # of sums of floats


@typed()
def lower_bound(
    costs: Costs | None = None,
    *,
    microbatches: int | None = None,
    devices: int | None = None,
    chunks: int = 1,
    placement: Placement | None = None,
    max_activations: int | None = None,
    objective: Objective = Objective.MAKESPAN,
) -> float:
    """A makespan below which no schedule goes that has these costs, this placement and at most so
    many activations on a device.

    The largest of three: the longest chain of actions that wait for each other; for each device the
    preemptive one-machine problem in which every action has a head (what must come before it) and a
    tail (what must come after it) (Carlier 1982, "The one-machine sequencing problem"); and for
    each device the time for which activations occupy its places, divided by their number.  Heads
    and tails count the releases that a cap demands.  Backwards may be whole, split or in overlapped
    pairs, whichever is cheaper.

    Tables with R (`add_recompute`) compute more and hold less.  Where `Costs.recompute` is given
    the bound holds for them too: with a cap, a device trades the time of an R for room.  Where it
    is None they may go below a bound with a cap, and not below one without.

    With `Objective.PERIOD`, a time of a microbatch in the steady state that no schedule goes below
    (modulo scheduling, Rau 1994, section 2): a device's work for one microbatch, and the time for
    which that occupies its memory, divided by the cap.

    Args:
        costs: as for `simulate`; all 1, and transfers 0, where it is None.
        microbatches: M; not needed for a period.
        devices: P; not needed where `placement` is given.
        chunks: V, the stages per device, where no placement is given: the bound is then the lesser
            of that of a loop and that of a V.
        placement: the devices of the stages.
        max_activations: the most activations (stage and microbatch pairs) on a device; no cap where
            it is None.
        objective: whether the bound is one of the makespan or of the period.

    Raises:
        ScheduleError: neither devices nor placement is given, a number is no whole number of at
            least 1, or the cap is too small for one microbatch.
        CostError: a sequence of costs does not have one entry per stage.

    >>> (
    ...     lower_bound(devices=4, microbatches=8),
    ...     lower_bound(devices=4, microbatches=8, max_activations=2),
    ... )
    (27, 39)
    >>> lower_bound(devices=4, max_activations=2, objective=Objective.PERIOD)
    4.5
    """
    if objective is Objective.PERIOD and microbatches is None:
        microbatches = 1
    places = _placements(devices, chunks, placement, microbatches, max_activations)
    # No table holds so many: a larger cap is none.
    max_activations = None if max_activations is None else min(max_activations, MAX_COUNT)
    costs = costs or Costs()
    times = cheapest(costs.for_stages(places[0].num_stages))
    assert microbatches is not None
    again = None if costs.recompute is None else times.recompute
    cap = max_activations if again is None else None
    shops = [JobShop.of(place, times, costs.release, microbatches, cap) for place in places]
    of = bound_of if objective is Objective.MAKESPAN else period_bound_of
    if again is None or max_activations is None:
        return min(map(of, shops))
    rows = 1 if objective is Objective.PERIOD else microbatches
    return min(max(of(shop), _with_recompute(shop, again, rows, max_activations)) for shop in shops)


def timeline_bound(timeline: Timeline) -> tuple[float, int | None]:
    """The bound of the makespan for a simulated table's costs, placement and peak of activations,
    and that peak.

    None is the peak of a table with R: its bound holds for any memory, since tables with R go below
    those of a cap.
    """
    schedule = timeline.schedule
    cap = None if schedule.encoded.of_kinds(RECOMPUTE).any() else max(timeline.peak_activations)
    shape: dict[str, Any] = {
        "placement": schedule.placement,
        "microbatches": schedule.num_microbatches,
    }
    # The table's own peak says nothing of tables with R.
    costs = replace(timeline.costs, recompute=None)
    found = lower_bound(costs, **shape, max_activations=cap)
    return max(found, _with_meetings(timeline)), cap


def _with_meetings(timeline: Timeline) -> float:
    """A bound for tables in which all devices do `last` or `first` together: on each device their
    shares are work besides.
    """
    schedule, table = timeline.schedule, timeline.schedule.encoded
    kinds = [kind for kind in COLLECTIVES if table.of_kinds((kind,)).any()]
    if not kinds:
        return 0
    times, count = timeline.costs.for_stages(schedule.num_stages), schedule.num_microbatches
    shop = JobShop.of(schedule.placement, cheapest(times), timeline.costs.release, count, None)
    shares = [times.of(kind) or (0,) for kind in kinds]
    return max(
        count * (shop.work(device) + sum(share[device] for share in shares))
        for device in range(shop.devices)
    )


def _placements(
    devices: object, chunks: object, placement: Placement | None, microbatches: object, cap: object
) -> list[Placement]:
    """Where stages may be; ScheduleError for arguments that make no sense."""
    numbers = [("microbatches", microbatches), ("chunks", chunks)]
    numbers += [("devices", devices)] if placement is None else []
    numbers += [("max_activations", cap)] if cap is not None else []
    faults = [
        f"{name} must be a whole number of at least 1, not {quoted(n)}"
        for name, n in numbers
        if not (is_whole(n) and n >= 1)
    ]
    ScheduleError.refuse("there is no bound for this", faults)
    found = [placement] if placement is not None else loop_and_vee(devices, chunks)
    if is_whole(cap) and cap < least_activations(found[0]):
        raise ScheduleError(
            f"max_activations={cap} is less than the {least_activations(found[0])} that one "
            "microbatch needs on a device: without R, the "
            "stages of a device wait for their backwards at the same time; give a larger "
            "max_activations or place fewer stages there"
        )
    return found


def loop_and_vee(devices: Any, chunks: Any) -> list[Placement]:
    """The placements of so many chunks: a loop, and a V where that is another one."""
    loop = Placement.loop(devices=devices, chunks=chunks)
    one = chunks == 1 or devices == 1
    return [loop] if one else [loop, Placement.vee(devices=devices, chunks=chunks)]


def least_activations(placement: Placement) -> int:
    """What one microbatch alone holds on some device before its first backward: of a stage on
    several devices, it goes through one.
    """
    found = [devices[0] for devices in placement.devices_of if len(set(devices)) == 1]
    return max((found.count(device) for device in set(found)), default=1)


def bound_of(shop: JobShop) -> float:
    """The largest of the bounds of a job shop."""
    if shop.shared:
        heads, _ = shop.alone()
        chain = max(head + node.length for head, node in zip(heads, shop.nodes, strict=True))
        return max(
            sum(node.length for node in shop.nodes) * shop.microbatches / shop.devices, chain
        )
    return max(_one_machine(shop), _area(shop))


def period_bound_of(shop: JobShop) -> float:
    """Of the time of a microbatch in the steady state: a device's work, and the time for which its
    memory is occupied.
    """
    if shop.shared:
        return sum(node.length for node in shop.nodes) / shop.devices
    devices = range(shop.devices)
    held = [0.0] if shop.cap is None else [sum(_lives(shop, d)) / shop.cap for d in devices]
    return max(*map(shop.work, devices), *held)


def _with_recompute(shop: JobShop, again: Sequence[float], microbatches: int, cap: int) -> float:
    """A device that computes some forwards again does more work, and holds those activations from
    there on alone: the least makespan for which neither its time nor its places are too few.

    Of the stages of a device, that one counts whose R saves most for its time.
    """
    found: list[float] = [0]
    for device in range(shop.devices):
        mine = [shop.nodes[n] for n in shop.on(device)]
        stages = [node.stage for node in mine if node.begins]
        if not stages:
            continue
        work = microbatches * shop.work(device)
        # From an R on: its time, and the backward's until the release.
        last = [
            max(n for n, node in enumerate(mine) if node.releases and node.stage == s)
            for s in stages
        ]
        short = [
            again[s] + sum(n.length for n in mine[: end + 1] if n.stage == s and not n.begins)
            for s, end in zip(stages, last, strict=True)
        ]
        lives = _lives(shop, device)
        saved = [max(0, life - rest) for life, rest in zip(lives, short, strict=True)]
        rates = [
            s / again[stage] if again[stage] else inf
            for s, stage in zip(saved, stages, strict=True)
            if s
        ]
        held, rate = microbatches * sum(lives), max(rates, default=0)
        least = held - microbatches * sum(saved)
        spent = 0 if rate == inf else max(0, (held - cap * work) / (cap + rate))
        found.append(max(work + spent if rate else max(work, held / cap), least / cap))
    return max(found)


def _ends(shop: JobShop, device: int) -> tuple[list[int], list[int]]:
    """The nodes of a device that take a place for activations, and those that free one."""
    mine = shop.on(device)
    return [n for n in mine if shop.nodes[n].begins], [n for n in mine if shop.nodes[n].releases]


def _lives(shop: JobShop, device: int) -> list[float]:
    """The least time from the F of each of a device's stages to its release: that of one microbatch
    alone.
    """
    heads, _ = shop.alone()
    begins, releases = _ends(shop, device)
    # Releases come in the opposite order of stages.
    return [
        heads[r] + shop.nodes[r].length - heads[b]
        for b, r in zip(begins, releases[::-1], strict=True)
    ]


def _one_machine(shop: JobShop) -> float:
    """Every device as one machine, with a head and a tail for every action; in a large instance,
    for all actions of a stage and kind as one.
    """
    count = shop.microbatches
    if len(shop.nodes) <= 3 * _MOST_STAGES and len(shop.nodes) * count <= 3 * _MOST_PAIRS:
        heads, tails, together = shop.heads(), shop.tails(), 1
    else:
        heads, tails = ([[time] for time in times] for times in shop.alone())
        together = count
    return max(
        preemptive_one_machine(
            [
                (head, shop.nodes[n].length * together, tail)
                for n in shop.on(device)
                for head, tail in zip(heads[n], tails[n], strict=True)
            ]
        )
        for device in range(shop.devices)
    )


def _area(shop: JobShop) -> float:
    """Activations of a device live for so long in all, in as many places as the cap has."""
    if shop.cap is None:
        return 0
    heads, tails = shop.alone()
    nodes, found = shop.nodes, [0.0]
    for device in range(shop.devices):
        begins, releases = _ends(shop, device)
        if not begins:
            continue
        places = min(shop.cap, len(begins) * shop.microbatches)
        shortest = (min(nodes[n].length for n in ends) for ends in (begins, releases))
        ramps = places * (places - 1) // 2 * sum(shortest)
        full = shop.microbatches * sum(_lives(shop, device)) + ramps
        outside = min(heads[n] for n in begins) + min(tails[n] for n in releases)
        found.append(outside + full / places)
    return _rounded_up(max(found), shop)


def cheapest(costs: StageCosts) -> StageCosts:
    """Times that no schedule goes below: of a whole backward and its halves the cheaper, of pairs
    what their halves add at the least.
    """
    forward, whole, dgrad = costs.forward, costs.backward, costs.input_grad
    if costs.overlap is not None:
        pair = min(costs.overlap)
        whole, dgrad = tuple(min(b, pair) for b in whole), tuple(min(i, pair) for i in dgrad)
        longest = max((*whole, *dgrad))
        forward = tuple(
            min(f, max(0, o - longest)) for f, o in zip(forward, costs.overlap, strict=True)
        )
    first = tuple(min(i, b) for i, b in zip(dgrad, whole, strict=True))
    times = zip(dgrad, costs.weight_grad, whole, first, strict=True)
    rest = tuple(min(i + w, b) - f for i, w, b, f in times)
    return replace(
        costs, forward=forward, input_grad=first, weight_grad=rest, backward=whole, overlap=None
    )


def is_cheapest_in_parts(costs: StageCosts) -> bool:
    """Whether neither a whole backward nor an overlapped pair is cheaper than its parts: what no
    table of F, I and W beats, none does.
    """
    parts = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    if any(whole < _ALMOST * both for whole, both in zip(costs.backward, parts, strict=True)):
        return False
    longest = max(costs.backward)
    return costs.overlap is None or all(
        o >= _ALMOST * (f + longest) for f, o in zip(costs.forward, costs.overlap, strict=True)
    )


def _rounded_up(value: float, shop: JobShop) -> float:
    """The next whole number where all times are whole, since then every makespan is."""
    whole = all(isinstance(n.length, int) for n in shop.nodes) and all(
        isinstance(a.delay, int) for a in shop.arcs
    )
    return ceil(value - 1e-9) if whole else value


def preemptive_one_machine(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The least time in which one machine can do jobs of (head, length, tail) if it may interrupt
    them: always the longest tail first.

    Jackson's preemptive schedule (Carlier and Pinson 1989), in n log n.

    >>> preemptive_one_machine([(0, 2, 5), (1, 2, 9), (3, 1, 0)])
    12
    """
    waiting: list[tuple[float, float]] = []  # (-tail, what is left)
    time: float = 0
    most: float = 0
    coming = sorted(jobs)
    at = 0
    while at < len(coming) or waiting:
        if not waiting:
            time = max(time, coming[at][0])
        while at < len(coming) and coming[at][0] <= time:
            heapq.heappush(waiting, (-coming[at][2], coming[at][1]))
            at += 1
        tail, left = heapq.heappop(waiting)
        until = coming[at][0] if at < len(coming) else float("inf")
        if time + left <= until:
            time += left
            most = max(most, time - tail)
        else:
            heapq.heappush(waiting, (tail, left - (until - time)))
            time = until
    return most
