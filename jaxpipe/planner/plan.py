"""The fastest pipelines that fit.  Choices are tried in the order of a bound; those that could be
among the best are simulated, and the shortest are lowered and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..engine.bounds import timeline_bound
from ..engine.simulate import simulate
from ..engine.timeline import Timeline
from ..errors import PlanError, ScheduleError, quoted
from ..layouts.layout import Layout, LayoutError
from ..lowering.overheads import Overheads
from ..lowering.slots import Offload
from ..schedules import build
from ..table.certificate import Certificate, Objective, Proof
from ..table.limits import is_number
from .candidate import Candidate, Choice, choices
from .layer_cost import LayerCost
from .layers import improved
from .memory import Memory, least_bytes
from .request import SCHEDULES as SCHEDULES
from .request import Request, requests
from .result import PipelinePlan, Plans, Rejected, gib
from .running import step_seconds

_Traced: TypeAlias = "Callable[[PipelinePlan], Mapping[str, int]]"
_Progress: TypeAlias = "Callable[[int, int], None]"
_MOVES = 60  # layouts that are simulated for each of the best candidates
_REFINED = 4  # candidates whose layout is improved
_MORE = 2  # programs that are lowered beyond the number of plans
_NEAR = 1.08  # of a bound: no larger cap is tried then
_FRONT = 3  # tables by which `auto` knows which ends and remat are worth its time
_EVEN = 1e-9  # relative: stages that differ by less are equal


def plan(
    model: Any,
    costs: Mapping[str, LayerCost] | Mapping[int, Mapping[str, LayerCost]],
    *,
    devices: int,
    microbatches: int | Sequence[int],
    memory: float | None = None,
    transfer: float | Mapping[int, float] = 0.0,
    schedules: Sequence[str] | None = None,
    chunks: Sequence[int] = (1, 2, 4),
    remat: Sequence[str | None] | None = None,
    offload: Sequence[str | None] = (None, "residuals"),
    host_bandwidth: float = 2.5e10,
    search: float = 0,
    seed: int = 0,
    most: int = 8,
    within: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    traced: Callable[[PipelinePlan], Mapping[str, int]] | None = None,
    mesh: Any = None,
    axis: str = "pipe",
    data_axes: Sequence[str] = (),
    overheads: Overheads | Mapping[str, float] | None = None,
) -> Plans:
    """The fastest pipelines of a model on P devices, best first: layout, schedule, chunks and
    remat, with what each device holds.

    Choices are tried in the order of a bound of their seconds, until the rest cannot be among the
    best.  Layers are split over stages so that the slowest stage is as fast as possible (exact
    dynamic programming), then moved one by one where the simulated step gets shorter.  The
    candidates of the shortest simulated steps are lowered as `Pipeline` lowers them for the mesh.
    Seconds are those of the lowered program for these costs, and memory is that of its pools,
    accumulators, parameters and optimizer state.  `first` and `last` may be spread where their
    costs allow it (`LayerCost.ends`).

    Args:
        model: the letters of the layers, such as "E" + "t" * 80 + "L" ("E" is `first`, "L" is
            `last`), or a `jaxpipe.Model` that is given by letters.
        costs: the costs of each letter, for one microbatch (see `LayerCost`, `measure`); by
            M, where that may vary.
        devices: P.
        microbatches: M, or some numbers to choose among: a step has the same rows, so each comes
            with costs of its own.
        memory: bytes that a device has; no limit where it is None.
        transfer: seconds of a hop to another device, where M may vary by its number.
        schedules: names of `schedules.names()` to choose among.
        chunks: stages per device to choose among.
        remat: what may be computed again, to choose among: None (nothing), "full", "stages" (of
            each stage the fewest microbatches for which the memory is enough, `add_recompute`),
            and the names of policies of which layers have costs (`LayerCost.policies`): each kind
            of layer has one or none.  All of these where it is None.
        offload: whether residuals may wait in the host's memory ("residuals"), where a plan does
            not fit without that, on GPUs.
        host_bandwidth: bytes a second between a device's memory and the host's, in each direction.
        search: seconds of search by OR-tools for a shorter table than the best one (the extra
            `jaxpipe[solver]`).
        seed: of the search.
        most: how many plans to return.
        within: seconds after which no further choice is tried: the plans are then the best of what
            was tried.
        progress: called with (how many choices are simulated, of how many), then with (how many
            candidates are lowered, of how many).
        traced: the memory of a step by what it is for, and its "total", of the traced model
            (`traced_memory` makes it); it takes the place of the sums of layers' sizes for every
            plan that is lowered.
        mesh: the `jax.sharding.Mesh` that the plan will run on; NVIDIA GPUs where it is None.
            Among virtual CPU devices of one process, every transfer waits for all of them.  Where
            it has axes besides those below (tensor parallelism), costs are those of what one device
            has of a layer (`measure(mesh=)`), and on GPUs the host decides each predicate,
            since blocks communicate.
        axis, data_axes: of the mesh, as for `Pipeline`.
        overheads: as for `Pipeline`; without a mesh, None stands for those that were measured on
            the one kind of NVIDIA GPU in the file of prices, or for guesses.

    Returns:
        Plans, a sequence with `.rejected`: what was left out, and why.

    Raises:
        PlanError: an argument is of another kind, a letter or a number of microbatches has no cost,
            there are fewer layers than devices, nothing fits (with the nearest plan), the mesh has
            no such axes, or numbers look as if they were in other units.

    >>> t = LayerCost(
    ...     forward=0.010,
    ...     input_grad=0.011,
    ...     weight_grad=0.009,
    ...     parameters=4e8,
    ...     residuals=1e8,
    ...     boundary=1e7,
    ... )
    >>> head = LayerCost(forward=0.006, input_grad=0.006, weight_grad=0.006, parameters=2e8)
    >>> best, *others = plan(
    ...     "t" * 15 + "L",
    ...     {"t": t, "L": head},
    ...     devices=4,
    ...     microbatches=8,
    ...     memory=16e9,
    ...     chunks=(1,),
    ...     remat=(None,),
    ... )
    >>> best.layout, best.schedule.num_microbatches, max(best.memory) < 16e9
    ('(t*4|)*3,t*3,L', 8, True)
    """
    wanted = requests(
        {
            "model": getattr(model, "layers", model),
            "costs": costs,
            "devices": devices,
            "microbatches": microbatches,
            "memory": memory,
            "transfer": transfer,
            "schedules": schedules,
            "chunks": chunks,
            "remat": remat,
            "offload": offload,
            "host_bandwidth": host_bandwidth,
            "within": within,
            "search": search,
            "seed": seed,
            "most": most,
            "progress": progress,
            "traced": traced,
            "mesh": mesh,
            "axis": axis,
            "data_axes": data_axes,
            "overheads": overheads,
        }
    )
    found = Search(wanted, most=most, within=within, progress=progress, traced=traced)
    return found.plans(search=search, seed=seed)


@dataclass(frozen=True)
class _Lowered:
    """A candidate with the seconds and the memory of its program."""

    candidate: Candidate
    seconds: float
    memory: Memory
    traced: Mapping[str, int] | None = None

    @property
    def needs(self) -> float:
        """Bytes that one device needs."""
        if self.traced is None:
            return self.memory.total
        return self.traced["total"] + self.memory.optimizer


class Search:
    """The choices of some requests, tried in the order of a bound of their seconds."""

    def __init__(
        self,
        wanted: Sequence[Request],
        *,
        most: int,
        within: float | None = None,
        progress: _Progress | None = None,
        traced: _Traced | None = None,
    ) -> None:
        self._wanted, self._most, self._traced = wanted, most, traced
        self._end = None if within is None else time.monotonic() + within
        self._progress = progress or (lambda done, of: None)
        self._fitting: list[Candidate] = []
        self._beyond: list[_Lowered] = []
        self._rejected: list[Rejected] = []

    def plans(self, *, search: float, seed: int) -> Plans:
        """The best plans, and the rejected choices."""
        self._simulate()
        fitting = self._lower_best()
        if not fitting:
            raise _nothing_fits(self._wanted[0], self._beyond, self._rejected)
        if search:
            best = min(fitting, key=lambda f: f.seconds)
            fitting += _searched(best, search, seed, self._traced)
        fitting.sort(key=lambda f: (f.seconds, f.needs))
        rejected = self._rejected + [
            Rejected(
                b.candidate.label,
                f"does not fit by {gib(b.needs - (b.candidate.request.memory or 0))} or more",
                b.seconds,
            )
            for b in self._beyond
        ]
        found = tuple(_result(f) for f in fitting[: self._most])
        return Plans(found, tuple(rejected), str(self._wanted[0].target.overheads))

    def _late(self) -> bool:
        """Whether the time is over and there is something to return."""
        return self._end is not None and time.monotonic() > self._end and bool(self._fitting)

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

    def _simulate(self) -> None:
        """Tables of every choice that could be among the best."""
        todo = [choice for q in _roomy(self._wanted) for choice in choices(q)]
        # A table of `auto` takes longest to build, so the others come first.
        todo.sort(key=lambda c: (c.name == "auto", c.seconds))
        # A plan of each request's cheapest kind comes first.
        for done, choice in enumerate(todo):
            if self._late():
                self._reject(choice, "not tried: the time was over")
            elif self._passes(choice, choice.seconds):
                try:
                    self._try(choice)
                except (ScheduleError, LayoutError) as error:
                    self._reject(choice, str(error).splitlines()[-1].strip())
            self._progress(done + 1, len(todo))

    def _passes(self, choice: Choice, seconds: float) -> bool:
        """Whether a choice may fit and be among the best; else it is rejected."""
        limit = choice.request.memory
        if limit is not None and choice.bytes > limit:
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
            near = [c for c in self._fitting if c.choice._replace(cap=cap) == capped]
            if near and near[-1].seconds <= _NEAR * bound:
                self._reject(
                    capped, f"takes {bound:.4g} s or more, {near[-1].label} {near[-1].seconds:.4g}"
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
        self._beyond.append(_Lowered(candidate, candidate.seconds, candidate.least))
        if candidate.seconds >= self._worst():
            return
        for smaller in filter(self._fits, candidate.smaller()):
            self._keep(smaller)
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

    def _lower_best(self) -> list[_Lowered]:
        """Programs of the front-runners."""
        candidates = sorted(self._fitting, key=lambda c: c.seconds)
        candidates[:_REFINED] = [_refined(c) for c in candidates[:_REFINED]]
        candidates.sort(key=lambda c: c.seconds)
        found: list[_Lowered] = []
        done = 0
        while candidates:
            candidate = candidates.pop(0)
            # No program is shorter than its table, so later candidates cannot be among the best.
            times = sorted(f.seconds for f in found)
            if len(found) >= self._most and candidate.seconds >= times[self._most - 1]:
                break
            if found and (self._late() or done >= self._most + _MORE):
                break
            lowered = _lower(candidate, self._traced)
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


def _lower(candidate: Candidate, traced: _Traced | None) -> _Lowered:
    """The seconds and the memory of the lowered program."""
    lowered = candidate.lowered
    request = candidate.request
    seconds = step_seconds(request.target, lowered, candidate.timeline.costs)
    seconds = max(seconds, candidate.moving) + request.reduction
    found = _Lowered(candidate, seconds, candidate.memory(lowered.program().slots))
    if traced is None:
        return found
    sizes = traced(_plan(found))
    if not (isinstance(sizes, Mapping) and is_number(sizes.get("total"))):
        raise PlanError(
            "traced must return bytes by what they are for, and their 'total', as "
            f"jaxpipe.measuring.traced_memory does; not {quoted(sizes)}"
        )
    return replace(found, traced=sizes)


def _searched(best: _Lowered, seconds: float, seed: int, traced: _Traced | None) -> list[_Lowered]:
    """A shorter table for the best plan's layout and memory, if the search finds one."""
    old, request = best.candidate, best.candidate.request
    placement, costs = old.schedule.placement, old.timeline.costs
    if old.recomputing or old.choice.spread or placement.is_bidirectional:
        return []
    cap = max(old.timeline.peak_activations)
    table = build(
        "auto",
        devices=request.devices,
        microbatches=request.microbatches,
        chunks=old.choice.chunks,
        placement=placement,
        max_activations=cap,
        costs=costs,
        search=seconds,
        seed=seed,
    )
    choice = old.choice._replace(name="auto", cap=cap)
    found = old._replace(choice=choice, timeline=simulate(table, costs))
    lowered = _lower(found, traced)
    fits = request.memory is None or lowered.needs <= request.memory
    return [lowered] if fits and lowered.seconds < best.seconds else []


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
        f"parameters, gradients and optimizer state alone, {gib(needs - request.memory)} more; "
        f"{_ADVICE}"
    )


def _nothing_fits(
    request: Request, beyond: Sequence[_Lowered], rejected: Sequence[Rejected]
) -> PlanError:
    """The error that nothing fits, with the nearest candidate and the missing bytes."""
    if not beyond:
        return PlanError.listing(
            "no schedule can be built for this model",
            [f"{r.what}: {r.why}" for r in rejected] or ["no schedule was named"],
        )
    assert request.memory is not None
    near = min(beyond, key=lambda b: b.needs)
    needs = near.needs - request.memory
    part, held = max(_parts(near.memory).items(), key=lambda item: item[1])
    return PlanError(
        f"nothing fits into {gib(request.memory)} a device: the nearest is "
        f"{near.candidate.label}, layout {near.candidate.layout}, "
        f"which needs at least {gib(near.needs)}, {gib(needs)} more (most of it, {gib(held)}, "
        f"{part}); what would help most: {_HELPS.get(part, 'smaller microbatches')}; or {_ADVICE}"
    )


_HELPS = {
    "parameters, gradients and optimizer state": "more devices, or shares of each",
    "residuals": "remat='full', or offload='residuals'",
    "stash": "whole backwards (1f1b, interleaved_1f1b)",
    "workspace": "a `last` that is spread, or smaller microbatches",
}
_ADVICE = (
    "use more devices or smaller microbatches, allow other chunks and remat='full', "
    "or shard parameters and optimizer state over another axis"
)


def _parts(memory: Memory) -> dict[str, float]:
    """Bytes of a device by purpose."""
    return {
        "parameters, gradients and optimizer state": memory.parameters
        + memory.gradients
        + memory.optimizer,
        "residuals": memory.pools["residual_weight"],
        "stash": memory.pools["stash"],
        "stage inputs and cotangents": memory.pools["x"] + memory.pools["cotangent"] + memory.sent,
        "workspace": memory.work,
        "the batch": memory.batch + memory.hoisted,
        "sums of the gradients of first and last": memory.summed,
    }


def _result(lowered: _Lowered) -> PipelinePlan:
    """The plan of a candidate, with its reasons."""
    c = lowered.candidate
    timeline = c.timeline
    bound, cap = timeline_bound(timeline)
    bound += c.request.reduction
    proof, own = Proof.RELAXATION, c.schedule.certificate
    if (
        own is not None
        and own.objective is Objective.MAKESPAN
        and own.bound + c.request.reduction > bound
    ):
        bound, proof = own.bound + c.request.reduction, own.proof
    certificate = Certificate(Objective.MAKESPAN, lowered.seconds, bound, proof, cap)
    times = timeline.costs.for_stages(c.schedule.num_stages)
    whole = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    slow = max(range(len(whole)), key=lambda s: whole[s])
    gap = (
        f"; at most {certificate.gap:.1%} above the optimum for its layout, remat and memory"
        if bound
        else ""
    )
    why = (
        f"{timeline.bubble:.1%} bubble; stage {slow} ({c.layout.stages[slow]}) is the slowest, "
        f"{whole[slow] * 1e3:.3g} ms a microbatch, "
        f"the mean is {sum(whole) / len(whole) * 1e3:.3g} ms{gap}"
    )
    return replace(_plan(lowered), lower_bound=bound, why=why, certificate=certificate)


def _plan(lowered: _Lowered) -> PipelinePlan:
    """A plan without its reasons."""
    c = lowered.candidate
    return PipelinePlan(
        layout=str(c.layout),
        schedule=c.schedule,
        remat=c.choice.remat.value,
        policies=c.choice.policies,
        spread=c.choice.spread,
        offload=None if c.offload is Offload.NOTHING else c.offload.value,
        mesh=c.request.mesh,
        seconds=lowered.seconds,
        memory=(lowered.needs,) * c.request.devices,
        lower_bound=0.0,
        why="",
        label=c.label,
        costs=c.timeline.costs,
        parts=lowered.memory,
        traced=lowered.traced,
        axis=c.request.axis,
        data_axes=c.request.data_axes,
        overheads=c.request.overheads,
    )
