"""Memory per device of a model of Llama 3 70B's shapes on 64 described H100s, against what the plan predicts.

    JAX_PLATFORMS=cpu python -m benchmarks.scale -o benchmarks/results/scale.txt

Compiles the step for 8 pipe x 8 tensor GPUs that are not there, and reads XLA's memory analysis.  The prediction needs no compiler:

    arguments   parameters that a device holds, and the batch
    gradients   the same in float32
    pools       slots of the plan times what a slot holds: stage input, residuals, cotangent, what I leaves for W

A residual is split over the tensor axis where the model's specs split the matmul that makes it.  What is left of XLA's total is the
work space of one block, and is printed apart: attention scores, logits and gathered inputs of matmuls, which no schedule changes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
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
        return jp.schedules.build(self.schedule, devices=self.pipe, microbatches=self.microbatches, chunks=self.chunks)

    def report(self) -> dict[str, Any]:
        """`Pipeline.compile_report` of the step on described GPUs, and the bytes of parameters that a device holds."""
        model, schedule = Model(self.shape, remat_layer=self.remat, sequence=self.sequence), self.build()
        mesh = gpu_mesh((self.pipe, self.tensor), ("pipe", TENSOR))
        canonical, split = parameters(self.shape, schedule.num_stages), specs()
        if self.layout is None:
            pipe = jp.Pipeline(model.stage, schedule=schedule, mesh=mesh, first=model.first, last=model.last, specs=split)
        else:
            layers = {"E": model.first, "t": model.layer, "L": model.last}
            one = parameters(self.shape, 1)["stages"]
            canonical["stages"] = {"t": jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), one)}
            split["stages"] = {"t": {name: PartitionSpec(*spec[1:]) for name, spec in split["stages"].items()}}
            pipe = jp.Pipeline(layers=layers, layout=self.layout, schedule=schedule, mesh=mesh, specs=split)
        params = pipe.place(canonical)
        rows = batch(self.shape, self.microbatches, NamedSharding(mesh, PartitionSpec()))
        held = sum(_bytes_on_a_device(leaf) for leaf in jax.tree.leaves(params))
        count = sum(_size_on_a_device(leaf) for leaf in jax.tree.leaves(params))
        return pipe.compile_report(params, rows) | {"parameter_bytes": held, "parameters": count}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: predicted, and as XLA has it."""

    parameters: int
    batch: int
    gradients: int
    pools: int
    arguments: int
    outputs: int
    temp: int

    @classmethod
    def of(cls, case: Case, report: dict[str, Any]) -> Memory:
        """From a report of `Case.report`."""
        rows = case.shape.rows * case.microbatches * case.shape.time
        return cls(
            parameters=report["parameter_bytes"],
            batch=2 * 4 * rows,  # tokens and targets
            gradients=4 * report["parameters"],
            pools=sum(pool_bytes(case, report).values()),
            arguments=report["argument_bytes"],
            outputs=report["output_bytes"],
            temp=report["temp_bytes"],
        )

    @property
    def predicted(self) -> int:
        """All that the plan knows of."""
        return self.parameters + self.batch + self.gradients + self.pools

    @property
    def total(self) -> int:
        """What XLA needs."""
        return self.arguments + self.outputs + self.temp

    @property
    def rest(self) -> int:
        """XLA's total less the prediction: the work space of a block."""
        return self.total - self.predicted


def pool_bytes(case: Case, report: dict[str, Any]) -> dict[str, int]:
    """Bytes of each pool on one device, with what the partitioner splits over the tensor axis split."""
    x = case.shape.rows * case.shape.time * case.shape.width * jnp.dtype(jnp.bfloat16).itemsize
    between = x // case.tensor if case.sequence else x
    slot = {"x": between, "cotangent": between, "residual_input": 0, "residual_weight": 0, "stash": 0, "first": 0}
    for pool, kind, size in report["residuals"]:
        slot[pool] += size // case.tensor if _is_split(case, kind) else size
    return {pool: size * getattr(report["slots"], pool) for pool, size in slot.items() if report["slot_bytes"][pool]}


def _is_split(case: Case, kind: str) -> bool:
    """Whether an array, as "dtype[dims]", has heads or hidden units among its dims, or is split by time."""
    dims = [int(n) for n in kind[kind.index("[") + 1 : -1].split(",") if n.strip()]
    shape = case.shape
    if shape.hidden in dims or shape.kv_heads in dims:
        return True
    return case.sequence and dims[-2:] == [shape.time, shape.width]


def _size_on_a_device(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _bytes_on_a_device(leaf: Any) -> int:
    return _size_on_a_device(leaf) * leaf.dtype.itemsize


def cases(shape: Shape, pipe: int, tensor: int, microbatches: Sequence[int]) -> Iterator[Case]:
    """1F1B, interleaved 1F1B and ZB-H1 with each layer recomputed; 1F1B with everything kept; GPipe for comparison."""
    base = Case(shape, pipe, tensor, "1f1b", 1, microbatches[0], remat=True, sequence=True)
    for count in microbatches:
        for name, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)):
            yield replace(base, schedule=name, chunks=chunks, microbatches=count)
    yield replace(base, schedule="gpipe")
    yield replace(base, remat=False)


COLUMNS = (
    "schedule",
    "V",
    "M",
    "remat",
    "slots",
    "params",
    "gradients",
    "pools",
    "predicted",
    "arguments",
    "outputs",
    "temp",
    "total",
    "rest",
)


def line(case: Case) -> tuple[str, ...]:
    """A line of the table of results."""
    report = case.report()
    found = Memory.of(case, report)
    sizes = (found.parameters, found.gradients, found.pools, found.predicted)
    sizes += (found.arguments, found.outputs, found.temp, found.total, found.rest)
    slots = report["slots"]
    held = max(slots.residual_input, slots.residual_weight)
    heads = (case.schedule, str(case.chunks), str(case.microbatches), "layer" if case.remat else "-", f"{slots.x}/{held}")
    return (*heads, *(f"{size / GIB:.2f}" for size in sizes))


NOTES = (
    "GiB of one device.  slots: of stage inputs / of residuals.  predicted: params + gradients (float32) + pools + the batch.",
    "remat: layer, where a layer keeps its input alone.  total: arguments + outputs + temp, as XLA has them.  rest: total less predicted,",
    "the work space of a block (float32 logits and attention scores, a layer's recomputed arrays) and what the partitioner leaves whole:",
    "the gathered inputs of column-parallel matmuls, which W reads, are stored whole by zb_h1 and without remat.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipe", type=int, default=8, metavar="P")
    parser.add_argument("--tensor", type=int, default=8, metavar="T")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[16, 32], metavar="M")
    parser.add_argument("--layout", metavar="TEXT", help="one case instead: the layers of each stage, as in Et*9|t*10|...|t*10L")
    parser.add_argument("--schedule", default="interleaved_1f1b", metavar="NAME", help="with --layout: its table")
    parser.add_argument("--chunks", type=int, default=2, metavar="V", help="with --layout: stages on a device")
    add_output(parser)
    args = parser.parse_args(argv)
    fault = gpu_fault()
    if fault is not None:
        parser.error(f"GPU programs cannot be compiled here ({fault}); install jax-cuda13-plugin and jax-cuda13-pjrt of jaxlib's version")
    shape = Shape(layers=args.layers)
    chosen = list(cases(shape, args.pipe, args.tensor, args.microbatches))
    if args.layout:
        uneven = replace(chosen[0], schedule=args.schedule, chunks=args.chunks, layout=args.layout)
        chosen = [replace(uneven, microbatches=count) for count in args.microbatches]
    machine = describe()
    rows = [line(case) for case in chosen]
    title = (
        f"Llama 3 70B's shapes, {args.layers} layers, bf16, {args.pipe} pipe x {args.tensor} tensor H100s, {shape.time} tokens a microbatch"
    )
    Result(title, machine, COLUMNS, rows, NOTES).write(args.output)


if __name__ == "__main__":
    main()
