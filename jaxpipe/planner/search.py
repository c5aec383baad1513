"""The search for plans.  Choices are tried in the order of a bound; those that could be among the
best are simulated, and the shortest are lowered and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

from ..engine.simulate import simulate
from ..errors import PlanError, ScheduleError
from ..layouts.layout import Layout, LayoutError
from ..schedules.registry import build, describe
from ..table.kinds import Kind, Offload
from ..transforms.add_transfers import add_recompute
from ..transforms.spread import spread_first, spread_last
from .candidate import Candidate, Plans, Rejected, Traced, gib, stage_seconds
from .layer_cost import FIRST, LAST, Ends, Remat
from .memory import MemoryParts
from .request import Choice, Request

_Progress: TypeAlias = "Callable[[int, int], None]"
_MOVES = 60  # layouts that are simulated for each of the best candidates
_REFINED = 4  # candidates whose layout is improved
_MORE = 2  # programs that are lowered beyond the number of plans
_EVEN = 1e-9  # relative: stages that differ by less are equal
_WORTH = 1e-6  # relative: a makespan that is shorter by less is rounded
_PLAINER = {"interleaved_1f1b": "1f1b", "interleaved_zb": "zb_h1"}


class Search:
    """The choices of some requests, tried in the order of a bound of their seconds."""

    def __init__(
        self,
        wanted: Sequence[Request],
        *,
        most: int,
        within: float | None = None,
        progress: _Progress | None = None,
        traced: Traced | None = None,
    ) -> None:
        self._begin, self._within = time.monotonic(), within
        self._wanted, self._rejected = wanted, list[Rejected]()
        self._most, self._traced = most, traced
        self._progress = progress or (lambda done, of: None)
        self._fitting: list[Candidate] = []
        self._beyond: list[Candidate] = []
        self._large: list[Choice] = []  # whose tables are not built

    def plans(self, *, search: float, seed: int) -> Plans:
        """The best plans, and the rejected choices."""
        self.candidates()
        found = self._lower_best()
        if not found:
            raise self._nothing_fits()
        if search:
            found += self._solved(min(found, key=lambda c: c.seconds), search, seed)
        found.sort(key=lambda c: (c.seconds, c.needs))
        beyond = [Rejected(c.label, lacks(c.needs, c.request), c.seconds) for c in self._beyond]
        return Plans(
            (c.plan() for c in found[: self._most]),
            (*self._rejected, *beyond),
            str(self._wanted[0].target.overheads),
        )

    def _late(self, share: float = 1) -> bool:
        """Whether a share of the time is over and there is something to return."""
        spent = time.monotonic() - self._begin
        return self._within is not None and spent > share * self._within and bool(self._fitting)

    def _worst(self, found: Sequence[Candidate]) -> float:
        """The seconds that a further candidate must stay below."""
        seconds = sorted(c.seconds for c in found)
        return seconds[self._most - 1] if len(seconds) >= self._most else float("inf")

    def _reject(self, choice: Choice, why: str, seconds: float | None = None) -> None:
        self._rejected.append(Rejected(choice.label, why, seconds))

    def candidates(self) -> list[Candidate]:
        """Those that fit, of every choice that could be among the best, without programs."""
        todo = [choice for request in self._wanted for choice in choices(request)]
        # Of equal bounds, those with spread ends are usually shorter.
        todo.sort(key=lambda c: (c.seconds, -len(c.spread)))
        for done, choice in enumerate(todo):
            if self._late(0.5):
                self._reject(choice, "not tried: the time was over")
            elif self._passes(choice):
                self._build(choice)
            self._progress(done + 1, len(todo))
        return self._fitting

    def _build(self, choice: Choice) -> None:
        """Candidates of a choice: gathered once a step, and more often."""
        try:
            base = candidate_of(choice, choice.layout())
        except (ScheduleError, LayoutError) as error:
            self._reject(choice, str(error).splitlines()[-1].strip())
            return
        if None in choice.request.max_active:
            self._sort(base)
        for most in choice.rooms:
            try:
                self._sort(base.gathering(most))
            except ScheduleError as error:
                self._reject(choice._replace(max_active=most), str(error).splitlines()[-1].strip())

    def _passes(self, choice: Choice) -> bool:
        """Whether a choice may fit and be among the best; else it is rejected."""
        limit = choice.request.memory
        if limit is not None and choice.bytes > limit:
            self._large.append(choice)
            self._reject(choice, lacks(choice.bytes, choice.request))
        elif choice.seconds >= self._worst(self._fitting):
            why = f"takes {choice.seconds:.4g} s or more, and {self._most} plans take less"
            self._reject(choice, why, choice.seconds)
        else:
            return True
        return False

    def _sort(self, built: Candidate) -> None:
        """Keep a candidate that fits by its sizes, or candidates with less memory."""
        if self._fits(built):
            self._fitting.append(built)
            return
        self._beyond.append(built)
        if built.seconds < self._worst(self._fitting):
            self._fitting += filter(self._fits, smaller(built))

    def _fits(self, candidate: Candidate) -> bool:
        # Sums of layers' sizes are no measure of a traced model.
        return self._traced is not None or candidate.fits

    def _lower_best(self) -> list[Candidate]:
        """Programs of the front-runners."""
        todo = sorted(self._fitting, key=lambda c: c.seconds)
        todo[:_REFINED] = [_refined(c) for c in todo[:_REFINED]]
        found: list[Candidate] = []
        done = 0
        while todo:
            todo.sort(key=lambda c: c.seconds)
            # No program is shorter than its table, so later candidates cannot be among the best.
            if todo[0].seconds >= self._worst(found):
                break
            if found and (self._late() or done >= self._most + _MORE):
                break
            candidate = todo.pop(0)
            lowered = candidate.lowered(self._traced)
            if lowered.fits:
                found.append(lowered)
            else:
                self._beyond.append(lowered)
                todo += filter(self._fits, smaller(candidate))
            done += 1
            self._progress(done, done + len(todo))
        return found

    def _nothing_fits(self) -> PlanError:
        """The error that nothing fits, with the nearest candidate and the missing bytes."""
        if not self._beyond and not self._large:
            return PlanError.listing(
                "no schedule can be built for this model",
                [f"{r.what}: {r.why}" for r in self._rejected] or ["no schedule was named"],
            )
        limit = self._wanted[0].memory
        assert limit is not None
        if self._beyond:
            near = min(self._beyond, key=lambda c: c.needs)
            part, (held, helps) = max(_parts(near.memory).items(), key=lambda item: item[1])
            name = f"{near.label}, layout {near.layout}, which needs at least {gib(near.needs)}"
            lack, most = near.needs - limit, f" (most of it, {gib(held)}, {part})"
        else:  # no table was built
            least, helps = min(choice.bytes for choice in self._large), _HELPS
            name = f"an even split of the layers, which needs {gib(least)} for {_HELD} alone"
            lack, most = least - limit, ""
        return PlanError(
            f"nothing fits into {gib(limit)} a device: the nearest is {name}, "
            f"{gib(lack)} more{most}; what would help most: {helps}; or {_ADVICE}"
        )

    def _solved(self, best: Candidate, seconds: float, seed: int) -> list[Candidate]:
        """A shorter table for the best plan's layout and memory, if the solver finds one."""
        choice, request, placement = best.choice, best.request, best.schedule.placement
        if best.recomputing or choice.spread or placement.is_bidirectional or request.slices > 1:
            return []
        costs, cap = best.timeline.costs, max(best.timeline.peak_activations)
        table = build(
            "auto",
            devices=request.devices,
            microbatches=request.microbatches,
            chunks=choice.chunks,
            placement=placement,
            max_activations=cap,
            costs=costs,
            search=seconds,
            seed=seed,
        )
        found = replace(
            best, choice=choice._replace(name="auto", cap=cap), timeline=simulate(table, costs)
        ).lowered(self._traced)
        return [found] if found.fits and found.seconds < best.seconds else []


def candidate_of(choice: Choice, layout: Layout) -> Candidate:
    """A choice with its table."""
    request, costs = choice.request, choice.stage_costs(layout)
    options: dict[str, Any] = {} if choice.cap is None else {"max_activations": choice.cap}
    takes = [option.name for option in describe(choice.name).options]
    if "costs" in takes and not request.by_name:
        options["costs"] = costs
    table = build(
        choice.name,
        devices=request.devices,
        microbatches=request.microbatches,
        chunks=choice.chunks,
        slices=request.slices,
        **options,
    )
    if table.num_stages != layout.num_stages:
        per = table.num_stages // request.devices
        raise ScheduleError(
            f"{choice.name} has {table.num_stages} stages, each on several devices; choose it "
            f"by chunks=({per},)"
        )
    if LAST in choice.spread:
        table = spread_last(table, costs=None if request.by_name else costs)
    if FIRST in choice.spread:
        table = spread_first(table, costs=costs)
    found = Candidate(choice, layout, simulate(table, costs))
    return found if choice.max_active is None else found.gathering(choice.max_active)


def smaller(candidate: Candidate) -> Iterator[Candidate]:
    """Candidates with less memory: with a spread `first`; with residuals in the host's memory;
    with the fewest R for as many activations as fit, and for one less; of `auto` with a smaller
    cap.  There are none for a candidate with R or offload.
    """
    request, table, choice = candidate.request, candidate.schedule, candidate.choice
    assert request.memory is not None, "without a limit of memory, nothing makes room"
    if candidate.recomputing or candidate.offload is not Offload.NOTHING:
        return
    end = request.costs.get(FIRST)
    if choice.spread == LAST and end is not None and end.ends is Ends.EITHER:
        own = {**choice.costs, FIRST: end.share(request.devices)}
        both = choice._replace(spread=FIRST + LAST, costs=own)
        # The first stage's times without `first` hardly differ, so the table keeps its order.
        costs = both.stage_costs(candidate.layout)
        table = spread_first(table, costs=costs)
        first = Candidate(both, candidate.layout, simulate(table, costs))
        yield first
        yield from smaller(first)
    pools, peak = candidate.memory.pools, max(candidate.timeline.peak_activations)
    # A cap saves inputs too; R only what a forward keeps besides.
    held = pools["residual_weight"] + (0.0 if choice.cap is None else pools["x"])
    free = request.memory - (candidate.memory.total - held)
    room = min(peak - 1, int(free * peak / held)) if held else 0
    if choice.cap is not None:
        if room >= choice.chunks:
            yield candidate_of(choice._replace(cap=room), candidate.layout)
        return
    if request.offloads:
        yield Candidate(choice, candidate.layout, candidate.timeline, offload=Offload.RESIDUALS)
    if Remat.STAGES not in request.remat or choice.remat is Remat.FULL:
        return
    costs = choice.stage_costs(candidate.layout, recomputing=True)
    for cap in sorted({max(1, room), max(1, room - 1)}, reverse=True):
        found = add_recompute(table, costs=costs, max_activations=cap)
        count = sum(action.kind is Kind.R for _, _, action in found.actions())
        if count:
            yield Candidate(choice, candidate.layout, simulate(found, costs), count)


def _refined(candidate: Candidate) -> Candidate:
    """The candidate with a better layout for its table, and the table adapted to that layout.

    Single layers are moved over borders between stages as long as the step gets shorter: a balanced
    split does not know that a stage at either end may be lighter or heavier without a delay.
    """
    choice, best = candidate.choice, candidate
    # The table's certificate holds only for the costs of its layout.
    table, recomputing = replace(candidate.schedule, certificate=None), bool(candidate.recomputing)
    whole = stage_seconds(candidate.timeline)
    if max(whole) <= min(whole) * (1 + _EVEN):
        return candidate
    tries, moves = 0, _moves(candidate.layout)
    while tries < _MOVES and (layout := next(moves, None)) is not None:
        tries += 1
        costs = choice.stage_costs(layout, recomputing=recomputing)
        moved = replace(candidate, layout=layout, timeline=simulate(table, costs))
        if moved.timeline.makespan < best.timeline.makespan * (1 - _WORTH):
            best, moves = moved, _moves(layout)
    if best is candidate or recomputing or candidate.offload is not Offload.NOTHING:
        return best
    return min((best, candidate_of(choice, best.layout)), key=lambda c: c.seconds)


def _moves(layout: Layout) -> Iterator[Layout]:
    """Every layout with one layer on the other side of a border and no empty stage."""
    stages = layout.stages
    for border in range(1, len(stages)):
        left, right = stages[border - 1], stages[border]
        changed = [(left[:-1], left[-1] + right)] if len(left) > 1 else []
        changed += [(left + right[0], right[1:])] if len(right) > 1 else []
        for one, other in changed:
            yield Layout(
                (*stages[: border - 1], one, other, *stages[border + 1 :]), layout.num_devices
            )


_HELD, _HELPS = "parameters, gradients and optimizer state", "more devices, or shares of each"
_ADVICE = (
    "use more devices or smaller microbatches, allow other chunks and remat='full', "
    "or shard parameters and optimizer state over another axis"
)


def lacks(needs: float, request: Request) -> str:
    """The reason to reject what needs so many bytes at least."""
    return f"does not fit by {gib(needs - (request.memory or 0))} or more"


def _parts(memory: MemoryParts) -> dict[str, tuple[float, str]]:
    """Bytes of a device by purpose, and what would help most against them."""
    pools, less = memory.pools, "smaller microbatches"
    boundaries = pools["x"] + pools["cotangent"] + memory.sent
    return {
        _HELD: (memory.held, _HELPS),
        "residuals": (pools["residual_weight"], "remat='full', or offload='residuals'"),
        "stash": (pools["stash"], "whole backwards (1f1b, interleaved_1f1b)"),
        "stage inputs and cotangents": (boundaries, less),
        "whole stages": (
            memory.gathered,
            "more chunks, fewer of them whole at a time (max_active)",
        ),
        "workspace": (memory.work, f"a `last` that is spread, or {less}"),
        "the batch": (memory.batch + memory.hoisted, less),
        "sums of the gradients of first and last": (memory.summed, less),
    }


def choices(request: Request) -> Iterator[Choice]:
    """All choices of a request: schedules, with the chunks that they take and that the layers
    suffice for.
    """
    shapes = [
        (name, chunks)
        for name in request.schedules
        for chunks in request.chunks
        if describe(name).chunks.nearest(chunks) == chunks
        and not (request.slices > 1 and describe(name).both_ways)
        and request.devices * chunks <= len(request.layers)
        # With one stage a device they equal 1F1B with more activations, and ZB-H1.
        and not (chunks == 1 and _PLAINER.get(name) in request.schedules)
    ]
    for spread, (remat, policies) in product(_spreads(request), _ways(request)):
        costs = dict(request.costs)
        for letter, policy in policies:
            costs[letter] = costs[letter].under(policy)
        for letter in (FIRST, LAST):
            if letter in spread:
                costs[letter] = costs[letter].share(request.devices)
            elif letter in costs:
                costs[letter] = replace(costs[letter], ends=Ends.ONE)
        for name, chunks in shapes:
            cap = 2 * chunks * request.devices if name == "auto" else None
            yield Choice(request, name, chunks, remat, policies, spread, costs, cap)


def _spreads(request: Request) -> list[str]:
    """The ends that may be spread.  Where both may be, `first` is spread only if memory is short
    (`smaller`).
    """
    ends = {c: request.costs[c].ends if c in request.layers else Ends.ONE for c in (FIRST, LAST)}
    always = "".join(c for c in (FIRST, LAST) if ends[c] is Ends.ALL)
    if ends[LAST] is Ends.EITHER:
        return [always, (FIRST if ends[FIRST] is Ends.WITH_LAST else always) + LAST]
    return [always, always + FIRST] if ends[FIRST] is Ends.EITHER else [always]


def _ways(request: Request) -> Iterator[tuple[Remat, tuple[tuple[str, str], ...]]]:
    """The kinds of recomputation: nothing, a policy for each kind of layer, or everything."""
    layers = dict.fromkeys(request.layers)
    wanted = [name for name in request.remat if isinstance(name, str)]
    names = [("", *(name for name in wanted if name in request.costs[c].policies)) for c in layers]
    for chosen in product(*names):
        policies = tuple((c, name) for c, name in zip(layers, chosen, strict=True) if name)
        if policies or Remat.NONE in request.remat or Remat.STAGES in request.remat:
            yield Remat.NONE, policies
    if Remat.FULL in request.remat:
        yield Remat.FULL, ()
