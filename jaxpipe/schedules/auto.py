"""The shortest schedule that list scheduling and local search find for given costs and memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.bounds import (
    JobShop,
    bound_of,
    is_cheapest_in_parts,
    least_activations,
    loop_and_vee,
    lower_bound,
)
from ..engine.costs import Costs
from ..engine.simulate import simulate
from ..errors import ScheduleError
from ..table.kinds import Placement
from ..table.schedule import Certificate, Objective, Proof, Schedule
from ..transforms.rewrites import flipped, merge_backward, sliced
from ._list_scheduling import fitted, shortest
from .loop import (
    dualpipev,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    looped_bfs,
    one_f_one_b,
)
from .zero_bubble import interleaved_zb, v_half, v_min, zb_h2, zbv

Times: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
NEVER = np.inf
# Partial schedules that a search keeps; starts that one of the least width may compute (some
# seconds), and starts as which each of its steps counts.
_WIDTHS, _BUDGET, _STEP = (128, 64, 32), 5_000_000, 1000
_MEAN = 0.1  # weight of the mean of all devices' bounds beside the largest
_EQUAL = 1e-9  # relative: sums of the same times in another order


def improved(schedule: Schedule, costs: Costs, shop: JobShop, *, at_least: float) -> Schedule:
    """A schedule of F, I and W that is never longer, and shorter where one is found; the same for
    the same arguments.

    Args:
        schedule: rows of F, I and W, every stage on one device.
        costs: what its makespan is counted in.
        shop: the instance, with the cap on activations.
        at_least: a makespan below which there is none.
    """
    makespan = simulate(schedule, costs).makespan
    actions = schedule.encoded.num_actions
    # A search of twice the width may compute half as much.
    prices = ((width, actions * (len(shop.nodes) * width + _STEP)) for width in _WIDTHS)
    fitting = (width for width, price in prices if price * width <= _BUDGET * _WIDTHS[-1])
    if makespan <= at_least * (1 + _EQUAL) or not (width := next(fitting, 0)):
        return schedule
    order = Beam(shop).search(makespan * (1 - _EQUAL), width=width)
    if order is None:
        return schedule
    better = schedule.with_rows(shop.rows(order))
    return better if simulate(better, costs).makespan < makespan * (1 - _EQUAL) else schedule


class Partial(NamedTuple):
    """Partial schedules, one a row of each array."""

    counts: Numbers  # per node, how many actions are placed
    # per node and microbatch, the end; NEVER where it is not placed; one more column of -NEVER, for
    # "needs nothing"
    ends: Times
    free: Times  # per device
    live: Numbers  # per device, the activations it holds
    reached: Times  # the least makespan after the actions that are placed

    def take(self, rows: Numbers) -> Partial:
        """The partial tables of these rows."""
        counts, ends, free, live, reached = self
        return Partial(counts[rows], ends[rows], free[rows], live[rows], reached[rows])


class Beam:
    """The arrays of a job shop, and the search on them."""

    def __init__(self, shop: JobShop) -> None:
        self.shop = shop
        nodes = shop.nodes
        arcs = sorted(shop.arcs, key=lambda arc: arc.target)
        self.device = np.array([node.device for node in nodes])
        self.length = np.array([node.length for node in nodes], np.float64)
        self.begins = np.array([node.begins for node in nodes])
        self.change = np.array([int(node.begins) - int(node.releases) for node in nodes])
        self._source, self._target, self._lag, self._delay = map(np.array, zip(*arcs, strict=True))
        # Every node comes after itself, so each has an arc.
        self._first_arc = np.searchsorted(self._target, np.arange(len(nodes)))
        self._cap = shop.cap if shop.cap is not None else len(nodes) * shop.microbatches
        self._hash = np.random.default_rng(0).integers(1, 1 << 62, len(nodes))
        # Per node and microbatch, the least time from its end to the end of all; one more column.
        self._tails = np.array([[*row, 0] for row in shop.tails()], np.float64)
        # Nodes by device, those first whose last action has the longest tail; and per node the
        # lengths of those of its device up to it: with any of them come all before it.
        self._last = self._tails[:, -2]
        self._by_device = np.lexsort((-self._last, self.device))
        device = self.device[self._by_device]
        self._first_node = np.searchsorted(device, np.arange(shop.devices))
        up_to = np.triu(device[:, None] == device)
        self._work = up_to * self.length[self._by_device][:, None]

    def _empty(self) -> Partial:
        """The schedule with nothing placed."""
        nodes, devices = len(self.shop.nodes), self.shop.devices
        ends = np.full((1, nodes, self.shop.microbatches + 1), NEVER)
        ends[:, :, -1] = -NEVER
        none, holding = (np.zeros((1, size), np.int64) for size in (nodes, devices))
        return Partial(none, ends, np.zeros((1, devices)), holding, np.zeros(1))

    def search(self, limit: float, *, width: int) -> list[int] | None:
        """The nodes in the order in which the shortest schedule found places their next actions;
        None where none is below the limit.
        """
        beam, parents, placed = self._empty(), [], []
        for _ in range(len(self.shop.nodes) * self.shop.microbatches):
            row, node = np.nonzero(self._conflict(beam))
            extended = self._place(beam.take(row), node)
            kept = self._best(extended, limit, width)
            if not len(kept):
                return None
            beam = extended.take(kept)
            parents.append(row[kept])
            placed.append(node[kept])
        last, path = int(beam.reached.argmin()), []
        for parent, node in zip(reversed(parents), reversed(placed), strict=True):
            path.append(int(node[last]))
            last = int(parent[last])
        return path[::-1]

    def _starts(self, beam: Partial) -> Times:
        """Per node, the earliest start of its next action; NEVER where what it needs is
        not placed.
        """
        at = beam.counts[:, self._target] - self._lag
        rows = np.arange(len(at))[:, None]
        at = np.where(at < 0, self.shop.microbatches, at)
        known = beam.ends[rows, self._source, at] + self._delay
        ready = np.maximum.reduceat(known, self._first_arc, axis=1)
        starts: Times = np.maximum(ready, beam.free[:, self.device])
        return starts

    def _conflict(self, beam: Partial) -> Flags:
        """On the device where an action can end first, the actions that could start before that
        end.
        """
        full = self.begins & (beam.live[:, self.device] >= self._cap)
        over = (beam.counts >= self.shop.microbatches) | full
        starts = np.where(over, NEVER, self._starts(beam))
        chosen = self._conflict_of(starts)
        if self.shop.cap is None:
            return chosen
        # An F takes memory, so it may also wait for what comes next without it.
        return chosen | self._conflict_of(np.where(chosen & self.begins, NEVER, starts))

    def _conflict_of(self, starts: Times) -> Flags:
        """The same, of actions with these starts."""
        ends = starts + self.length
        first = ends.argmin(1)
        rows = np.arange(len(ends))
        end = ends[rows, first]
        chosen: Flags = (self.device == self.device[first][:, None]) & (starts < end[:, None])
        chosen[rows, first] = np.isfinite(end)
        return chosen

    def _place(self, beam: Partial, node: Numbers) -> Partial:
        """Each partial schedule with the next action of a node placed; the arrays are changed in
        place.
        """
        rows = np.arange(len(node))
        at = beam.counts[rows, node]
        device = self.device[node]
        end = self._starts(beam)[rows, node] + self.length[node]
        beam.ends[rows, node, at] = end
        beam.counts[rows, node] += 1
        beam.free[rows, device] = end
        beam.live[rows, device] += self.change[node]
        return beam._replace(reached=np.maximum(beam.reached, end + self._tails[node, at]))

    def _best(self, beam: Partial, limit: float, width: int) -> Numbers:
        """The rows of least score below the limit, one of those that have placed the same actions:
        what ranks them is the largest bound of a device and some of the mean.

        A device is bounded by each action that can start, and by what is left to do on it: the
        first start, all its work up to some node, and that node's tail.
        """
        left, starts = self.shop.microbatches - beam.counts, self._starts(beam)
        todo, known = left > 0, (left > 0) & (starts < NEVER)
        tails = self._tails[np.arange(len(self.device)), np.where(known, beam.counts, -1)]
        alone = np.where(known, starts + self.length + tails, 0)
        # What cannot start yet starts no earlier than the first that can.
        soonest = np.where(known, starts, NEVER).min(1)[:, None]
        heads = np.where(known, starts, np.maximum(beam.free[:, self.device], soonest))
        order, first = self._by_device, self._first_node
        heads = np.minimum.reduceat(np.where(todo, heads, NEVER)[:, order], first, axis=1)
        together = heads[:, self.device[order]] + left[:, order] @ self._work + self._last[order]
        device = np.maximum(np.where(todo[:, order], together, 0), alone[:, order])
        device = np.maximum(np.maximum.reduceat(device, first, axis=1), beam.free)
        bound = np.maximum(device.max(1), beam.reached)
        ends = known.any(1) | ~left.any(1)  # others wait for what cannot start
        score = np.where(ends & (bound < limit), bound + _MEAN * device.mean(1), NEVER)
        ranked = np.argsort(score, kind="stable")
        ranked = ranked[score[ranked] < NEVER]
        key = beam.counts[ranked] @ self._hash
        _, first = np.unique(key, return_index=True)
        found: Numbers = ranked[np.sort(first)[:width]]
        return found


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
    wanted = _Wanted(places, microbatches, costs, max_activations, most)
    if slices > 1:
        factors = (1,) * slices if costs.slice_factors is None else costs.slice_factors
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

    found, proven = [], []
    for place in wanted.places:
        better = improve(
            _start(wanted._replace(places=[place])),
            wanted.costs,
            cap=wanted.cap,
            seconds=seconds / len(wanted.places),
            seed=seed,
        )
        found.append(better.schedule)
        proven.append(better.proven)
    return _certified(wanted, _shortest(wanted, shortest(found, wanted.costs)), min(proven))


def _shortest(wanted: _Wanted, split: Schedule) -> Schedule:
    """The shortest of a table of F, I and W, of the same whose backwards are whole, and of the
    named tables that placement and cap allow; with each backward whole or split, as is shorter.
    """
    costs = wanted.costs
    if simulate(split, costs).makespan <= _bound(wanted):
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
    shape: dict[str, Any] = {
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
        for table in tables if slices == 1 else (sliced(each, slices) for each in tables):
            if max(simulate(table, wanted.costs).peak_activations) <= wanted.cap:
                yield table


def _steady(wanted: _Wanted, seconds: float, seed: int) -> Schedule:
    """The table whose steady state has the least period that is found; of equals, the
    shorter step.
    """
    from ..solver import least_period  # needs the extra

    costs = wanted.costs
    found: list[tuple[float, float, int, Schedule]] = []
    for place in wanted.places:
        steady = least_period(
            place,
            costs,
            microbatches=wanted.microbatches,
            cap=wanted.cap,
            seconds=seconds / len(wanted.places),
            seed=seed,
        )
        if steady is not None:
            makespan = simulate(steady.schedule, costs).makespan
            found.append((steady.period, makespan, len(found), steady.schedule))
    if not found:
        raise ScheduleError(
            "auto cannot be built:\n"
            f"  search={seconds:g} found no steady state in its time; give it more seconds"
        )
    period, _, _, table = min(found)
    bound = _bound(wanted, Objective.PERIOD)
    certificate = Certificate(
        Objective.PERIOD, period, bound, Proof.RELAXATION, wanted.requested_cap
    )
    return replace(table, certificate=certificate)


def _bound(wanted: _Wanted, objective: Objective = Objective.MAKESPAN) -> float:
    """What no schedule goes below."""
    return min(
        lower_bound(
            wanted.costs,
            placement=place,
            microbatches=wanted.microbatches,
            max_activations=wanted.requested_cap,
            objective=objective,
        )
        for place in wanted.places
    )


def _certified(wanted: _Wanted, schedule: Schedule, proven: float = 0) -> Schedule:
    """The schedule with its certificate; `proven` by the solver, under the cap that it had."""
    costs, cap, bound = wanted.costs, wanted.requested_cap, _bound(wanted)
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
