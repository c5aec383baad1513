"""Counts of `Loss.SUM_OVER_COUNT`: which are known before the first backward, and which are refused
because their gradient would be lost.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from jaxpipe.jaxprs.equations import every_equation
from tests.lowering.test_errors import raises
from tests.tolerance import FLOAT64, relative

WIDTH, ROWS, M = 4, 4, 2


def stage(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params["w"])


def error(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.sum((x @ params["head"] - microbatch["y"]) ** 2, axis=-1)


def by_mask(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.sum(microbatch["mask"] * error(params, x, microbatch)), jnp.sum(microbatch["mask"])


def in_chunks(params: Any, x: Any, microbatch: Any) -> Any:
    """A scan that carries the sum and the count, under `jax.checkpoint`."""

    def chunk(carry: Any, rows: Any) -> Any:
        total, count = carry
        own, mask, y = rows
        total += jnp.sum(mask * error(params, own, {"y": y}))
        return (total, count + jnp.sum(mask)), None

    cut = [
        leaf.reshape(2, -1, *leaf.shape[1:]) for leaf in (x, microbatch["mask"], microbatch["y"])
    ]
    return jax.lax.scan(jax.checkpoint(chunk), (0.0, 0.0), cut)[0]


def printing(params: Any, x: Any, microbatch: Any) -> Any:
    jax.debug.callback(lambda _: None, x)
    return by_mask(params, x, microbatch)


def at_random(params: Any, x: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
    kept = jax.random.bernoulli(ctx.rng, 0.5, (x.shape[0],))
    return jnp.sum(kept * error(params, x, microbatch)), jnp.sum(kept)


CLASSES = np.arange(1.0, 4.0)


def returning(count: Any) -> Any:
    """`last` with this count of (params, x, microbatch)."""

    def last(params: Any, x: Any, microbatch: Any) -> Any:
        return jnp.sum(error(params, x, microbatch)), count(params, x, microbatch)

    return last


EARLY = {
    "mask": by_mask,
    "chunks": in_chunks,
    "print": printing,
    "random": at_random,
    "number": returning(lambda p, x, mb: 4),
    "shape": returning(lambda p, x, mb: jnp.sum(jnp.ones_like(x))),
    "closed over": returning(lambda p, x, mb: jnp.sum(jnp.asarray(CLASSES)[mb["class"]])),
    "integers": returning(lambda p, x, mb: jnp.sum(mb["class"] > 0)),
    "whole": returning(lambda p, x, mb: mb["per_row"] * x.shape[0]),
}
LATE = {
    "comparison": returning(lambda p, x, mb: jnp.sum(x[:, 0] > x[:, 1])),
    "stopped": returning(lambda p, x, mb: jax.lax.stop_gradient(jnp.sum(x**2))),
    "parameters": returning(lambda p, x, mb: jnp.sum(jnp.abs(jnp.sign(p["gate"])))),
}
LOST = {
    "gate": returning(lambda p, x, mb: jnp.sum(jax.nn.sigmoid(x @ p["gate"]))),
    "x": returning(lambda p, x, mb: jnp.sum(x**2)),
    "parameters alone": returning(lambda p, x, mb: jnp.sum(p["gate"] ** 2)),
}


def pipe_of(last: Any, **how: Any) -> jp.Pipeline:
    model = {"loss": jp.Loss.SUM_OVER_COUNT, "whole": ("per_row",)} | how.pop("model", {})
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    return jp.Pipeline(jp.Model(stage, last=last, **model), schedule, mesh, **how)


def numbers() -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and a batch."""
    draw, rows = np.random.default_rng(1), M * ROWS
    params = {
        "stages": {"w": draw.normal(size=(2, WIDTH, WIDTH))},
        "last": {"head": draw.normal(size=(WIDTH, 2)), "gate": draw.normal(size=(WIDTH,))},
    }
    batch = {
        "x": draw.normal(size=(rows, WIDTH)),
        "y": draw.normal(size=(rows, 2)),
        "mask": (draw.random(rows) > 0.4).astype(float),
        "class": draw.integers(0, 3, size=rows),
        "per_row": np.float64(2.0),
    }
    return jax.tree.map(jnp.asarray, params), batch


def traced(pipe: jp.Pipeline) -> Any:
    """The code of `last`."""
    params, batch = numbers()
    return pipe.trace(pipe.place(params), batch, rng=jax.random.key(0)).code.last


@pytest.mark.parametrize("name", EARLY)
def test_a_count_of_rows_is_known_before_the_first_backward(name):
    code = traced(pipe_of(EARLY[name]))
    assert code.count is not None
    names = {eqn.primitive.name for eqn in every_equation(code.count.jaxpr)}
    assert not names & {"dot_general", "debug_callback"}, "it runs more than the count"


@pytest.mark.parametrize("name", LATE)
def test_a_count_without_a_gradient_may_depend_on_anything(name):
    assert traced(pipe_of(LATE[name])).count is None


@pytest.mark.parametrize("name", LOST)
def test_a_count_with_a_gradient_is_refused(name):
    advice = "return (sum, jax.lax.stop_gradient(count))", "loss=Loss.MEAN"
    with raises("`last` would lose a gradient: it returns (sum, count)", *advice):
        traced(pipe_of(LOST[name]))


def test_a_count_of_frozen_parameters_has_no_gradient():
    pipe = pipe_of(LOST["parameters alone"], model={"frozen": ("last/gate",)})
    assert traced(pipe).count is None


def test_letters_and_the_eager_executor_refuse_it_too():
    params, batch = numbers()
    layers = jp.Model(
        {"t": stage, "L": LOST["x"]}, layers="ttL", loss=jp.Loss.SUM_OVER_COUNT, whole="per_row"
    )
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(layers, schedule, mesh)
    with raises("`layers['L']` would lose a gradient"):
        pipe.lower(pipe.place({**params, "stages": {"t": params["stages"]}}), batch)
    eager = pipe_of(LOST["x"], executor=EagerExecutor())
    with raises("`last` would lose a gradient"):
        eager.value_and_grad(eager.place(params), batch)
    # without a gradient nothing is lost
    wanted = pipe_of(LOST["x"]).model.loss(params, batch, microbatches=M)
    assert relative(np.asarray(eager.loss(eager.place(params), batch)), np.asarray(wanted)) <= (
        FLOAT64
    )


@pytest.mark.parametrize("last", [LATE["comparison"], at_random], ids=["late", "random"])
def test_the_numbers_are_those_of_the_plain_model(last):
    (params, batch), key = numbers(), jax.random.key(3)
    pipe = pipe_of(last)
    wanted = jax.value_and_grad(lambda p: 2.0 * pipe.model.loss(p, batch, microbatches=M, rng=key))(
        params
    )
    for executor in (None, EagerExecutor()):
        pipe = pipe_of(last, executor=executor)
        loss, grads = pipe.value_and_grad(pipe.place(params), batch, rng=key, scale=2)
        own = {name: pipe.canonical(grads)[name] for name in params}
        assert relative((np.asarray(loss), own), (np.asarray(wanted[0]), wanted[1])) <= FLOAT64


def test_a_scale_that_is_no_number():
    pipe, (params, batch) = pipe_of(by_mask), numbers()
    placed = pipe.place(params)
    for scale in (np.ones(2), "2", 1j, [2.0]):
        with raises("scale must be a number or a scalar array, a factor of the loss"):
            pipe.value_and_grad(placed, batch, scale=scale)
    with raises("Pipeline.loss has a gradient by the parameters alone", "scale"):
        jax.grad(lambda s: pipe.loss(placed, batch, scale=s))(2.0)
