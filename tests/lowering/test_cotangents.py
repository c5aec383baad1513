"""A step begins its backwards with the cotangent that the loss of the step has: over the count, and
times the factor of the loss.

Gradients that are clipped between layers show it: a rule that is not linear in the cotangent gives
something else where a factor comes after the backward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.tiers import needs_half, slow
from tests.tolerance import FLOAT64, longest_chain, relative, rounding, same

WIDTH, ROWS, M = 4, 2, 4
SCALE = 2.0**6


@jax.custom_vjp
def clipped(x: Any, most: Any) -> Any:
    """x, with a gradient that is clipped entry by entry."""
    return x


def _clip(most: Any, g: Any) -> Any:
    return jnp.clip(g, -most, most), None


clipped.defvjp(lambda x, most: (x, most), _clip)


def stage(params: Any, x: Any, *, microbatch: Any) -> Any:
    return clipped(x + jnp.tanh(x @ params["w"]), microbatch["most"])


def losing(params: Any, x: Any, *, microbatch: Any) -> Any:
    return stage(params, x, microbatch=microbatch), 0.1 * jnp.sum(x**2)


def by_rows(params: Any, x: Any, microbatch: Any) -> Any:
    error = (x @ params["head"] - microbatch["y"]) ** 2
    mask = jnp.broadcast_to(microbatch["mask"].reshape(-1, *(1,) * (x.ndim - 1)), error.shape)
    return jnp.sum(mask * error), jnp.sum(mask)


def by_mean(params: Any, x: Any, microbatch: Any) -> Any:
    return by_rows(params, x, microbatch)[0] / ROWS


def by_share(params: Any, x: Any, microbatch: Any, *, ctx: Any) -> Any:
    """The same, of a head whose outputs are spread over the devices."""
    part = x @ params["head"]
    at = jax.lax.axis_index(ctx.axis) * part.shape[-1] + jnp.arange(part.shape[-1])
    wanted = jnp.pad(microbatch["y"], ((0, 0), (0, 3)))[:, at]
    exists = (at < ctx.sizes["head"]) * microbatch["mask"][:, None]
    total = jnp.sum(exists * (part - wanted) ** 2)
    return jax.lax.psum((total, jnp.sum(exists)), ctx.axis)


def case(form: str, loss: jp.Loss) -> tuple[jp.Model, jp.Schedule, dict[str, Any]]:
    """A model, a table and further arguments of its pipeline."""
    last = by_rows if loss is jp.Loss.SUM_OVER_COUNT else by_mean
    how: dict[str, Any] = {"loss": loss, "whole": ("most",)}
    table = {"devices": 2, "microbatches": M}
    if form == "letters":
        model = jp.Model({"t": stage, "L": last}, layers="t*3L", **how)
        return model, jp.schedules.build("1f1b", **table), {"layout": "t|ttL"}
    if form == "slices":
        model = jp.Model(stage, last=last, time=("x", "y"), **how)
        return model, jp.schedules.build("1f1b", **table, slices=2), {}
    if form == "spread":
        spread = jp.spread(by_share, dims={"head": 1})
        return jp.Model(stage, last=spread, **how), jp.schedules.build("zb_h1", **table), {}
    if form == "stage_loss":
        model = jp.Model(losing, last=last, stage_loss=True, **how)
        return model, jp.schedules.build("interleaved_1f1b", **table), {}
    if form == "data":
        model, sharding = jp.Model(stage, last=last, **how), jp.Sharding(data=("data",))
        return model, jp.schedules.build("zbv", **table), {"sharding": sharding}
    return jp.Model(stage, last=last, **how), jp.schedules.build("zb_h1", **table), {}


def numbers(form: str, schedule: jp.Schedule) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and a batch."""
    draw = np.random.default_rng(3)
    shards, outs = (2 if form == "data" else 1), (3 if form == "spread" else 2)
    rows = M // schedule.slices * ROWS * shards
    time = (4,) if form == "slices" else ()
    own = {"w": draw.normal(size=(3 if form == "letters" else schedule.num_stages, WIDTH, WIDTH))}
    params = {
        "stages": {"t": own} if form == "letters" else own,
        "last": {"head": draw.normal(size=(WIDTH, outs))},
    }
    batch = {
        "x": draw.normal(size=(rows, *time, WIDTH)),
        "y": draw.normal(size=(rows, *time, outs)),
        "mask": (draw.random(rows) > 0.4).astype(float),
        "most": np.float64(0.05),
    }
    return jax.tree.map(jnp.asarray, params), batch


MEAN, COUNT = jp.Loss.MEAN, jp.Loss.SUM_OVER_COUNT
CASES = [
    ("alike", COUNT, None),
    ("data", COUNT, SCALE),
    ("spread", COUNT, SCALE),
    ("letters", MEAN, SCALE),
    *(slow(form, COUNT, SCALE) for form in ("alike", "letters", "slices", "stage_loss")),
    *(slow(form, MEAN, SCALE) for form in ("alike", "data", "slices", "stage_loss")),
    *(slow(form, COUNT, None) for form in ("data", "spread", "slices", "stage_loss")),
]


@pytest.mark.parametrize(("form", "loss", "scale"), CASES)
def test_a_clipped_cotangent_is_that_of_the_plain_model(form, loss, scale):
    model, schedule, how = case(form, loss)
    params, batch = numbers(form, schedule)
    shards, factor = (2 if form == "data" else 1), 1.0 if scale is None else scale
    batch["most"] *= factor

    def plain(params: Any, most: Any) -> Any:
        cut = {"microbatches": M * shards, "slices": schedule.slices}
        return factor * model.loss(params, {**batch, "most": most}, **cut)

    wanted = jax.value_and_grad(plain)(params, batch["most"])
    assert relative(jax.grad(plain)(params, 1e9), wanted[1]) > 0.1, "nothing is clipped"
    shape = {"data": (2, 2)}.get(form, (2,))
    names = ("data", "pipe")[2 - len(shape) :]
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: 2 * shards])
    for executor in (None, EagerExecutor()):
        pipe = jp.Pipeline(model, schedule, mesh, executor=executor, **how)
        placed = pipe.place(params)
        found, grads = pipe.value_and_grad(placed, batch, scale=scale)
        own = {key: pipe.canonical(grads)[key] for key in params}
        assert relative((np.asarray(found), own), (np.asarray(wanted[0]), wanted[1])) <= FLOAT64


@pytest.mark.parametrize("executor", [None, EagerExecutor()], ids=["spmd", "eager"])
def test_the_loss_has_a_factor_before_the_backward_and_one_after(executor):
    model, schedule, how = case("alike", COUNT)
    params, batch = numbers("alike", schedule)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(model, schedule, mesh, executor=executor, **how)
    placed = pipe.place(params)

    def plain(params: Any) -> Any:
        return SCALE * model.loss(params, batch, microbatches=M)

    loss, wanted = jax.value_and_grad(plain)(params)
    found, grads = jax.value_and_grad(lambda p: 3 * pipe.loss(p, batch, scale=SCALE))(placed)
    own = {key: pipe.canonical(grads)[key] for key in params}
    assert relative(own, jax.tree.map(lambda g: 3 * g, wanted)) <= FLOAT64
    forwards = pipe.loss(placed, batch, scale=SCALE)
    for value in (np.asarray(found) / 3, np.asarray(forwards)):
        assert relative(value, np.asarray(loss)) <= FLOAT64


def test_a_new_scale_needs_no_new_program():
    model, schedule, how = case("alike", MEAN)
    params, batch = numbers("alike", schedule)
    batch["most"] *= 1e9  # nothing is clipped
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(model, schedule, mesh, **how)
    step = pipe.jit(lambda p, b, s: pipe.value_and_grad(p, b, scale=s))
    placed = pipe.place(params)
    one, four = (jax.device_get(step(placed, batch, np.float32(s))) for s in (1.0, 4.0))
    # One program, and a power of two: every product and every sum is exact.
    assert same(four, jax.tree.map(lambda leaf: 4 * leaf, one))
    assert step._cache_size() == 1


@needs_half
def test_float16_keeps_gradients_that_underflow():
    """Without a scale, and with a factor after the backward, all gradients of the stages are zeros:
    they are below 6e-8.
    """

    def narrow(params: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ params["w"])

    def small(params: Any, x: Any, microbatch: Any) -> Any:
        out = (x @ params["head"]).astype(jnp.float32)
        return 1e-6 * jnp.mean((out - microbatch["y"]) ** 2)

    half, draw = jnp.float16, np.random.default_rng(0).normal
    params = {"stages": {"w": draw(size=(2, 8, 8)) / 3}, "last": {"head": draw(size=(8, 1)) / 50}}
    batch = {"x": draw(size=(64, 8)) / 10, "y": draw(size=(64, 1)).astype(np.float32) / 10}
    model = jp.Model(narrow, last=small)
    wide = jax.grad(lambda p: model.loss(p, batch, microbatches=M))
    exact = wide(jax.tree.map(jnp.asarray, params))["stages"]["w"]
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(model, schedule, mesh)
    placed = pipe.place(jax.tree.map(lambda p: jnp.asarray(p, half), params))
    rows = {**batch, "x": batch["x"].astype(half)}
    large = 2.0**26
    outside = jax.grad(lambda p: large * pipe.loss(p, rows))(placed)
    assert not np.any(pipe.canonical(outside)["stages"]["w"])
    _, grads = pipe.value_and_grad(placed, rows, scale=large)
    found = np.asarray(pipe.canonical(grads)["stages"]["w"], np.float64) / large
    assert relative(found, np.asarray(exact)) <= rounding(longest_chain(wide, params), half)
