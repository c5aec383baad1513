"""The result of `plan`: plans, and the rejected choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..engine.costs import Costs
from ..engine.simulate import Timeline, simulate
from ..layouts.layout import in_columns
from ..table.schedule import Certificate, Schedule
from .memory import Memory


@dataclass(frozen=True)
class PipelinePlan:
    """One way to run the model.

    Attributes:
        layout: the layers of each stage, as `parse_layout` reads them.
        schedule: the table.
        remat: None or "full", as `Pipeline` takes it; None where the table has R for some stages.
        policies: letters with the `jax.checkpoint` policies that their layers run under.
        spread: of "E" and "L", those that are spread over all devices (`jaxpipe.spread`).
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
    parts: Memory | None = field(default=None, compare=False)
    traced: Mapping[str, int] | None = field(default=None, compare=False)
    certificate: Certificate | None = field(default=None, compare=False)
    axis: str = field(default="pipe", compare=False)
    data_axes: tuple[str, ...] = field(default=(), compare=False)
    policies: tuple[tuple[str, str], ...] = ()
    spread: str = ""
    offload: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def timeline(self) -> Timeline:
        """The table, simulated under the planned costs, for comparison with a run."""
        return simulate(self.schedule, self.costs)

    def pipeline(self, model: Any, mesh: Any, **options: Any) -> Any:
        """The `jaxpipe.Pipeline` that runs it; options are those of `Pipeline`.

        Its program is the planned one, chosen by the same costs.  `sharding` and `memory` replace
        the plan's axes (`axis`, `data_axes`) and its `remat`.
        """
        # By name: JAX need not be installed where plans are made.
        settings = import_module("jaxpipe.model.settings")
        mine = {
            "layout": self.layout,
            "costs": self.costs,
            "sharding": settings.Sharding(pipe=self.axis, data=self.data_axes),
            "memory": settings.Memory(remat=self.remat, offload=self.offload),
        }
        if self.policies:
            arguments = import_module("jaxpipe.model.arguments")
            model = arguments.under_policies(model, dict(self.policies))
        constructor = import_module("jaxpipe.pipeline").Pipeline
        return constructor(model, self.schedule, mesh, **mine | options)

    def facts(self) -> dict[str, Any]:
        """The plan's fields as values that JSON can hold."""
        own = ("label", "layout", "remat", "spread", "offload", "seconds", "lower_bound", "why")
        return {name: getattr(self, name) for name in own} | {
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
