"""Data, tensor and fsdp axes beside the pipe axis: the numbers of one device, on 2x2x2 meshes of
virtual CPU devices.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
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
    first,
    last,
    like_truth,
    mesh,
    pipeline,
    stage,
    truth,
    worst_error,
)
from tests.oracle import oracle_value_and_grad
from tests.tiers import slow
from tests.tolerance import FLOAT64, step_error

M = 4
EVERYTHING = {"data_axes": ("data",), "fsdp": "data", "shard_outer": True, "specs": SPECS}


def combinations() -> list[dict[str, Any]]:
    """Every choice of data_axes, fsdp (which needs a data axis), shard_outer and specs."""
    spread: list[dict[str, Any]] = [
        {},
        {"data_axes": ("data",)},
        {"data_axes": ("data",), "fsdp": "data"},
    ]
    outer: list[dict[str, Any]] = [{}, {"shard_outer": True}]
    tensor: list[dict[str, Any]] = [{}, {"specs": SPECS}]
    return [{**a, **b, **c} for a, b, c in itertools.product(spread, outer, tensor)]


def name_of(options: dict[str, Any]) -> str:
    return "+".join(options) or "plain"


def cases() -> list[Any]:
    """1f1b with one option at a time, and all schedules with all options; the rest
    is exhaustive.
    """
    found = []
    for name, options in itertools.product(SCHEDULES, combinations()):
        quick = options == EVERYTHING or (
            name == "1f1b"
            and (len(options) < 2 or options == {"data_axes": ("data",), "fsdp": "data"})
        )
        found.append(
            pytest.param(
                name,
                options,
                id=f"{name}-{name_of(options)}",
                marks=() if quick else pytest.mark.exhaustive,
            )
        )
    return found


@pytest.mark.parametrize(("name", "options"), cases())
def test_loss_and_gradients_equal_one_device(name: str, options: dict[str, Any]) -> None:
    schedule = build(name, M)
    pipe = pipeline(schedule, **options)
    params, rows = pipe.place(canonical(schedule.num_stages)), batch(M)
    loss, grads = pipe.value_and_grad(params, rows)
    wanted_loss, wanted = truth(schedule.num_stages, M)
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert worst_error(like_truth(pipe.canonical(grads)), wanted) <= FLOAT64
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert (grad.shape, grad.dtype) == (param.shape, param.dtype)
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)
    assert abs(pipe.evaluate(params, rows) - wanted_loss) <= FLOAT64 * abs(wanted_loss)


@pytest.mark.parametrize(
    "name", ["dualpipe", *(slow(name) for name in SCHEDULES if name != "dualpipe")]
)
def test_a_second_step_compiles_nothing_and_keeps_shardings(name: str) -> None:
    schedule = build(name, M)
    pipe = pipeline(schedule, **EVERYTHING)
    params = pipe.place(canonical(schedule.num_stages))
    layout = jax.tree.map(lambda leaf: leaf.sharding, params)
    losses, compiled = [], []
    for seed in range(3):
        if seed == 1:
            jax.monitoring.register_event_duration_secs_listener(
                lambda event, *_, **__: compiled.append(event)
            )
        rows = batch(M, seed=seed)
        loss, grads = pipe.value_and_grad(params, rows)
        params = jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)
        losses += [float(loss), float(pipe.evaluate(params, rows))]
        # The sharding itself, not an equivalent one, is what `jax.jit` looks its compiled programs
        # up by.
        assert jax.tree.map(lambda leaf: leaf.sharding, params) == layout
    jax.monitoring.clear_event_listeners()
    assert [event for event in compiled if "backend_compile" in event] == []
    assert losses[1] < losses[0]


def part_sizes(params: dict[str, Any]) -> dict[str, float]:
    """Of each parameter, the share that every device holds."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sizes = {shard.data.size for shard in leaf.addressable_shards}
        assert len(sizes) == 1
        found[jax.tree_util.keystr(path[-1:], simple=True)] = sizes.pop() / leaf.size
    return found


def test_each_device_holds_only_its_part() -> None:
    def parts(**options: Any) -> dict[str, float]:
        return part_sizes(pipeline(build("1f1b"), **options).place(canonical(2)))

    whole = {"embed": 1, "head": 1, "w": 1 / 2, "b": 1 / 2, "v": 1 / 2, "gain": 1 / 2, "odd": 1 / 2}
    assert parts() == whole
    fsdp = {name: share if name in ("gain", "odd") else share / 2 for name, share in whole.items()}
    assert parts(data_axes=("data",), fsdp="data") == fsdp
    assert parts(shard_outer=True) == whole | {"embed": 1 / 2, "head": 1 / 2}
    tensor = {
        name: share / 2 if name in ("w", "b", "v", "head") else share
        for name, share in whole.items()
    }
    assert parts(specs=SPECS) == tensor
    # b has one dim, which is split over tensor: nothing is left for fsdp, and head's other dim goes
    # to the pipe axis.
    everything = whole | {"w": 1 / 8, "v": 1 / 8, "b": 1 / 4, "embed": 1 / 4, "head": 1 / 4}
    assert parts(**EVERYTHING) == everything


def test_shapes_are_placed_like_arrays() -> None:
    pipe = pipeline(build("interleaved_1f1b"), **EVERYTHING)
    arrays = pipe.place(canonical(4))
    shapes = pipe.place(
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), canonical(4))
    )
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), shapes) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), arrays
    )
    back = pipe.canonical(arrays)
    assert worst_error(like_truth(back), canonical(4)) == 0  # numbers are moved, not computed


@pytest.mark.parametrize("name", ["dualpipe"])
def test_two_data_axes_with_fsdp_over_one(name: str) -> None:
    # "Hybrid" sharding: parameters are split over `fsdp`, and copied over `data`.
    schedule = build(name, M)
    pipe = pipeline(
        schedule,
        mesh=mesh("pipe", "data", "fsdp"),
        data_axes=("data", "fsdp"),
        fsdp="fsdp",
        shard_outer=True,
    )
    stages = schedule.num_stages
    assert step_error(pipe, canonical(stages), batch(M), truth(stages, M)) <= FLOAT64


def test_one_axis_given_as_a_string() -> None:
    pipe = pipeline(build("1f1b"), data_axes="data", fsdp="data")
    assert pipe.data_axes == ("data",)


@pytest.mark.parametrize("name", ["zb_h1"])
def test_the_axes_may_stand_in_any_order(name: str) -> None:
    schedule = build(name, M)
    pipe = pipeline(schedule, mesh=mesh("tensor", "pipe", "data"), **EVERYTHING)
    stages = schedule.num_stages
    assert step_error(pipe, canonical(stages), batch(M), truth(stages, M)) <= FLOAT64


def weighted_last(params: Any, x: Any, microbatch: Any) -> Any:
    """(sum, count) and a metric: rows count as much as their weight."""
    error = jnp.mean(jnp.square(x @ params["head"] - microbatch["y"]), axis=1)
    weight = microbatch["weight"]
    return (jnp.sum(error * weight), jnp.sum(weight)), {"largest": jnp.mean(error)}


def test_shards_of_unequal_weight_are_averaged_by_count() -> None:
    schedule = build("1f1b", M)
    rows = batch(M) | {"weight": np.random.default_rng(2).integers(0, 5, ROWS * M).astype(float)}
    # All the weight but little in one data shard: a mean of the shards' means would be far off.
    rows["weight"][: ROWS * M // 2] *= 100
    pipe = pipeline(
        schedule, last=weighted_last, loss=jp.Loss.SUM_OVER_COUNT, has_metrics=True, **EVERYTHING
    )
    (loss, metrics), grads = pipe.value_and_grad(pipe.place(canonical(2)), rows)

    def whole(params: Any, x: Any, microbatch: Any) -> Any:
        (total, count), _ = weighted_last(params, x, microbatch)
        return total / count

    wanted_loss, wanted = oracle_value_and_grad(
        canonical(2), rows, first=first, stage=stage, last=whole, microbatches=1
    )
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert worst_error(like_truth(pipe.canonical(grads)), wanted) <= FLOAT64
    # Metrics are means over microbatches and shards, whatever the weights.
    assert abs(metrics["largest"] - truth(2, M)[0]) <= FLOAT64 * truth(2, M)[0]


def shared_stage(params: Any, x: Any, *, shared: Any) -> Any:
    return stage(params, x) + jnp.tanh(x @ shared["mix"])


def test_shared_parameters_are_summed_over_every_use_and_shard() -> None:
    schedule = build("interleaved_1f1b", M)
    params = canonical(4) | {
        "shared": {"mix": np.random.default_rng(3).standard_normal((WIDTH, WIDTH))}
    }
    pipe = pipeline(schedule, stage=shared_stage, **EVERYTHING)
    loss, grads = pipe.value_and_grad(pipe.place(params), batch(M))

    wanted_loss, wanted = oracle_value_and_grad(
        params, batch(M), first=first, stage=shared_stage, last=last, microbatches=1
    )
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert worst_error(pipe.canonical(grads), wanted) <= FLOAT64


def test_losses_by_microbatch_are_means_over_the_shards() -> None:
    schedule = build("1f1b", M)
    pipe = pipeline(schedule, **EVERYTHING)
    params, rows = canonical(2), batch(M)
    found = pipe.losses(pipe.place(params), rows)
    # Microbatch m is the m-th part of the first shard's rows together with the m-th part of the
    # second shard's.
    cut = jax.tree.map(lambda leaf: leaf.reshape(2, M, ROWS // 2, -1), rows)
    for m in range(M):
        mine = jax.tree.map(lambda leaf, m=m: np.concatenate([leaf[0, m], leaf[1, m]]), cut)

        wanted, _ = oracle_value_and_grad(
            params, mine, first=first, stage=stage, last=last, microbatches=1
        )
        assert abs(found[m] - wanted) <= FLOAT64 * abs(wanted)


def test_the_model_needs_every_axis() -> None:
    # If a dim of the model did not divide, fsdp or specs would silently leave a parameter whole and
    # the tests above would say less.
    assert WIDTH % 4 == HIDDEN % 4 == CLASSES % 4 == 0
