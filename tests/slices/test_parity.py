"""Losses and gradients of slices of sequences against plain JAX on whole sequences."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.slices.models import MODELS, data
from tests.tiers import slow
from tests.tolerance import relative, step_error

BOUND = 1e-12


@lru_cache
def truth(name, stages, sequences):
    """Loss and gradients of whole sequences, by plain JAX."""
    model, params, batch = data(name, stages, sequences)
    step = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=sequences)))
    return step(params)


def pipeline(model, schedule, **options):
    devices = jax.devices()[: schedule.num_devices]
    mesh = jax.make_mesh((schedule.num_devices,), ("pipe",), devices=devices)
    return jp.Pipeline(model, schedule, mesh, **options)


def check(name, schedule, **options):
    sequences = schedule.num_microbatches // schedule.slices
    model, params, batch = data(name, schedule.num_stages, sequences)
    pipe = pipeline(model, schedule, **options)
    loss, grads = pipe.value_and_grad(pipe.place(params), batch)
    wanted = truth(name, schedule.num_stages, sequences)
    assert relative((loss, pipe.canonical(grads)), wanted) < BOUND


def build(name, *, devices, slices, sequences=2, **options):
    return jp.schedules.build(
        name, devices=devices, microbatches=sequences * slices, slices=slices, **options
    )


@pytest.mark.parametrize("slices", [slow(2), 4, slow(8)])
@pytest.mark.parametrize("name", MODELS)
def test_the_plain_loss_of_slices_is_that_of_whole_sequences(name, slices):
    model, params, batch = data(name, 2, 2)

    def loss(p):
        return model.loss(p, batch, microbatches=2 * slices, slices=slices)

    assert relative(jax.jit(jax.value_and_grad(loss))(params), truth(name, 2, 2)) < BOUND


QUICK = [
    ("recurrent", "1f1b", 2, 4),
    ("state_space", "zb_h1", 2, 2),
    ("attention", "zbv", 2, 4),
]


@pytest.mark.parametrize(("name", "schedule", "devices", "slices"), QUICK)
def test_programs_equal_whole_sequences(name, schedule, devices, slices):
    """A few; `test_grid` has the whole grid, with torch_ref beside."""
    check(name, build(schedule, devices=devices, slices=slices))


@pytest.mark.parametrize("name", [slow("recurrent"), slow("state_space"), "attention"])
def test_the_eager_executor_equals_whole_sequences(name):
    check(name, build("zb_h1", devices=2, slices=2, sequences=1), executor=EagerExecutor())


def test_stages_that_pass_nothing_run_by_slices_in_the_eager_executor():
    def plain(p, x):
        return jnp.tanh(x @ p["w"])

    _, params, batch = data("recurrent", 2, 2)
    model = jp.Model(plain, last=MODELS["recurrent"][0].last, time=("x", "y"))
    pipe = pipeline(model, build("1f1b", devices=2, slices=2), executor=EagerExecutor())
    wanted = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=2))(params)
    assert step_error(pipe, params, batch, wanted) < BOUND


def test_the_first_carry_is_zeros_where_the_model_says_nothing():
    def stage(params, x, *, carry):
        return jnp.tanh(x @ params + carry), carry + x.sum(axis=1, keepdims=True)

    model = jp.Model(stage, last=lambda p, x, mb: jnp.sum(x * mb["y"]), time=("x", "y"))
    rng = np.random.default_rng(1)
    params = {"stages": rng.standard_normal((2, 3, 3)), "last": ()}
    batch = {key: rng.standard_normal((2, 8, 3)) for key in ("x", "y")}

    def wanted(params):
        halves = [batch["x"][:, :4], batch["x"][:, 4:]]
        for w in params["stages"]:
            before = jnp.zeros((2, 1, 3))
            made = []
            for half in halves:
                made.append(jnp.tanh(half @ w + before))
                before = before + half.sum(axis=1, keepdims=True)
            halves = made
        return sum(jnp.sum(h * batch["y"][:, 4 * i :][:, :4]) for i, h in enumerate(halves)) / 2

    pipe = pipeline(model, build("1f1b", devices=2, slices=2, sequences=1))
    loss, grads = pipe.value_and_grad(pipe.place(params), batch)
    assert relative((loss, pipe.canonical(grads)), jax.value_and_grad(wanted)(params)) < BOUND
