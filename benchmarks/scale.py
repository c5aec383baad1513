"""Memory per device of a model of Llama 3 70B's shapes on 64 described H100s, against what the
report predicts.

    JAX_PLATFORMS=cpu python -m benchmarks.scale --microbatches 16 -o benchmarks/results/scale.txt
    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false JAX_PLATFORMS=cpu python -m benchmarks.scale
                             --microbatches 16 -o benchmarks/results/scale_cublas.txt
    JAX_PLATFORMS=cpu python -m benchmarks.scale --layers 61 --pipe 16 --layout "Et|(tt|)*30L"
                             --microbatches 32 -o benchmarks/results/scale_uneven.txt

Compiles the step for 8 pipe x 8 tensor GPUs that are not there, and reads XLA's memory analysis.
The prediction is the report's (`jaxpipe.inspect.memory`): parameters, the batch, gradients, the
slots of each pool by what a device holds of them, and the work space of the block that needs most,
each block compiled alone.  XLA_FLAGS also reach these: with calls of cuBLAS, as autotuning on a GPU
chooses them for many matmuls, their workspaces are counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.llama import TENSOR, Model, Shape, batch, layered, layered_specs, parameters, specs
from benchmarks.machine import describe
from benchmarks.output import Command, Result, told
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model, a mesh of pipe x tensor devices, a table, and what is kept for the backward."""

    shape: Shape
    pipe: int
    tensor: int
    schedule: str
    chunks: int
    microbatches: int
    remat: bool  # each layer keeps its input alone (Chen et al. 2016)
    layout: str | None = None  # the layers of each stage; None cuts them evenly

    def build(self) -> jp.Schedule:
        """The table."""
        return jp.schedules.build(
            self.schedule, devices=self.pipe, microbatches=self.microbatches, chunks=self.chunks
        )

    def report(self) -> dict[str, Any]:
        """`jp.inspect.report` of the step on described GPUs."""
        model, schedule = Model(self.shape, remat_layer=self.remat, sequence=True), self.build()
        mesh = gpu_mesh((self.pipe, self.tensor), ("pipe", TENSOR))
        if self.layout is None:
            own, split = model.by_stages(), specs()
            canonical = parameters(self.shape, schedule.num_stages)
        else:
            own, split = model.by_letters(self.layout), layered_specs()
            canonical = jax.eval_shape(layered, parameters(self.shape, 1))
        sharding = jp.Sharding(specs=split)
        pipe = jp.Pipeline(own, schedule, mesh, layout=self.layout, sharding=sharding)
        params = pipe.place(canonical)
        rows = batch(self.shape, self.microbatches, NamedSharding(mesh, PartitionSpec()))
        return jp.inspect.report(pipe, params, rows)


def cases(shape: Shape, pipe: int, tensor: int, microbatches: Sequence[int]) -> Iterator[Case]:
    """Schedules with and without a split backward, each layer recomputed; 1F1B with everything
    kept; GPipe for comparison.
    """
    base = Case(shape, pipe, tensor, "1f1b", 1, microbatches[0], remat=True)
    schedules = (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2), ("dualpipev", 2))
    for count in microbatches:
        for name, chunks in schedules:
            yield replace(base, schedule=name, chunks=chunks, microbatches=count)
    yield replace(base, schedule="gpipe")
    yield replace(base, remat=False)
    yield replace(base, schedule="zb_h1", remat=False)


PARTS = ("parameters", "gradients", "pools", "work")
COLUMNS = (
    "schedule  V  M  remat  slots  parameters  gradients  pools  work  predicted  arguments  "
    "outputs  temp  total  ratio"
)


def line(case: Case) -> tuple[str, ...]:
    """A line of the table of results."""
    report = case.report()
    predicted = report["predicted"]
    xla = [report[f"{name}_bytes"] for name in ("argument", "output", "temp")]
    total = sum(xla)
    sizes = [*(predicted[part] for part in (*PARTS, "total")), *xla, total]
    slots = report["slots"]
    held = max(slots.residual_input, slots.residual_weight)
    heads = (
        case.schedule,
        str(case.chunks),
        str(case.microbatches),
        "layer" if case.remat else "-",
        f"{slots.x}/{held}",
    )
    return (*heads, *(f"{size / GIB:.2f}" for size in sizes), f"{predicted['total'] / total:.3f}")


NOTES = (
    "GiB of one device.  slots: of stage inputs / of residuals.  work: the arrays of the block "
    "that needs most, compiled alone.",
    "predicted: all parts (the batch and what is on its way besides); total: arguments + outputs "
    "+ temp, as XLA has them; ratio: of these.",
    "remat: layer, where a layer keeps its input alone.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--pipe", 8, "P")
    parser.option("--tensor", 8, "T")
    parser.add_argument("--layers", type=int, default=80)
    parser.option("--microbatches", [16, 32], "M")
    parser.add_argument(
        "--layout",
        metavar="TEXT",
        help="one case instead: the layers of each stage, as in Et*9|t*10|...|t*10L",
    )
    parser.option("--schedule", "interleaved_1f1b", "NAME", "with --layout: its table")
    parser.option("--chunks", 2, "V", "with --layout: stages on a device")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these schedules of the list")
    args = parser.parse_args(argv)
    require_gpu_compiler(parser)
    shape = Shape(layers=args.layers)
    chosen = list(cases(shape, args.pipe, args.tensor, args.microbatches))
    if args.layout:
        uneven = replace(chosen[0], schedule=args.schedule, chunks=args.chunks, layout=args.layout)
        chosen = [replace(uneven, microbatches=count) for count in args.microbatches]
    chosen = [case for case in chosen if args.only is None or case.schedule in args.only]
    flags = os.environ.get("XLA_FLAGS")
    machine = [*describe(), *([f"XLA_FLAGS: {flags}"] if flags else [])]
    rows = told(line(case) for case in chosen)
    title = (
        f"Llama 3 70B's shapes, {args.layers} layers, bf16, {args.pipe} pipe x {args.tensor} "
        f"tensor H100s, {shape.time} tokens a microbatch"
    )
    Result(title, machine, COLUMNS, rows, NOTES).write(args.output)


if __name__ == "__main__":
    main()
