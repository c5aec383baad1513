"""The executor on one device: V chunks and no neighbours, against plain gradient accumulation in
the same process.

    python -m benchmarks.gpu_single -o benchmarks/results/gpu_single.txt

Nothing is sent, so what is left is what the lowering itself costs: slots, accumulators, loops, and
the predicates with which a tick asks who runs what.  "predicated" is the program of one chunk with
a predicate around every block, as positions have them whose devices do different things; with
several chunks a tick asks for each of them.  On one device a step is one CUDA graph; on several,
graphs end at every permute.  "in parts" is the predicated program with an operation that no graph
takes after every block, where a permute would be.  On a GPU everything runs twice, with and without
XLA's command buffers, each in a process of its own; the ratios to plain accumulation are taken in
turns within a process.  Command buffers are a compiler option of each step: a pipeline's own
options go before XLA_FLAGS.  They stay on while a profiler runs.  XLA records CUDA graphs in the
second call, so every step is called twice before any is timed.  On a machine without a GPU it runs
a smaller model on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from benchmarks.baselines.accumulate import accumulate
from benchmarks.baselines.model import Model
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from examples.gpt.model import GPT
from jaxpipe.lowering.plan import Plan
from jaxpipe.program.segments import Presence
from jaxpipe.spmd.block import TOKEN, run_where
from jaxpipe.spmd.xla import NO_GRAPHS

MARK = "result "
LAYERS = 8
WARM_UP = 2  # calls: a CUDA graph is recorded in the second
# Compiler options by setting.
_PROFILED = {"xla_enable_command_buffers_during_profiling": True}
SETTINGS: dict[str, dict[str, str | bool]] = {
    "on": _PROFILED,
    "off": NO_GRAPHS,
    "": {},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, the batch, and bfloat16 or float32 compute."""

    width: int
    heads: int
    context: int
    vocab: int
    rows: int  # of a microbatch
    microbatches: int
    dtype: str

    def gpt(self, stages: int) -> GPT:
        """The model cut into stages."""
        return GPT(
            stages,
            LAYERS,
            self.vocab,
            self.context,
            self.width,
            self.heads,
            dtype=jnp.dtype(self.dtype),
        )


SIZES = {
    "gpu": Sizes(
        width=2048, heads=16, context=1024, vocab=8192, rows=2, microbatches=16, dtype="bfloat16"
    ),
    "cpu": Sizes(
        width=256, heads=4, context=128, vocab=256, rows=2, microbatches=8, dtype="float32"
    ),
    "tiny": Sizes(width=32, heads=2, context=16, vocab=32, rows=1, microbatches=4, dtype="float32"),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A step, and how many predicates it asks."""

    name: str
    step: Callable[[], Any]
    predicates: int


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.child:
        _measure_all(SIZES[args.size], args.chunks, args.repeats, SETTINGS[args.buffers])
        return
    machine = describe()
    on_gpu, device = _device()
    size = args.size or ("gpu" if on_gpu else "cpu")
    rows = [
        row
        for setting in (("on", "off") if on_gpu else ("",))
        for row in _run_child(size, args.chunks, args.repeats, setting)
    ]
    Result(
        f"One device, {LAYERS} layers of a GPT ({SIZES[size]}) (medians of {args.repeats} turns)",
        [*machine, f"device: {device}"],
        "contender  command buffers  step ms  / plain  throughput  predicates  us a predicate",
        rows,
        NOTES,
    ).write(args.output)


NOTES = (
    "throughput: of plain accumulation's; medians of ratios taken in turns.  predicates: blocks "
    "run in a loop of at most one trip.",
    "us a predicate: (step - step of the executor with one chunk and no predicates) / "
    "predicates, in microseconds.",
)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Command(__doc__)
    parser.add_argument("--size", choices=SIZES, help="default: gpu where there is one, else cpu")
    parser.option("--chunks", (1, 2, 4, 8), "V", choices=(1, 2, 4, 8))
    parser.option("--repeats", 9, "N", "turns that are timed")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--buffers", choices=SETTINGS, default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _device() -> tuple[bool, str]:
    """Whether JAX finds a GPU, and the device's name; asked in another process, so that this one
    holds no GPU memory.
    """
    code = "import jax; d = jax.devices()[0]; print(d.platform == 'gpu', d.device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    is_gpu, kind = done.stdout.strip().splitlines()[-1].split("|")
    return is_gpu == "True", kind


def _run_child(
    size: str, chunks: Sequence[int], repeats: int, setting: str
) -> Iterator[tuple[str, ...]]:
    """All contenders in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.gpu_single", "--child", "--size", size]
    command += ["--repeats", str(repeats), "--buffers", setting]
    command += ["--chunks", *map(str, chunks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit("the process that measures failed; its message is above")
    for row in json.loads(lines[0]):
        yield (row[0], setting, *row[1:])


def _measure_all(
    sizes: Sizes, chunks: Sequence[int], repeats: int, options: dict[str, str | bool]
) -> None:
    """Take turns; print the lines of the table as JSON."""
    contenders = list(_contenders(sizes, chunks, options))
    for contender in contenders:
        for _ in range(WARM_UP):
            contender.step()
    samples = np.array([[_seconds(c.step) for c in contenders] for _ in range(repeats)])
    ratios = samples / samples[:, :1]
    rows = [_line(i, contenders, samples, ratios) for i in range(len(contenders))]
    print(MARK + json.dumps(rows), flush=True)


def _line(i: int, contenders: Sequence[Contender], samples: Any, ratios: Any) -> list[str]:
    """A line of the table; predicates are priced against the executor's program without any, the
    contender after plain.
    """
    contender = contenders[i]
    ratio = statistics.median(ratios[:, i])
    asked = contender.predicates
    extra = f"{statistics.median(samples[:, i] - samples[:, 1]) / asked * 1e6:.1f}" if asked else ""
    milliseconds = statistics.median(samples[:, i]) * 1e3
    return [
        contender.name,
        f"{milliseconds:.2f}",
        f"{ratio:.3f}",
        f"{1 / ratio:.3f}",
        str(contender.predicates),
        extra,
    ]


def _seconds(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _contenders(
    sizes: Sizes, chunks: Sequence[int], options: dict[str, str | bool]
) -> Iterator[Contender]:
    """Plain accumulation, then the executor with 1 chunk, without predicates and with them, and
    with several chunks.
    """
    rows = sizes.microbatches * sizes.rows
    tokens = np.random.default_rng(0).integers(
        0, sizes.vocab, (rows, sizes.context + 1), dtype=np.int32
    )
    batch = jax.device_put({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    gpt = sizes.gpt(1)
    params = jax.device_put(gpt.init(jax.random.key(0)))
    plain = jax.jit(
        accumulate(Model(gpt.first, gpt.stage, gpt.last, 1), microbatches=sizes.microbatches),
        compiler_options=options or None,
    )
    yield Contender("plain", lambda: jax.block_until_ready(plain(params, batch)), 0)
    mesh = jax.make_mesh((1,), ("pipe",))
    for count in sorted({1, *chunks}):
        name = "1f1b" if count == 1 else "interleaved_1f1b"
        schedule = jp.schedules.build(
            name, devices=1, microbatches=sizes.microbatches, chunks=count
        )
        # With several chunks a tick asks for each of them anyway.
        for form in Form if count == 1 else (Form.WHOLE,):
            step, placed, predicates = lowered(sizes, schedule, mesh, batch, form)
            compiled = step.compile(compiler_options=options)
            yield Contender(
                f"{schedule.name}, V = {count}{form.value}",
                partial(_run, compiled, placed, batch),
                predicates,
            )


def _run(compiled: Any, params: Any, batch: Any) -> Any:
    return jax.block_until_ready(compiled(params, batch))


class Form(Enum):
    """The program of one device as it is, or as devices that do different things have it."""

    WHOLE = ""
    PREDICATED = ", predicated"
    IN_PARTS = ", predicated, in parts"


def lowered(
    sizes: Sizes, schedule: jp.Schedule, mesh: jax.sharding.Mesh, batch: Any, form: Form
) -> tuple[Any, Any, int]:
    """A step, its parameters, and the number of predicates; of shapes where the batch is."""
    gpt = sizes.gpt(schedule.num_stages)
    pipe = jp.Pipeline(jp.Model(gpt.stage, first=gpt.first, last=gpt.last), schedule, mesh)
    shapes = isinstance(jax.tree.leaves(batch)[0], jax.ShapeDtypeStruct)
    init = partial(jax.eval_shape, gpt.init) if shapes else gpt.init
    params = pipe.place(init(jax.random.key(0)))
    # No option does this, and none should: it only makes the program ask what it knows.
    how = {Form.WHOLE: run_where, Form.PREDICATED: _predicated, Form.IN_PARTS: _with_break}
    with mock.patch("jaxpipe.spmd.gathers.run_where", how[form]):
        step = pipe.lower(params, batch)
    return step, params, _count_predicates(pipe._steps.plan, form)


def _predicated(_presence: Any, predicate: Any, block: Any, state: Any, **how: bool) -> Any:
    """The block under its predicate, also where that is always True."""
    return run_where(Presence.SOMETIMES, predicate, block, state, **how)


def _with_break(presence: Any, predicate: Any, block: Any, state: Any, **how: bool) -> Any:
    """The block, then a small Fourier transform that the next block waits for.  It is an operation
    that XLA puts into no CUDA graph.
    """
    state = _predicated(presence, predicate, block, state, **how)
    numbers = jnp.where(state[TOKEN], jnp.ones(8, jnp.complex64), 0)
    return state | {TOKEN: jnp.real(jnp.fft.fft(numbers))[0] > 0.5}


def _count_predicates(plan: Plan, form: Form) -> int:
    uses = [
        (segment.repeats, use)
        for segment in plan.segments
        for position in segment.templates
        for use in position.blocks
    ]
    asked = form is not Form.WHOLE
    return sum(repeats for repeats, use in uses if asked or use.active is Presence.SOMETIMES)


if __name__ == "__main__":
    main()
