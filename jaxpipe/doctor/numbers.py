"""Check that six schedules give the numbers of a small model's plain function, in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..arrays import PyTree
from ..errors import ScheduleError
from ..lowering.target import Target
from ..model.model import Model
from ..model.settings import Memory
from ..pipeline import Pipeline
from ..schedules.registry import build
from ..spmd.xla import NO_GRAPHS
from ..vocabulary import VocabEmbedding, VocabHead
from .run import Findings, Line, Scope, at, judged, not_tried

WIDTH, WORDS, TOKENS = 16, 32, 8
ROWS = 2  # of a microbatch
TOLERANCE = 1e-4  # float32, sums of some hundred numbers in another order
Step = Callable[[Any, Any], tuple[Any, PyTree]]


def numbers(
    scope: Scope,
    mesh: Mesh,
    name: str,
    chunks: int | None = None,
    spread: bool = False,
    offload: str | None = None,
) -> Findings:
    """The pipeline of a schedule against `Model.loss`; on GPUs with CUDA graphs and without them.

    Args:
        scope: the number of runs.
        mesh: the devices.
        name: of the schedule.
        chunks: a device.
        spread: the ends are spread over all devices.
        offload: as `Memory` takes it.
    """
    item = f"numbers: {name}{', spread ends' * spread}{', offload' * bool(offload)}"
    count = mesh.size
    if offload and count == 1:
        return Findings((not_tried(item, "one device: no residual waits on the host"),))
    try:
        schedule = build(name, devices=count, microbatches=2 * max(count, 2), chunks=chunks)
    except ScheduleError as error:
        return Findings((not_tried(item, f"{count} devices: {error}"),))
    microbatches = schedule.num_microbatches
    model, weights = small_model(schedule.num_stages, spread=spread)
    pipe = Pipeline(model, schedule, mesh, memory=Memory(offload=offload))
    batches = [_batch(microbatches, seed) for seed in (1, 2)]
    with jax.default_matmul_precision("highest"):
        at(f"{item}: the plain function")
        plain = jax.jit(jax.value_and_grad(model.loss), static_argnames="microbatches")
        wanted = [plain(weights, batch, microbatches=microbatches) for batch in batches]
        expected = [(loss, pipe.place(jax.tree.map(np.asarray, grads))) for loss, grads in wanted]
        steps: dict[str, Step] = {item: pipe.jit(pipe.value_and_grad)}
        if Target.of(mesh, ()).on_gpus:
            options = {**pipe.compiler_options, **NO_GRAPHS}
            no_graphs = jax.jit(pipe.value_and_grad, compiler_options=options)
            steps[f"{item}, without graphs"] = no_graphs
        params = pipe.place(weights)
        lines = (
            judge(title, step, params, batches, expected, scope.steps)
            for title, step in steps.items()
        )
        return Findings(tuple(lines))


def judge(
    item: str,
    step: Step,
    params: PyTree,
    batches: Sequence[PyTree],
    expected: Sequence[tuple[Any, PyTree]],
    count: int,
) -> Line:
    """Run a step with batches in turn.  Compare the first results with the plain ones, and later
    results with the first, bit by bit.
    """
    bound = f"below {TOLERANCE:g} of the plain function, equal bits in {count} runs"

    def line(measured: str, advice: str = "") -> Line:
        return judged(item, measured, bound, advice, wrong=advice)

    at(item)
    first = [step(params, batch) for batch in batches]
    errors = [float(_distance(*pair)) for pair in zip(first, expected, strict=True)]
    worst = max(errors, key=lambda error: error if error == error else np.inf)
    if not worst <= TOLERANCE:
        return line(
            f"{worst:.2g} from the plain function",
            "do not train with this: see known faults above, and try another version of jaxlib",
        )
    for number in range(count):
        run, which = number + len(batches) + 1, number % len(batches)
        at(f"{item}, run {run}")
        if not bool(_same(step(params, batches[which]), first[which])):
            return line(
                f"{worst:.1g} at first, other bits in run {run}",
                "the same program gives other numbers: try "
                "XLA_FLAGS=--xla_gpu_enable_command_buffer= and look for faulty memory",
            )
    return line(f"{worst:.1g}, equal bits in {count} runs")


@jax.jit
def _distance(result: PyTree, expected: PyTree) -> Any:
    """The largest difference of a leaf, relative to the leaf's largest number."""
    each = jax.tree.map(
        lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30),
        result,
        expected,
    )
    return jnp.max(jnp.stack(jax.tree.leaves(each)))


@jax.jit
def _same(result: PyTree, expected: PyTree) -> Any:
    each = jax.tree.map(lambda a, b: jnp.all(a == b), result, expected)
    return jnp.all(jnp.stack(jax.tree.leaves(each)))


def small_model(stages: int, *, spread: bool) -> tuple[Model, dict[str, PyTree]]:
    """Two layers a stage, an embedding and a head, with canonical parameters."""
    draw = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return np.asarray(0.3 * draw.standard_normal(shape), np.float32)

    def block(p: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    weights = {
        "first": {"table": numbers(WORDS, WIDTH)},
        "stages": {"up": numbers(stages, WIDTH, WIDTH), "down": numbers(stages, WIDTH, WIDTH)},
        "last": {"table": numbers(WORDS, WIDTH)},
    }
    if spread:
        return Model(block, first=VocabEmbedding(), last=VocabHead()), weights

    def embed(p: Any, microbatch: Any) -> Any:
        # no scatter in the gradient, so sums have a fixed order
        return jax.nn.one_hot(microbatch["tokens"], WORDS, dtype=jnp.float32) @ p["table"]

    def head(p: Any, x: Any, microbatch: Any) -> Any:
        logits = x @ p["table"].T
        target = jax.nn.one_hot(microbatch["targets"], WORDS, dtype=logits.dtype)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * target, -1))

    return Model(block, first=embed, last=head), weights


def _batch(microbatches: int, seed: int) -> dict[str, Any]:
    """Rows without repeated words in a microbatch, so that no sum depends on an order."""
    draw = np.random.default_rng(seed)
    each = [draw.permutation(WORDS)[: ROWS * TOKENS] for _ in range(microbatches)]
    words = np.stack(each).reshape(-1, TOKENS).astype(np.int32)
    return {"tokens": words, "targets": draw.permuted(words, axis=1)}
