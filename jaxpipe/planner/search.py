"""The search: choices are tried in the order of a bound; those that could be among the best are
simulated, and the shortest are lowered and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..engine.simulate import simulate
from ..errors import PlanError, ScheduleError
from ..layouts.layout import Layout, LayoutError
from ..schedules import build
from ..table.effects import Offload
from .candidate import Candidate, Choice, Traced, choices, stage_seconds
from .memory import Memory, least_bytes
from .request import Request
from .result import Plans, Rejected, gib

_Progress: TypeAlias = "Callable[[int, int], None]"
_MOVES = 60  # layouts that are simulated for each of the best candidates
_REFINED = 4  # candidates whose layout is improved
_MORE = 2  # programs that are lowered beyond the number of plans
_NEAR = 1.08  # of a bound: `auto` is not tried where another table is as short
_FRONT = 3  # tables by which `auto` knows which ends and remat are worth its time
_EVEN = 1e-9  # relative: stages that differ by less are equal
_WORTH = 1e-6  # relative: a makespan that is shorter by less is rounded


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
        self._wanted, self._rejected = roomy(wanted)
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
            self._build_nearest()
            raise nothing_fits(self._wanted[0], self._beyond, self._rejected)
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
        # A table of `auto` takes longest to build, so the others come first; of equal bounds those
        # with spread ends, which are usually shorter.
        todo.sort(key=lambda c: (c.name == "auto", c.seconds, -len(c.spread)))
        for done, choice in enumerate(todo):
            if self._late(0.5):
                self._reject(choice, "not tried: the time was over")
            elif self._passes(choice, choice.seconds):
                try:
                    layout, is_auto = choice.layout(), choice.name == "auto"
                    wanted = choice.capped(layout) if is_auto else choice
                    if not (is_auto and self._is_near(wanted, layout)):
                        self._sort(wanted.built(layout))
                except (ScheduleError, LayoutError) as error:
                    self._reject(choice, str(error).splitlines()[-1].strip())
            self._progress(done + 1, len(todo))
        return self._fitting

    def _passes(self, choice: Choice, seconds: float) -> bool:
        """Whether a choice may fit and be among the best; else it is rejected."""
        limit = choice.request.memory
        if limit is not None and choice.bytes > limit:
            self._large.append(choice)
            self._reject(choice, lacks(choice.bytes, choice.request))
        elif choice.name == "auto" and not self._in_front(choice):
            self._reject(choice, "the shortest tables of other schedules have other ends or remat")
        elif seconds >= self._worst(self._fitting):
            why = f"takes {seconds:.4g} s or more, and {self._most} plans take less"
            self._reject(choice, why, seconds)
        else:
            return True
        return False

    def _in_front(self, choice: Choice) -> bool:
        """Whether a table of another schedule with the same ends and remat is among the shortest,
        or `auto` is the only schedule.
        """
        others = [c for c in self._fitting if c.choice.name != "auto"]
        front = sorted(others, key=lambda c: c.seconds)[:_FRONT]
        return not others or choice.kind in [c.choice.kind for c in front]

    def _is_near(self, choice: Choice, layout: Layout) -> bool:
        """Whether no table of a choice of `auto` can be much shorter than a table of the same
        stages, so that it is rejected.
        """
        bound, own = choice.bound(layout), (*choice.kind, choice.chunks)
        same = [c for c in self._fitting if (*c.choice.kind, c.choice.chunks) == own]
        near = min(same, key=lambda c: c.seconds, default=None)
        if near is None or near.seconds > _NEAR * bound:
            return not self._passes(choice, bound)
        self._reject(choice, f"takes {bound:.4g} s or more, {near.label} {near.seconds:.4g}")
        return True

    def _sort(self, built: Candidate) -> None:
        """Keep a candidate that fits by its sizes, or candidates with less memory."""
        fitting = [built]
        if not self._fits(built):
            self._beyond.append(built)
            near = built.seconds < self._worst(self._fitting)
            fitting = list(filter(self._fits, built.smaller())) if near else []
        for candidate in fitting:
            # Another may have as short a table with as few activations.
            same = next((c for c in self._fitting if c.same == candidate.same), None)
            if same is None:
                self._fitting.append(candidate)
            else:
                why = f"takes as long as {same.label}"
                self._reject(candidate.choice, why, candidate.seconds)

    def _fits(self, candidate: Candidate) -> bool:
        # Sums of layers' sizes are no measure of a traced model.
        return self._traced is not None or candidate.fits

    def _build_nearest(self) -> None:
        """Build the smallest choice whose table was not built, if it may be the nearest of all."""
        least = min((c.needs for c in self._beyond), default=float("inf"))
        for choice in sorted(self._large, key=lambda c: c.bytes):
            if choice.bytes >= least:
                return
            try:
                self._beyond.append(choice.built(choice.layout()))
            except (ScheduleError, LayoutError):
                continue
            return

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
                todo += filter(self._fits, candidate.smaller())
            done += 1
            self._progress(done, done + len(todo))
        return found

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
    return min((best, choice.built(best.layout)), key=lambda c: c.seconds)


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


_HELD = "parameters, gradients and optimizer state"
_HELPS = {
    _HELD: "more devices, or shares of each",
    "residuals": "remat='full', or offload='residuals'",
    "stash": "whole backwards (1f1b, interleaved_1f1b)",
    "workspace": "a `last` that is spread, or smaller microbatches",
}
_ADVICE = (
    "use more devices or smaller microbatches, allow other chunks and remat='full', "
    "or shard parameters and optimizer state over another axis"
)


def lacks(needs: float, request: Request) -> str:
    """The reason to reject what needs so many bytes at least."""
    return f"does not fit by {gib(needs - (request.memory or 0))} or more"


def roomy(wanted: Sequence[Request]) -> tuple[list[Request], list[Rejected]]:
    """The requests whose parameters, gradients and optimizer state alone fit, and the others;
    PlanError if there are none.
    """
    least = [(least_bytes(q.layers, q.costs, q.devices), q) for q in wanted]
    found = [q for needs, q in least if q.memory is None or needs <= q.memory]
    if found:
        others = [
            Rejected(q.text, lacks(needs, q), None)
            for needs, q in least
            if q.memory is not None and needs > q.memory
        ]
        return found, others
    needs, request = min(least, key=lambda each: each[0])
    assert request.memory is not None
    raise PlanError(
        f"nothing fits into {gib(request.memory)} a device: the nearest is an even split of the "
        f"layers, which needs {gib(needs)} for "
        f"{_HELD} alone, {gib(needs - request.memory)} more; what would help most: "
        f"{_HELPS[_HELD]}; or {_ADVICE}"
    )


def nothing_fits(
    request: Request, beyond: Sequence[Candidate], rejected: Sequence[Rejected]
) -> PlanError:
    """The error that nothing fits, with the nearest candidate and the missing bytes."""
    if not beyond:
        return PlanError.listing(
            "no schedule can be built for this model",
            [f"{r.what}: {r.why}" for r in rejected] or ["no schedule was named"],
        )
    assert request.memory is not None
    near = min(beyond, key=lambda c: c.needs)
    part, held = max(_parts(near.memory).items(), key=lambda item: item[1])
    return PlanError(
        f"nothing fits into {gib(request.memory)} a device: the nearest is "
        f"{near.label}, layout {near.layout}, which needs at least {gib(near.needs)}, "
        f"{gib(near.needs - request.memory)} more (most of it, {gib(held)}, "
        f"{part}); what would help most: {_HELPS.get(part, 'smaller microbatches')}; or {_ADVICE}"
    )


def _parts(memory: Memory) -> dict[str, float]:
    """Bytes of a device by purpose."""
    return {
        _HELD: memory.held,
        "residuals": memory.pools["residual_weight"],
        "stash": memory.pools["stash"],
        "stage inputs and cotangents": memory.pools["x"] + memory.pools["cotangent"] + memory.sent,
        "workspace": memory.work,
        "the batch": memory.batch + memory.hoisted,
        "sums of the gradients of first and last": memory.summed,
    }
