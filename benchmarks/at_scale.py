"""Plans for published runs, from their published sizes, beside what was published; and how long the
largest tables take.

    python -m benchmarks.at_scale -o benchmarks/results/at_scale.txt
    python -m benchmarks.at_scale --only-tables --tables interleaved_zb:4 zbv:2 -o
    benchmarks/results/large_tables.txt

Nothing runs on a device.  Sources:

    ZB          Qi et al. 2023 (arXiv 2401.10241): tables 3 (sizes) and 5 (bubble rates), and the
    profiled times that those are for Megatron    Narayanan et al. 2021 (arXiv 2104.04473): table 1,
    section 5.3.2, figure 12 Llama 3     Llama team 2024 (arXiv 2407.21783): tables 3 and 4
    DeepSeek-V3 DeepSeek-AI 2024 (arXiv 2412.19437): section 3.2.1, table 2; the same formulas are
    in the README of deepseek-ai/DualPipe

The zero-bubble paper's layers are k P - 2, so that the first and the last device have room for the
embedding and the head (README of sail-sg/zero-bubble-pipeline-parallelism); its times and its
bubble rates belong together, since simulation gets the one from the other to four digits.
Megatron's 1T run: 502 petaFLOP/s on 3,072 A100s, 52 % of the peak (abstract).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result, write_all
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.target import Target
from jaxpipe.planner.candidate import PipelinePlan, gib
from jaxpipe.planner.layer_cost import Ends
from jaxpipe.planner.transformer import Transformer

Row = tuple[str, ...]


@dataclass(frozen=True)
class Profiled:
    """One model of the zero-bubble paper: times of a microbatch in milliseconds, and the bubble
    rates given for the fewest microbatches.
    """

    name: str
    devices: int
    microbatches: int
    forward: float
    input_grad: float
    weight_grad: float
    transfer: float
    published: dict[str, float]

    def rows(self) -> Iterator[Row]:
        """Simulated and published bubble rates: the share of the makespan in which a device does
        not compute.
        """
        busy = self.microbatches * (self.forward + self.input_grad + self.weight_grad)
        costs = jp.Costs(
            forward=self.forward,
            input_grad=self.input_grad,
            weight_grad=self.weight_grad,
            transfer=self.transfer,
        )
        for name, rate in self.published.items():
            table = jp.schedules.build(name, devices=self.devices, microbatches=self.microbatches)
            found = 1 - busy / jp.simulate(table, costs).makespan
            yield (
                self.name,
                str(self.devices),
                str(self.microbatches),
                name,
                f"{found:.4f}",
                f"{rate:.4f}",
                f"{found - rate:+.4f}",
            )


ZERO_BUBBLE = (
    Profiled(
        "ZB 1.5B",
        8,
        24,
        18.522,
        18.086,
        9.337,
        0.601,
        {"1f1b": 0.2431, "zb_h1": 0.1585, "zb_h2": 0.1083},
    ),
    Profiled("ZB 6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, {"1f1b": 0.2347, "zb_h1": 0.1323}),
    Profiled("ZB 14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, {"1f1b": 0.2552, "zb_h1": 0.1397}),
    Profiled("ZB 28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, {"1f1b": 0.2646, "zb_h1": 0.1421}),
)


@dataclass(frozen=True)
class Choice:
    """What `plan` may choose among."""

    schedules: tuple[str, ...]
    chunks: tuple[int, ...]
    remat: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Run:
    """A published run: the model's sizes, its mesh, and the choice that was published."""

    name: str
    model: Transformer
    layers: int
    devices: int
    microbatches: int
    chosen: Choice
    free: Choice
    published: str
    memory: float = 80e9

    def rows(self) -> Iterator[Row]:
        """The published choice, and the best plan among more; where there is no room, what it
        lacks.
        """
        first = self._best(self.chosen, None, published=True)
        yield self._row("published", first, first, self.published)
        try:
            yield self._row("best", self._best(self.free, self.memory), first, "")
        except jp.PlanError as error:
            yield (self.name, "", "", "best", str(error)[:60], *("",) * 6)

    def _best(
        self, choice: Choice, memory: float | None, *, published: bool = False
    ) -> PipelinePlan:
        """The fastest; what was published has each end on one device, and nothing on the host."""
        costs = self.model.costs()
        if published:
            costs = {letter: replace(cost, ends=Ends.ONE) for letter, cost in costs.items()}
        plans = jp.plan(
            f"Et*{self.layers},L",
            costs,
            devices=self.devices,
            microbatches=self.microbatches,
            transfer=self.model.transfer,
            schedules=choice.schedules,
            chunks=choice.chunks,
            remat=choice.remat,
            offload=(None,) if published else (None, "residuals"),
            memory=memory,
            most=1,
            mesh=Target(communicates=self.model.tensor > 1),
        )
        return plans.best

    def _row(self, what: str, plan: PipelinePlan, first: PipelinePlan, published: str) -> Row:
        stages = plan.layout.replace(" ", "")
        ends = f"{stages[:18]}...{stages[-12:]}" if len(stages) > 34 else stages
        speed = f"{first.seconds / plan.seconds:.3f}"
        size = f"{self.devices} x {self.model.tensor:g}"
        bubble, program = (
            f"{plan.timeline.bubble:.1%}",
            f"{plan.seconds / plan.timeline.makespan:.3f}",
        )
        return (
            self.name,
            size,
            str(self.microbatches),
            what,
            plan.label,
            ends,
            bubble,
            program,
            speed,
            gib(max(plan.memory)),
            published,
        )


# of the data sheets' peak of dense bf16: what large matmuls reach
A100, H100 = 312e12 * 0.6, 989e12 * 0.6
ONE_STAGE = ("1f1b", "zb_h1", "zb_h2")
EVERY = (*ONE_STAGE, "interleaved_1f1b", "zbv")


def _zb(
    name: str, width: int, layers: int, rows: int, devices: int, microbatches: int, published: str
) -> Run:
    """Section 5.1: GPT-3-like models on A100s of 80 GB, sequences of 1,024; the vocabulary is
    GPT-2's.
    """
    model = Transformer(
        width=width, vocab=50304, context=1024, rows=rows, flops=A100, bandwidth=1e10
    )
    chosen = Choice(("1f1b",), (1,))
    return Run(name, model, layers, devices, microbatches, chosen, Choice(EVERY, (1, 2)), published)


def _gpt3(microbatches: int) -> Run:
    """Figure 12: GPT-3 175B on 96 A100s, 8 tensor x 12 pipe; each layer is recomputed."""
    model = Transformer(
        width=12288, vocab=51200, context=2048, tensor=8, flops=A100, bandwidth=2.5e10
    )
    chosen, free = (
        Choice(("1f1b",), (1,), ("full",)),
        Choice(("interleaved_1f1b",), (2, 4), ("full",)),
    )
    return Run("Megatron 175B", model, 96, 12, microbatches, chosen, free, "see below")


def _llama(data: int, chunks: int) -> Run:
    """Table 4: 16M tokens a step in sequences of 8,192, 8 tensor x 16 pipe x `data`; nothing is
    recomputed (section 3.3.2).
    """
    model = Transformer(
        width=16384,
        vocab=128256,
        context=8192,
        ffn=53248,
        gated=True,
        kv_share=1 / 16,
        tensor=8,
        shards=data,
        flops=H100,
        bandwidth=5e10,
    )
    microbatches = 2048 // data
    chosen = Choice(("interleaved_1f1b",), (chunks,))
    free = Choice(EVERY, (1, 2, 4), (None, "full"))
    rate = {64: "430", 128: "400"}[data]
    return Run(
        f"Llama 3 405B, data {data}", model, 126, 16, microbatches, chosen, free, f"{rate} TFLOP/s"
    )


RUNS: dict[str, Callable[[], Run]] = {
    "zb-1.5": partial(_zb, "ZB 1.5B", 2304, 22, 6, 8, 24, "bubble 24.3 %"),
    "zb-6.2": partial(_zb, "ZB 6.2B", 4096, 30, 3, 8, 24, "bubble 23.5 %"),
    "zb-14.6": partial(_zb, "ZB 14.6B", 5120, 46, 1, 16, 48, "bubble 25.5 %"),
    "zb-28.3": partial(_zb, "ZB 28.3B", 6144, 62, 1, 32, 96, "bubble 26.5 %"),
    "gpt3-12": partial(_gpt3, 12),
    "gpt3-24": partial(_gpt3, 24),
    "gpt3-60": partial(_gpt3, 60),
    "1t": lambda: Run(
        "Megatron 1T",
        Transformer(width=25600, vocab=51200, context=2048, tensor=8, flops=A100, bandwidth=2.5e10),
        128,
        64,
        512,
        Choice(("interleaved_1f1b",), (2,), ("full",)),
        Choice(("1f1b", "zb_h1", "interleaved_1f1b"), (1, 2), ("full",)),
        "163 TFLOP/s, 52 %",
    ),
    "llama-64": partial(_llama, 64, 4),
    "llama-128": partial(_llama, 128, 4),
}


def deepseek() -> Iterator[Row]:
    """Tables on 16 devices: the bubble that the report's table 2 gives by formula, against the
    simulated one.
    """
    devices, microbatches = 16, 120
    formulas = {
        "1f1b": ((devices - 1) * 3.0, "(P - 1)(F + B)", "P"),
        "zb_h1": ((devices - 1) * (1 + 2 - 2 * 1.0), "(P - 1)(F + B - 2 W)", "P"),
        "dualpipe": ((devices / 2 - 1) * (3 + 2 - 3 * 1.0), "(P / 2 - 1)(F&B + B - 3 W)", "P + 1"),
    }
    for name, (wait, formula, kept) in formulas.items():
        timeline = jp.simulate(
            jp.schedules.build(name, devices=devices, microbatches=microbatches), jp.Costs()
        )
        found = timeline.makespan - microbatches * 3
        yield (
            name,
            str(devices),
            str(microbatches),
            f"{found:g}",
            f"{wait:g}",
            formula,
            f"{max(timeline.peak_activations):g}",
            kept,
        )


@dataclass
class Clock:
    """Processor seconds of each step."""

    seconds: list[float] = field(default_factory=list)

    def __call__(self, work: Callable[[], Any]) -> Any:
        """Do it and note its time."""
        begin = time.process_time()
        result = work()
        self.seconds.append(time.process_time() - begin)
        return result


def largest(name: str, chunks: int, devices: int, microbatches: int) -> Row:
    """Build, check, simulate and lower one large table."""
    clock = Clock()
    table = clock(
        lambda: jp.schedules.build(name, devices=devices, microbatches=microbatches, chunks=chunks)
    )
    clock(lambda: jp.check(table))
    clock(lambda: jp.simulate(table).makespan)
    plan = clock(lambda: plan_of(table))
    program = clock(plan.program)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = (
        str(table.encoded.num_actions),
        str(program.num_ticks),
        str(sum(segment.size for segment in plan.segments)),
    )
    size = (str(devices), str(chunks), str(microbatches))
    return (
        name,
        *size,
        *counts,
        *(f"{s:.1f}" for s in clock.seconds),
        f"{sum(clock.seconds):.1f}",
        gib(peak),
    )


LARGEST = (
    "interleaved_1f1b:4",
    "looped_bfs:4",
    "interleaved_zb:4",
    "zbv:2",
    "v_half:2",
    "dualpipev:2",
    "zb_h1:1",
    "1f1b:1",
)
BUBBLES = "model  P  M  schedule  simulated  published  difference"
PLANS = (
    "run",
    "P x T",
    "M",
    "",
    "plan",
    "layout",
    "bubble",
    "program",
    "speed",
    "memory",
    "published",
)
DUALPIPE = "schedule  P  M  bubble  published  formula  activations  published"
_SECONDS = ("build", "check", "simulate", "plan", "program", "seconds")
TABLES = ("table", "P", "V", "M", "actions", "ticks", "blocks", *_SECONDS, "memory")
TITLES = (
    "Bubble rates of the zero-bubble paper (table 5), for its profiled times; those of the "
    "fewest microbatches",
    "Plans of published runs, from their sizes",
    "DeepSeek-V3: bubble in units of F, and microbatches held by a device (table 2)",
    "Processor seconds of large tables",
)
NOTES = (
    ("bubble: 1 - M (F + I + W) / makespan.",),
    (
        "speed: of a step, against the published choice; memory: of one device, best: in 80 GB.  "
        "Times are estimates: matmuls and",
        "attention at 60 % of the data sheet's peak; so speeds and bubbles compare, seconds do "
        "not.  Left out: the reduction of",
        "gradients and gathers of parameters over data, tensor collectives, the optimizer's "
        "step, norms and activation functions,",
        "data loading, fragmentation, what libraries reserve (NCCL, cuBLAS).  Of the Megatron 1T "
        "and Llama 3 runs the number of",
        "chunks is not published: 2 and 4 are taken.  program: seconds of the lowered program "
        "over those of its table.",
        "Megatron 175B: interleaving is published to gain 10 % and more at small batches, and "
        "less at larger ones (abstract, figure 12).",
        "Llama 3 at 64 and 128: half as many microbatches cost 400 / 430 = 0.930 of the rate; "
        "compare the two runs' 1 - bubble.",
    ),
    (
        "F = I = W = 1, B = 2, F&B = 3.  The overlap of all-to-alls with compute, DualPipe's "
        "purpose, is left out.",
    ),
    (
        "blocks: pieces of stage code in the program;",
        "memory: the process's peak so far.  One core.",
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--runs", tuple(RUNS), "NAME", f"of {', '.join(RUNS)}", choices=tuple(RUNS))
    parser.option("--tables", LARGEST, "NAME:V")
    parser.add_argument(
        "--only-tables", action="store_true", help="only the processor seconds of large tables"
    )
    parser.option("--size", "128,2048", "P,M", "of the tables")
    args = parser.parse_args(argv)
    machine = describe()
    devices, microbatches = map(int, args.size.split(","))
    named = [text.partition(":") for text in args.tables]
    tables = [largest(name, int(chunks), devices, microbatches) for name, _, chunks in named]
    whole = not args.only_tables
    runs = [row for name in args.runs for row in RUNS[name]().rows()] if whole else []
    bubbles = [row for model in ZERO_BUBBLE for row in model.rows()] if whole else []
    formulas = [*deepseek()] if whole else []
    columns, rows = (BUBBLES, PLANS, DUALPIPE, TABLES), (bubbles, runs, formulas, tables)
    every = zip(TITLES, columns, rows, NOTES, strict=True)
    results = [Result(title, machine, *rest) for title, *rest in every]
    write_all([result for result in results if result.rows], args.output)


if __name__ == "__main__":
    main()
