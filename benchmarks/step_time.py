"""Step time and CPU seconds of a pipelined step against the usual ways to do the same work.

    python -m benchmarks.step_time -o benchmarks/results/step_time.txt

A GPT of 8 layers on P = 4 devices, as 4 stages of 2 layers or 8 of 1.  All contenders take turns in
one run, so that whatever else the machine does hits all of them; the table holds medians, and
medians of the ratios to plain accumulation in the same turn. Every contender's loss and gradient
norm are compared with plain accumulation's before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import jaxpipe as jp
from benchmarks.baselines.accumulate import accumulate
from benchmarks.baselines.alone import alone
from benchmarks.baselines.circular import circular, place_circular
from benchmarks.baselines.model import Model, PyTree
from benchmarks.baselines.scan_permute import place_stages, scan_permute
from benchmarks.machine import describe
from benchmarks.output import Command, Result, Row, told
from examples.gpt.model import GPT

DEVICES = 4
PIPES = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1))
TORCH = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2))
# float32 sums in another order: losses agree to about 1e-6, norms of gradients to about 1e-5.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sizes:
    """The model and the batch."""

    layers: int = 8
    width: int = 256
    heads: int = 4
    context: int = 128
    vocab: int = 256
    rows: int = 2  # of a microbatch

    def gpt(self, stages: int) -> GPT:
        """The model cut into stages."""
        return GPT(stages, self.layers, self.vocab, self.context, self.width, self.heads)


@dataclass(frozen=True)
class Contender:
    """Something that does the step; `measure` runs it once and returns (wall, CPU) seconds,
    `outcome` gives (loss, gradient norm).

    Without `outcome` it does the work of a step without its sums, so that there is nothing to
    compare.
    """

    name: str
    measure: Callable[[], tuple[float, float]]
    outcome: Callable[[], tuple[float, float]] | None


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    machine = describe("torch")
    sizes = (
        Sizes(layers=8, width=32, heads=2, context=16, vocab=32, rows=1) if args.tiny else Sizes()
    )
    rows: list[Row] = []
    notes = list(NOTES)
    for count in args.microbatches:
        with contextlib.ExitStack() as stack:
            contenders = [*_ours(sizes, count), *_others(sizes, count)]
            try:
                contenders += _torchs(sizes, count, stack)
            except ImportError as error:
                notes.append(f"torch.distributed.pipelining was left out: {error}")
            _check(contenders)
            rows += told(_rows(contenders, count, args.repeats))
    Result(
        f"A step of a GPT ({sizes}), P = {DEVICES} (medians of {args.repeats} turns)",
        machine,
        "contender  M  wall s  CPU s  wall / plain  CPU / plain",
        rows,
        notes,
    ).write(args.output)


NOTES = (
    "plain: gradient accumulation by a scan over microbatches (and one over layers) on one "
    "device.  All of JAX's contenders share a",
    "process and its thread pool.",
    "CPU s: processor time of all threads of all processes between the step's start and its end.",
    "scan + ppermute: GPipe differentiated from outside; circular: vmap and rotate, V stages a "
    "device.  Both keep residuals, no remat.",
    "torch: torch.distributed.pipelining's own schedules, a gloo process a device with one "
    "thread each.",
    "kernels alone: each stage's F and B called by itself M times, nothing sent or summed: what "
    "the framework's kernels cost.",
)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Command(__doc__)
    parser.option("--microbatches", [8, 16], "M")
    parser.option("--repeats", 9, "N", "turns that are timed")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model that takes no time, to see that everything runs",
    )
    return parser.parse_args(argv)


def _inputs(sizes: Sizes, stages: int, count: int) -> tuple[GPT, PyTree, PyTree]:
    """(model, canonical parameters, batch); the same numbers for every number of stages."""
    model = sizes.gpt(stages)
    tokens = np.random.default_rng(0).integers(
        0, sizes.vocab, (count * sizes.rows, sizes.context + 1), dtype=np.int32
    )
    return (
        model,
        model.init(jax.random.key(0)),
        {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]},
    )


def _in_process(
    name: str, step: Callable[[PyTree, PyTree], Any], params: PyTree, batch: PyTree
) -> Contender:
    """A contender that is a function of JAX."""

    def measure() -> tuple[float, float]:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(step(params, batch))
        return time.perf_counter() - begin, time.process_time() - begin_cpu

    def outcome() -> tuple[float, float]:
        loss, grads = step(params, batch)
        square = sum(
            float(np.sum(np.square(np.asarray(g, np.float64)))) for g in jax.tree.leaves(grads)
        )
        return float(loss), square**0.5

    return Contender(name, measure, outcome)


def _others(sizes: Sizes, count: int) -> Iterator[Contender]:
    """GPipe by scan and ppermute, and the circular pipeline."""
    mesh = jax.make_mesh((DEVICES,), ("pipe",), axis_types=(jax.sharding.AxisType.Auto,))
    gpt, params, batch = _inputs(sizes, DEVICES, count)
    model = Model(gpt.first, gpt.stage, gpt.last, DEVICES)
    yield _in_process(
        "scan + ppermute + grad",
        jax.jit(scan_permute(model, mesh=mesh, microbatches=count)),
        place_stages(params, mesh=mesh),
        batch,
    )
    for chunks in (1, 2):
        gpt, params, batch = _inputs(sizes, DEVICES * chunks, count)
        model = Model(gpt.first, gpt.stage, gpt.last, DEVICES * chunks)
        step = jax.jit(circular(model, mesh=mesh, microbatches=count))
        yield _in_process(f"circular, V = {chunks}", step, place_circular(params, mesh=mesh), batch)


def _ours(sizes: Sizes, count: int) -> Iterator[Contender]:
    """Plain accumulation first, then jaxpipe's schedules."""
    device = jax.devices()[0]
    for stages, name in ((1, "plain"), (sizes.layers, "plain, layers unrolled")):
        gpt, params, batch = _inputs(sizes, stages, count)
        model = Model(gpt.first, gpt.stage, gpt.last, stages)
        yield _in_process(
            name,
            jax.jit(accumulate(model, microbatches=count)),
            jax.device_put(params, device),
            batch,
        )
    gpt, params, batch = _inputs(sizes, DEVICES, count)
    model = Model(gpt.first, gpt.stage, gpt.last, DEVICES)
    kernels = _in_process(
        "XLA's kernels alone",
        alone(model, microbatches=count),
        jax.device_put(params, device),
        batch,
    )
    yield dataclasses.replace(kernels, outcome=None)
    mesh = jax.make_mesh((DEVICES,), ("pipe",))
    for name, chunks in PIPES:
        gpt, params, batch = _inputs(sizes, DEVICES * chunks, count)
        schedule = jp.schedules.build(name, devices=DEVICES, microbatches=count, chunks=chunks)
        pipe = jp.Pipeline(jp.Model(gpt.stage, first=gpt.first, last=gpt.last), schedule, mesh)
        title = f"jaxpipe {name}" + (f", V = {chunks}" if chunks > 1 else "")
        yield _in_process(title, pipe.value_and_grad, pipe.place(params), batch)


def _torchs(sizes: Sizes, count: int, stack: contextlib.ExitStack) -> list[Contender]:
    """torch.distributed.pipelining, in processes that live as long as `stack`."""
    from benchmarks.baselines.torch_pipelining import TorchJob, TorchPipelines
    from torch_ref.models import GPT as TorchGPT

    jobs = []
    for name, chunks in TORCH:
        gpt, params, batch = _inputs(sizes, DEVICES * chunks, count)
        model = TorchGPT(
            num_stages=gpt.stages,
            layers_per_stage=gpt.layers // gpt.stages,
            vocab=sizes.vocab,
            block=sizes.context,
            width=sizes.width,
            heads=sizes.heads,
            tied=False,
        )
        jobs.append(TorchJob(name, DEVICES, count, model, _named(params), batch))
    pipelines = stack.enter_context(TorchPipelines(jobs))

    def contender(number: int) -> Contender:
        def measure() -> tuple[float, float]:
            cost = pipelines.step(number)
            return cost.wall, cost.cpu

        def outcome() -> tuple[float, float]:
            pipelines.step(number)
            return pipelines.outcome(number)

        name, chunks = TORCH[number]
        return Contender(
            f"torch {name}" + (f", V = {chunks}" if chunks > 1 else ""), measure, outcome
        )

    def kernels() -> tuple[float, float]:
        cost = pipelines.alone(0)
        return cost.wall, cost.cpu

    return [
        *(contender(n) for n in range(len(jobs))),
        Contender("torch's kernels alone", kernels, None),
    ]


def _named(params: PyTree) -> dict[str, np.ndarray[Any, Any]]:
    """Canonical parameters by torch_ref's names: the path, joined by slashes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(key.key for key in path): np.array(leaf) for path, leaf in leaves}


def _check(contenders: Sequence[Contender]) -> None:
    """Run everything once, and stop where something computes something else."""
    outcomes = [
        (contender, contender.outcome())
        for contender in contenders
        if contender.outcome is not None
    ]
    _, wanted = outcomes[0]
    for contender, found in outcomes[1:]:
        if not np.allclose(found, wanted, rtol=TOLERANCE, atol=0):
            raise SystemExit(
                f"{contender.name} computes another loss or gradient: {found}, plain "
                f"accumulation {wanted}"
            )


def _rows(contenders: Sequence[Contender], count: int, repeats: int) -> Iterator[Row]:
    """Take turns, then make lines."""
    samples = np.array(
        [[contender.measure() for contender in contenders] for _ in range(repeats + 1)]
    )[1:]
    ratios = samples / samples[:, :1]
    for i, contender in enumerate(contenders):
        wall, cpu = (statistics.median(samples[:, i, k]) for k in (0, 1))
        of_plain = [statistics.median(ratios[:, i, k]) for k in (0, 1)]
        seconds, ratio = (f"{wall:.3f}", f"{cpu:.3f}"), (f"{each:.2f}" for each in of_plain)
        yield (contender.name, str(count), *seconds, *ratio)


if __name__ == "__main__":
    main()
