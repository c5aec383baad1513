"""A planned pipeline against hand-made ones: a real model on virtual CPU devices of one process,
measured layer by layer.

    python -m benchmarks.plans_real -o benchmarks/results/plans_real.txt

A residual MLP with an embedding, and a head with its loss that costs as much as some layers.  The
devices share this machine's cores: with no more devices than cores, and a thread for each, a device
has a core of its own, as far as nothing else runs; so P is 2 on two cores. What the devices do
share is caches, memory and the threads of the transfers.  Steps of all pipelines are taken in
turns; medians. "predicted" is what `jp.plan` says for the measured layers, before a pipeline is
run.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# A block alone would else be shared by all cores, which in the step other devices use.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from benchmarks.plans_time import by_count, even
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.target import RunsOn, Target
from jaxpipe.measuring import measure_stages
from jaxpipe.planner.layer_cost import LayerCost, Remat, stage_costs

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")


def embed(params: Any, microbatch: Any) -> Any:
    """Tokens to vectors."""
    return params[microbatch["tokens"]]


def layer(params: Any, x: Any) -> Any:
    """A residual MLP."""
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def loss(params: Any, x: Any, microbatch: Any) -> Any:
    """Mean cross-entropy."""
    logits = jax.nn.log_softmax(x @ params)
    return -jnp.mean(jnp.take_along_axis(logits, microbatch["targets"][..., None], axis=-1))


FUNCTIONS = {"E": embed, "t": layer, "L": loss}


def parameters(layers: int, width: int, vocab: int) -> dict[str, Any]:
    """Canonical parameters."""

    def draw(seed: int, *shape: int) -> Any:
        return jax.random.normal(jax.random.key(seed), shape) / 16

    own = {"up": draw(1, layers, width, 4 * width), "down": draw(2, layers, 4 * width, width)}
    return {"first": draw(0, vocab, width), "stages": {"t": own}, "last": draw(3, width, vocab)}


def median_walls(steps: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds of each, all in turn; the first turn warms up."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats + 1):
        for step, mine in zip(steps, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(step())
            if turn:
                mine.append(time.perf_counter() - begin)
    return [statistics.median(mine) for mine in times]


def predicted(table: jp.Schedule, layout: str, costs: dict[str, LayerCost], hop: float) -> float:
    """Seconds of a hand-made pipeline, as `plan` has them of its own."""
    where = Target(RunsOn.ONE_CPU_PROCESS)
    times = stage_costs(
        jp.parse_layout(layout, devices=table.num_devices), costs, remat=Remat.NONE, transfer=hop
    )
    return plan_of(table, costs=times, overheads=where.overheads).seconds(where, times)


COLUMNS = "pipeline  schedule  V  layout  predicted s  wall s  predicted / wall  against the plan"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.option("--devices", 2, "P")
    parser.option("--microbatches", 8, "M")
    parser.option("--layers", 12, "N")
    parser.option("--width", 256, "N")
    parser.option("--vocab", 4096, "N")
    parser.option("--rows", 256, "N", "tokens of a microbatch")
    parser.option("--repeats", 7, "N")
    args = parser.parse_args(argv)
    if args.layers % (2 * args.devices):
        parser.error(
            f"--layers must be a multiple of {2 * args.devices}, so that they can be cut evenly"
        )
    jax.config.update("jax_num_cpu_devices", args.devices)
    machine, count, letters = describe(), args.devices, "E" + "t" * args.layers + "L"
    params = parameters(args.layers, args.width, args.vocab)
    model = jp.Model(FUNCTIONS, layers=letters)
    tokens = jax.random.randint(jax.random.key(4), (args.rows * args.microbatches,), 0, args.vocab)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, 1)}
    mesh = jax.make_mesh((count,), ("pipe",))

    def built(name: str, chunks: int) -> jp.Schedule:
        return jp.schedules.build(
            name, devices=count, microbatches=args.microbatches, chunks=chunks
        )

    hand = [
        ("even, 1f1b", built("1f1b", 1), even(args.layers, count)),
        ("even, interleaved", built("interleaved_1f1b", 2), even(args.layers, 2 * count)),
        ("by count, 1f1b", built("1f1b", 1), by_count(letters, count)),
    ]
    pipes = [jp.Pipeline(model, table, mesh, layout=layout) for _, table, layout in hand]
    microbatch = {name: jax.ShapeDtypeStruct((args.rows,), jnp.int32) for name in batch}
    costs = jp.measure(model, params, microbatch, repeats=args.repeats)
    hop = float(
        measure_stages(pipes[0], pipes[0].place(params), batch, repeats=args.repeats).transfer
    )
    given: dict[str, Any] = {
        "schedules": SCHEDULES,
        "chunks": (1, 2),
        "remat": (None,),
        "most": 2,
        "mesh": mesh,
        "transfer": hop,
    }
    plans = jp.plan(letters, costs, devices=count, microbatches=args.microbatches, **given)
    every = [
        (name, table, layout, predicted(table, layout, costs, hop)) for name, table, layout in hand
    ]
    every += [(f"plan {i + 1}", p.schedule, p.layout, p.seconds) for i, p in enumerate(plans)]
    pipes += [p.pipeline(model, mesh) for p in plans]
    steps = [partial(pipe.value_and_grad, pipe.place(params), batch) for pipe in pipes]
    losses = [float(step()[0]) for step in steps]
    assert max(losses) - min(losses) < 1e-4 * max(losses), (
        f"the same model, float32 sums in another order: {losses}"
    )
    walls = median_walls(steps, args.repeats)
    print(walls, file=sys.stderr, flush=True)
    rows = [
        (
            name,
            t.name,
            str(t.num_chunks),
            layout,
            f"{s:.4f}",
            f"{wall:.4f}",
            f"{s / wall:.3f}",
            f"{wall / walls[len(hand)]:.3f}",
        )
        for (name, t, layout, s), wall in zip(every, walls, strict=True)
    ]
    times = ", ".join(
        f"{c}: F {1e3 * v.forward:.2f}, B {1e3 * v.backward_seconds:.2f}" for c, v in costs.items()
    )
    notes = (
        f"Measured, ms of a microbatch: {times}; a hop {1e3 * hop:.2f}.",
        "against the plan: wall time over that of plan 1, the one that `jp.plan` puts first.",
    )
    sizes = (
        f"{args.layers} layers of width {args.width}, vocabulary {args.vocab}, {args.rows} "
        "tokens a microbatch"
    )
    title = (
        f"{sizes}: planned against hand-made, P = {count}, M = {args.microbatches}, medians "
        f"of {args.repeats}"
    )
    Result(title, machine, COLUMNS, rows, notes).write(args.output)


if __name__ == "__main__":
    main()
