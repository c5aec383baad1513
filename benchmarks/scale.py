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

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.llama import TENSOR, Model, Shape, batch, parameters, specs
from benchmarks.machine import describe
from benchmarks.output import Result, add_output
from tests.gpu.programs import gpu_fault, gpu_mesh

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
    sequence: bool  # what lies between layers is split over the tensor axis too
    layout: str | None = None  # the layers of each stage; None cuts them evenly

    def build(self) -> jp.Schedule:
        """The table."""
        return jp.schedules.build(
            self.schedule, devices=self.pipe, microbatches=self.microbatches, chunks=self.chunks
        )

    def report(self) -> dict[str, Any]:
        """`jp.inspect.report` of the step on described GPUs."""
        model, schedule = (
            Model(self.shape, remat_layer=self.remat, sequence=self.sequence),
            self.build(),
        )
        mesh = gpu_mesh((self.pipe, self.tensor), ("pipe", TENSOR))
        canonical, split = parameters(self.shape, schedule.num_stages), specs()
        if self.layout is None:
            pipe = jp.Pipeline(
                jp.Model(model.stage, first=model.first, last=model.last),
                schedule,
                mesh,
                sharding=jp.Sharding(specs=split),
            )
        else:
            layers = {"E": model.first, "t": model.layer, "L": model.last}
            one = parameters(self.shape, 1)["stages"]
            canonical["stages"] = {
                "t": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), one)
            }
            split["stages"] = {
                "t": {name: PartitionSpec(*spec[1:]) for name, spec in split["stages"].items()}
            }
            pipe = jp.Pipeline(
                jp.Model(layers, layers=self.layout),
                schedule,
                mesh,
                layout=self.layout,
                sharding=jp.Sharding(specs=split),
            )
        params = pipe.place(canonical)
        rows = batch(self.shape, self.microbatches, NamedSharding(mesh, PartitionSpec()))
        return jp.inspect.report(pipe, params, rows)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: predicted, by what they are for, and as XLA has them."""

    predicted: dict[str, int]
    arguments: int
    outputs: int
    temp: int

    @classmethod
    def of(cls, report: dict[str, Any]) -> Memory:
        """From a report of `Case.report`."""
        return cls(
            report["predicted"],
            report["argument_bytes"],
            report["output_bytes"],
            report["temp_bytes"],
        )

    @property
    def total(self) -> int:
        """What XLA needs."""
        return self.arguments + self.outputs + self.temp

    @property
    def ratio(self) -> float:
        """Predicted over what XLA needs."""
        return self.predicted["total"] / self.total


def cases(shape: Shape, pipe: int, tensor: int, microbatches: Sequence[int]) -> Iterator[Case]:
    """Schedules with and without a split backward, each layer recomputed; 1F1B with everything
    kept; GPipe for comparison.
    """
    base = Case(shape, pipe, tensor, "1f1b", 1, microbatches[0], remat=True, sequence=True)
    schedules = (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2), ("dualpipev", 2))
    for count in microbatches:
        for name, chunks in schedules:
            yield replace(base, schedule=name, chunks=chunks, microbatches=count)
    yield replace(base, schedule="gpipe")
    yield replace(base, remat=False)
    yield replace(base, schedule="zb_h1", remat=False)


PARTS = ("parameters", "gradients", "pools", "work")
COLUMNS = (
    "schedule",
    "V",
    "M",
    "remat",
    "slots",
    *PARTS,
    "predicted",
    "arguments",
    "outputs",
    "temp",
    "total",
    "ratio",
)


def line(case: Case) -> tuple[str, ...]:
    """A line of the table of results."""
    report = case.report()
    found = Memory.of(report)
    sizes = [found.predicted[part] for part in (*PARTS, "total")] + [
        found.arguments,
        found.outputs,
        found.temp,
        found.total,
    ]
    slots = report["slots"]
    held = max(slots.residual_input, slots.residual_weight)
    heads = (
        case.schedule,
        str(case.chunks),
        str(case.microbatches),
        "layer" if case.remat else "-",
        f"{slots.x}/{held}",
    )
    return (*heads, *(f"{size / GIB:.2f}" for size in sizes), f"{found.ratio:.3f}")


NOTES = (
    "GiB of one device.  slots: of stage inputs / of residuals.  work: the arrays of the block "
    "that needs most, compiled alone.",
    "predicted: all parts (the batch and what is on its way besides); total: arguments + outputs "
    "+ temp, as XLA has them; ratio: of these.",
    "remat: layer, where a layer keeps its input alone.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipe", type=int, default=8, metavar="P")
    parser.add_argument("--tensor", type=int, default=8, metavar="T")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[16, 32], metavar="M")
    parser.add_argument(
        "--layout",
        metavar="TEXT",
        help="one case instead: the layers of each stage, as in Et*9|t*10|...|t*10L",
    )
    parser.add_argument(
        "--schedule", default="interleaved_1f1b", metavar="NAME", help="with --layout: its table"
    )
    parser.add_argument(
        "--chunks", type=int, default=2, metavar="V", help="with --layout: stages on a device"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these schedules of the list")
    add_output(parser)
    args = parser.parse_args(argv)
    fault = gpu_fault()
    if fault is not None:
        parser.error(
            f"GPU programs cannot be compiled here ({fault}); install jax-cuda13-plugin and "
            "jax-cuda13-pjrt of jaxlib's version"
        )
    shape = Shape(layers=args.layers)
    chosen = list(cases(shape, args.pipe, args.tensor, args.microbatches))
    if args.layout:
        uneven = replace(chosen[0], schedule=args.schedule, chunks=args.chunks, layout=args.layout)
        chosen = [replace(uneven, microbatches=count) for count in args.microbatches]
    chosen = [case for case in chosen if args.only is None or case.schedule in args.only]
    flags = os.environ.get("XLA_FLAGS")
    machine = [*describe(), *([f"XLA_FLAGS: {flags}"] if flags else [])]
    rows = []
    for case in chosen:
        rows.append(line(case))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    title = (
        f"Llama 3 70B's shapes, {args.layers} layers, bf16, {args.pipe} pipe x {args.tensor} "
        f"tensor H100s, {shape.time} tokens a microbatch"
    )
    Result(title, machine, COLUMNS, rows, NOTES).write(args.output)


if __name__ == "__main__":
    main()
