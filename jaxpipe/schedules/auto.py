"""The shortest schedule that list scheduling finds for given costs and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

from ..errors import ScheduleError
from ..simulation.costs import Costs
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._list_scheduling import ListSchedule
from ._orders import turn_order, zbv_order
from ._waves import OrderMaker, best_of, cost_waves, least_makespan, shortest, v_blocks


def auto(
    *,
    devices: int,
    microbatches: int,
    chunks: int,
    max_activations: int | None = None,
    costs: Costs | None = None,
    placement: Placement | None = None,
    search: float = 0,
    seed: int = 0,
) -> Schedule:
    """The shortest schedule found for given costs under a cap on activations, by list scheduling along waves.

    Any P, V and M.  Every device holds at most `max_activations` (stage and microbatch pairs; V or more), or 2 V P where it is not
    given, which is enough to fill any bubble.  Stages are placed in a loop or in a V, whichever gives the shorter schedule, or as
    `placement` says.  Backwards are split into I and W.  The reference orders are waves of several paces and densities
    (Pipeline Parallelism with Controllable Memory, Qi et al. 2024), list-scheduled under the cap and compared by simulation.
    `jaxpipe.lower_bound` says how far from optimal the result can be.  With `search` seconds, OR-tools (the extra `jaxpipe[solver]`)
    shortens it where it finds how: never longer than without, and the same for the same seed.  Where F, I and W cost the same and
    V P activations are allowed, the makespan is V M (F + I + W) + (P - 1) F in costs of a chunk for M >= P, and no schedule is shorter.
    """
    if search:
        return _searched(
            partial(auto, devices=devices, microbatches=microbatches, chunks=chunks), max_activations, costs, placement, search, seed
        )
    places = _placements(devices, chunks) if placement is None else [placement]
    _check_fit(places[0], devices, chunks, max_activations)
    costs = costs or Costs()
    caps = (chunks * devices, 2 * chunks * devices) if max_activations is None else (max_activations,)
    found: list[tuple[ListSchedule, Placement]] = []
    for cap, place in product(caps, places):
        stages = costs.for_stages(place.num_stages)
        makers = [*_known_orders(place, microbatches), *cost_waves(place, stages, cap)]
        best = best_of(makers, place, stages, microbatches=microbatches, cap=cap, release=costs.release)
        assert best is not None, "one microbatch after the other fits any cap"
        found.append((best, place))
        if best.makespan <= least_makespan(place, stages, microbatches):
            break
    best, place = min(found, key=lambda f: (f[0].makespan, f[0].peak))
    return Schedule.from_rows(best.rows, placement=place, num_microbatches=microbatches, name="auto")


def _searched(
    listed: Callable[..., Schedule], cap: int | None, costs: Costs | None, placement: Placement | None, seconds: float, seed: int
) -> Schedule:
    """The best that list scheduling finds, shortened by the solver; where no placement is given, each gets its part of the time."""
    from ..solver import improve  # needs the extra

    given = Costs() if costs is None else costs
    shape = listed.keywords  # type: ignore[attr-defined]
    places = _placements(shape["devices"], shape["chunks"]) if placement is None else [placement]
    most = 2 * shape["chunks"] * shape["devices"] if cap is None else cap
    found = []
    for place in places:
        starts = [listed(max_activations=cap, costs=known, placement=place) for known in (given, None)]
        found.append(improve(shortest(starts, given), given, cap=most, seconds=seconds / len(places), seed=seed).schedule)
    return shortest(found, given)


def _placements(devices: int, chunks: int) -> list[Placement]:
    loop, vee = Placement.loop(devices=devices, chunks=chunks), Placement.vee(devices=devices, chunks=chunks)
    return [loop] if chunks == 1 or devices == 1 else [vee, loop]


def _check_fit(placement: Placement, devices: int, chunks: int, max_activations: int | None) -> None:
    """ScheduleError for a placement of another size or with stages on two devices, and for a cap that no schedule can keep."""
    faults = []
    if placement.num_devices != devices or placement.num_stages != devices * chunks:
        faults.append(
            f"placement has {placement.num_devices} devices and {placement.num_stages} stages, "
            f"but devices={devices} and chunks={chunks} make {devices * chunks} stages; give a placement of that size"
        )
    if placement.is_bidirectional:
        faults.append("placement has stages on two devices; auto takes one device per stage (dualpipe is the schedule for two)")
    if max_activations is not None and max_activations < placement.num_chunks:
        faults.append(
            f"max_activations={max_activations} is less than the {placement.num_chunks} that one microbatch needs on a device; "
            f"the nearest that works is max_activations={placement.num_chunks}"
        )
    if faults:
        raise ScheduleError("auto cannot be built:\n" + "\n".join(f"  {fault}" for fault in faults))


def _known_orders(placement: Placement, microbatches: int) -> list[OrderMaker]:
    """The reference orders of the named schedules that have this placement."""
    devices = placement.num_devices
    if placement == Placement.loop(devices=devices, chunks=placement.num_chunks):
        return [partial(turn_order, placement, hop, placement.num_chunks * microbatches) for hop in (1, 2)]
    if placement == Placement.vee(devices=devices):
        return [partial(zbv_order, devices), *v_blocks(placement)]
    return []
