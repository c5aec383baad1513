"""Parameters of few bits, summed in their own dtype, on meshes with axes of one device too."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxpipe as jp
from jaxpipe.debug import find_nonfinite
from tests.axes.model import (
    ROWS,
    SPECS,
    WIDTH,
    batch,
    canonical,
    first,
    last,
    like_truth,
    pipeline,
    stage,
    worst_error,
)
from tests.flat import flat_pipeline
from tests.oracle import oracle_outputs, oracle_value_and_grad
from tests.tiers import exhaustive, slow
from tests.tolerance import longest_chain, rounding

M = 2
FUNCTIONS = {"first": first, "stage": stage, "last": last}
FSDP = {"data_axes": ("data",), "fsdp": "data", "shard_outer": True}
GRIDS: dict[str, tuple[tuple[str, ...], tuple[int, ...], dict[str, Any]]] = {
    "nothing beside": (("pipe", "tensor"), (2, 1), {}),
    "tensor": (("tensor", "pipe"), (2, 2), {}),
    "one stage": (("pipe", "tensor"), (1, 2), {}),
    "one device": (("pipe", "tensor"), (1, 1), {}),
    "one data shard": (("pipe", "data", "tensor"), (2, 1, 2), {"data_axes": ("data",)}),
    "only tensor": (("pipe", "data", "tensor"), (1, 1, 2), FSDP),
    "only data": (("data", "pipe", "tensor"), (2, 1, 2), FSDP),
    "everything": (("pipe", "data", "tensor"), (2, 2, 2), FSDP),
    "no tensor": (("pipe", "data", "tensor"), (2, 2, 1), FSDP),
}
QUICK = ("nothing beside", "one stage")


def grid(name: str) -> tuple[Mesh, dict[str, Any]]:
    names, sizes, options = GRIDS[name]
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names), options


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


@cache
def truth(stages: int, dtype: str) -> tuple[Any, Any, int]:
    """(loss, gradients), outputs, of the rounded weights in float64; the roundings on the way."""
    params, rows = (
        jax.tree.map(lambda a: np.asarray(a, np.float64), cast(tree, dtype))
        for tree in (canonical(stages), batch(M))
    )
    step = jax.jit(lambda p, b: oracle_value_and_grad(p, b, **FUNCTIONS, microbatches=1))
    chain = longest_chain(
        lambda p, b: oracle_value_and_grad(p, b, **FUNCTIONS, microbatches=1), params, rows
    )
    return step(params, rows), oracle_outputs(params, rows, first=first, stage=stage), chain


def precisions() -> list[Any]:
    """Every mesh in bfloat16, whose sums are widened; the other dtypes on the largest mesh and on
    the one with axes of one device.
    """
    every = ("everything", "no tensor")
    cases = [(name, dtype) for name in GRIDS for dtype in ("bfloat16", "float16", "float32")]
    return [
        case
        if case[0] in QUICK and case[1] == "bfloat16"
        else (slow if case[1] == "bfloat16" or case[0] in every else exhaustive)(*case)
        for case in cases
    ]


@pytest.mark.parametrize(("name", "dtype"), precisions())
def test_every_call_gives_the_numbers_of_one_device(name: str, dtype: str) -> None:
    mesh, options = grid(name)
    schedule = jp.schedules.build("1f1b", devices=mesh.shape["pipe"], microbatches=M)
    pipe = pipeline(schedule, mesh=mesh, specs=SPECS, accumulate_dtype=None, **options)
    params, rows = pipe.place(cast(canonical(schedule.num_stages), dtype)), cast(batch(M), dtype)
    (wanted_loss, wanted), outputs, chain = truth(schedule.num_stages, dtype)
    bound = rounding(chain, dtype)
    loss, grads = pipe.value_and_grad(params, rows)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}
    assert worst_error(like_truth(pipe.canonical(grads)), wanted) <= bound
    for found in (loss, pipe.loss(params, rows), pipe.evaluate(params, rows)):
        assert abs(float(found) - float(wanted_loss)) <= bound * abs(float(wanted_loss))
    assert worst_error(pipe.outputs(params, rows), outputs) <= bound


def reducing(params: Any, x: Any) -> Any:
    """Sums, maxima, and a gather whose gradient is a scattered sum; one of them in a loop."""
    every = lax.all_gather(x, "data", axis=0, tiled=True)
    scanned = lax.scan(
        lambda carry, _: (carry + lax.psum(x, "data"), None), jnp.zeros_like(x), length=1
    )[0]
    largest = lax.pmax(lax.stop_gradient(x), "data")
    return (
        stage(params, x) + jnp.mean(every, axis=0) + scanned + largest + lax.pmin(largest, "data")
    )


def with_metrics(params: Any, x: Any, microbatch: Any) -> Any:
    return last(params, x, microbatch), {"norm": jnp.sum(x), "rows": jnp.int32(len(x))}


def reduced(name: str) -> tuple[jp.Pipeline, Any, Any, Any]:
    """(pipeline, parameters, loss, gradients) of stages that reduce over data in bfloat16."""
    mesh, options = grid(name)
    schedule = jp.schedules.build("1f1b", devices=mesh.shape["pipe"], microbatches=M)
    pipe = pipeline(
        schedule,
        mesh=mesh,
        specs=SPECS,
        stage=reducing,
        last=with_metrics,
        has_metrics=True,
        **options,
    )
    params = pipe.place(cast(canonical(schedule.num_stages), jnp.bfloat16))
    (loss, metrics), grads = pipe.value_and_grad(params, cast(batch(M), jnp.bfloat16))
    assert metrics["rows"] == ROWS / math.prod(mesh.shape[axis] for axis in options["data_axes"])
    return pipe, params, loss, like_truth(pipe.canonical(grads))


def test_what_functions_reduce_over_one_data_shard() -> None:
    pipe, params, loss, grads = reduced("only tensor")

    def plain(params: Any, x: Any) -> Any:
        return stage(params, x) + jnp.mean(x, axis=0) + x + 2 * lax.stop_gradient(x)

    weights, rows = (
        cast(cast(tree, jnp.bfloat16), jnp.float64) for tree in (canonical(1), batch(M))
    )
    functions = {**FUNCTIONS, "stage": plain}
    wanted = oracle_value_and_grad(weights, rows, **functions, microbatches=M)
    chain = longest_chain(
        lambda p, b: oracle_value_and_grad(p, b, **functions, microbatches=M), weights, rows
    )
    assert worst_error((loss, grads), wanted) <= rounding(chain, jnp.bfloat16)
    assert find_nonfinite(pipe, params, cast(batch(M), jnp.bfloat16)) is None


@pytest.mark.slow
def test_what_functions_reduce_over_data_shards_beside_a_tensor_axis() -> None:
    (_, _, *found), (_, _, *wanted) = reduced("everything"), reduced("no tensor")
    assert worst_error(found, cast(wanted, jnp.float64)) <= 2 * rounding(100, jnp.bfloat16)


@pytest.mark.parametrize("sizes", [(2, 1), slow((2, 2)), slow((1, 2))])
def test_a_vocabulary_in_bfloat16(sizes: tuple[int, int]) -> None:
    mesh = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("pipe", "tensor"))
    schedule = jp.schedules.build("1f1b", devices=sizes[0], microbatches=M)
    ends = {"first": jp.VocabEmbedding(), "last": jp.VocabHead()}
    options = {
        "schedule": schedule,
        "mesh": mesh,
        "replicated_axes": ("tensor",),
        "accumulate_dtype": None,
        **ends,
    }
    pipe = flat_pipeline(lambda p, x: x + jnp.tanh(x @ p), **options)
    rng = np.random.default_rng(0)
    shapes = {
        "first": {"table": (12, WIDTH)},
        "stages": (sizes[0], WIDTH, WIDTH),
        "last": {"w": (12, WIDTH)},
    }
    weights = jax.tree.map(
        lambda shape: rng.standard_normal(shape),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    rows = {"tokens": rng.integers(0, 12, (4 * M, 3)), "targets": rng.integers(0, 12, (4 * M, 3))}
    found = pipe.value_and_grad(pipe.place(cast(weights, jnp.bfloat16)), rows)
    wide = flat_pipeline(lambda p, x: x + jnp.tanh(x @ p), **options)
    wanted = wide.value_and_grad(wide.place(cast(cast(weights, jnp.bfloat16), jnp.float64)), rows)
    assert worst_error(
        (found[0], pipe.canonical(found[1])), (wanted[0], wide.canonical(wanted[1]))
    ) <= rounding(100, jnp.bfloat16)
