"""Memory that plans promise, against XLA's own figure for their programs on described GPUs; time:
`benchmarks.plans_time`.

    JAX_PLATFORMS=cpu python -m benchmarks.plans -o benchmarks/results/plans.txt

Each of three models is measured layer by layer (shapes alone; blocks compiled for a described
H100), planned, and the step of each plan compiled.  "layers" is the sum of the layers' sizes that
`plan` makes by itself; "traced" is what it takes instead where it is given the traced model
(`plan(traced=jp.measuring.traced_memory(...))`), before the step is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result, Row, told
from benchmarks.planned_models import Planned, llama, mixed
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

H100 = jp.measuring.Peak(flops=6e14, bandwidth=3e12, link=5e10, latency=1e-5)
CHOICES = (
    ("1f1b", 1, None),
    ("zb_h1", 1, None),
    ("gpipe", 1, None),
    ("interleaved_1f1b", 2, None),
    ("1f1b", 1, "full"),
)
MODELS = (
    llama(layers=8, width=2048, vocab=8192, time=1024),
    llama(layers=8, width=1024, vocab=64000, time=512, rows=2),
    mixed(pairs=6, width=1024, rows=2048),
)
TINY = (mixed(pairs=4, width=64, rows=256),)


@dataclass(frozen=True)
class Compared:
    """Bytes of one device."""

    plan: jp.planner.PipelinePlan
    xla: int

    @property
    def traced(self) -> float:
        """Of the traced model over XLA's."""
        return max(self.plan.memory) / self.xla

    @property
    def layers(self) -> float:
        """Of the layers' sizes over XLA's."""
        assert self.plan.parts is not None
        return self.plan.parts.total / self.xla


def compared(
    model: Planned, devices: int, microbatches: int, choices: Sequence[tuple[str, int, str | None]]
) -> Iterator[Compared]:
    """Plans of a model, and XLA's memory of their steps: arguments, results and temporary arrays;
    no optimizer.
    """
    mesh = gpu_mesh((devices,), ("pipe",))
    alone = Mesh(mesh.devices[:1], ("pipe",))
    functions = model.model
    costs = jp.measure(functions, model.parameters, model.microbatch, mesh=alone, peak=H100)
    costs = {letter: replace(cost, optimizer=0) for letter, cost in costs.items()}
    traced = jp.measuring.traced_memory(functions, model.parameters, model.microbatch, mesh=mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    rows: Any = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), model.batch(microbatches)
    )
    for name, chunks, remat in choices:
        options: dict[str, Any] = {
            "schedules": (name,),
            "chunks": (chunks,),
            "remat": (remat,),
            "traced": traced,
            "most": 1,
            "mesh": mesh,
        }
        plan = jp.plan(
            functions.layers, costs, devices=devices, microbatches=microbatches, **options
        ).best
        pipe = plan.pipeline(functions, mesh)
        found = pipe.lower(pipe.place(model.parameters), rows).compile().memory_analysis()
        yield Compared(
            plan,
            found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes,
        )


def row(model: Planned, found: Compared) -> tuple[str, ...]:
    """A line of the table."""
    plan = found.plan
    sizes = [plan.parts.total if plan.parts else 0, max(plan.memory), found.xla]
    return (
        model.name,
        plan.label,
        plan.layout,
        *(f"{size / 2**20:.0f}" for size in sizes),
        f"{found.layers:.3f}",
        f"{found.traced:.3f}",
    )


COLUMNS = "model  plan  layout  layers  traced  XLA  layers / XLA  traced / XLA"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--devices", 4, "P")
    parser.option("--microbatches", 8, "M")
    parser.add_argument("--tiny", action="store_true", help="one small model and one plan")
    args = parser.parse_args(argv)
    require_gpu_compiler(parser)
    machine, ratios = describe(), []

    def lines() -> Iterator[Row]:
        choices = CHOICES[:1] if args.tiny else CHOICES
        for model in TINY if args.tiny else MODELS:
            for found in compared(model, args.devices, args.microbatches, choices):
                ratios.append((found.layers, found.traced))
                yield row(model, found)

    rows = told(lines())
    within = [sum(abs(ratio[i] - 1) <= 0.05 for ratio in ratios) for i in range(2)]
    notes = (
        "MiB of one device: parameters, the batch, gradients, pools, work space; no optimizer.",
        f"Within 5 % of XLA's figure: {within[1]} of {len(rows)} traced, {within[0]} of "
        f"{len(rows)} by the layers' sizes.",
    )
    title = f"Memory of plans on {args.devices} described H100s, {args.microbatches} microbatches"
    Result(title, machine, COLUMNS, rows, notes).write(args.output)


if __name__ == "__main__":
    main()
