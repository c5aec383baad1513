"""Plans, and their candidates: choices with a simulated table, then with a program.

Before any program exists, seconds and bytes come from the table and sums of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from ..engine.bounds import timeline_bound
from ..engine.costs import Costs
from ..engine.simulate import Timeline, simulate
from ..errors import PlanError, ScheduleError, is_number, quoted
from ..layouts.layout import Layout
from ..lowering.plan import plan_of
from ..lowering.rooms import rooms_of, with_rooms
from ..program.ir import UNDER_WAY, Slots
from ..table.columns import in_columns
from ..table.effects import LastUse, Liveness
from ..table.kinds import Offload
from ..table.schedule import Certificate, Objective, Proof, Schedule
from .memory import MemoryParts, Sizes, layer_sizes, least_slots, memory_of
from .request import Choice, Request

if TYPE_CHECKING:
    from ..model.model import Model
    from ..pipeline import Pipeline


@dataclass(frozen=True)
class PipelinePlan:
    """One way to run the model.

    Attributes:
        layout: the layers of each stage, as `parse_layout` reads them.
        schedule: the table.
        remat: None or "full", as `Pipeline` takes it; None where the table has R for some stages.
        policies: letters with the `jax.checkpoint` policies that their layers run under.
        spread: of "E" and "L", those that are spread over all devices (`jaxpipe.spread`).
        fsdp: the axis of the mesh over which parameters, gradients and optimizer state are split.
        max_active: the most stages that a device has whole at once (`add_gathers`); None where it
            gathers all of its stages once a step.
        offload: "residuals" where they wait in the host's memory, as `Memory` takes it.
        mesh: devices along each axis, where the plan was chosen among meshes.
        seconds: of one step, of the lowered program under the planned costs.
        memory: bytes, a device each: parameters, gradients, optimizer state, pools, workspace.
        lower_bound: seconds below which no schedule goes for this layout, remat, placement and peak
            of activations.
        why: where its time goes, in a sentence.
        label: its choices in short.
        costs: of its stages, in seconds.
        parts: what a device's memory is for, from the sizes of its layers.
        traced: the same of a step of the traced model, without the optimizer's state
            (`plan(traced=)`).
        axis, data_axes: those of the mesh that it was planned for, as `Pipeline` takes them.
        certificate: how far from the lower bound its seconds are, and where the bound comes from.
    """

    layout: str
    schedule: Schedule
    remat: str | None
    seconds: float
    memory: tuple[float, ...]
    lower_bound: float
    why: str
    label: str = field(default="", compare=False)
    costs: Costs = field(default_factory=Costs, compare=False)
    parts: MemoryParts | None = field(default=None, compare=False)
    traced: Mapping[str, int] | None = field(default=None, compare=False)
    certificate: Certificate | None = field(default=None, compare=False)
    axis: str = field(default="pipe", compare=False)
    data_axes: tuple[str, ...] = field(default=(), compare=False)
    policies: tuple[tuple[str, str], ...] = ()
    spread: str = ""
    fsdp: str | None = None
    max_active: int | None = None
    offload: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def timeline(self) -> Timeline:
        """The table with its gathers, simulated under the planned costs, for comparison with a
        run.
        """
        return simulate(with_rooms(self.schedule, self.max_active), self.costs)

    def pipeline(self, model: Model, mesh: Any, **options: Any) -> Pipeline:
        """The `jaxpipe.Pipeline` that runs it; options are those of `Pipeline`.

        Its program is the planned one, chosen by the same costs.  `sharding` and `memory` replace
        the plan's axes (`axis`, `data_axes`) and its `remat`.
        """
        # JAX need not be installed where plans are made.
        from ..model.arguments import under_policies
        from ..model.settings import Memory, Sharding
        from ..pipeline import Pipeline

        mine: dict[str, Any] = {
            "layout": self.layout,
            "costs": self.costs,
            "sharding": Sharding(pipe=self.axis, data=self.data_axes, fsdp=self.fsdp),
            "memory": Memory(remat=self.remat, offload=self.offload),
        }
        if self.policies:
            model = under_policies(model, dict(self.policies))
        table = with_rooms(self.schedule, self.max_active)
        return Pipeline(model, table, mesh, **mine | options)

    def facts(self) -> dict[str, object]:
        """The plan's fields as values that JSON can hold."""
        own = ("label", "layout", "remat", "spread", "offload", "seconds", "lower_bound", "why")
        return {name: getattr(self, name) for name in (*own, "fsdp", "max_active")} | {
            "schedule": self.schedule.name,
            "chunks": self.schedule.num_chunks,
            "placement": list(self.schedule.stage_to_device),
            "policies": dict(self.policies),
            "mesh": dict(self.mesh),
            "memory": list(self.memory),
            "memory_parts": self.parts and self.parts.facts() | {"total": self.parts.total},
            "gap": self.certificate and self.certificate.gap,
            "certificate": self.certificate and str(self.certificate),
        }


@dataclass(frozen=True)
class Rejected:
    """A rejected choice, with the reason and its seconds (None if it cannot be built)."""

    what: str
    why: str
    seconds: float | None

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Plans(tuple[PipelinePlan, ...]):
    """Plans, best first, with the rejected choices and the prices of predicates and hops."""

    rejected: tuple[Rejected, ...]
    prices: str  # and where they come from

    def __new__(
        cls, found: Iterable[PipelinePlan], rejected: Iterable[Rejected], prices: str
    ) -> Plans:
        """Plans in this order."""
        plans = super().__new__(cls, found)
        plans.rejected, plans.prices = tuple(rejected), prices
        return plans

    @property
    def best(self) -> PipelinePlan:
        """The fastest that fits."""
        return self[0]

    def rows(self) -> list[tuple[str, ...]]:
        """One line a plan: choices, layout, seconds, ratio to the best, bubble, memory, lower
        bound, and distance above it.
        """
        return [
            (
                p.label,
                p.layout,
                f"{p.seconds:.4g}",
                f"{p.seconds / self.best.seconds:.3f}" if self.best.seconds else "-",
                f"{p.timeline.bubble:.1%}",
                gib(max(p.memory)),
                f"{p.lower_bound:.4g}",
                f"{p.certificate.gap:.1%}" if p.certificate and p.lower_bound else "-",
            )
            for p in self
        ]

    def __str__(self) -> str:
        return in_columns([COLUMNS, *self.rows()])


COLUMNS = ("plan", "layout", "seconds", "vs best", "bubble", "memory", "bound", "above bound")


def gib(size: float) -> str:
    """Bytes as people read them.

    >>> gib(80e9), gib(3 * 2**20)
    ('74.5 GiB', '3.0 MiB')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 2**10:.1f} KiB"


Traced: TypeAlias = "Callable[[PipelinePlan], Mapping[str, int]]"


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

    def gathering(self, max_active: int) -> Candidate:
        """The same with at most so many stages of a device whole at once."""
        found = replace(self, choice=self.choice._replace(max_active=max_active))
        if rooms_of(found.gathered.schedule) is None:
            raise ScheduleError("each stage is used in one run, and gathered once a step")
        return found

    @property
    def request(self) -> Request:
        """The request of its choice."""
        return self.choice.request

    @property
    def schedule(self) -> Schedule:
        """The candidate's table."""
        return self.timeline.schedule

    @cached_property
    def gathered(self) -> Timeline:
        """The table with the gathers and reductions that run beside its actions."""
        if self.choice.max_active is None:
            return self.timeline
        return simulate(with_rooms(self.schedule, self.choice.max_active), self.timeline.costs)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step, by the program, or by the table before there is a program.  Programs
        have no prices of gathers, so these delay a program as they delay its table.
        """
        found = self.timeline.makespan if self.makespan is None else self.makespan
        return max(found, self._moving) + self._delay + self.exchanging

    @property
    def _delay(self) -> float:
        """Seconds by which gathers and reductions delay the actions of the table."""
        return self.gathered.makespan - self.timeline.makespan

    @property
    def exchanging(self) -> float:
        """Seconds in which replicas gather parameters and sum gradients beside no action."""
        if self.choice.max_active:
            return self.choice.at_ends
        costs = self.timeline.costs.for_stages(self.schedule.num_stages)
        each = [sum(pair) for pair in zip(costs.gather, costs.reduce, strict=True)]
        every = self.schedule.placement.stages_of
        return self.choice.at_ends + max(sum(each[s] for s in stages) for stages in every)

    @property
    def _moving(self) -> float:
        """Seconds of the copies of residuals to the host's memory, or back."""
        if self.offload is Offload.NOTHING:
            return 0.0
        moved = self.request.microbatches * self.choice.chunks * self.sizes.entry["residual_weight"]
        return moved / self.request.host_bandwidth

    @cached_property
    def sizes(self) -> Sizes:
        """Sums of layers' sizes."""
        return layer_sizes(
            self.layout,
            self.schedule,
            self.choice.costs,
            remat=self.choice.remat,
            on_gpus=self.request.target.on_gpus,
            replicas=self.request.replicas,
            max_active=self.choice.max_active,
        )

    @cached_property
    def memory(self) -> MemoryParts:
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

    def lowered(self, traced: Traced | None) -> Candidate:
        """The candidate with its program."""
        target, costs = self.request.target, self.timeline.costs
        table = self.gathered.schedule
        lowered = plan_of(table, costs=costs, overheads=target.overheads)
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
            bound += self.exchanging
        own = self.schedule.certificate
        if own and own.objective is Objective.MAKESPAN and own.bound + self.exchanging > bound:
            bound, proof = own.bound + self.exchanging, own.proof
        return Certificate(Objective.MAKESPAN, self.seconds, bound, proof, cap)

    def plan(self) -> PipelinePlan:
        """The plan that users see, with its reasons."""
        request, timeline, certificate = self.request, self.timeline, self.certificate()
        whole = stage_seconds(timeline)
        slow, bound = whole.index(max(whole)), certificate.bound
        why = [
            f"{self.gathered.bubble:.1%} bubble",
            f"stage {slow} ({self.layout.stages[slow]}) is the slowest, {whole[slow] * 1e3:.3g} ms "
            f"a microbatch, the mean is {sum(whole) / len(whole) * 1e3:.3g} ms",
        ]
        if request.replicas.fsdp:
            most = self.choice.max_active
            which = f"max_active {most}" if most else "once a step"
            late = (self._delay + self.exchanging) * 1e3
            why.append(f"gathers and reductions ({which}) take {late:.3g} ms beside no action")
        if bound:
            above = f"at most {certificate.gap:.1%} above the optimum"
            why.append(f"{above} for its layout, remat and memory")
        return PipelinePlan(
            layout=str(self.layout),
            schedule=self.schedule,
            remat=self.choice.remat.value,
            policies=self.choice.policies,
            spread=self.choice.spread,
            fsdp=request.replicas.axis if request.replicas.fsdp else None,
            max_active=self.choice.max_active,
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
