"""What the compiled program sends over the data and tensor axes, and how often: once a step, or in
the loop over microbatches.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.axes.collectives import Collective, collectives
from tests.axes.model import (
    CLASSES,
    HIDDEN,
    ROWS,
    SCHEDULES,
    SPECS,
    WIDTH,
    batch,
    build,
    canonical,
    mesh,
    pipeline,
    stage,
)
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler
from tests.tiers import exhaustive, slow

OPTIONS: dict[str, dict[str, Any]] = {
    "data": {"data_axes": ("data",)},
    "fsdp": {"data_axes": ("data",), "fsdp": "data"},
    "everything": {"data_axes": ("data",), "fsdp": "data", "shard_outer": True, "specs": SPECS},
}
FEW, MANY = 4, 12


@cache
def found(name: str, microbatches: int, options: str, gpu: bool = False) -> list[Collective]:
    """The collectives of a step on a 2x2x2 mesh of CPU devices, or of GPUs that are
    only described.
    """
    schedule = build(name, microbatches)
    on = gpu_mesh((2, 2, 2), ("pipe", "data", "tensor")) if gpu else mesh()
    pipe = pipeline(schedule, mesh=on, **OPTIONS[options])
    everywhere = NamedSharding(on, PartitionSpec())
    params = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), canonical(schedule.num_stages)
    )
    rows = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), batch(microbatches)
    )
    return collectives(pipe.lower(pipe.place(params), rows).compile().as_text(), dict(on.shape))


def over(axis: str, ops: list[Collective], *, in_loop: bool) -> Counter[str]:
    return Counter(op.kind for op in ops if axis in op.axes and op.in_loop == in_loop)


def cases() -> list[Any]:
    """1f1b with each of the options, all schedules with the most; the rest is exhaustive."""
    quick = {
        (name, options)
        for name in SCHEDULES
        for options in OPTIONS
        if name == "1f1b" or options == "everything"
    }
    pairs = ((name, options) for name in SCHEDULES for options in OPTIONS)
    quickest = {("1f1b", "everything"), ("dualpipe", "everything")}
    return [
        pair if pair in quickest else slow(*pair) if pair in quick else exhaustive(*pair)
        for pair in pairs
    ]


@pytest.mark.parametrize(("name", "options"), cases())
def test_gradients_are_reduced_and_parameters_gathered_once_a_step(name: str, options: str) -> None:
    few, many = (found(name, count, options) for count in (FEW, MANY))
    check_once(few, options, chunks=SCHEDULES[name])
    assert over("data", few, in_loop=False) == over("data", many, in_loop=False)
    assert not over("data", many, in_loop=True)


def check_once(ops: list[Collective], options: str, *, chunks: int, combined: bool = False) -> None:
    assert not over("data", ops, in_loop=True)
    once = over("data", ops, in_loop=False)
    # Losses; gradients over the data axis alone; and those over the pipe axis too.
    assert 1 <= once["all-reduce"] <= 3
    # w, b and v of each chunk, embed and head; but with specs and shard_outer b and head have no
    # dim left for the data axis.
    stages, outer = {"data": (0, 0), "fsdp": (3, 2), "everything": (2, 1)}[options]
    apart = stages * chunks + outer
    assert once["reduce-scatter"] == (min(1, stages) if combined else apart)
    # On a mesh with a tensor axis gathers are left apart, so that those of layers run beside
    # matmuls (`compiler_options`).
    assert once["all-gather"] == apart


@needs_gpu_compiler
@pytest.mark.parametrize(
    "options", [name if name == "everything" else slow(name) for name in OPTIONS]
)
def test_so_does_the_gpu_program(options: str) -> None:
    ops = found("1f1b", FEW, options, gpu=True)
    # XLA:GPU makes one collective of all small ones that are ready together.
    check_once(ops, options, chunks=1, combined=True)
    assert {op.kind for op in ops if "tensor" in op.axes} == (
        {"all-reduce"} if options == "everything" else set()
    )
    assert {op.kind for op in ops if "pipe" in op.axes and op.in_loop} == {"collective-permute"}


def test_the_counter_sees_what_the_partitioner_does_by_itself() -> None:
    """The test above has teeth: where a stage spreads its rows over an axis that is left to the
    partitioner, gradients are reduced in the loop.
    """

    def spread(params: Any, x: Any) -> Any:
        return stage(params, jax.lax.with_sharding_constraint(x, PartitionSpec("data")))

    pipe = pipeline(build("1f1b", MANY), stage=spread)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), canonical(2))
    text = pipe.lower(pipe.place(params), batch(MANY)).compile().as_text()
    assert over("data", collectives(text, dict(mesh().shape)), in_loop=True)["all-reduce"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_tensor_parallel_stages_exchange_activations_and_no_parameter(name: str) -> None:
    ops = [op for op in found(name, MANY, "everything") if "tensor" in op.axes]
    rows = ROWS // 2
    assert {op.kind for op in ops} == {"all-reduce"}
    assert all(op.axes == ("tensor",) for op in ops)
    # Partial sums of a stage's output or of its gradient, of a number for the loss or for `gain`;
    # never a parameter or a hidden layer.
    allowed = {(rows, WIDTH), (rows, 1), (rows,), ()}
    assert {shape for op in ops for shape in op.shapes} <= allowed
    assert any(op.in_loop for op in ops)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_collectives_of_parameters_move_tensor_parts_only(name: str) -> None:
    ops = found(name, FEW, "everything")
    whole = {
        (WIDTH, HIDDEN),
        (HIDDEN, WIDTH),
        (WIDTH, CLASSES),
        (WIDTH // 2, HIDDEN),
        (HIDDEN, WIDTH // 2),
        (WIDTH // 2, CLASSES),
    }
    assert not [op for op in ops if whole & set(op.shapes)]
    parts = {(WIDTH, HIDDEN // 2), (HIDDEN // 2, WIDTH)}
    assert parts <= {shape for op in ops for shape in op.shapes if op.kind == "all-gather"}


def test_the_pipe_axis_carries_permutes_and_once_a_step_sums() -> None:
    ops = [op for op in found("1f1b", MANY, "everything") if "pipe" in op.axes]
    assert {op.kind for op in ops if op.in_loop} == {"collective-permute"}
    assert {op.kind for op in ops if not op.in_loop} - {"collective-permute"} == {
        "all-gather",
        "reduce-scatter",
        "all-reduce",
    }
    for op in ops:
        assert op.kind != "collective-permute" or op.axes == ("pipe",)
