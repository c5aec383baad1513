"""`Pipeline.loss` under jax.grad gives the gradients of the step, scaled; what has no gradient says
so.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.axes.model import (
    batch,
    build,
    canonical,
    first,
    last,
    like_truth,
    mesh,
    stage,
    truth,
    worst_error,
)
from tests.axes.test_errors import raises
from tests.flat import flat_pipeline
from tests.parity.tolerance import FLOAT64


def build_pipe(**options: Any) -> tuple[jp.Pipeline, Any]:
    options = {
        "last": lambda p, x, mb: (last(p, x, mb), {"m": jnp.sum(x)}),
        "has_metrics": True,
        **options,
    }
    where = {
        "mesh": mesh("pipe", "data", "rest"),
        "data_axes": ("data",),
        "replicated_axes": ("rest",),
    }
    pipe = flat_pipeline(stage, schedule=build("1f1b"), first=first, **where, **options)
    return pipe, pipe.place(canonical(2))


def half_square(tree: Any) -> Any:
    """A penalty whose gradient is the tree itself."""
    return 0.5 * sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("how", ["eager", "scan", "interpreted"])
def test_the_gradient_of_a_scaled_loss_and_a_penalty(how: str) -> None:
    pipe, params = build_pipe(executor=EagerExecutor() if how == "interpreted" else None)

    def total(params: Any, rows: Any) -> Any:
        loss, metrics = pipe.loss(params, rows)
        return 3.0 * loss + half_square(params), metrics

    def step(params: Any, rows: Any) -> Any:
        return jax.value_and_grad(total, has_aux=True)(params, rows)

    def scanned(params: Any, rows: Any) -> Any:
        """Two steps of accumulation inside one differentiated scan."""

        def accumulate(params: Any) -> Any:
            def add(sums: Any, rows: Any) -> Any:
                loss, metrics = total(params, rows)
                return sums + loss / 2, metrics

            twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), rows)
            loss, metrics = jax.lax.scan(add, 0.0, twice)
            return loss, jax.tree.map(lambda leaf: leaf[0], metrics)

        return jax.value_and_grad(accumulate, has_aux=True)(params)

    run = jax.jit(scanned) if how == "scan" else step
    (found, metrics), grads = run(params, batch(4))
    loss, wanted = truth(2, 4)
    weights = like_truth(canonical(2))
    assert abs(found - (3 * loss + half_square(weights))) <= FLOAT64 * abs(found)
    assert (
        worst_error(
            like_truth(pipe.canonical(grads)), jax.tree.map(lambda g, w: 3 * g + w, wanted, weights)
        )
        <= FLOAT64
    )
    assert np.isfinite(metrics["m"])
    if how == "eager":  # nothing differentiated: forwards alone give the same numbers
        assert abs(pipe.loss(params, batch(4))[0] - loss) <= FLOAT64 * abs(loss)


def test_what_has_no_gradient_says_so() -> None:
    pipe, params = build_pipe(has_metrics=False, last=last)
    rows = batch(4)
    for function, name in (
        (pipe.evaluate, "evaluate"),
        (lambda p, b: jnp.sum(pipe.outputs(p, b)), "outputs"),
    ):
        with raises(f"Pipeline.{name} cannot be differentiated", "pipe.loss(params, batch)"):
            jax.grad(function)(params, rows)
    with raises("Pipeline.value_and_grad cannot be differentiated"):
        jax.grad(lambda p: pipe.value_and_grad(p, rows)[0])(params)
    with raises("Pipeline.evaluate cannot be differentiated"):
        jax.jvp(lambda p: pipe.evaluate(p, rows), (params,), (params,))
    with raises("depend on what is differentiated", "batch/x"):
        jax.grad(lambda scale: pipe.loss(params, {**rows, "x": rows["x"] * scale}))(1.0)
    # A number beside the loss is fine where it is said to be one.
    grads = jax.grad(lambda p: pipe.loss(p, rows) + pipe.evaluate(jax.lax.stop_gradient(p), rows))(
        params
    )
    assert worst_error(like_truth(pipe.canonical(grads)), truth(2, 4)[1]) <= FLOAT64


def test_what_jax_does_with_the_gradient() -> None:
    """A Python number as the cotangent, and a product with the Hessian, are plain JAX's; a second
    reverse and forward mode say what to write instead.
    """
    pipe, params = build_pipe(has_metrics=False, last=last)
    rows = batch(4)

    def loss(params: Any) -> Any:
        return pipe.loss(params, rows)

    def squared(params: Any) -> Any:
        return half_square(jax.grad(loss)(params))

    (grads,) = jax.vjp(loss, params)[1](1.0)
    assert worst_error(like_truth(pipe.canonical(grads)), truth(2, 4)[1]) <= FLOAT64
    _, product = jax.jvp(jax.grad(loss), (params,), (params,))
    plain = jax.grad(lambda p: pipe.model.loss(p, rows, microbatches=4))
    own = jax.tree.map(jnp.asarray, canonical(2))
    wanted = like_truth(jax.jvp(plain, (own,), (own,))[1])
    assert worst_error(like_truth(pipe.canonical(product)), wanted) <= FLOAT64
    for twice in (squared, jax.jit(squared), lambda p: jax.value_and_grad(loss)(p)[0]):
        with raises("differentiated twice in reverse", "jax.jvp(jax.grad(pipe.loss), ...)"):
            jax.grad(twice)(params)
    with raises("no derivative in forward mode", "jax.jvp(jax.grad(pipe.loss), ...) works"):
        jax.jvp(loss, (params,), (params,))


def test_the_loss_of_forwards_is_that_of_training() -> None:
    """Dropout is on, as in the step; gradients have their parameters' dtypes."""

    def noisy(params: Any, x: Any, *, ctx: Any, training: bool) -> Any:
        return stage(params, x) * (jax.random.bernoulli(ctx.rng, 0.5, x.shape) if training else 1.0)

    pipe = jp.Pipeline(
        jp.Model(noisy, first=first, last=last),
        build("1f1b"),
        mesh("pipe", "a", "b"),
        sharding=jp.Sharding(replicated=("a", "b")),
    )
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), pipe.place(canonical(2)))
    key = jax.random.key(0)
    loss, grads = jax.value_and_grad(lambda p: pipe.loss(p, batch(4), rng=key))(params)
    assert all(
        g.dtype == p.dtype
        for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
    )
    # float32, two programs
    assert pipe.loss(params, batch(4), rng=key) == pytest.approx(float(loss), rel=1e-5)
    assert pipe.evaluate(params, batch(4), rng=key) != pytest.approx(float(loss), rel=1e-5)
