"""How long one step takes to trace, lower and compile for hundreds of described GPUs, and what a
device needs of memory.

    JAX_PLATFORMS=cpu python -m benchmarks.many_gpus -o benchmarks/results/many_gpus.txt

The model has Llama 3's structure and a small width, since no device is there: what is compiled is
the program of one of `pipe x data x tensor` GPUs, and XLA's partitioner and collectives see all of
them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.llama import TENSOR, Model, Shape, batch, parameters, specs
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

MIB = 2**20
DATA = "data"


@dataclass(frozen=True)
class Case:
    """A table, and the mesh that it runs on."""

    schedule: str
    chunks: int
    pipe: int
    data: int
    tensor: int
    microbatches: int

    def line(self) -> tuple[str, ...]:
        """Compile the step; a line of the table of results."""
        begin = time.perf_counter()
        table = jp.schedules.build(
            self.schedule, devices=self.pipe, microbatches=self.microbatches, chunks=self.chunks
        )
        narrow = Shape(width=256, heads=8, kv_heads=4, head_dim=32, hidden=512, vocab=1024, time=64)
        shape = replace(narrow, layers=table.num_stages, rows=self.data)
        sizes = {"pipe": self.pipe, DATA: self.data, TENSOR: self.tensor}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        mesh = gpu_mesh(tuple(sizes.values()), tuple(sizes))
        model = Model(shape, remat_layer=True, sequence=True, tensor=TENSOR in sizes)
        data, split = (DATA,) if DATA in sizes else (), specs() if TENSOR in sizes else None
        sharding = jp.Sharding(data=data, specs=split)
        pipe = jp.Pipeline(model.by_stages(), table, mesh, sharding=sharding)
        params = pipe.place(parameters(shape, table.num_stages))
        by_row = NamedSharding(mesh, PartitionSpec(DATA if data else None))
        rows = batch(shape, self.microbatches, by_row)
        planned = time.perf_counter()
        lowered = pipe.lower(params, rows)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        sent = text.count(" collective-permute-start(") + text.count(" collective-permute(")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
        seconds = (planned - begin, traced - planned, done - traced)
        size = (self.pipe * self.data * self.tensor, self.pipe, self.data, self.tensor)
        bytes_of = (
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.temp_size_in_bytes,
        )
        return (
            *(self.schedule, str(self.chunks), str(self.microbatches)),
            *map(str, size),
            *(f"{s:.1f}" for s in seconds),
            f"{peak:.2f} GiB",
            *(f"{b / MIB:.2f}" for b in bytes_of),
            str(sent),
            f"{len(text) / MIB:.2f}",
        )


CASES = (
    Case("1f1b", 1, 8, 4, 2, 32),
    Case("1f1b", 1, 16, 8, 4, 64),
    Case("1f1b", 1, 128, 4, 1, 256),
)
COLUMNS = (
    "schedule  V  M  GPUs  pipe  data  tensor  build  trace  compile  memory  arguments  "
    "outputs  temp  permutes  text"
)
NOTES = (
    "build, trace, compile: seconds of the wall clock, of the table and the pipeline, of jax's "
    "tracing and lowering, and of XLA;",
    "memory: the process's peak so far; arguments, outputs, temp: MiB of one device; permutes: "
    "in the program's text; text: its MiB.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="NAME:V:P:D:T:M",
        help="instead of the usual ones, as in 1f1b:1:16:8:4:64",
    )
    args = parser.parse_args(argv)
    require_gpu_compiler(parser)
    chosen = [
        Case(name, *map(int, numbers))
        for name, *numbers in (text.split(":") for text in args.cases or ())
    ] or CASES
    machine = describe()
    rows = [case.line() for case in chosen]
    title = "One step of a narrow Llama compiled for many described H100s"
    Result(title, machine, COLUMNS, rows, NOTES).write(args.output)


if __name__ == "__main__":
    main()
