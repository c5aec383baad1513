"""The shortest schedule that list scheduling and local search find for given costs and memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import NamedTuple

from ..engine.bounds import (
    JobShop,
    bound_of,
    is_cheapest_in_parts,
    least_activations,
    loop_and_vee,
    lower_bound,
)
from ..engine.costs import Costs
from ..engine.simulate import shortest, simulate
from ..errors import ScheduleError
from ..table.placement import Placement
from ..table.schedule import Certificate, Objective, Proof, Schedule
from ..transforms.rewrites import flipped, merge_backward
from ._beam import improved
from ._list_scheduling import fitted
from .loop import (
    dualpipev,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    looped_bfs,
    one_f_one_b,
    sliced,
)
from .zero_bubble import interleaved_zb, v_half, v_min, zb_h2, zbv

# The named schedules, each with one device for a stage; gpipe, 1f1b_overlap, zb_h1 and zb_1p are
# those of several chunks for one.
_NAMED: tuple[Callable[..., Schedule], ...] = (
    *(looped_bfs, one_f_one_b, interleaved_1f1b, interleaved_1f1b_overlap, interleaved_zb),
    *(zb_h2, zbv, v_half, v_min, dualpipev),
)


def auto(
    *,
    devices: int,
    microbatches: int,
    chunks: int,
    max_activations: int | None = None,
    costs: Costs | None = None,
    placement: Placement | None = None,
    objective: Objective = Objective.MAKESPAN,
    search: float = 0,
    seed: int = 0,
    slices: int = 1,
) -> Schedule:
    """The shortest schedule found for given costs under a cap on activations, by list scheduling
    along waves and local search.

    Any P, V and M.  Every device holds at most `max_activations` (stage and microbatch pairs; V or
    more), or 2 V P where it is not given, which is enough to fill any bubble.  Stages are placed in
    a loop or in a V, whichever gives the shorter schedule, or as `placement` says.  Each backward
    is whole, or split into I and W, whichever is shorter, and no named schedule that the cap and
    the placement allow is shorter than the result.  The reference orders are waves of several paces
    and densities (Pipeline Parallelism with Controllable Memory, Qi et al. 2024), list-scheduled
    under the cap and compared by simulation.  A table of some thousand actions or less is then
    shortened by beam search over active schedules. `schedule.certificate` says how
    far from optimal the result can be.  With `search` seconds, OR-tools (the extra
    `jaxpipe[solver]`) shortens it where it finds how, or proves that it cannot be shorter: never
    longer than without, and the same for the same seed. With `objective=Objective.PERIOD`, which
    needs a search, the steady state is made short instead, however long the ramps are: a turn of up
    to four microbatches, found by modulo scheduling, repeats until all are done.  With `slices` the
    orders are those of slices, `costs.slice_factors` count, and there is neither local search nor a
    certificate.  Where F, I and W
    cost the same and V P activations are allowed, the makespan is V M (F + I + W) + (P - 1) F in
    costs of a chunk for M >= P, and no schedule is shorter.
    """
    costs = costs or Costs()
    places = loop_and_vee(devices, chunks)[::-1] if placement is None else [placement]
    faults = _misfits(places[0], devices, chunks, max_activations, slices)
    if objective is Objective.PERIOD and not search:
        faults.append(
            "objective=PERIOD is found by a search alone; give seconds for it, such as search=10"
        )
    if slices > 1 and search:
        faults.append("search= knows no slices; leave it out, or slices=")
    ScheduleError.refuse("auto cannot be built", faults)
    most = chunks * (2 * devices + slices - 1) if max_activations is None else max_activations
    bound = lower_bound(
        costs,
        microbatches=microbatches,
        devices=devices,
        chunks=chunks,
        placement=placement,
        max_activations=max_activations,
        objective=objective,
    )
    wanted = _Wanted(places, microbatches, costs, max_activations, most, bound)
    if slices > 1:
        factors = costs.for_stages(devices * chunks).factor_of(slices, slices)
        listed = _listed(wanted, replace(costs, slice_factors=factors), slices)
        return shortest((listed, *_named(wanted, slices)), costs)
    if objective is Objective.PERIOD:
        return _steady(wanted, search, seed)
    if search:
        return _searched(wanted, search, seed)
    return _certified(wanted, _shortest(wanted, _start(wanted)))


class _Wanted(NamedTuple):
    """The arguments of `auto`."""

    places: list[Placement]
    microbatches: int
    costs: Costs
    requested_cap: int | None
    cap: int
    bound: float  # below which no schedule goes


def _listed(wanted: _Wanted, costs: Costs, slices: int = 1) -> Schedule:
    """The best of list scheduling along waves."""
    least = least_activations(wanted.places[0]) * slices
    caps = [wanted.cap] if wanted.requested_cap else [max(least, wanted.cap // 2), wanted.cap]
    found: list[Schedule] = []
    for cap, place in product(caps, wanted.places):
        found.append(fitted(place, costs, wanted.microbatches, cap=cap))
        makespan = simulate(found[-1], costs).makespan
        if slices == 1 and makespan <= bound_of(_shop(wanted, place, costs)):
            break
    return shortest(found, costs)


def _shop(wanted: _Wanted, placement: Placement, costs: Costs) -> JobShop:
    times = costs.for_stages(placement.num_stages)
    return JobShop.of(placement, times, costs.release, wanted.microbatches, wanted.cap)


def _start(wanted: _Wanted) -> Schedule:
    """The best of list scheduling, after local search."""
    listed = _listed(wanted, wanted.costs)
    shop = _shop(wanted, listed.placement, wanted.costs)
    return improved(listed, wanted.costs, shop, at_least=bound_of(shop))


def _searched(wanted: _Wanted, seconds: float, seed: int) -> Schedule:
    """The best that is found without the solver, shortened by it; where no placement is given, each
    gets its part of the time.
    """
    from ..solver import improve  # needs the extra

    found = [
        improve(
            _start(wanted._replace(places=[place])),
            wanted.costs,
            cap=wanted.cap,
            seconds=seconds / len(wanted.places),
            seed=seed,
        )
        for place in wanted.places
    ]
    split = shortest((better.schedule for better in found), wanted.costs)
    return _certified(wanted, _shortest(wanted, split), min(better.proven for better in found))


def _shortest(wanted: _Wanted, split: Schedule) -> Schedule:
    """The shortest of a table of F, I and W, of the same whose backwards are whole, and of the
    named tables that placement and cap allow; with each backward whole or split, as is shorter.
    """
    costs = wanted.costs
    if simulate(split, costs).makespan <= wanted.bound:
        return split
    # List scheduling is a heuristic: the table for equal costs may be the shorter one.
    equal = wanted._replace(costs=Costs(release=costs.release))
    starts = [split, _listed(equal, equal.costs), *_named(wanted)]
    if not is_cheapest_in_parts(costs.for_stages(split.num_stages)):
        # The same orders for whole backwards, which are I that take as long, and W that take none.
        stages = costs.for_stages(split.num_stages)
        whole = replace(costs, input_grad=stages.backward, weight_grad=0, backward=None)
        starts.append(merge_backward(_listed(wanted, whole), delayed=True))
    return replace(_mixed(shortest(starts, costs), costs), name="auto", certificate=None)


def _named(wanted: _Wanted, slices: int = 1) -> Iterator[Schedule]:
    """The named tables of these placements that hold no more than the cap."""
    shape = {
        "devices": wanted.places[0].num_devices,
        "microbatches": wanted.microbatches + slices - 1,
        "chunks": wanted.places[0].num_chunks,
    }
    costs = replace(wanted.costs, slice_factors=None)
    for make in _NAMED:
        tables = [make(**shape)]
        if tables[0].placement not in wanted.places:
            continue
        if "costs" in inspect.signature(make).parameters:
            tables.append(make(**shape, costs=costs))
        for table in (sliced(each, slices) for each in tables):
            if max(simulate(table, wanted.costs).peak_activations) <= wanted.cap:
                yield table


def _steady(wanted: _Wanted, seconds: float, seed: int) -> Schedule:
    """The table whose steady state has the least period that is found; of equals, the
    shorter step.
    """
    from ..solver import least_period  # needs the extra

    costs = wanted.costs
    turns = (
        least_period(
            place,
            costs,
            microbatches=wanted.microbatches,
            cap=wanted.cap,
            seconds=seconds / len(wanted.places),
            seed=seed,
        )
        for place in wanted.places
    )
    found = [turn for turn in turns if turn is not None]
    if not found:
        raise ScheduleError(
            "auto cannot be built:\n"
            f"  search={seconds:g} found no steady state in its time; give it more seconds"
        )
    period, table = min(found, key=lambda t: (t.period, simulate(t.schedule, costs).makespan))
    proven = wanted.bound, Proof.RELAXATION, wanted.requested_cap
    return replace(table, certificate=Certificate(Objective.PERIOD, period, *proven))


def _certified(wanted: _Wanted, schedule: Schedule, proven: float = 0) -> Schedule:
    """The schedule with its certificate; `proven` by the solver, under the cap that it had."""
    costs, cap, bound = wanted.costs, wanted.requested_cap, wanted.bound
    proof = Proof.RELAXATION
    # The solver's tables are of F, I and W alone.
    alone = costs.recompute is None and is_cheapest_in_parts(costs.for_stages(schedule.num_stages))
    if proven > bound * (1 + 1e-9) and alone:
        bound, proof, cap = proven, Proof.SOLVER, wanted.cap
    makespan = simulate(schedule, costs).makespan
    return replace(
        schedule, certificate=Certificate(Objective.MAKESPAN, makespan, bound, proof, cap)
    )


def _misfits(
    placement: Placement, devices: int, chunks: int, max_activations: int | None, slices: int
) -> list[str]:
    """Why a placement has another size or stages on two devices, or no schedule keeps the cap."""
    faults = []
    if placement.num_devices != devices or placement.num_stages != devices * chunks:
        faults.append(
            f"placement has {placement.num_devices} devices and {placement.num_stages} stages, "
            f"but devices={devices} and chunks={chunks} make {devices * chunks} stages; give a "
            "placement of that size"
        )
    if placement.is_bidirectional:
        faults.append(
            "placement has stages on two devices; auto takes one device per stage (dualpipe is "
            "the schedule for two)"
        )
    least = least_activations(placement) * slices
    if max_activations is not None and max_activations < least:
        faults.append(
            f"max_activations={max_activations} is less than the {least} that one "
            f"{'microbatch' if slices == 1 else 'sequence'} needs on a device; "
            f"the nearest that works is max_activations={least}"
        )
    return faults


_MOST_ACTIONS = 60_000  # of all tables that are simulated together: about half a second
_SHORTER = 1 - 1e-9


def _mixed(schedule: Schedule, costs: Costs) -> Schedule:
    """The table with the backwards of those stages whole, or split, with which it is shorter: of
    all stages, then of one stage after the other.
    """
    best, makespan = schedule, simulate(schedule, costs).makespan
    stages, every = range(schedule.num_stages), range(schedule.num_microbatches)
    tries = max(1, _MOST_ACTIONS // max(1, schedule.encoded.num_actions))
    for changed in islice([stages, *([stage] for stage in stages)], tries):
        table = flipped(best, {(stage, m) for stage in changed for m in every})
        found = simulate(table, costs).makespan
        if found < makespan * _SHORTER:
            best, makespan = table, found
    return best
