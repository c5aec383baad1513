"""Head and embedding spread over the pipeline against those of one device each: memory of GPU
programs, and the simulated step.

    JAX_PLATFORMS=cpu python -m benchmarks.spread_head -o benchmarks/results/spread_head.txt
    JAX_PLATFORMS=cpu python -m benchmarks.spread_head --devices 64 --microbatches 128 --schedules
                             1f1b --ends NOTHING HEAD BOTH TIED -o
                             benchmarks/results/spread_head_64.txt
    JAX_PLATFORMS=cpu python -m benchmarks.spread_head --schedules 1f1b --ends WHOLE_BACKWARDS
                             DEFERRED -o benchmarks/results/deferred_head.txt

Steps of models of published shapes are compiled for H100s that are only described (nothing is run,
no GPU is needed), and their memory is read.  The simulated step takes floating point operations as
its costs.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.llama import Model, Shape, batch, parameters
from benchmarks.machine import describe
from benchmarks.output import Command, Result, told
from jaxpipe.inspect.programs import GpuProgram, compile_and_read, most_waits
from jaxpipe.lowering.plan import plan_of
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

GIB = 2**30
# Llama 3: Llama team 2024, "The Llama 3 Herd of Models", table 3.  Gemma's vocabulary and width:
# Gemma team 2024, table 1 (2B), with attention heads and layers that divide.
MODELS = {
    "Llama 3 8B": Shape(
        width=4096, heads=32, kv_heads=8, head_dim=128, hidden=14336, vocab=128256, layers=32
    ),
    "Llama 3 70B": Shape(),
    "Gemma 2B": Shape(
        width=2048, heads=8, kv_heads=1, head_dim=256, hidden=16384, vocab=256000, layers=16
    ),
}


class Ends(enum.Enum):
    """What is spread, in words."""

    NOTHING = "last device"
    HEAD = "spread"
    WHOLE_BACKWARDS = "spread, B whole"
    DEFERRED = "spread, B whole, H"
    BOTH = "spread, embedding too"
    TIED = "one table, spread"


@dataclass(frozen=True)
class Case:
    """A model, a schedule, and what is spread."""

    model: str
    schedule: str
    ends: Ends
    devices: int
    microbatches: int
    tokens: int
    block: int

    @property
    def shape(self) -> Shape:
        """Of the model, with microbatches of one row; at least a layer a device, and as many on
        each.
        """
        shape = MODELS[self.model]
        return dataclasses.replace(
            shape,
            time=self.tokens,
            block=self.block,
            layers=-(-shape.layers // self.devices) * self.devices,
        )

    @property
    def spread(self) -> bool:
        """Whether the head is."""
        return self.ends is not Ends.NOTHING

    def table(self) -> jp.Schedule:
        """The schedule, with the costs of the model."""
        plain = jp.schedules.build(
            self.schedule, devices=self.devices, microbatches=self.microbatches
        )
        if not self.spread:
            return plain
        costs = self.costs(plain.num_stages)
        table = jp.spread_last(
            plain,
            costs=costs,
            split=False if self.ends in (Ends.WHOLE_BACKWARDS, Ends.DEFERRED) else None,
        )
        if self.ends is Ends.DEFERRED:
            return jp.defer_last(table, costs=costs)
        return jp.spread_first(table, costs=costs) if self.ends in (Ends.BOTH, Ends.TIED) else table

    @property
    def repeats_another(self) -> bool:
        """Whether backwards are whole in the table of a spread head already."""
        whole = self.ends is Ends.WHOLE_BACKWARDS
        return whole and self.table() == dataclasses.replace(self, ends=Ends.HEAD).table()

    def costs(self, stages: int, *, head: bool = True) -> jp.Costs:
        """Operations of a token, in units of a stage's forward; without `spread` the head and its
        gradient run with the last stage's F.
        """
        layer, logits = _operations(self.shape)
        share = 3 * logits / (layer * self.shape.layers / stages) if head else 0.0
        forward = [1.0] * (stages - 1) + [1.0 if self.spread else 1.0 + share]
        return jp.Costs(
            forward=forward,
            input_grad=1.0,
            weight_grad=1.0,
            last=share / self.devices,
            first=0.0,
            first_grad=0.0,
        )

    @property
    def bytes_of_ends(self) -> float:
        """Parameters in bfloat16 and gradients in float32 of embedding and head, on one device."""
        tables = {Ends.NOTHING: 2.0, Ends.BOTH: 2 / self.devices, Ends.TIED: 1 / self.devices}
        return (
            tables.get(self.ends, 1 + 1 / self.devices)
            * self.shape.vocab
            * self.shape.width
            * (2 + 4)
        )

    def makespan(self, *, head: bool = True) -> float:
        """The simulated step."""
        table = (
            self.table()
            if head
            else jp.schedules.build(
                self.schedule, devices=self.devices, microbatches=self.microbatches
            )
        )
        return float(jp.simulate(table, self.costs(table.num_stages, head=head)).makespan)

    def program(self) -> GpuProgram:
        """Compiled for described GPUs."""
        shape, table = self.shape, self.table()
        mesh = gpu_mesh((self.devices,), ("pipe",))
        model = Model(shape, remat_layer=True, tensor=False)
        first, last = model.first, model.last
        whole = parameters(shape, table.num_stages)
        if self.spread:
            last = jp.spread(_spread_head, dims={"norm": None, "head": 0})
            whole["last"]["head"] = jax.ShapeDtypeStruct((shape.vocab, shape.width), jnp.bfloat16)
        if self.ends is Ends.BOTH:
            first = jp.spread(_spread_embedding)
        if self.ends is Ends.TIED:
            first, last = jp.spread(_tied_embedding), jp.spread(_tied_head, dims=None)
            whole |= {"first": {}, "shared": {"table": whole["last"].pop("head")}}
        pipe = jp.Pipeline(jp.Model(model.stage, first=first, last=last), table, mesh)
        rows = NamedSharding(mesh, PartitionSpec())
        return compile_and_read(
            pipe.lower(pipe.place(whole), batch(shape, self.microbatches, rows)),
            pipe.compiler_options,
        )


def _spread_embedding(params: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
    """The embedding of `benchmarks.llama`, a share of it."""
    return jp.VocabEmbedding()(params, microbatch, ctx=ctx).astype(jnp.bfloat16)


def _tied_embedding(params: Any, microbatch: Any, *, ctx: jp.Context, shared: Any) -> Any:
    """The same of a table that the head has too."""
    return jp.VocabEmbedding()(params, microbatch, ctx=ctx, shared=shared).astype(jnp.bfloat16)


def _tied_head(params: Any, x: Any, microbatch: Any, *, ctx: jp.Context, shared: Any) -> Any:
    """The head with that table."""
    from benchmarks.llama import _norm

    return jp.VocabHead()({}, _norm(params["norm"], x), microbatch, ctx=ctx, shared=shared)


def _spread_head(params: Any, x: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
    """The head of `benchmarks.llama`, a share of it."""
    from benchmarks.llama import _norm

    sizes = ctx.sizes["head"]
    head = jp.VocabHead()
    return head(params["head"], _norm(params["norm"], x), microbatch, ctx=ctx._replace(sizes=sizes))


def _operations(shape: Shape) -> tuple[float, float]:
    """Multiply-adds of a token in a layer's forward, and in that of the logits."""
    attention = (
        2 * shape.width * shape.head_dim * (shape.heads + shape.kv_heads)
        + shape.heads * shape.head_dim * shape.time
    )
    return attention + 3 * shape.width * shape.hidden, float(shape.width * shape.vocab)


COLUMNS = (
    "model  schedule  head  parameters  gradients  ends  temp  total  step  "
    "step without head  more  asked  waits  CPU s"
)
NOTES = (
    "parameters, gradients, temp, total: GiB of one device (of the program, so of the device "
    "with most; parameters in bfloat16,",
    "gradients in float32, every layer keeps its input alone).  Without optimizer state: Adam's "
    "moments are twice the gradients.",
    "step: simulated, in forwards of a stage, with floating point operations as costs and free "
    "transfers; head: F and B of the logits.",
    "step without head: of the same schedule, of a model that ends with the last layer.  more: "
    "step over that.",
    "asked: predicates around what all devices do together, a step.  waits: how often a device's "
    "host waits in a step at most (loops over",
    "queries keep blocks out of CUDA graphs, with or without a spread head).  one table: of a "
    "model whose embedding is its head.",
    "B whole, H: the weight gradient of a share as an action of its own where a device waits, "
    "one microbatch of it left to do at most.",
    "ends: of the parameters and gradients, those of embedding and head.  Models have at least a "
    "layer a device and as many on each: of",
    "Llama 3 8B 64 layers on 64 devices, of 70B 128, of Gemma 2B 64.",
)


def line(case: Case) -> tuple[str, ...]:
    """A line of the table."""
    jax.clear_caches()  # what was traced and compiled for the case before
    begin = time.process_time()
    program, rows = case.program(), case.table().rows
    ends, plan = case.bytes_of_ends, plan_of(case.table())
    asked = sum(segment.num_collective_predicates for segment in plan.segments)
    memory, waits = program.memory, most_waits(program.predicates, max(map(len, rows)))
    step, bare = case.makespan(), case.makespan(head=False)
    return (
        case.model,
        case.schedule,
        case.ends.value,
        *(
            f"{number / GIB:.2f}"
            for number in (
                memory.argument_size_in_bytes,
                memory.output_size_in_bytes,
                ends,
                memory.temp_size_in_bytes,
                program.total_bytes,
            )
        ),
        f"{step:.1f}",
        f"{bare:.1f}",
        f"{step / bare - 1:+.1%}",
        f"{asked}",
        f"{waits:.0f}",
        f"{time.process_time() - begin:.0f}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--models", list(MODELS), "NAME", choices=list(MODELS))
    parser.option("--schedules", ["1f1b", "zb_h1"], "NAME")
    parser.option("--devices", 8, "P")
    parser.option("--microbatches", 32, "M")
    parser.option("--tokens", 4096, "T", "of a microbatch")
    parser.option("--block", 512, "B", "queries whose scores are there at a time; 0 for all (512)")
    parser.option(
        "--ends",
        [e.name for e in Ends if e is not Ends.DEFERRED],
        "WHAT",
        choices=[e.name for e in Ends],
    )
    args = parser.parse_args(argv)
    require_gpu_compiler(parser)
    sizes = (args.devices, args.microbatches, args.tokens, args.block)
    of = product(args.models, args.schedules, (Ends[name] for name in args.ends))
    cases = [Case(*what, *sizes) for what in of]
    rows = told(line(case) for case in cases if not case.repeats_another)
    scores = f"of {args.block} queries at a time" if args.block else "whole"
    title = (
        "Head and embedding of one device each, and spread: "
        f"{args.devices} described H100s, M = {args.microbatches}, {args.tokens} tokens a "
        f"microbatch, attention scores {scores}"
    )
    Result(title, describe(), COLUMNS, rows, NOTES).write(args.output)


if __name__ == "__main__":
    main()
