"""The fastest pipelines that fit: every schedule, number of chunks and remat that may vary,
simulated, lowered and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from ..engine.bounds import bound_beside
from ..engine.simulate import simulate
from ..engine.timeline import Timeline
from ..errors import PlanError, ScheduleError, quoted
from ..layouts.layout import Layout, LayoutError
from ..lowering.overheads import Overheads
from ..lowering.plan import Plan
from ..program.pools import Slots
from ..schedules import build
from ..schedules.registry import describe
from ..table.certificate import Certificate, Objective, Proof
from ..table.kinds import Kind
from ..table.limits import is_number
from ..table.schedule import Schedule
from ..transforms.recompute import add_recompute
from .layer_cost import LayerCost, Remat, stage_costs
from .layers import balanced, improved
from .memory import Memory, layer_sizes, least_bytes, least_slots, memory_of
from .request import SCHEDULES as SCHEDULES
from .request import Request, requests
from .result import PipelinePlan, Plans, Rejected, gib
from .running import program_of, step_seconds

_Traced: TypeAlias = "Callable[[PipelinePlan], Mapping[str, int]]"
_MOVES = 60  # layouts that are simulated for each of the best candidates
_REFINED = 4  # candidates whose layout is improved


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
    remat: Sequence[str | None] = (None, "full"),
    search: float = 0,
    seed: int = 0,
    most: int = 8,
    progress: Callable[[int, int], None] | None = None,
    traced: Callable[[PipelinePlan], Mapping[str, int]] | None = None,
    mesh: Any = None,
    axis: str = "pipe",
    data_axes: Sequence[str] = (),
    overheads: Overheads | Mapping[str, float] | None = None,
) -> Plans:
    """The fastest pipelines of a model on P devices, best first: layout, schedule, chunks and
    remat, with what each device holds.

    Layers are split over stages so that the slowest stage is as fast as possible (exact dynamic
    programming), then moved one by one where the simulated step gets shorter.  The candidates of
    the shortest simulated steps are lowered as `Pipeline` lowers them for the mesh: seconds are
    those of the lowered program for these costs, and memory is that of its pools, accumulators,
    parameters and optimizer state.

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
        remat: what may be computed again, to choose among: None (nothing), "full", or "stages": of
            each stage the fewest microbatches for which the memory is enough (`add_recompute`).
        search: seconds of search by OR-tools for a shorter table than the best one (the extra
            `jaxpipe[solver]`).
        seed: of the search.
        most: how many plans to return.
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
    candidates, rejected = _candidates(_roomy(wanted), progress)
    candidates.sort(key=lambda c: c.seconds)
    candidates[:_REFINED] = [_refined(c) for c in candidates[:_REFINED]]
    candidates.sort(key=lambda c: c.seconds)
    fitting: list[_Lowered] = []
    beyond: list[_Lowered] = []
    for done, candidate in enumerate(candidates):
        # No program is shorter than its table, so what comes now cannot be among the best any more.
        if (
            len(fitting) >= most
            and candidate.seconds >= sorted(f.seconds for f in fitting)[most - 1]
        ):
            break
        # what its program takes and holds at the least
        least = candidate.memory(least_slots(candidate.timeline))
        lowered = _Lowered(candidate, candidate.seconds, least)
        # Sums of layers' sizes say nothing of a traced model.
        if memory is None or traced is not None or lowered.needs <= memory:
            lowered = _lower(candidate, traced)
        (fitting if memory is None or lowered.needs <= memory else beyond).append(lowered)
        if progress is not None:
            progress(done + 1, len(candidates))
    if not fitting:
        raise _nothing_fits(wanted[0], beyond, rejected)
    if search:
        fitting += _searched(min(fitting, key=lambda f: f.seconds), search, seed, traced)
    fitting.sort(key=lambda f: (f.seconds, f.needs))
    rejected += [
        Rejected(
            b.candidate.label, f"does not fit by {gib(b.needs - (memory or 0))} or more", b.seconds
        )
        for b in beyond
    ]
    found = tuple(_result(f) for f in fitting[:most])
    return Plans(found, tuple(rejected), str(wanted[0].target.overheads))


class _Candidate(NamedTuple):
    """A choice with its table, simulated."""

    request: Request
    name: str
    chunks: int
    remat: Remat
    cap: int | None
    layout: Layout
    timeline: Timeline
    recomputing: int = 0  # R in the table

    @property
    def schedule(self) -> Schedule:
        """Its table."""
        return self.timeline.schedule

    @property
    def seconds(self) -> float:
        """Of the table."""
        return self.timeline.makespan

    @property
    def lowered(self) -> Plan:
        """Its program."""
        return program_of(self.request.target, self.schedule, self.timeline.costs)

    def memory(self, slots: Slots) -> Memory:
        """What a device holds of it, by sums of layers' sizes."""
        request = self.request
        in_place = request.target.on_gpus
        sizes = layer_sizes(
            self.layout, self.schedule, request.costs, remat=self.remat, in_place=in_place
        )
        return memory_of(slots, sizes)

    @property
    def label(self) -> str:
        """As a table names it."""
        parts = [self.name, f"V {self.chunks}"]
        parts += [f"cap {self.cap}"] if self.cap else []
        parts += [f"M {self.request.microbatches}"] if self.request.one_of_many else []
        share = self.recomputing / (self.schedule.num_stages * self.schedule.num_microbatches)
        parts += [f"recompute {share:.0%}"] if self.recomputing else []
        parts += [f"remat {self.remat.value}"] if self.remat is Remat.FULL else []
        return ", ".join(parts)


@dataclass(frozen=True)
class _Lowered:
    """A candidate with what its program takes and holds."""

    candidate: _Candidate
    seconds: float
    memory: Memory
    traced: Mapping[str, int] | None = None

    @property
    def needs(self) -> float:
        """Bytes of one device."""
        if self.traced is None:
            return self.memory.total
        return self.traced["total"] + self.memory.optimizer


def _candidates(
    wanted: Sequence[Request], progress: Callable[[int, int], None] | None
) -> tuple[list[_Candidate], list[Rejected]]:
    """Every choice that can be built."""
    choices = [(request, *choice) for request in wanted for choice in _choices(request)]
    found: list[_Candidate] = []
    rejected: list[Rejected] = []
    for done, (request, name, chunks, remat) in enumerate(choices):
        try:
            shape = {"devices": request.devices, "chunks": chunks}
            layout = balanced(request.layers, request.costs, **shape, remat=remat)
            caps = _caps(request, layout, chunks, remat) if name == "auto" else (None,)
            built = [_built(request, name, chunks, remat, cap, layout) for cap in caps]
            for one in built:
                found += _recomputing(one) if remat is Remat.STAGES else (one,)
        except (ScheduleError, LayoutError) as error:
            rejected.append(
                Rejected(f"{name}, V {chunks}", str(error).splitlines()[-1].strip(), None)
            )
        if progress is not None:
            progress(done + 1, len(choices))
    return found, rejected


def _recomputing(candidate: _Candidate) -> Iterator[_Candidate]:
    """The table with the fewest R for as many activations as there is room for, for one less, and
    for one: by sums of layers' sizes.
    """
    request, table, costs = candidate.request, candidate.schedule, candidate.timeline.costs
    assert request.memory is not None, "where memory has no limit, nothing is computed again"
    slots = candidate.lowered.program().slots
    held = candidate.memory(slots)
    residuals = held.pools["residual_weight"]
    each, free = residuals / slots.residual_weight, request.memory - (held.total - residuals)
    room = int(free / each) if each else table.num_stages * table.num_microbatches
    peak = max(candidate.timeline.peak_activations)
    if room >= peak and Remat.NONE not in request.remat:
        yield candidate
    for cap in sorted({max(1, min(room, peak - 1)), max(1, min(room, peak) - 1), 1}, reverse=True):
        found = add_recompute(table, costs=costs, max_activations=cap)
        count = sum(action.kind is Kind.R for _, _, action in found.actions())
        if count:
            yield candidate._replace(timeline=simulate(found, costs), recomputing=count)


def _choices(request: Request) -> Iterator[tuple[str, int, Remat]]:
    """Schedules with the chunks that they take and that the layers are enough for."""
    for name in request.schedules:
        rule = describe(name).chunks
        for chunks in request.chunks:
            # With one stage a device it is 1F1B with more activations.
            same = name == "interleaved_1f1b" and chunks == 1 and "1f1b" in request.schedules
            if (
                not same
                and rule.nearest(chunks) == chunks
                and request.devices * chunks <= len(request.layers)
            ):
                for remat in request.remat:
                    # Where memory has no limit, nothing is computed again for it.
                    if remat is not Remat.STAGES or request.memory is not None:
                        yield name, chunks, remat


def _built(
    request: Request, name: str, chunks: int, remat: Remat, cap: int | None, layout: Layout
) -> _Candidate:
    """A candidate with its table."""
    costs = stage_costs(layout, request.costs, remat=remat, transfer=request.transfer)
    options: dict[str, Any] = {} if cap is None else {"max_activations": cap}
    if any(option.name == "costs" for option in describe(name).options):
        options["costs"] = costs
    schedule = build(
        name, devices=request.devices, microbatches=request.microbatches, chunks=chunks, **options
    )
    if schedule.num_stages != layout.num_stages:
        per = schedule.num_stages // request.devices
        raise ScheduleError(
            f"{name} has {schedule.num_stages} stages, each on several devices; choose it by "
            f"chunks=({per},)"
        )
    return _Candidate(request, name, chunks, remat, cap, layout, simulate(schedule, costs))


def _caps(request: Request, layout: Layout, chunks: int, remat: Remat) -> tuple[int | None, ...]:
    """Caps for `auto`: as much as it asks for, 1F1B's memory, and what the limit leaves
    room for.
    """
    enough = chunks * request.devices
    if request.memory is None:
        return None, enough
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    trial = _built(request, name, chunks, remat, None, layout)
    slots = trial.lowered.program().slots
    held = trial.memory(slots)
    residuals = held.pools["residual_weight"]
    boundaries = held.pools["x"] + held.pools["cotangent"] + held.sent
    each = residuals / slots.residual_weight + boundaries / (slots.x + slots.cotangent)
    room = request.memory - (held.total - residuals - boundaries)
    fits = int(room / each) if each else 2 * enough
    return tuple(
        dict.fromkeys([max(chunks, min(2 * enough, fits)), max(chunks, min(enough, fits))])
    )


def _refined(candidate: _Candidate) -> _Candidate:
    """The candidate with a better layout for its table, and the table fitted again to it."""
    request, remat = candidate.request, candidate.remat
    # What is certified of the table is so for the costs that it was made for.
    table = replace(candidate.schedule, certificate=None)

    def timeline(layout: Layout) -> Timeline:
        costs = stage_costs(layout, request.costs, remat=remat, transfer=request.transfer)
        return simulate(table, costs)

    layout = improved(candidate.layout, lambda each: timeline(each).makespan, tries=_MOVES)
    if layout == candidate.layout:
        return candidate
    same = candidate._replace(layout=layout, timeline=timeline(layout))
    if candidate.recomputing:
        return same
    again = _built(request, candidate.name, candidate.chunks, remat, candidate.cap, layout)
    return min(same, again, key=lambda c: c.seconds)


def _lower(candidate: _Candidate, traced: _Traced | None) -> _Lowered:
    """What the lowered program takes and holds."""
    lowered = candidate.lowered
    seconds = step_seconds(candidate.request.target, lowered, candidate.timeline.costs)
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
    if old.recomputing or placement.is_bidirectional:
        return []
    cap = max(old.timeline.peak_activations)
    table = build(
        "auto",
        devices=request.devices,
        microbatches=request.microbatches,
        chunks=old.chunks,
        placement=placement,
        max_activations=cap,
        costs=costs,
        search=seconds,
        seed=seed,
    )
    found = old._replace(name="auto", cap=cap, timeline=simulate(table, costs))
    lowered = _lower(found, traced)
    fits = request.memory is None or lowered.needs <= request.memory
    return [lowered] if fits and lowered.seconds < best.seconds else []


def _roomy(wanted: Sequence[Request]) -> list[Request]:
    """Those for which parameters, gradients and optimizer state alone fit; PlanError where that is
    none.
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
    """By how much, and what comes nearest."""
    if not beyond:
        return PlanError.listing(
            "no schedule can be built for this model",
            [f"{r.what}: {r.why}" for r in rejected] or ["none was asked for"],
        )
    assert request.memory is not None
    near = min(beyond, key=lambda b: b.needs)
    needs = near.needs - request.memory
    part, held = max(_parts(near.memory).items(), key=lambda item: item[1])
    return PlanError(
        f"nothing fits into {gib(request.memory)} a device: the nearest is "
        f"{near.candidate.label}, layout {near.candidate.layout}, "
        f"which needs at least {gib(near.needs)}, {gib(needs)} more (most of it, {gib(held)}, "
        f"{part}); {_ADVICE}"
    )


_ADVICE = (
    "use more devices or smaller microbatches, allow other chunks and remat='full', "
    "or shard parameters and optimizer state over another axis"
)


def _parts(memory: Memory) -> dict[str, float]:
    """Bytes of a device by what they are for."""
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
    bound, cap = bound_beside(timeline)
    proof, own = Proof.RELAXATION, c.schedule.certificate
    if own is not None and own.objective is Objective.MAKESPAN and own.bound > bound:
        bound, proof = own.bound, own.proof
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
        remat=None if c.remat is Remat.STAGES else c.remat.value,
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
