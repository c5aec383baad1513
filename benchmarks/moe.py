"""The programs of published mixtures of experts, compiled for described H100s, and the tokens/s
that a roofline predicts, beside published figures.

    JAX_PLATFORMS=cpu python -m benchmarks.moe -o benchmarks/results/moe.txt
    JAX_PLATFORMS=cpu python -m benchmarks.moe --cases v3 v3-exchanged 67b-exchanged
        -o benchmarks/results/moe_exchanged.txt

Nothing runs on a device: XLA compiles the program of one of `pipe x expert x data` GPUs, and the
prediction is arithmetic on the table.  Sources:

    67B-A2B     marin-community/marin 7024: 64 H100s, PP 8 x EP 8, DualPipe-V, M = 32, 256 rows of
                8,192 tokens, everything recomputed: 603,327 tokens/s, 19.46 % MFU, 59.2 GB a device
    DeepSeek-V3 DeepSeek-AI 2024 (arXiv 2412.19437): 2,048 H800s, PP 16 x EP 64, DualPipe; 14.8T
                tokens in 2.664M GPU hours (table 1), so 1,543 tokens/s a GPU
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.moves import large_moves
from benchmarks.output import Command, Result, write_all
from jaxpipe.inspect.hlo import Compute
from jaxpipe.inspect.programs import GpuProgram, compile_and_read
from jaxpipe.inspect.step_report import host_waits
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from llama_parts.model import Attention, Remat
from moe_parts.model import MoE
from moe_parts.sizes import PUBLISHED

PEAK = 989e12  # of an H100 in bfloat16, by the data sheet
SHARE = 0.5  # of it, that matmuls and attention reach: assumed
NVLINK, NETWORK = (
    300e9,
    40e9,
)  # bytes a second of a GPU, each way, that an all-to-all reaches: assumed
NODE = 8  # GPUs that NVLink joins
GIB = 2**30
_PAIR = re.compile(r"F\.\d+ with [BW]\.\d+/")  # the scope of a pair's code


@dataclass(frozen=True)
class Case:
    """A published run; `rows` of a microbatch on each device."""

    name: str
    model: str
    pipe: int
    expert: int
    data: int
    microbatches: int
    context: int
    remat: Remat
    layout: str
    published: str
    params: Any = jnp.float32
    schedule: str = "dualpipev"
    merged: bool = False  # each W at its I
    rows: int = 1
    capacity: float = 1.25
    loss_tokens: int = 512
    fsdp: str | None = None
    max_active: int | None = None  # stages whose parameters are whole at a time
    attention: Attention = Attention.BLOCKS

    @property
    def sizes(self) -> Any:
        """Without the layer that predicts one more token."""
        return dataclasses.replace(PUBLISHED[self.model], predict=0)

    def table(self) -> jp.Schedule:
        """The schedule's table."""
        table = jp.schedules.build(self.schedule, devices=self.pipe, microbatches=self.microbatches)
        return jp.merge_backward(table, delayed=True) if self.merged else table

    @property
    def label(self) -> str:
        """The schedule's name; "B": without a W of its own."""
        return f"{self.schedule} B" if self.merged else self.schedule

    @property
    def stages(self) -> tuple[str, ...]:
        """The letters of each stage."""
        letters = "".join(sorted({*self.sizes.letters()}))
        return jp.parse_layout(self.layout, devices=self.pipe, letters=letters).stages

    def arguments(
        self, described: Callable[..., Any], executor: Any = None
    ) -> tuple[jp.Pipeline, Any, Any]:
        """The pipeline, its parameters and a batch as shapes; `described` makes its mesh."""
        shape = {"pipe": self.pipe, "expert": self.expert, "data": self.data}
        shape = {name: size for name, size in shape.items() if size > 1 or name != "data"}
        mesh = described(tuple(shape.values()), tuple(shape))
        model = self.model_of(self.sizes)
        data = tuple(name for name in ("data", "expert") if name in shape)
        pipe = jp.Pipeline(
            model.pipeline_model(self.sizes.letters()),
            self.table(),
            mesh,
            layout=jp.parse_layout(
                self.layout,
                devices=self.pipe,
                letters="".join(sorted({*self.sizes.letters()})),
            ),
            sharding=jp.Sharding(
                data=data,
                local="expert",
                fsdp=self.fsdp,
                specs=model.specs(),
                max_active=self.max_active,
            ),
            memory=jp.Memory(remat="full" if self.remat is Remat.STAGE else None),
            executor=executor,
        )
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, self.params), model.shapes())
        params = pipe.place(shapes)
        count = self.microbatches * self.rows * self.expert * self.data
        return pipe, params, self.batch(count, NamedSharding(mesh, PartitionSpec(data)))

    def model_of(self, sizes: Any) -> MoE:
        """The model of these sizes, with experts on the devices of their axis."""
        return MoE(
            sizes,
            jnp.bfloat16,
            self.remat,
            self.attention,
            self.loss_tokens,
            expert="expert",
            capacity=self.capacity,
        )

    def batch(self, rows: int, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch as shapes."""
        return {
            name: jax.ShapeDtypeStruct((rows, self.context), dtype, sharding=sharding)
            for name, dtype in (("tokens", "int32"), ("targets", "int32"), ("weights", "float32"))
        }

    def program(self) -> tuple[GpuProgram, dict[str, float]]:
        """The compiled step, and seconds to trace and to compile it and bytes of Adam's moments."""
        pipe, params, batch = self.arguments(gpu_mesh)
        begin = time.perf_counter()
        lowered = pipe.lower(params, batch)
        traced = time.perf_counter()
        found = compile_and_read(lowered)
        done = time.perf_counter()
        held = sum(
            4 * leaf.sharding.shard_shape(leaf.shape)[0] * _rest(leaf)
            for leaf in jax.tree.leaves(params)
        )
        return found, {"trace": traced - begin, "compile": done - traced, "moments": 2 * held}

    def compiled(self) -> tuple[tuple[str, ...], float]:
        """A line of the first table, and the share of all-to-alls of a pair that matmuls hide."""
        found, other = self.program()
        memory, table = found.memory, self.table()
        waits = host_waits(found, table)
        sent = [each for each in found.collectives if each.kind == "all-to-all"]
        pairs = [each for each in sent if _PAIR.search(each.start.attributes)]
        beside = sum(each.compute is Compute.MATMUL for each in pairs)
        moved = sum(m.nbytes_a_step for m in large_moves(found.module) if m.place.in_loop)
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
        total = found.total_bytes + other["moments"]
        line = (
            self.name,
            self.label,
            f"{self.pipe} x {self.expert} x {self.data}",
            str(self.microbatches),
            self.remat.value,
            self.fsdp or "-",
            f"{kept / 1e9:.1f}",
            f"{memory.temp_size_in_bytes / 1e9:.1f}",
            f"{other['moments'] / 1e9:.1f}",
            f"{total / 1e9:.1f}",
            "59.2" if self.model == "67b-a2b" else "",
            f"{waits:.0f}",
            f"{moved / GIB:.1f}",
            f"{beside}/{len(pairs)}",
            f"{other['trace']:.0f}",
            f"{other['compile']:.0f}",
        )
        return line, beside / max(1, len(pairs))

    def predicted(self, hidden: float) -> tuple[str, ...]:
        """A line of the second table; `hidden`: the share of a pair's sends beside matmuls."""
        sizes, tokens = self.sizes, self.rows * self.context
        flops = sizes.flops(self.context / 2)  # of attention a token sees half of the row
        again = 1 if self.remat is not Remat.NONE else 0
        each = tokens / (3 * PEAK * SHARE)
        compute = [sum(flops[x] for x in stage) * each for stage in self.stages]
        one = 2 * tokens * sizes.routing.chosen * self.capacity * sizes.width
        far = max(0, self.expert - NODE) / self.expert
        near = (min(self.expert, NODE) - 1) / self.expert
        send = max(one * far / NETWORK, one * near / NVLINK)
        there = [2 * send * stage.count("t") for stage in self.stages]
        # forward, and backward with what it computes and sends again
        back = 1 + again * (self.remat is not Remat.EXCHANGED)
        work = [(c, (2 + again) * c) for c in compute]
        wait = [(t, back * t) for t in there]
        # a device's stages are s and, in DualPipe-V, S - 1 - s: each forward's partner is the
        # backward of the other
        vee = self.schedule == "dualpipev"
        pair = [
            max(f + b, hidden * (x + y)) + (1 - hidden) * (x + y)
            for (f, _), (_, b), (x, _), (_, y) in zip(
                work, work[::-1] if vee else work, wait, wait[::-1] if vee else wait, strict=True
            )
        ]
        transfer = 2 * tokens * sizes.width / NETWORK

        def seconds(overlap: list[float] | None) -> float:
            # W sends nothing; what is computed again is in I
            i_and_w = [(b - f + y, f) for (f, b), (_, y) in zip(work, wait, strict=True)]
            costs = jp.Costs(
                forward=[f + x for (f, _), (x, _) in zip(work, wait, strict=True)],
                input_grad=[i for i, _ in i_and_w],
                weight_grad=[w for _, w in i_and_w],
                overlap=overlap,
                transfer=transfer,
            )
            return float(jp.simulate(self.table(), costs).makespan)

        makespan = seconds(pair)
        whole = self.microbatches * tokens * self.expert * self.data
        devices = self.pipe * self.expert * self.data
        speed = whole / makespan
        every = sum(sizes.flops(self.context)[x] for x in sizes.letters())
        return (
            self.name,
            self.label,
            str(devices),
            f"{sum(compute) / len(compute) * 1e3:.1f}",
            f"{sum(there) / len(there) * 1e3:.1f}",
            f"{makespan:.2f}",
            f"{seconds(None):.2f}",
            f"{speed:,.0f}",
            f"{speed / devices:,.0f}",
            f"{every * speed / devices / PEAK:.1%}",
            self.published,
        )


def _rest(leaf: Any) -> int:
    """Numbers of a device's part of an array, a unit of its first dim."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    found = 1
    for size in shape[1:]:
        found *= size
    return found


def _deepseek(
    name: str, data: int, schedule: str = "1f1b_overlap", *, merged: bool = False
) -> Case:
    layout = "Eddd|" + "t" * 4 + "|" + "tttt|" * 12 + "tttt|ttL"
    if schedule == "dualpipev":
        layout = "Ed|dd|" + "tt|" * 28 + "t|tL"
    case = Case(name, "deepseek-v3", 16, 64, data, 120, 4096, Remat.LAYER, layout, "1,543 a GPU")
    return dataclasses.replace(case, schedule=schedule, fsdp="expert", merged=merged)


def _marin(name: str, remat: Remat) -> Case:
    layout = "Et|" + "tt|" * 11 + "t|" * 3 + "L"
    published = "603,327 (9,427 a GPU), MFU 19.5 %"
    return Case(name, "67b-a2b", 8, 8, 1, 32, 8192, remat, layout, published, params=jnp.bfloat16)


CASES = {
    "67b": _marin("67B-A2B", Remat.LAYER),
    "67b-exchanged": _marin("67B-A2B", Remat.EXCHANGED),
    "v3-dualpipev": _deepseek("DeepSeek-V3", 1, "dualpipev"),
    "v3-merged": _deepseek("DeepSeek-V3", 1, "dualpipev", merged=True),
    "v3": _deepseek("DeepSeek-V3", 1),
    "v3-exchanged": dataclasses.replace(_deepseek("DeepSeek-V3", 1), remat=Remat.EXCHANGED),
    "v3-merged-data": _deepseek("DeepSeek-V3", 2, "dualpipev", merged=True),
}
DEFAULT = ("67b", "v3-merged", "v3-merged-data", "v3")  # of moe.txt
COMPILED = (
    "run  schedule  pipe x expert x data  M  remat  fsdp  arguments  temp  moments  total  "
    "published  host waits  GiB moved  beside  trace  compile"
)
PREDICTED = (
    "run  schedule  GPUs  F ms  sends ms  step s  exposed s  tokens/s  a GPU  MFU  "
    "published tokens/s"
)
NOTES = (
    (
        "GB of one device: arguments and results of value_and_grad (parameters, gradients in "
        "float32, batch), its temp, and Adam's two moments in float32,",
        "which the step of an optimizer adds.  Parameters are bfloat16 in 67B-A2B, as published, "
        "else float32.  Attention by blocks of 512 queries; capacity 1.25.",
        "host waits: at most, a step; GiB moved: by large copies in loops, if every predicate is "
        "taken; beside: all-to-alls of pairs next to a matmul.",
        "trace, compile: seconds of the wall clock on a loaded machine.  DeepSeek-V3 without its "
        "layer for one more token.  B: each W at its I.",
        "The moves of a step would take GiB moved / 3,120 seconds at the data sheet's memory "
        "bandwidth, if all predicates were taken: no prediction has that.",
    ),
    (
        "Written down before anyone ran it.  F, sends: of an average stage and microbatch.  "
        f"Matmuls and attention at {SHARE:.0%} of the peak of {PEAK / 1e12:.0f} TFLOP/s; an "
        f"all-to-all at {NVLINK / 1e9:.0f} GB/s",
        f"within a node of {NODE}, and {NETWORK / 1e9:.0f} GB/s for what leaves it; tokens are "
        "sent once for each expert (not once for each node), in bfloat16.  In a pair, the share "
        "`beside` of the sends",
        "is hidden as far as there is compute.  step: the makespan of the table with these costs; "
        "exposed: the same where nothing is hidden.  MFU: of active parameters, attention to the "
        "whole row.",
        "Left out: the reduction of gradients, gathers of fsdp, the optimizer's step, router, "
        "sorts and gathers of rows, norms, host waits, uneven loads beyond the capacity, "
        "contention of permutes and all-to-alls.",
    ),
)
TITLES = (
    "Steps of published mixtures of experts, compiled for described H100s",
    "Tokens/s by a roofline and the table's makespan: a prediction",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=DEFAULT)
    parser.add_argument(
        "--hidden", type=float, help="predict alone, with this share of the sends beside matmuls"
    )
    args = parser.parse_args(argv)
    machine, cases = describe(), [CASES[name] for name in args.cases]
    if args.hidden is not None:
        rows = [case.predicted(args.hidden) for case in cases]
        Result(TITLES[1], machine, PREDICTED, rows, NOTES[1]).write(args.output)
        return
    require_gpu_compiler(parser)
    lines, predictions = [], []
    for case in cases:
        line, hidden = case.compiled()
        print(*line, flush=True)
        lines.append(line)
        predictions.append(case.predicted(hidden))
    tables = zip(TITLES, (COMPILED, PREDICTED), (lines, predictions), NOTES, strict=True)
    write_all([Result(title, machine, *rest) for title, *rest in tables], args.output)


if __name__ == "__main__":
    main()
