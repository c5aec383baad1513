"""The choices of a plan, and candidates: choices with a simulated table, then with a program.

Before any program exists, seconds and bytes come from the table and sums of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from ..engine.bounds import lower_bound, timeline_bound
from ..engine.costs import Costs
from ..engine.simulate import Timeline, simulate
from ..errors import PlanError, ScheduleError, quoted
from ..layouts.layout import Layout
from ..lowering.plan import plan_of
from ..program.ir import UNDER_WAY, Slots
from ..schedules import build
from ..schedules.registry import describe
from ..table.effects import LastUse, Liveness, Offload
from ..table.kinds import Kind
from ..table.schedule import Certificate, Objective, Proof, Schedule
from ..table.typed import is_number
from ..transforms.recompute import add_recompute
from ..transforms.rewrites import split_backward
from ..transforms.spread import spread_first, spread_last
from .layer_cost import FIRST, LAST, Ends, LayerCost, Remat, balanced, stage_costs
from .memory import Memory, Sizes, device_work, layer_sizes, least_bytes, least_slots, memory_of
from .request import Request
from .result import PipelinePlan

Traced: TypeAlias = "Callable[[PipelinePlan], Mapping[str, int]]"

_PLAINER = {"interleaved_1f1b": "1f1b", "interleaved_zb": "zb_h1"}


class Choice(NamedTuple):
    """A schedule, its chunks, its recomputation and its spread ends."""

    request: Request
    name: str
    chunks: int
    remat: Remat
    policies: tuple[tuple[str, str], ...]  # a letter and its `jax.checkpoint` policy
    spread: str  # the collective ends among "E" and "L"
    costs: Mapping[str, LayerCost]  # of its policies and shares
    cap: int | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Its mesh, ends and remat."""
        return (id(self.request), self.remat, self.policies, self.spread.replace(FIRST, ""))

    @property
    def seconds(self) -> float:
        """A lower bound of its tables: a device's work, and the reduction of gradients."""
        request, again = self.request, self.remat is Remat.FULL
        work = device_work(request.layers, self.costs, request.devices, again=again)
        return request.microbatches * work + request.reduction

    @property
    def bytes(self) -> float:
        """A lower bound of its programs' memory: parameters, and, without recomputation by stages
        and offload, the residuals of one microbatch.
        """
        request = self.request
        held = least_bytes(request.layers, self.costs, request.devices)
        if self.remat is Remat.FULL or Remat.STAGES in request.remat or request.offloads:
            return held
        inner = [self.costs[c] for c in request.layers if c not in (FIRST, LAST)]
        return held + sum(c.residuals for c in inner) / request.devices

    @property
    def label(self) -> str:
        """Its name in a printed table."""
        request, names = self.request, dict.fromkeys(name for _, name in self.policies)
        letters = {n: "".join(c for c, name in self.policies if name == n) for n in names}
        parts = {
            f"cap {self.cap}": self.cap,
            f"M {request.microbatches}": request.one_of_many,
            f"K {request.slices}": request.slices > 1,
            f"spread {self.spread}": self.spread,
            "remat full": self.remat is Remat.FULL,
            **{f"remat {n}" + (f" of {letters[n]}" if len(names) > 1 else ""): n for n in names},
        }
        shown = [text for text, is_shown in parts.items() if is_shown]
        return ", ".join([*request.label, self.name, f"V {self.chunks}", *shown])

    def layout(self) -> Layout:
        """Its layers in stages."""
        request = self.request
        return balanced(
            request.layers,
            self.costs,
            devices=request.devices,
            chunks=self.chunks,
            remat=self.remat,
        )

    def stage_costs(self, layout: Layout, *, recomputing: bool = False) -> Costs:
        """The times of a layout's stages."""
        remat = Remat.STAGES if recomputing else self.remat
        request = self.request
        return stage_costs(
            layout, self.costs, remat=remat, transfer=request.transfer, slices=request.slices
        )

    def built(self, layout: Layout) -> Candidate:
        """The choice with its table."""
        request, costs = self.request, self.stage_costs(layout)
        options: dict[str, Any] = {} if self.cap is None else {"max_activations": self.cap}
        takes = [option.name for option in describe(self.name).options]
        if "costs" in takes and not request.by_name:
            options["costs"] = costs
        table = build(
            self.name,
            devices=request.devices,
            microbatches=request.microbatches,
            chunks=self.chunks,
            slices=request.slices,
            **options,
        )
        if table.num_stages != layout.num_stages:
            per = table.num_stages // request.devices
            raise ScheduleError(
                f"{self.name} has {table.num_stages} stages, each on several devices; choose it "
                f"by chunks=({per},)"
            )
        if LAST in self.spread:
            table = spread_last(table, costs=None if request.by_name else costs)
        if FIRST in self.spread:
            table = spread_first(table, costs=costs)
        return Candidate(self, layout, simulate(table, costs))

    def capped(self, layout: Layout) -> Choice:
        """The same choice of `auto` with a cap: twice as many activations as 1F1B has, or as many
        as the memory has room for.
        """
        request, cap = self.request, 2 * self.chunks * self.request.devices
        if request.memory is not None:
            name = "1f1b" if self.chunks == 1 else "interleaved_1f1b"
            trial = self._replace(name=name, spread="").built(layout)
            split = replace(trial.timeline, schedule=split_backward(trial.schedule))
            sizes = replace(trial, timeline=split).sizes
            held = memory_of(Slots(x=0, cotangent=1, stash=1, first=1), sizes).total
            each = sizes.entry["residual_weight"] + sizes.entry["x"]
            cap = min(cap, int((request.memory - held) / each) if each else cap)
        return self._replace(cap=max(self.chunks, cap))

    def with_first(self) -> Choice | None:
        """The same choice with a spread `first`, of which a device holds a share; None where it
        cannot be spread.
        """
        end = self.request.costs.get(FIRST)
        if self.spread != LAST or end is None or end.ends is not Ends.EITHER:
            return None
        share = end.share(self.request.devices)
        return self._replace(spread=FIRST + LAST, costs={**self.costs, FIRST: share})

    def bound(self, layout: Layout) -> float:
        """A lower bound of the step's seconds, by `lower_bound`."""
        request = self.request
        if request.slices > 1:
            return self.seconds
        found = lower_bound(
            self.stage_costs(layout),
            microbatches=request.microbatches,
            devices=request.devices,
            chunks=self.chunks,
            max_activations=self.cap,
        )
        return max(found + request.reduction, self.seconds)


def choices(request: Request) -> Iterator[Choice]:
    """All choices of a request: schedules, with the chunks that they take and that the layers
    suffice for.
    """
    shapes = [
        (name, chunks)
        for name in request.schedules
        for chunks in request.chunks
        if describe(name).chunks.nearest(chunks) == chunks
        and not (request.slices > 1 and describe(name).one_slice)
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
            yield Choice(request, name, chunks, remat, policies, spread, costs)


def _spreads(request: Request) -> list[str]:
    """The ends that may be spread.  Where both may be, `first` is spread only if memory is short
    (`Choice.with_first`).
    """
    ends = {c: request.costs[c].ends if c in request.layers else Ends.ONE for c in (FIRST, LAST)}
    always = "".join(c for c in (FIRST, LAST) if ends[c] is Ends.ALL)
    if ends[LAST] is Ends.EITHER:
        return [always, (FIRST if ends[FIRST] is Ends.WITH_LAST else always) + LAST]
    return [always, always + FIRST] if ends[FIRST] is Ends.EITHER else [always]


def _ways(request: Request) -> Iterator[tuple[Remat, tuple[tuple[str, str], ...]]]:
    """The kinds of recomputation: nothing, a policy for each kind of layer, or everything."""
    wanted, layers = request.remat, dict.fromkeys(request.layers)
    names = [
        ("", *(name for name in request.policies if name in request.costs[c].policies))
        for c in layers
    ]
    for chosen in product(*names):
        policies = tuple((c, name) for c, name in zip(layers, chosen, strict=True) if name)
        if policies or Remat.NONE in wanted or Remat.STAGES in wanted:
            yield Remat.NONE, policies
    if Remat.FULL in wanted:
        yield Remat.FULL, ()


@dataclass(frozen=True)
class Candidate:
    """A choice with its table, simulated; once it is lowered, with its program."""

    choice: Choice
    layout: Layout
    timeline: Timeline
    recomputing: int = 0  # R in the table
    offload: Offload = Offload.NOTHING
    makespan: float | None = None  # of the program
    slots: Slots | None = None  # of the program
    traced: Mapping[str, int] | None = None  # memory of the traced model

    @property
    def request(self) -> Request:
        """The request of its choice."""
        return self.choice.request

    @property
    def schedule(self) -> Schedule:
        """The candidate's table."""
        return self.timeline.schedule

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step, by the program, or by the table before there is a program."""
        found = self.timeline.makespan if self.makespan is None else self.makespan
        return max(found, self._moving) + self.request.reduction

    @property
    def _moving(self) -> float:
        """Seconds of the copies of residuals to the host's memory, or back."""
        if self.offload is Offload.NOTHING:
            return 0.0
        moved = self.request.microbatches * self.choice.chunks * self.sizes.entry["residual_weight"]
        return moved / self.request.host_bandwidth

    @property
    def same(self) -> tuple[object, ...]:
        """A key that equal tables of different names share."""
        choice, peak = self.choice, max(self.timeline.peak_activations)
        costs = (choice.chunks, choice.remat, choice.policies, choice.spread, self.offload)
        return (id(self.request), *costs, peak, f"{self.seconds:.9g}")

    @cached_property
    def sizes(self) -> Sizes:
        """Sums of layers' sizes."""
        return layer_sizes(
            self.layout,
            self.schedule,
            self.choice.costs,
            remat=self.choice.remat,
            in_place=self.request.target.on_gpus,
            gathered=self.request.gathered,
        )

    @cached_property
    def memory(self) -> Memory:
        """A device's memory, of the program, or the least of any program of the table."""
        slots = self.slots
        if slots is None:
            slots = least_slots(self.timeline)
            if self.offload is not Offload.NOTHING:
                slots.residual_weight = min(slots.residual_weight, UNDER_WAY)
        return memory_of(slots, self.sizes)

    @property
    def needs(self) -> float:
        """Bytes that one device needs."""
        if self.traced is None:
            return self.memory.total
        return self.traced["total"] + self.memory.optimizer

    @property
    def fits(self) -> bool:
        """Whether a device has so many bytes."""
        return self.request.memory is None or self.needs <= self.request.memory

    @property
    def label(self) -> str:
        """The candidate's name in a printed table."""
        parts = [self.choice.label]
        share = self.recomputing / (self.schedule.num_stages * self.schedule.num_microbatches)
        parts += [f"recompute {share:.0%}"] if self.recomputing else []
        parts += ["offload"] if self.offload is not Offload.NOTHING else []
        return ", ".join(parts)

    def smaller(self) -> Iterator[Candidate]:
        """Candidates with less memory: with a spread `first`; with residuals in the host's memory;
        with the fewest R for as many activations as fit, and for one less; of `auto` with a smaller
        cap.  There are none for a candidate with R or offload.
        """
        request, table, choice = self.request, self.schedule, self.choice
        assert request.memory is not None, "without a limit of memory, nothing makes room"
        if self.recomputing or self.offload is not Offload.NOTHING:
            return
        if (both := choice.with_first()) is not None:
            # The first stage's times without `first` hardly differ, so the table keeps its order.
            costs = both.stage_costs(self.layout)
            table = spread_first(table, costs=costs)
            first = Candidate(both, self.layout, simulate(table, costs))
            yield first
            yield from first.smaller()
        if choice.cap is not None:  # a smaller one makes room in less time
            if choice.cap > choice.chunks:
                yield choice._replace(cap=choice.cap - 1).built(self.layout)
            return
        if request.offloads:
            yield Candidate(choice, self.layout, self.timeline, offload=Offload.RESIDUALS)
        if Remat.STAGES not in request.remat or choice.remat is Remat.FULL:
            return
        costs = choice.stage_costs(self.layout, recomputing=True)
        peak, residuals = max(self.timeline.peak_activations), self.memory.pools["residual_weight"]
        each, free = residuals / peak, request.memory - (self.memory.total - residuals)
        room = min(peak - 1, int(free / each)) if each else 0
        for cap in sorted({max(1, room), max(1, room - 1)}, reverse=True):
            found = add_recompute(table, costs=costs, max_activations=cap)
            count = sum(action.kind is Kind.R for _, _, action in found.actions())
            if count:
                yield Candidate(choice, self.layout, simulate(found, costs), count)

    def lowered(self, traced: Traced | None) -> Candidate:
        """The candidate with its program."""
        target, costs = self.request.target, self.timeline.costs
        lowered = plan_of(self.schedule, costs=costs, overheads=target.overheads)
        rows = LastUse.INPUT_GRAD if self.request.slices > 1 else LastUse.NONE
        liveness = Liveness(buffer=rows, buffer_gradient=rows)
        found = replace(
            self,
            makespan=lowered.seconds(target, costs),
            slots=replace(lowered, offload=self.offload).program(liveness).slots,
        )
        if traced is None:
            return found
        sizes = traced(found.plan())
        if not (isinstance(sizes, Mapping) and is_number(sizes.get("total"))):
            raise PlanError(
                "traced must return bytes by what they are for, and their 'total', as "
                f"jaxpipe.measuring.traced_memory does; not {quoted(sizes)}"
            )
        return replace(found, traced=sizes)

    def certificate(self) -> Certificate:
        """How far from the optimum its seconds are."""
        request, proof, cap = self.request, Proof.RELAXATION, None
        bound = self.choice.seconds  # the work of a device
        if request.slices == 1:
            bound, cap = timeline_bound(self.timeline)
            bound += request.reduction
        own = self.schedule.certificate
        if own and own.objective is Objective.MAKESPAN and own.bound + request.reduction > bound:
            bound, proof = own.bound + request.reduction, own.proof
        return Certificate(Objective.MAKESPAN, self.seconds, bound, proof, cap)

    def plan(self) -> PipelinePlan:
        """The plan that users see, with its reasons."""
        request, timeline, certificate = self.request, self.timeline, self.certificate()
        whole = stage_seconds(timeline)
        slow, bound = whole.index(max(whole)), certificate.bound
        why = [
            f"{timeline.bubble:.1%} bubble",
            f"stage {slow} ({self.layout.stages[slow]}) is the slowest, {whole[slow] * 1e3:.3g} ms "
            f"a microbatch, the mean is {sum(whole) / len(whole) * 1e3:.3g} ms",
        ]
        if bound:
            above = f"at most {certificate.gap:.1%} above the optimum"
            why.append(f"{above} for its layout, remat and memory")
        return PipelinePlan(
            layout=str(self.layout),
            schedule=self.schedule,
            remat=self.choice.remat.value,
            policies=self.choice.policies,
            spread=self.choice.spread,
            offload=None if self.offload is Offload.NOTHING else self.offload.value,
            mesh=request.mesh,
            seconds=self.seconds,
            memory=(self.needs,) * request.devices,
            lower_bound=bound,
            why="; ".join(why),
            label=self.label,
            costs=timeline.costs,
            parts=self.memory,
            traced=self.traced,
            certificate=certificate,
            axis=request.axis,
            data_axes=request.data_axes,
        )


def stage_seconds(timeline: Timeline) -> list[float]:
    """Per stage, its forward and its backward."""
    times = timeline.costs.for_stages(timeline.schedule.num_stages)
    return [f + b for f, b in zip(times.forward, times.backward, strict=True)]
