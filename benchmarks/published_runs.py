"""Published runs against what their sizes say: throughput with one constant, and the planner's own
choice for the same devices.

    python -m benchmarks.published_runs -o benchmarks/results/published_runs.txt

published_runs.json has the rows of Narayanan et al. 2021 (arXiv 2104.04473, table 1) and of Llama 3
(arXiv 2407.21783, table 4).  The constant, the share of peak that matmuls reach, is that with
which the median row is predicted as published.

Besides matmuls, a layer moves the bytes that its forward keeps once in each pass, at the memory's
peak: a tensor between a matmul and another operation is written or read by that one.  What the
layers of 2021 kept, with the scores of attention, is in Korthikanti et al. 2022 (arXiv 2205.05198,
section 4).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from benchmarks.output import Command, Result
from jaxpipe.lowering.target import Target
from jaxpipe.planner.candidate import Candidate
from jaxpipe.planner.layer_cost import Ends, LayerCost
from jaxpipe.planner.request import Request, allowed_remat
from jaxpipe.planner.search import Search
from jaxpipe.planner.transformer import Transformer
from jaxpipe.prices import read_prices

_MOST = 40  # devices of pipelines for which more schedules than 1F1B are tried, to bound the time
_MEMORY = 80e9
_PUBLISHED = ("1f1b", "interleaved_1f1b")
_A100, _H100 = 312e12, 989e12
_A100_MEMORY, _H100_MEMORY = 2.039e12, 3.35e12  # bytes a second, of 80 GB SXM devices


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
    moved: float  # seconds in which operations other than matmuls move a layer's bytes, in a pass
    fsdp: bool = False  # gradients are scattered, and parameters of half the bytes gathered

    def at(self, share: float, *, free: bool = False) -> tuple[float, str]:
        """Predicted TFLOP/s of a device where matmuls reach a share of the peak, and the plan: that
        of the publication, or the planner's own for the same mesh.
        """
        model = replace(self.model, flops=share * self.peak)
        costs, text = self.costs(model), ""
        if self.pipe == 1 and not free:
            again = costs["t"].forward if self.remat else 0.0
            layer = costs["t"].forward + costs["t"].backward_seconds + again
            head = costs["L"].forward + costs["L"].backward_seconds
            seconds = self.microbatches * (self.layers * layer + head)
        else:
            found = self.candidate(model, free=free)
            seconds, text = found.seconds, found.label
        held = sum(costs[c].gradient_bytes for c in "E" + "t" * self.layers) / self.pipe
        passes = 1.5 if self.fsdp else 2
        reduced = passes * (self.data - 1) / self.data * held / model.bandwidth
        return self.flops / (seconds + reduced) / 1e12, text

    def costs(self, model: Transformer) -> dict[str, LayerCost]:
        """The model's costs, with the bytes that layers move."""
        found = model.costs()
        layer, moved = found["t"], self.moved
        policies = {
            name: kept._replace(again=kept.again + moved) for name, kept in layer.policies.items()
        }
        times = {"forward": layer.forward + moved, "input_grad": layer.input_grad + moved}
        return found | {"t": replace(layer, **times, policies=policies)}

    def candidate(self, model: Transformer, *, free: bool) -> Candidate:
        """The shortest table: of 1F1B and its interleaving with the published remat, or of more
        schedules, with any ends and any remat, in a device's memory.
        """
        costs = self.costs(model)
        if not free or self.pipe == 1:
            costs = {c: replace(cost, ends=Ends.ONE) for c, cost in costs.items()}
        request = Request(
            layers="E" + "t" * self.layers + "L",
            costs=costs,
            devices=self.pipe,
            microbatches=self.microbatches,
            transfer=model.transfer,
            schedules=self._schedules(free=free),
            chunks=tuple(v for v in (1, 2, 3, 4) if 1 < self.pipe <= self.layers // v or v == 1),
            remat=allowed_remat(None if free else (self.remat,), costs, stages=free),
            memory=_MEMORY if free else None,
            offloads=free,
            target=Target().measured(read_prices()),
        )
        return min(Search([request], most=1).candidates(), key=lambda found: found.seconds)

    def _schedules(self, *, free: bool) -> tuple[str, ...]:
        """The published ones, or more."""
        if not free:
            return _PUBLISHED
        return (*_PUBLISHED, "zb_h1", "zbv") if self.pipe <= _MOST else _PUBLISHED[:1]


def megatron(rows: Sequence[Sequence[float]]) -> list[Run]:
    found = []
    for billions, heads, hidden, layers, tensor, pipe, gpus, batch, tflops, _ in rows:
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
        kept = 2048 * (hidden * (10 + 24 / tensor) + 5 * heads * 2048 / tensor)
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
                kept / _A100_MEMORY,
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
        moved = model.costs()["t"].residuals / _H100_MEMORY
        shape = (126, int(pipe), data, int(batch))
        found.append(Run(name, model, *shape, tflops, flops, _H100, None, moved, fsdp=True))
    return found


def _share(runs: Sequence[Run]) -> float:
    """The share of peak with which the median row is predicted as published."""
    low, high = 0.3, 1.0
    while high - low > 1e-3:
        share = (low + high) / 2
        over = median(run.at(share)[0] / run.published for run in runs) > 1
        low, high = (low, share) if over else (share, high)
    return (low + high) / 2


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    args = parser.parse_args(argv)
    given = json.loads(Path(__file__).with_suffix(".json").read_text())
    runs = megatron(given["megatron_2021_table_1"]["rows"])
    runs += llama(given["llama3_2024_table_4"]["rows"])
    share = _share(runs)
    rows = []
    for run in runs:
        said, text = run.at(share)
        own, better = run.at(share, free=True)
        rows.append(
            (
                run.name,
                f"{run.published:g}",
                f"{said:.0f}",
                f"{said / run.published - 1:+.1%}",
                text,
                f"{own / said:.3f}",
                better,
            )
        )
    columns = "run  published  predicted  difference  as  own  planner's own"
    notes = (
        f"TFLOP/s of a device, at {share:.1%} of the peak in matmuls, the same for all rows.",
        "as: the shortest of 1F1B and its interleaving with the published remat, in any memory.",
        "own: throughput of the planner's own plan for the same mesh in 80 GB over the prediction "
        f"(1F1B alone where the pipeline has more than {_MOST} devices).",
        "Norms, activation functions, dropout and the scores of attention of 2021 move the bytes "
        "that a layer keeps once in each pass, at the memory's peak.",
        "Left out: optimizer steps, data loading, and the exchange of keys among devices that "
        "share a sequence (the last row).",
        "None of a reduction of gradients is hidden, which counts most where M is P.",
        "By its sizes the published Llama 3 holds 85 to 100 GB without offload or remat; its "
        "authors freed tensors early (section 3.3.2).",
    )
    title = "Published runs, predicted from their sizes"
    Result(title, describe(), columns, rows, notes).write(args.output)


if __name__ == "__main__":
    main()
