"""The search: choices are tried in the order of a bound; those that could be among the best are
simulated, and the shortest are lowered and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..engine.simulate import simulate
from ..engine.timeline import Timeline
from ..errors import PlanError, ScheduleError
from ..layouts.layout import Layout, LayoutError
from ..table.effects import Offload
from .candidate import Candidate, Choice, choices
from .layers import improved
from .lowered import ADVICE, HELD, HELPS, Lowered, Traced, lower, nothing_fits, result_of, searched
from .memory import least_bytes
from .request import Request
from .result import Plans, Rejected, gib

_Progress: TypeAlias = "Callable[[int, int], None]"
_MOVES = 60  # layouts that are simulated for each of the best candidates
_REFINED = 4  # candidates whose layout is improved
_MORE = 2  # programs that are lowered beyond the number of plans
_NEAR = 1.08  # of a bound: `auto` is not tried where another table is as short
_FRONT = 3  # tables by which `auto` knows which ends and remat are worth its time
_EVEN = 1e-9  # relative: stages that differ by less are equal


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
        self._wanted, self._most, self._traced = wanted, most, traced
        self._begin, self._within = time.monotonic(), within
        self._progress = progress or (lambda done, of: None)
        self._fitting: list[Candidate] = []
        self._beyond: list[Lowered] = []
        self._rejected: list[Rejected] = []
        self._large: list[Choice] = []  # whose tables are not built

    def plans(self, *, search: float, seed: int) -> Plans:
        """The best plans, and the rejected choices."""
        self.candidates()
        fitting = self._lower_best()
        if not fitting:
            self._build_nearest()
            raise nothing_fits(self._wanted[0], self._beyond, self._rejected)
        if search:
            best = min(fitting, key=lambda f: f.seconds)
            fitting += searched(best, search, seed, self._traced)
        fitting.sort(key=lambda f: (f.seconds, f.needs))
        rejected = self._rejected + [
            Rejected(
                b.candidate.label,
                f"does not fit by {gib(b.needs - (b.candidate.request.memory or 0))} or more",
                b.seconds,
            )
            for b in self._beyond
        ]
        found = tuple(result_of(f) for f in fitting[: self._most])
        return Plans(found, tuple(rejected), str(self._wanted[0].target.overheads))

    def _late(self, share: float = 1) -> bool:
        """Whether a share of the time is over and there is something to return."""
        spent = time.monotonic() - self._begin
        return self._within is not None and spent > share * self._within and bool(self._fitting)

    def _worst(self) -> float:
        """The seconds that a choice must stay below."""
        found = sorted(c.seconds for c in self._fitting)
        return found[self._most - 1] if len(found) >= self._most else float("inf")

    def _front(self) -> list[object]:
        """Ends and remat of the shortest tables of schedules other than `auto`, which takes longest
        to build; all of them where `auto` is the only schedule.
        """
        others = [c for c in self._fitting if c.choice.name != "auto"]
        if not others:
            return [choice.kind for q in self._wanted for choice in choices(q)]
        return [c.choice.kind for c in sorted(others, key=lambda c: c.seconds)[:_FRONT]]

    def _reject(self, choice: Choice, why: str, seconds: float | None = None) -> None:
        self._rejected.append(Rejected(choice.label, why, seconds))

    def candidates(self) -> list[Candidate]:
        """Those that fit, of every choice that could be among the best, without programs."""
        todo = [choice for q in _roomy(self._wanted) for choice in choices(q)]
        # A table of `auto` takes longest to build, so the others come first; of equal bounds those
        # with spread ends, which are usually shorter.
        todo.sort(key=lambda c: (c.name == "auto", c.seconds, -len(c.spread)))
        for done, choice in enumerate(todo):
            if self._late(0.5):
                self._reject(choice, "not tried: the time was over")
            elif self._passes(choice, choice.seconds):
                try:
                    self._try(choice)
                except (ScheduleError, LayoutError) as error:
                    self._reject(choice, str(error).splitlines()[-1].strip())
            self._progress(done + 1, len(todo))
        return self._fitting

    def _passes(self, choice: Choice, seconds: float) -> bool:
        """Whether a choice may fit and be among the best; else it is rejected."""
        limit = choice.request.memory
        if limit is not None and choice.bytes > limit:
            self._large.append(choice)
            self._reject(choice, f"does not fit by {gib(choice.bytes - limit)} or more")
        elif choice.name == "auto" and choice.kind not in self._front():
            self._reject(choice, "the shortest tables of other schedules have other ends or remat")
        elif seconds >= self._worst():
            self._reject(
                choice, f"takes {seconds:.4g} s or more, and {self._most} plans take less", seconds
            )
        else:
            return True
        return False

    def _try(self, choice: Choice) -> None:
        """Build and simulate its tables."""
        layout = choice.layout()
        if choice.name != "auto":
            self._sort(choice, layout)
            return
        for cap in choice.caps(layout):
            capped = choice._replace(cap=cap)
            bound = capped.bound(layout)
            # Tables of the same stages, for which no table of `auto` can be much shorter.
            same = [c for c in self._fitting if c.choice.like == choice.like]
            near = min(same, key=lambda c: c.seconds, default=None)
            if near is not None and near.seconds <= _NEAR * bound:
                self._reject(
                    capped, f"takes {bound:.4g} s or more, {near.label} {near.seconds:.4g}"
                )
            elif self._passes(capped, bound):
                self._sort(capped, layout)

    def _sort(self, choice: Choice, layout: Layout) -> None:
        """Keep its tables that fit by the table's sizes; where none does, try candidates with less
        memory.
        """
        candidate, *others = choice.built(layout)
        fitting = [c for c in (candidate, *others) if self._fits(c)]
        for one in fitting:
            self._keep(one)
        if fitting:
            return
        self._beyond.append(Lowered(candidate, candidate.seconds, candidate.least))
        if candidate.seconds >= self._worst():
            return
        for smaller in filter(self._fits, candidate.smaller()):
            self._keep(smaller)
        return

    def _build_nearest(self) -> None:
        """Build the smallest choice whose table was not built, if it may be the nearest of all."""
        least = min((b.needs for b in self._beyond), default=float("inf"))
        for choice in sorted(self._large, key=lambda c: c.bytes):
            if choice.bytes >= least:
                return
            try:
                candidate = next(choice.built(choice.layout()))
            except (ScheduleError, LayoutError):
                continue
            self._beyond.append(Lowered(candidate, candidate.seconds, candidate.least))
            return

    def _keep(self, candidate: Candidate) -> None:
        """Keep a candidate, unless another has as short a table with as few activations."""
        same = next((c for c in self._fitting if c.like == candidate.like), None)
        if same is None:
            self._fitting.append(candidate)
        else:
            self._reject(candidate.choice, f"takes as long as {same.label}", candidate.seconds)

    def _fits(self, candidate: Candidate) -> bool:
        memory = candidate.request.memory
        # Sums of layers' sizes are no measure of a traced model.
        return memory is None or self._traced is not None or candidate.least.total <= memory

    def _lower_best(self) -> list[Lowered]:
        """Programs of the front-runners."""
        candidates = sorted(self._fitting, key=lambda c: c.seconds)
        candidates[:_REFINED] = [_refined(c) for c in candidates[:_REFINED]]
        candidates.sort(key=lambda c: c.seconds)
        found: list[Lowered] = []
        done = 0
        while candidates:
            candidate = candidates.pop(0)
            # No program is shorter than its table, so later candidates cannot be among the best.
            times = sorted(f.seconds for f in found)
            if len(found) >= self._most and candidate.seconds >= times[self._most - 1]:
                break
            if found and (self._late() or done >= self._most + _MORE):
                break
            lowered = lower(candidate, self._traced)
            memory = candidate.request.memory
            if memory is None or lowered.needs <= memory:
                found.append(lowered)
            else:
                self._beyond.append(lowered)
                smaller = [c for c in candidate.smaller() if self._fits(c)]
                candidates = sorted(candidates + smaller, key=lambda c: c.seconds)
            done += 1
            self._progress(done, done + len(candidates))
        return found


def _refined(candidate: Candidate) -> Candidate:
    """The candidate with a better layout for its table, and the table adapted to that layout."""
    choice = candidate.choice
    # The table's certificate holds only for the costs of its layout.
    table = replace(candidate.schedule, certificate=None)
    recomputing = bool(candidate.recomputing)

    def timeline(layout: Layout) -> Timeline:
        return simulate(table, choice.stage_costs(layout, recomputing=recomputing))

    times = candidate.timeline.costs.for_stages(table.num_stages)
    whole = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    if max(whole) <= min(whole) * (1 + _EVEN):
        return candidate
    layout = improved(candidate.layout, lambda each: timeline(each).makespan, tries=_MOVES)
    if layout == candidate.layout:
        return candidate
    same = candidate._replace(layout=layout, timeline=timeline(layout))
    if recomputing or candidate.offload is not Offload.NOTHING:
        return same
    return min((same, *choice.built(layout)), key=lambda c: c.seconds)


def _roomy(wanted: Sequence[Request]) -> list[Request]:
    """The requests whose parameters, gradients and optimizer state alone fit; PlanError if there
    are none.
    """
    least = [(least_bytes(q.layers, q.costs, q.devices), q) for q in wanted]
    found = [q for needs, q in least if q.memory is None or needs <= q.memory]
    if found:
        return found
    needs, request = min(least, key=lambda each: each[0])
    assert request.memory is not None
    raise PlanError(
        f"nothing fits into {gib(request.memory)} a device: the nearest is an even split of the "
        f"layers, which needs {gib(needs)} for "
        f"{HELD} alone, {gib(needs - request.memory)} more; what would help most: {HELPS[HELD]}; "
        f"or {ADVICE}"
    )
