"""Candidates with their programs: seconds, memory, the plan of each, and the nearest one where
nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..engine.bounds import timeline_bound
from ..engine.simulate import simulate
from ..errors import PlanError, quoted
from ..schedules import build
from ..table.certificate import Certificate, Objective, Proof
from ..table.effects import LastUse, Liveness, Offload
from ..table.limits import is_number
from .candidate import Candidate
from .memory import Memory
from .request import Request
from .result import PipelinePlan, Rejected, gib

Traced: TypeAlias = "Callable[[PipelinePlan], Mapping[str, int]]"


@dataclass(frozen=True)
class Lowered:
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


def lower(candidate: Candidate, traced: Traced | None) -> Lowered:
    """The seconds and the memory of the lowered program."""
    lowered = candidate.lowered
    request = candidate.request
    seconds = lowered.seconds(request.target, candidate.timeline.costs)
    seconds = max(seconds, candidate.moving) + request.reduction
    rows = LastUse.INPUT_GRAD if request.slices > 1 else LastUse.NONE
    program = lowered.program(Liveness(buffer=rows, buffer_gradient=rows))
    found = Lowered(candidate, seconds, candidate.memory(program.slots))
    if traced is None:
        return found
    sizes = traced(_plan(found))
    if not (isinstance(sizes, Mapping) and is_number(sizes.get("total"))):
        raise PlanError(
            "traced must return bytes by what they are for, and their 'total', as "
            f"jaxpipe.measuring.traced_memory does; not {quoted(sizes)}"
        )
    return replace(found, traced=sizes)


def searched(best: Lowered, seconds: float, seed: int, traced: Traced | None) -> list[Lowered]:
    """A shorter table for the best plan's layout and memory, if the search finds one."""
    old, request = best.candidate, best.candidate.request
    placement, costs = old.schedule.placement, old.timeline.costs
    if old.recomputing or old.choice.spread or placement.is_bidirectional or request.slices > 1:
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
    lowered = lower(found, traced)
    fits = request.memory is None or lowered.needs <= request.memory
    return [lowered] if fits and lowered.seconds < best.seconds else []


def nothing_fits(
    request: Request, beyond: Sequence[Lowered], rejected: Sequence[Rejected]
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
        f"{part}); what would help most: {HELPS.get(part, 'smaller microbatches')}; or {ADVICE}"
    )


HELD = "parameters, gradients and optimizer state"
HELPS = {
    HELD: "more devices, or shares of each",
    "residuals": "remat='full', or offload='residuals'",
    "stash": "whole backwards (1f1b, interleaved_1f1b)",
    "workspace": "a `last` that is spread, or smaller microbatches",
}
ADVICE = (
    "use more devices or smaller microbatches, allow other chunks and remat='full', "
    "or shard parameters and optimizer state over another axis"
)


def _parts(memory: Memory) -> dict[str, float]:
    """Bytes of a device by purpose."""
    return {
        HELD: memory.parameters + memory.gradients + memory.optimizer,
        "residuals": memory.pools["residual_weight"],
        "stash": memory.pools["stash"],
        "stage inputs and cotangents": memory.pools["x"] + memory.pools["cotangent"] + memory.sent,
        "workspace": memory.work,
        "the batch": memory.batch + memory.hoisted,
        "sums of the gradients of first and last": memory.summed,
    }


def result_of(lowered: Lowered) -> PipelinePlan:
    """The plan of a candidate, with its reasons."""
    c = lowered.candidate
    timeline = c.timeline
    if c.request.slices > 1:
        bound, cap = c.choice.seconds, None  # the work of a device
    else:
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


def _plan(lowered: Lowered) -> PipelinePlan:
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
