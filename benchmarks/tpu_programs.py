"""What XLA makes of steps on TPUs: where it expects the time to go, large copies, permutes beside
compute, memory, and seconds to compile.

    JAX_PLATFORMS=cpu python -m benchmarks.tpu_programs --models small 8b 70b moe
        --schedules 1f1b zb_h1 --predict --plain -o benchmarks/results/tpu_programs.txt

The devices are only described by libtpu, and the program is read (`jaxpipe.inspect.programs`).
Nothing is run, and no TPU is needed.  Cycles are XLA's own estimates.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks import moe
from benchmarks.gpu_programs import SHAPE, Axes, Case, Remat
from benchmarks.llama import TENSOR, Model, Shape, batch, parameters, specs
from benchmarks.machine import describe
from benchmarks.moves import Move, large_moves_on_tpus
from benchmarks.output import Command, Result, told
from jaxpipe.inspect.hlo import steady
from jaxpipe.inspect.programs import Purpose, TpuProgram
from jaxpipe.lowering.target import Chip
from tests.tpu.programs import tpu_fault, tpu_mesh

GIB = 2**30
LLAMA_8B = Shape(
    width=4096, heads=32, kv_heads=8, head_dim=128, hidden=14336, vocab=128256, rows=1, time=4096
)
LLAMA_70B = Shape(rows=1, time=4096)


class Work(NamedTuple):
    """A case and the devices that it is compiled for."""

    model: str
    topology: str
    case: Case | moe.Case
    axes: str = ""

    def arguments(self) -> tuple[jp.Pipeline, Any, Any]:
        """The pipeline, its parameters and a batch as shapes."""
        return self.case.arguments(partial(tpu_mesh, topology=self.topology))


def works(args: argparse.Namespace) -> Iterator[Work]:
    """The small transformer of `benchmarks.gpu_programs` by every schedule, and large models."""
    small = Case("1f1b", devices=4, microbatches=16, remat=Remat.DOTS)
    if "small" in args.models:
        for name in args.schedules:
            yield Work("small", "v5p:2x2x1", dataclasses.replace(small, schedule=name))
    if "grid" in args.models:
        for axes in (Axes.DATA, Axes.FSDP, Axes.TENSOR):
            yield Work("small", "v5p:2x2x2", dataclasses.replace(small, axes=axes))
        for remat in (Remat.NOTHING, Remat.LAYER, Remat.FULL):
            yield Work("small", "v5p:2x2x1", dataclasses.replace(small, remat=remat))
        yield Work("small", "v6e:2x2", small)
    large = dataclasses.replace(small, devices=8, remat=Remat.LAYER, shape=LLAMA_8B, layers=4)
    if "8b" in args.models:
        for name in ("1f1b", "zb_h1"):
            yield Work("8B", "v5p:2x2x2", dataclasses.replace(large, schedule=name))
    if "70b" in args.models:
        wide = dataclasses.replace(
            large, shape=LLAMA_70B, layers=10, axes=Axes.TENSOR, other=8, microbatches=16
        )
        yield Work("70B", "v5p:4x4x4", wide)
    if "moe" in args.models:
        layout = "Ettt|tttt|tttt|" + "ttt|" * 4 + "tttL"  # one stage a device
        mixture = dataclasses.replace(moe.CASES["67b"], schedule="1f1b", layout=layout)
        yield Work("67B-A2B", "v5p:4x4x4", mixture, "8 x 8 experts")


COLUMNS = (
    "model",
    "devices",
    "schedule",
    "axes",
    "remat",
    "M cycles",
    *(purpose.value for purpose in Purpose),
    "remade",
    "permutes",
    "padding",
    "temp",
    "total",
    "predicted",
    "compile s",
    "CPU s",
    "plain s",
    "plain CPU s",
)
NOTES = (
    "M cycles: XLA's estimate for a step's loops, in millions, if every predicate is taken; then "
    "the share of each purpose in percent",
    "(kernels: custom calls; writes and reads: of slots and rows; copies: transposes and fills "
    "too).  Collectives have no estimates.",
    "remade: instructions that make a whole array again which the loops carry or read, of 1 MiB or "
    "more (MiB if each is run once).",
    "permutes: of the loop of most trips, those with compute issued between start and done / all: "
    "a matmul, or work that XLA estimates to take as long as the transfer.",
    "padding: MiB that tiles add to what the loops carry.  temp, total: GiB of one device; "
    "predicted: `jaxpipe.inspect.memory` / total.",
    "compile s: of the step.  plain s: of plain JAX's gradients of one device's layers and the "
    "ends, for one microbatch.  CPU s: of all threads.",
)


def line(work: Work, *, predicts: bool, plain: bool) -> tuple[str, ...]:
    """A line of the table of results."""
    jax.clear_caches()  # what was traced and compiled for the case before
    case = work.case
    pipe, params, rows = work.arguments()
    lowered = pipe.lower(params, rows)
    executable, seconds = compiled(lowered)
    program = TpuProgram(executable, Chip.of(pipe.mesh))
    cycles = program.cycles
    whole = sum(cycles.values())
    made = [
        each
        for each in large_moves_on_tpus(program.module)
        if each.place.in_loop and each.is_carried and each.move is not Move.SLICE
    ]
    permutes = steady(program.collectives)
    memory = program.memory
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    predicted = jp.inspect.memory(pipe, params, rows)["total"] if predicts else 0
    return (
        work.model,
        work.topology,
        case.schedule,
        case.axes.value if isinstance(case, Case) else work.axes,
        case.remat.value,
        f"{whole / 1e6:.1f}",
        *(f"{100 * cycles[purpose] / whole:.0f}" for purpose in Purpose),
        f"{len(made)} ({sum(each.nbytes for each in made) / 2**20:.0f})" if made else "0",
        f"{sum(each.overlapped for each in permutes)}/{len(permutes)}",
        f"{program.padding / 2**20:.1f}",
        f"{(program.total_bytes - kept) / GIB:.2f}",
        f"{program.total_bytes / GIB:.2f}",
        f"{predicted / program.total_bytes:.3f}" if predicts else "-",
        *(f"{each:.0f}" for each in seconds),
        *(_plain(work) if plain else ("-", "-")),
    )


class Seconds(NamedTuple):
    """Seconds of the clock, and of all threads of this process."""

    clock: float
    cpu: float


def compiled(lowered: Any) -> tuple[Any, Seconds]:
    """The compiled program, and how long it took to compile."""
    clock, cpu = time.perf_counter(), time.process_time()
    found = lowered.compile()
    return found, Seconds(time.perf_counter() - clock, time.process_time() - cpu)


def _plain(work: Work) -> tuple[str, ...]:
    """The two last columns."""
    if isinstance(work.case, moe.Case):
        lowered = plain_mixture(work.case, work.topology)
    elif work.case.axes in (Axes.PIPE, Axes.TENSOR):
        lowered = plain_model(work.case, work.topology)
    else:
        return "-", "-"
    return tuple(f"{each:.0f}" for each in compiled(lowered)[1])


def plain_mixture(case: moe.Case, topology: str) -> Any:
    """Plain JAX's loss and gradients of as many layers of a mixture of experts as a device has, and
    of the ends, lowered; the experts are split over devices.
    """
    layers = max(stage.count("t") for stage in case.stages)
    model = case.model_of(dataclasses.replace(case.sizes, layers=layers))
    own, everywhere = model.pipeline_model(model.sizes.letters()), PartitionSpec()
    mesh = tpu_mesh((case.expert,), ("expert",), topology=topology)
    shapes = model.shapes()
    splits = jax.tree.map(lambda _: everywhere, shapes)
    splits["stages"]["t"]["experts"] = jax.tree.map(
        lambda _: PartitionSpec(None, "expert"), shapes["stages"]["t"]["experts"]
    )

    def loss(params: Any, batch: Any) -> Any:
        found, _ = own.loss(params, batch)
        return jax.lax.pmean(found, "expert")

    split = PartitionSpec("expert")
    whole = jax.shard_map(
        loss, mesh=mesh, in_specs=(splits, split), out_specs=everywhere, check_vma=False
    )

    def placed(leaf: Any, split: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, case.params, sharding=NamedSharding(mesh, split))

    batch = case.batch(case.rows * case.expert, NamedSharding(mesh, split))
    return jax.jit(jax.value_and_grad(whole)).lower(jax.tree.map(placed, shapes, splits), batch)


def plain_model(case: Case, topology: str) -> Any:
    """Plain JAX's loss and gradients of the layers of one stage and the ends, lowered."""
    shape, tensor = dataclasses.replace(case.shape, layers=case.layers), case.axes is Axes.TENSOR
    model = Model(shape, remat_layer=case.remat.of_layer, sequence=tensor, tensor=tensor)
    own = model.by_stages()
    mesh = tpu_mesh((1, case.other if tensor else 1), ("pipe", TENSOR), topology=topology)
    one = jp.Pipeline(
        own,
        jp.schedules.build("gpipe", devices=1, microbatches=1),
        mesh,
        sharding=jp.Sharding(specs=specs() if tensor else None),
    )
    params = one.place(parameters(shape, 1))
    params["stages"] = params["stages"][0]
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(own.loss)).lower(params, batch(shape, 1, whole))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    names = [name for name in jp.schedules.names() if name != "no_pipelining"]
    models = ("small", "grid", "8b", "70b", "moe")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=models,
        default=models,
        help="grid: the small one on other axes, with other remats, and on v6e",
    )
    parser.option("--schedules", names, "NAME")
    parser.add_argument(
        "--predict", action="store_true", help="predict memory too: compiles each block alone"
    )
    parser.add_argument("--plain", action="store_true", help="compile plain JAX too")
    args = parser.parse_args(argv)
    fault = tpu_fault()
    if fault is not None:
        parser.error(f"TPU programs cannot be compiled here ({fault}); install libtpu")
    machine = describe()
    rows = told(line(work, predicts=args.predict, plain=args.plain) for work in works(args))
    sizes = f"width {SHAPE.width}, {SHAPE.rows} x {SHAPE.time} tokens, 2 layers a stage"
    small = f"small: a transformer ({sizes})"
    title = f"Steps on described TPUs, M = 16 (67B-A2B: 32); {small}; Llama 3's and Marin's shapes"
    Result(title, machine, COLUMNS, rows, NOTES).write(args.output)


if __name__ == "__main__":
    main()
