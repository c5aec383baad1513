"""Losses and gradients of the lowered program against plain JAX, on one tiny MLP and every table
that has a name.
"""

from functools import lru_cache
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.table.kinds import parts
from tests.models import to_flat, twin
from tests.parity.engines import (
    Outcome,
    case_data,
    jaxpipe_step,
    mesh_of,
    oracle_step,
    pipeline,
    torch_step,
    truth,
    worst_error,
)
from tests.parity.tolerance import FLOAT64, bound
from tests.tiers import slow
from tests.tolerance import relative, same

ROWS = 2


@lru_cache
def mlp_of(stages):
    """One twin for each S, so that `truth` computes the oracle's answer once and not once a
    schedule.
    """
    return twin("mlp", stages)


def step_of(schedule, dtype=np.float64):
    model = mlp_of(schedule.num_stages)
    return jaxpipe_step(
        pipeline(schedule, model), *case_data(model, schedule.num_microbatches, ROWS, dtype=dtype)
    )


def error_and_bound(schedule, dtype):
    """Worst error of a step against the float64 oracle, and what it may be."""
    model, count = mlp_of(schedule.num_stages), schedule.num_microbatches
    limit = bound(model.reference, rows=ROWS, microbatches=count, dtype=dtype)
    return worst_error(step_of(schedule, dtype), truth(model, count, ROWS)), limit


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 8])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_equal_the_oracle(name, devices, microbatches, dtype):
    error, limit = error_and_bound(
        jp.schedules.build(name, devices=devices, microbatches=microbatches), dtype
    )
    assert error <= limit


@pytest.mark.parametrize("name", jp.schedules.names())
def test_every_named_schedule_equals_the_oracle(name):
    error, limit = error_and_bound(jp.schedules.build(name, devices=2, microbatches=4), np.float64)
    assert error <= limit


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [3, 8])
@pytest.mark.parametrize("name", jp.schedules.names())
def test_every_named_schedule_equals_the_oracle_on_four_devices(name, microbatches):
    try:
        schedule = jp.schedules.build(name, devices=4, microbatches=microbatches)
    except jp.ScheduleError:
        pytest.skip(f"{name} is not defined for 4 devices and {microbatches} microbatches")
    error, limit = error_and_bound(schedule, np.float64)
    assert error <= limit


def test_bfloat16_stays_within_its_rounding_errors():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=4)
    error, limit = error_and_bound(schedule, jnp.bfloat16)
    assert error <= limit
    assert limit < 0.25, "with such a limit the comparison would say nothing"


def added(numbers):
    """Their float32 sum, from left to right."""
    total = np.float32(0)
    for number in numbers:
        total = np.float32(total + number)
    return float(total)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_gradients_are_added_in_the_order_of_backwards(name):
    """A microbatch's gradient is its x, exactly: every factor is a power of two.  So only additions
    round, and their order shows.
    """
    schedule = jp.schedules.build(name, devices=2, microbatches=4)
    xs = np.random.default_rng(527).standard_normal(4).astype(np.float32)
    pipe = jp.Pipeline(
        jp.Model(lambda w, x: w * x, last=lambda _, x, microbatch: jnp.sum(x)), schedule, mesh_of(2)
    )
    _, grads = pipe.value_and_grad(
        pipe.place({"stages": np.ones((2, 1), np.float32), "last": {}}), {"x": xs}
    )
    for s, found in enumerate(pipe.canonical(grads)["stages"]):
        order = [
            a.microbatch
            for row in schedule.rows
            for cell in row
            for a in parts(cell)
            if a.stage == s and a.kind in (jp.Kind.B, jp.Kind.W)
        ]
        alike = [
            other for other in permutations(order) if added(xs[list(other)]) == added(xs[order])
        ]
        assert len(alike) == 2, (
            "this order, and the same with its first two swapped, must be the only ones with "
            "this sum"
        )
        assert float(found[0]) == added(xs[order]) / 4


MODELS = [
    ("conv", {}),
    ("gpt", {}),
    ("gpt", {"tied": False}),
    ("moe", {}),
    ("rnn", {}),
    ("mlp_nnx", {}),
]


def check_model(schedule, name, flags):
    model, count = twin(name, schedule.num_stages, **flags), schedule.num_microbatches
    weights, batch = case_data(model, count, ROWS)
    found = jaxpipe_step(pipeline(schedule, model), weights, batch)
    assert worst_error(found, oracle_step(model, weights, batch, count)) <= FLOAT64
    assert worst_error(found, torch_step(schedule, model, weights, batch)) <= FLOAT64


@pytest.mark.parametrize(
    ("name", "flags"), [model if model[0] == "rnn" else slow(*model) for model in MODELS]
)
def test_every_model_equals_the_oracle_and_torch(name, flags):
    # Split backwards of convolutions, of scans over layers and over time, and of a dict that
    # travels between stages.
    check_model(jp.schedules.build("zb_h1", devices=2, microbatches=3), name, flags)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv", "dualpipe"])
@pytest.mark.parametrize(("name", "flags"), MODELS)
def test_every_model_equals_the_oracle_and_torch_on_two_chunks(name, flags, schedule):
    check_model(jp.schedules.build(schedule, devices=2, microbatches=4), name, flags)


def test_without_first_the_stage_takes_x():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=3)
    model = twin("mlp", 2, with_first=False, features_in=4, width=4)
    weights, batch = case_data(model, 3, ROWS)
    found = jaxpipe_step(pipeline(schedule, model), weights, batch)
    assert worst_error(found, oracle_step(model, weights, batch, 3)) <= FLOAT64


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipe"])
def test_canonical_undoes_place_bit_for_bit(name):
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    model = mlp_of(schedule.num_stages)
    pipe = pipeline(schedule, model)
    weights = model.weights()
    placed = pipe.place(model.canonical())
    back = to_flat(pipe.canonical(placed))
    # numbers are moved, not computed
    assert all(np.array_equal(back[k], weights[k]) for k in weights)
    # Each device holds its own stages and no others: 1/P of the parameters, not all of them.
    for leaf in jax.tree.leaves(placed["stages"]):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}
    shapes = pipe.place(
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), model.canonical())
    )
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), shapes) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), placed
    )


def test_gradients_are_laid_out_like_the_parameters():
    schedule = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=2)
    model = mlp_of(4)
    pipe = pipeline(schedule, model)
    params = pipe.place(model.canonical())
    _, grads = pipe.value_and_grad(params, model.batch(4))
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert (grad.shape, grad.dtype) == (param.shape, param.dtype)
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)


def test_a_step_twice_gives_the_same_bits_and_inside_jit_the_same_numbers():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=3)
    model = mlp_of(2)
    pipe = pipeline(schedule, model)
    params, batch = pipe.place(model.canonical()), model.batch(6)
    outside, again = pipe.value_and_grad(params, batch), pipe.value_and_grad(params, batch)
    inside = jax.jit(lambda p, b: pipe.value_and_grad(p, b))(params, batch)
    # Nothing was donated: the parameters are still there to be compared and used.
    # One compiled program run twice: the same bits.
    assert same(outside, again)
    # Inside another jit it is part of a program that is compiled apart.
    assert relative(inside, outside) <= FLOAT64


def test_an_explicit_mesh_works_like_an_automatic_one():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=3)
    model = mlp_of(2)
    weights, batch = case_data(model, 3, ROWS)
    explicit = jax.make_mesh((2,), ("stages",), devices=jax.devices()[:2])
    found = jaxpipe_step(pipeline(schedule, model, mesh=explicit, axis="stages"), weights, batch)
    assert worst_error(found, truth(model, 3, ROWS)) <= FLOAT64


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_the_data_axis_gives_the_mean_over_all_rows(name):
    schedule = jp.schedules.build(name, devices=4, microbatches=3)
    model = mlp_of(schedule.num_stages)
    weights, batch = case_data(model, 2 * 3, ROWS)
    pipe = pipeline(schedule, model, mesh=mesh_of(4, data=2), data_axes=("data",))
    # Each of the two shards cuts its own rows into 3 microbatches: in row order, 6 microbatches in
    # all.
    assert worst_error(jaxpipe_step(pipe, weights, batch), truth(model, 2 * 3, ROWS)) <= FLOAT64


def test_pipe_lower_compiles_from_shapes_alone_and_runs():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=3)
    model = mlp_of(2)
    pipe = pipeline(schedule, model)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (model.canonical(), model.batch(6))
    )
    compiled = pipe.lower(pipe.place(shapes[0]), shapes[1]).compile()
    loss, grads = compiled(pipe.place(model.canonical()), jax.tree.map(jnp.asarray, model.batch(6)))
    flat = to_flat(pipe.canonical(grads))
    found = Outcome(float(loss), {k: flat[k] for k in model.weights()})
    assert worst_error(found, truth(model, 3, ROWS)) <= FLOAT64
