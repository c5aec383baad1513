"""What a device holds and how long a step takes, by the stages that are whole at a time, of models
whose replicas split parameters (fsdp).

    python -m benchmarks.gathers -o benchmarks/results/gathers.txt
    JAX_PLATFORMS=cpu python -m benchmarks.gathers --compile 70b:2 70b:once -o FILE

Nothing runs on a device: sizes and times are those of the planner; with `--compile` also those of
steps compiled for described H100s.  Shapes:

    Llama 3 405B, 70B   Llama team 2024 (arXiv 2407.21783), table 3
    DeepSeek-V3         DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; all of its layers have
                        experts in plans, and its attention has the weights of queries, keys and
                        values of one width; the compiled model is that of the paper without its
                        layer for one more token
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.llama import TENSOR, Model, Shape, batch, layered, layered_specs, parameters
from benchmarks.machine import describe
from benchmarks.moe import CASES as MIXTURES
from benchmarks.output import Command, Result, Row, told, write_all
from jaxpipe.layouts.layout import parse_layout
from jaxpipe.lowering.target import Target
from jaxpipe.planner.layer_cost import Ends, Remat
from jaxpipe.planner.memory import layer_sizes, memory_of
from jaxpipe.planner.replicas import Replicas
from jaxpipe.planner.transformer import Transformer
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

GIB = 2**30
SCHEDULES = ("interleaved_1f1b", "looped_bfs")
H100 = 989e12 * 0.6  # of the data sheet's peak of dense bf16: what large matmuls reach
HOST, NETWORK = 3e11, 5e10  # bytes a second of a GPU, each way, within a host and between hosts


# A pipeline, its parameters and a batch as shapes, and the costs of layers.
Compiled: TypeAlias = "tuple[jp.Pipeline, Any, Any, dict[str, jp.LayerCost] | None]"


@dataclass(frozen=True)
class Case:
    """A model on pipe x fsdp x tensor GPUs."""

    name: str
    model: Transformer
    layers: int
    pipe: int
    fsdp: int
    bandwidth: float  # of gathers and reductions
    chunks: int
    microbatches: int
    remat: str | None = None
    mixture: str = ""  # of `benchmarks.moe`; a dense model without one

    def plan(self, schedule: str, max_active: int | None) -> jp.planner.PipelinePlan:
        """The plan with so many stages whole at a time; each end is on one device."""
        costs = {c: cost.split(self.fsdp) for c, cost in self.model.costs().items()}
        return jp.plan(
            f"Et*{self.layers},L",
            {c: replace(cost, ends=Ends.ONE) for c, cost in costs.items()},
            devices=self.pipe,
            microbatches=self.microbatches,
            transfer=self.model.transfer,
            fsdp={"data": self.fsdp},
            fsdp_bandwidth=self.bandwidth,
            max_active=(max_active,),
            schedules=schedule,
            chunks=(self.chunks,),
            remat=(self.remat,),
            mesh=Target(communicates=self.model.tensor > 1),
        ).best

    def compiled(self, max_active: int | None) -> Row:
        """The step of the first schedule as XLA compiles it, beside what `jp.inspect.memory`
        predicts, and the planner from sizes of layers that are compiled alone.
        """
        plan = self.plan(SCHEDULES[0], max_active)
        pipe, params, rows, costs = (self._mixed if self.mixture else self._dense)(plan)
        lowered, begin = pipe.lower(params, rows), perf_counter()
        found = lowered.compile().memory_analysis()
        seconds = perf_counter() - begin
        total = sum(getattr(found, f"{of}_size_in_bytes") for of in ("argument", "output", "temp"))
        predicted = jp.inspect.memory(pipe, params, rows)["total"]
        held = ""
        if costs is not None:
            sizes = layer_sizes(
                parse_layout(plan.layout, devices=self.pipe),
                plan.schedule,
                costs,
                remat=Remat.NONE,
                replicas=Replicas(count=self.fsdp, fsdp=True),
                max_active=max_active,
            )
            planned = memory_of(pipe.trace(params, rows).program.slots, sizes)
            held = f"{(planned.total - planned.optimizer) / GIB:.1f}"
        return (
            self.name,
            f"{self.pipe} x {self.fsdp} x {self.model.tensor:g}",
            f"{SCHEDULES[0]}, V {self.chunks}, M {self.microbatches}",
            "once" if max_active is None else str(max_active),
            *(f"{size / GIB:.1f}" for size in (found.temp_size_in_bytes, total, predicted)),
            held,
            f"{seconds:.0f}",
        )

    def _mixed(self, plan: jp.planner.PipelinePlan) -> Compiled:
        """That of a mixture; attention by blocks of 512 queries."""
        case = replace(
            MIXTURES[self.mixture],
            schedule=SCHEDULES[0],
            layout="Ed|dd|" + "tt|" * 28 + "t|tL",
            microbatches=self.microbatches,
            max_active=plan.max_active,
        )
        return *case.arguments(gpu_mesh), None

    def _dense(self, plan: jp.planner.PipelinePlan) -> Compiled:
        """That of a dense model; attention by blocks of 1,024 queries."""
        tensor, own = self.model.tensor > 1, self.model
        names = ("pipe", "data", TENSOR)
        heads = own.width // 128
        sizes = Shape(own.width, heads, 8, 128, own.ffn, own.vocab, self.layers, block=1024)
        sizes = replace(sizes, time=own.context)
        used = (self.pipe, self.fsdp, int(own.tensor))[: 2 + tensor]
        mesh = gpu_mesh(used, names[: len(used)])
        model = Model(sizes, remat_layer=True, sequence=tensor, tensor=tensor)
        lettered = model.by_letters(f"Et*{self.layers}L")
        sharding = jp.Sharding(data="data", fsdp="data", specs=layered_specs() if tensor else None)
        shapes = jax.eval_shape(layered, parameters(sizes, 1))
        costs = jp.measure(
            lettered,
            shapes,
            batch(replace(sizes, rows=self.fsdp), 1),
            mesh=gpu_mesh((1, *used[1:]), names[: len(used)]),
            sharding=sharding,
            peak=jp.measuring.Peak(flops=H100, bandwidth=3e12),
        )
        assert isinstance(costs, dict)
        sharding = replace(sharding, max_active=plan.max_active)
        pipe = jp.Pipeline(lettered, plan.schedule, mesh, layout=plan.layout, sharding=sharding)
        split = NamedSharding(mesh, PartitionSpec("data"))
        rows = batch(replace(sizes, rows=self.fsdp), self.microbatches, split)
        return pipe, pipe.place(shapes), rows, costs

    def rows(self) -> Iterator[Row]:
        """All stages of a device whole at once, and fewer of them."""
        once = self.plan(SCHEDULES[0], None)
        turns = (None, *range(1, min(4, self.chunks)))
        for schedule, most in product(SCHEDULES, turns):
            plan = self.plan(schedule, most)
            parts, table = plan.parts, plan.timeline.schedule
            gathers = sum(action.kind is jp.Kind.U for _, _, action in table.actions())
            own = parts.parameters + parts.gradients + parts.accumulators
            other = parts.total - own - parts.optimizer - parts.gathered
            sizes = (parts.optimizer, own, parts.gathered, other, parts.total)
            yield (
                self.name,
                f"{self.pipe} x {self.fsdp} x {self.model.tensor:g}",
                f"{schedule}, V {self.chunks}, M {self.microbatches}",
                self.remat or "-",
                "once" if most is None else str(most),
                f"{gathers / self.pipe:g}" if gathers else str(self.chunks),
                *(f"{size / GIB:.1f}" for size in sizes),
                f"{plan.seconds:.2f}",
                f"{plan.seconds / once.seconds:.3f}",
            )


def _llama(width: int, ffn: int, kv_share: float, tensor: int) -> Transformer:
    return Transformer(
        width=width,
        ffn=ffn,
        kv_share=kv_share,
        vocab=128256,
        context=8192,
        gated=True,
        tensor=tensor,
        sequence=tensor > 1,
        loss_tokens=1024,
        flops=H100,
        bandwidth=NETWORK,
        tensor_bandwidth=HOST,
    )


# Attention has 187 million weights a layer, by its compressed queries, keys and values.
_V3 = Transformer(
    width=7168,
    ffn=2048,
    shared=2048,
    experts=256,
    chosen=8,
    capacity=1.25,
    expert_devices=64,
    q_share=12288 / 7168,
    kv_share=768 / 7168,
    vocab=129280,
    context=4096,
    loss_tokens=512,
    flops=H100,
    bandwidth=NETWORK,
    tensor_bandwidth=NETWORK,
)
LAYER = "nothing_saveable"  # each layer keeps its input alone
CASES = {
    # Devices of a layer are on one host, replicas on several.
    "405b": Case(
        "Llama 3 405B", _llama(16384, 53248, 1 / 16, 8), 126, 16, 8, NETWORK, 4, 32, remat=LAYER
    ),
    "v3": Case("DeepSeek-V3", _V3, 61, 16, 64, NETWORK, 2, 64, remat=LAYER, mixture="v3"),
    # Replicas are on one host.
    "70b": Case("Llama 3 70B", _llama(8192, 28672, 1 / 8, 1), 80, 8, 8, HOST, 5, 16, remat=LAYER),
}

COLUMNS = (
    "model  P x fsdp x T  table  remat  max_active  gathers  Adam  parts  whole  other  GiB  "
    "seconds  vs once"
)
NOTES = (
    f"vs once: seconds over those of {SCHEDULES[0]} with all stages gathered once.",
    "max_active: stages of a device that are whole at a time; once: all of its V stages, gathered "
    "before the first action and reduced after the last one.",
    "gathers: of a device, in a step.  GiB of a device; Adam: its state with a master copy, which "
    "is no part of a step without the optimizer.",
    "parts: of parameters and gradients, and of the accumulators of reductions.  whole: parameters "
    "and gradients of the stages that are whole, and of",
    "embedding and head, which are gathered once.  other: activations, the batch, work space.",
    "seconds: of the lowered program, with what gathers and reductions delay its table.  They are "
    "beside actions on a link of their own, at",
    f"{HOST:.0e} bytes a second within a host and {NETWORK:.0e} between hosts; once, beside none.  "
    "Matmuls are at 60 % of the data sheet's peak.",
    "Experts are not gathered; where stages take turns, a room has a copy of a stage's own ones.",
)


COMPILED = "model  P x fsdp x T  table  max_active  temp  XLA  predicted  planned  compile"
COMPILED_NOTES = (
    "GiB of a device without an optimizer.  XLA: arguments, results and temp of the compiled step; "
    "predicted: `jaxpipe.inspect.memory`; planned: of the planner,",
    "from sizes of layers that are compiled alone.",
    "compile: seconds, on a loaded machine.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.add_argument(
        "--compile", nargs="+", default=[], metavar="NAME:MOST", help="as in 70b:2, 70b:once"
    )
    parser.option("--cases", tuple(CASES), "NAME", f"of {', '.join(CASES)}", choices=tuple(CASES))
    args = parser.parse_args(argv)
    rows = [row for name in args.cases for row in CASES[name].rows()]
    title = "Gathering stages in turn, against gathering all of them once a step"
    results = [Result(title, describe(), COLUMNS, rows, NOTES)]
    if args.compile:
        require_gpu_compiler(parser)
        pairs = (text.split(":") for text in args.compile)
        found = told(CASES[k].compiled(None if n == "once" else int(n)) for k, n in pairs)
        title = "Steps compiled for described H100s"
        results.append(Result(title, describe(), COMPILED, found, COMPILED_NOTES))
    write_all(results, args.output)


if __name__ == "__main__":
    main()
