"""Published runs against what their sizes say: throughput with one constant, and the planner's own
choice for the same devices.

    python -m benchmarks.published_runs FILE.json -o benchmarks/results/published_runs.txt

The file has the rows of Narayanan et al. 2021 (arXiv 2104.04473, table 1) and of Llama 3 (arXiv
2407.21783, table 4).  The constant, the share of peak that matmuls reach, is the median over all
rows of the share with which a row's prediction is its published value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Result, add_output, write_all
from jaxpipe.planner.layer_cost import Ends, Remat, stage_costs
from jaxpipe.planner.layers import balanced
from jaxpipe.planner.memory import layer_sizes, least_slots, memory_of
from jaxpipe.planner.transformer import Transformer

_MOST = 16  # devices of pipelines for which more schedules are tried, to bound the time
_A100, _H100 = 312e12, 989e12


@dataclass(frozen=True)
class Run:
    """A published run."""

    name: str
    model: Transformer
    layers: int
    pipe: int
    data: float
    microbatches: int
    published: float  # TFLOP/s of a device, as its source counts them
    flops: float  # of a step and device, counted so
    peak: float
    remat: str | None

    def at(self, share: float, *, free: bool = False) -> float:
        """Predicted TFLOP/s of a device where matmuls reach a share of the peak."""
        model = replace(self.model, flops=share * self.peak)
        costs = model.costs()
        seconds = 0.0
        if self.pipe == 1:
            again = costs["t"].forward if self.remat else 0.0
            layer = costs["t"].forward + costs["t"].backward_seconds + again
            head = costs["L"].forward + costs["L"].backward_seconds
            seconds = self.microbatches * (self.layers * layer + head)
        else:
            seconds = self._pipeline(model, free=free)
        held = sum(costs[c].gradient_bytes for c in "E" + "t" * self.layers) / self.pipe
        reduced = 2 * (self.data - 1) / self.data * held / model.bandwidth
        return self.flops / (seconds + reduced) / 1e12

    def _pipeline(self, model: Transformer, *, free: bool) -> float:
        """Seconds of the shortest table: of 1F1B and its interleaving with the published remat, or
        of more schedules and any remat that the memory has room for.
        """
        costs = {c: replace(cost, ends=Ends.ONE) for c, cost in model.costs().items()}
        names = ("1f1b", "interleaved_1f1b", *(("zb_h1", "zbv") if free else ()))
        ways = [(Remat.FULL, "")] if self.remat and not free else [(Remat.NONE, "")]
        if free:
            ways += [(Remat.FULL, ""), *((Remat.NONE, name) for name in costs["t"].policies)]
        found = []
        for name, chunks, (remat, policy) in product(names, (1, 2) if free else (1, 2, 3, 4), ways):
            rule = jp.schedules.describe(name).chunks
            if rule.nearest(chunks) != chunks or self.pipe * chunks > self.layers:
                continue
            own = {**costs, "t": costs["t"].under(policy)}
            shape = {"devices": self.pipe, "chunks": chunks}
            layers = "E" + "t" * self.layers + "L"
            layout = balanced(layers, own, **shape, remat=remat)
            times = stage_costs(layout, own, remat=remat, transfer=model.transfer)
            table = jp.schedules.build(name, microbatches=self.microbatches, **shape)
            timeline = jp.simulate(table, times)
            sizes = layer_sizes(layout, table, own, remat=remat)
            if not free or memory_of(least_slots(timeline), sizes).total <= 80e9:
                found.append(timeline.makespan)
        return min(found, default=float("nan"))


def megatron(rows: Sequence[Sequence[float]]) -> list[Run]:
    found = []
    for billions, _, hidden, layers, tensor, pipe, gpus, batch, tflops, _ in rows:
        data = gpus / tensor / pipe
        per = batch / data
        model = Transformer(
            width=hidden,
            vocab=51200,
            context=2048,
            tensor=tensor,
            shards=1,
            bandwidth=2.5e10,
            tensor_bandwidth=2e11,
        )
        each = 96 * batch * 2048 * layers * hidden**2
        flops = each * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)) / gpus
        found.append(
            Run(
                f"Megatron {billions:g}B, {gpus:g} x A100",
                model,
                int(layers),
                int(pipe),
                data,
                int(per),
                tflops,
                flops,
                _A100,
                "full",
            )
        )
    return found


def llama(rows: Sequence[Sequence[float]]) -> list[Run]:
    found = []
    for gpus, tensor, shared, pipe, data, context, batch, tflops, _ in rows:
        model = Transformer(
            width=16384,
            vocab=128256,
            context=context,
            rows=1 / shared,  # the devices that share a row have a part of its tokens each
            shards=data,
            sequence=True,
            ffn=53248,
            gated=True,
            kv_share=1 / 16,
            tensor=tensor,
        )
        tokens = batch * context * data / gpus
        parameters = 126 * 16384 * (2 * 16384 + 2 * 1024 + 3 * 53248) + 128256 * 16384
        flops = tokens * (6 * parameters + 6 * 126 * 16384 * context)
        name = f"Llama 3 405B, {gpus:g} x H100, {context:g} tokens"
        run = Run(name, model, 126, int(pipe), data, int(batch), tflops, flops, _H100, None)
        found.append(run)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    add_output(parser)
    args = parser.parse_args(argv)
    given = json.loads(args.file.read_text())
    runs = megatron(given["megatron_2021_table_1"]["rows"])
    runs += llama(given["llama3_2024_table_4"]["rows"])
    # Nearly all of a step is in proportion to the share, so two predictions give the row's own.
    half = [run.at(0.5) for run in runs]
    share = median(0.5 * run.published / tflops for run, tflops in zip(runs, half, strict=True))
    rows = []
    for run in runs:
        said = run.at(share)
        own = said
        if run.pipe > 1:
            own = run.at(share, free=True) if run.pipe <= _MOST else said
        rows.append(
            (
                run.name,
                f"{run.published:g}",
                f"{said:.0f}",
                f"{said / run.published - 1:+.1%}",
                f"{own / said:.3f}",
            )
        )
    columns = ("run", "published", "predicted", "difference", "planner's own")
    notes = (
        f"TFLOP/s of a device, at {share:.1%} of the peak in matmuls, the same for all rows.",
        "planner's own: throughput of the shortest of 1F1B, interleaved 1F1B, ZB-H1 and ZB-V with "
        "any remat for the same mesh in 80 GB, over",
        "the prediction (1 where the pipeline has one device or more than 16; nan: nothing fits by "
        "its sizes), of one or two chunks.",
        "Left out: optimizer steps, data loading, norms and activation functions.",
    )
    write_all(
        [Result("Published runs, predicted from their sizes", describe(), columns, rows, notes)],
        args.output,
    )


if __name__ == "__main__":
    main()
