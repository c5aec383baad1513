"""What XLA makes of the steps of the catalogue on GPUs: host waits, large copies, collectives
beside compute, memory.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu_programs -o benchmarks/results/gpu_programs.txt
    JAX_PLATFORMS=cpu python -m benchmarks.gpu_programs --axes pipe
        --options xla_gpu_enable_triton_gemm=false -o benchmarks/results/gpu_programs_cublas.txt

Without a GPU to autotune on, XLA makes all matmuls with Triton, and so with cuBLAS.

A small transformer is compiled for H100s that are only described, and the program is read
(`jaxpipe.inspect`).  Nothing is run, and no GPU is needed; how long a wait or a copy takes is for
`benchmarks.gpu_single` to say, where there is a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.llama import TENSOR, Model, Shape, batch, parameters, specs
from benchmarks.machine import describe
from benchmarks.moves import LargeMove, Move, large_moves
from benchmarks.output import Command, Result
from jaxpipe.inspect.hlo import kind_of, steady
from jaxpipe.inspect.programs import GpuProgram, compile_and_read, count_waits
from jaxpipe.inspect.step_report import actions_of, host_waits
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

GIB = 2**30
DATA = "data"
# Activations of 2 MiB a layer, so that their halves on a second axis count as large too; and of
# sizes that tell what an array is.
SHAPE = Shape(
    width=512, heads=6, kv_heads=2, head_dim=64, hidden=1408, vocab=2176, rows=1, time=2048
)
LAYERS = 2  # of a stage


class Axes(Enum):
    """The mesh's axes."""

    PIPE = "pipe"
    DATA = "pipe x data"
    FSDP = "fsdp"
    TENSOR = "tensor"  # with sequence parallelism


class Remat(Enum):
    """What the backward recomputes."""

    NOTHING = "-"
    LAYER = "layer"  # each layer keeps its input alone
    DOTS = "dots"  # each layer keeps its matmuls
    FULL = "full"  # each stage keeps its input alone

    @property
    def of_layer(self) -> Callable[..., bool] | bool:
        """`remat_layer` of a model."""
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return dots if self is Remat.DOTS else self is Remat.LAYER


@dataclass(frozen=True)
class Case:
    """A schedule, a mesh and what is kept for the backward."""

    schedule: str
    devices: int
    microbatches: int
    axes: Axes = Axes.PIPE
    remat: Remat = Remat.NOTHING
    shape: Shape = SHAPE
    layers: int = LAYERS  # of a stage
    other: int = 2  # devices of the axis beside the pipe axis

    def build(self) -> jp.Schedule:
        """The table, with the schedule's usual number of chunks."""
        return jp.schedules.build(
            self.schedule, devices=self.devices, microbatches=self.microbatches
        )

    def lower(self) -> Any:
        """The step, lowered for described GPUs."""
        pipe, params, rows = self.arguments(gpu_mesh)
        return pipe.lower(params, rows)

    def arguments(self, described: Callable[..., Any]) -> tuple[jp.Pipeline, Any, Any]:
        """The pipeline, its parameters and a batch as shapes; `described` makes its mesh."""
        schedule, tensor = self.build(), self.axes is Axes.TENSOR
        shape = dataclasses.replace(self.shape, layers=self.layers * schedule.num_stages)
        data = self.axes in (Axes.DATA, Axes.FSDP)
        second = (TENSOR,) if tensor else (DATA,) if data else ()
        mesh = described((self.devices, *(self.other for _ in second)), ("pipe", *second))
        model = Model(shape, remat_layer=self.remat.of_layer, sequence=tensor, tensor=tensor)
        pipe = jp.Pipeline(
            model.by_stages(),
            schedule,
            mesh,
            sharding=jp.Sharding(
                data=(DATA,) if data else (),
                fsdp=DATA if self.axes is Axes.FSDP else None,
                specs=specs() if tensor else None,
            ),
            memory=jp.Memory(remat="full" if self.remat is Remat.FULL else None),
        )
        rows = self.microbatches * (self.other if data else 1)
        sharding = NamedSharding(mesh, PartitionSpec(DATA if data else None))
        params = pipe.place(parameters(shape, schedule.num_stages))
        return pipe, params, batch(shape, rows, sharding)


COLUMNS = (
    "schedule  axes  remat  predicates  on host  waits  copies  transposes  fills  others  "
    "in blocks  slices  GiB moved  permutes  collectives  temp  total  CPU s"
)
NOTES = (
    "predicates: loops of unknown trip count and conditionals; on host: those that are no nodes "
    "of CUDA graphs, so that the host waits.",
    "waits: host waits of a device a step, at least (where nothing is taken) and at most (where "
    "each action takes a predicate).",
    "copies, transposes, fills (with zeros) and others (pads, concatenations, rewrites): of 1 "
    "MiB or more, of whole arrays that a segment",
    "carries or reads (pools, accumulators, stacked parameters, what is sent), in its loop: "
    "instructions, and MiB if each is run once.",
    "in blocks: the same of other arrays, which are a block's own.  slices: what is read apart "
    "from a pool or stack before its reader.",
    "GiB moved: all but slices, a step of a device; of a block's code for each slot one runs.",
    "permutes: of the loop of most trips, those with a matmul (or 16 MiB of elementwise work) "
    "issued between start and done / all;",
    "collectives: the same of all others, anywhere.",
    "temp, total: GiB of one device.  CPU s: to trace and compile, of all threads.",
)


def line(case: Case, program: GpuProgram, seconds: float) -> tuple[str, ...]:
    """A line of the table of results."""
    predicates = program.predicates
    schedule = case.build()
    least, most = (
        count_waits(predicates, taken=False),
        host_waits(program, schedule),
    )
    waits = f"{least:.0f}-{most:.0f}" if most > least else f"{least:.0f}"
    on_host = sum(not each.in_graph for each in predicates)
    looped = [each for each in large_moves(program.module) if each.place.in_loop]
    made = [each for each in looped if each.move is not Move.SLICE]
    groups = [[each for each in made if each.is_carried and each.move in kinds] for kinds in KINDS]
    groups += [
        [each for each in made if not each.is_carried],
        [each for each in looped if each.move is Move.SLICE],
    ]
    permutes = steady(program.collectives)
    others = [each for each in program.collectives if each.kind != "collective-permute"]
    return (
        case.schedule,
        case.axes.value,
        case.remat.value,
        str(len(predicates)),
        str(on_host),
        waits,
        *map(_group, groups),
        f"{bytes_moved(program, schedule, made) / GIB:.2f}",
        *(f"{sum(each.overlapped for each in those)}/{len(those)}" for those in (permutes, others)),
        f"{program.memory.temp_size_in_bytes / GIB:.2f}",
        f"{program.total_bytes / GIB:.2f}",
        f"{seconds:.0f}",
    )


def bytes_moved(program: GpuProgram, schedule: jp.Schedule, moves: Sequence[LargeMove]) -> float:
    """Bytes a step of the device with most actions of each kind.

    The predicates of a kind share its actions.  Slots that are arrays of their own have a copy of
    the block's code each, under predicates inside of the block's, and many of them in groups: of
    the predicates inside of one that move anything, one is taken.
    """
    runs, asked = reduce(or_, actions_of(schedule)), Counter[str | None]()
    for each in program.predicates:
        asked[each.kind] += 0 if each.place.guarded else each.place.trips
    pairs = {pair for each in moves for pair in pairwise(g.name for g in each.place.guards)}
    inside = Counter(outer for outer, _ in pairs)

    def share(move: LargeMove) -> float:
        guards = move.place.guards
        kind = kind_of(guards[0]) if guards else None
        if kind is None:
            return 1.0
        copies = math.prod(inside[guard.name] for guard in guards[:-1])
        return min(1.0, runs[kind] / asked[kind]) / copies

    return sum(share(each) * each.nbytes_a_step for each in moves)


KINDS = ((Move.COPY,), (Move.TRANSPOSE,), (Move.FILL,), (Move.PAD, Move.CONCATENATE, Move.REWRITE))


def _group(moves: Sequence[LargeMove]) -> str:
    """How many instructions, and MiB."""
    return f"{len(moves)} ({sum(each.nbytes for each in moves) / 2**20:.0f})" if moves else "0"


def details(program: GpuProgram) -> Iterator[str]:
    """Each predicate, large copy in a loop, and collective, a line each."""
    for predicate in program.predicates:
        kind, graph = (
            "loop" if predicate.is_loop else "conditional",
            " (graph)" * predicate.in_graph,
        )
        yield f"  {kind} {predicate.instruction.name} asked {predicate.place.trips}{graph}"
    yield from (f"  {each}" for each in large_moves(program.module) if each.place.in_loop)
    for each in program.collectives:
        trips = f"{each.place.trips} x{' guarded' * each.place.guarded}"
        yield f"  {each.name}, {trips}, beside {each.compute.name.lower()}"


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every schedule on the pipe axis with everything kept; the chosen ones with each mesh and each
    choice of what is kept.
    """
    for name in args.schedules:
        base = Case(name, args.devices, args.microbatches)
        yield base
        if name in args.grid:
            for axes in args.axes:
                found = (dataclasses.replace(base, axes=axes, remat=remat) for remat in args.remat)
                yield from (case for case in found if case != base)


def main(argv: Sequence[str] | None = None) -> None:
    catalogue = [name for name in jp.schedules.names() if name != "no_pipelining"]
    parser = Command(__doc__)
    parser.option("--schedules", catalogue, "NAME")
    parser.option(
        "--grid", ["1f1b", "zb_h1"], "NAME", "those compiled for all meshes and choices of remat"
    )
    parser.option("--axes", list(Axes), "AXES", choices=list(Axes))
    parser.option("--remat", list(Remat), "REMAT", choices=list(Remat))
    parser.option("--devices", 8, "P")
    parser.option("--microbatches", 32, "M")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="NAME=VALUE", help="XLA options to compile with"
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="print every predicate, copy and collective to the error output",
    )
    args = parser.parse_args(argv)
    require_gpu_compiler(parser)
    flags = {"true": True, "false": False}  # JAX takes no text for these
    given = dict(option.split("=", 1) for option in args.options)
    options = {name: flags.get(value, value) for name, value in given.items()}
    machine, rows = describe(), []
    for case in cases(args):
        begin = time.process_time()
        program = compile_and_read(case.lower(), options)
        rows.append(line(case, program, time.process_time() - begin))
        jax.clear_caches()  # what was traced and compiled for the case before
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
        if args.details:
            print(*details(program), sep="\n", file=sys.stderr, flush=True)
    model = f"Steps of a transformer ({LAYERS} layers a stage, {_sizes(SHAPE)})"
    title = f"{model}, {args.devices} described H100s a pipe, M = {args.microbatches}"
    with_options = [f"XLA options: {' '.join(args.options)}"] if args.options else []
    Result(title, [*machine, *with_options], COLUMNS, rows, NOTES).write(args.output)


def _sizes(shape: Shape) -> str:
    heads = f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} for keys"
    return (
        f"width {shape.width}, {heads}, hidden {shape.hidden}, {shape.rows} x {shape.time} tokens"
    )


if __name__ == "__main__":
    main()
