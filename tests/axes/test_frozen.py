"""Frozen parameters: no gradient, no accumulator, no optimizer state, any dtype; the rest is
trained as plain JAX trains it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.eager import EagerExecutor
from tests.axes.test_errors import raises
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.tolerance import same

WIDTH, RANK, STAGES, M = 6, 2, 4, 3
FROZEN = (r"^stages/.*base", r"first")


def first(params: Any, microbatch: Any) -> Any:
    return microbatch["x"] @ params["embed"]


def stage(params: Any, x: Any) -> Any:
    """A quantised weight of 8 bits with its scale, and a trained update of low rank beside it."""
    weight = params["base"].astype(x.dtype) * params["base_scale"]
    return x + jnp.tanh(x @ weight + (x @ params["a"]) @ params["b"])


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((x @ params["head"] - microbatch["y"]) ** 2)


def weights() -> Any:
    rng = np.random.default_rng(0)
    return {
        "first": {"embed": rng.standard_normal((3, WIDTH))},
        "stages": {
            "base": rng.integers(-100, 100, (STAGES, WIDTH, WIDTH)).astype(np.int8),
            "base_scale": np.full((STAGES, WIDTH), 0.003),
            "a": rng.standard_normal((STAGES, WIDTH, RANK)),
            "b": rng.standard_normal((STAGES, RANK, WIDTH)),
        },
        "last": {"head": rng.standard_normal((WIDTH, 2))},
    }


def batch() -> Any:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((4 * M, 3)), "y": rng.standard_normal((4 * M, 2))}


def plain(trained: Any, rows: Any) -> Any:
    given = weights()
    x = first(given["first"], rows)
    for s in range(STAGES):
        own = jax.tree.map(lambda leaf, s=s: leaf[s], {**given["stages"], **trained["stages"]})
        x = stage(own, x)
    return last(trained["last"], x, rows)


def pipe_of(name: str, **how: Any) -> jp.Pipeline:
    chunks = {"zbv": 2}.get(name, 1)
    schedule = jp.schedules.build(name, devices=STAGES // chunks, microbatches=M, chunks=chunks)
    model = {"stage": stage, "first": first, "last": last, "frozen": FROZEN}
    return flat_pipeline(**{**model, **how}, schedule=schedule, mesh=mesh_of(STAGES // chunks))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("1f1b", {}),
        ("zbv", {}),
        ("zb_h1", {"stage": [stage] * STAGES}),
        ("1f1b", {"executor": EagerExecutor()}),
    ],
    ids=["1f1b", "zbv", "unlike", "eager"],
)
def test_the_rest_is_trained_as_without_a_pipeline(name: str, how: dict[str, Any]) -> None:
    pipe = pipe_of(name, **how)
    given = weights()
    trained = {"stages": {k: given["stages"][k] for k in "ab"}, "last": given["last"]}
    canonical = dict(given)
    if "stage" in how:
        canonical["stages"] = [
            jax.tree.map(lambda leaf, s=s: leaf[s], given["stages"]) for s in range(STAGES)
        ]
    params = pipe.place(canonical)
    loss, grads = pipe.value_and_grad(params, batch())
    wanted_loss, wanted = jax.value_and_grad(plain)(trained, batch())
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert jax.tree.leaves(grads["first"]) == []
    if "stage" in how:
        assert {path for path, leaf in grads["stages"][0].leaves.items() if leaf is not None} == {
            "a",
            "b",
        }
        stages = {k: np.asarray(grads["stages"][0].leaves[k]) for k in "ab"}
    else:
        assert grads["stages"][0]["base"] is None
        found = pipe.canonical(grads)
        assert found["stages"]["base"] is None
        stages = {k: np.asarray(found["stages"][k]) for k in "ab"}
    for k in "ab":
        np.testing.assert_allclose(
            stages[k], wanted["stages"][k], rtol=0, atol=FLOAT64 * np.abs(wanted["stages"][k]).max()
        )
    np.testing.assert_allclose(
        grads["last"]["head"],
        wanted["last"]["head"],
        rtol=0,
        atol=FLOAT64 * np.abs(wanted["last"]["head"]).max(),
    )


def test_an_optimizer_has_no_state_for_them_and_a_checkpoint_keeps_them(tmp_path: Any) -> None:
    pipe = pipe_of("1f1b")
    params = pipe.place(weights())
    optimizer = optax.adam(0.1)
    state = pipe.init(optimizer, params)
    assert state[0].mu["stages"][0]["base"] is None
    assert jax.tree.structure(state[0].mu) == jax.tree.structure(pipe.trained(params))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(
            lambda own: pipe.loss(pipe.with_trained(params, own), batch())
        )(pipe.trained(params))
        updates, state = optimizer.update(grads, state)
        return (
            pipe.with_trained(params, optax.apply_updates(pipe.trained(params), updates)),
            state,
            loss,
        )

    after, state, loss = step(params, state)
    after, state, less = step(after, state)
    assert step._cache_size() == 1
    assert less < loss
    base = after["stages"][0]["base"]
    assert base.dtype == jnp.int8
    assert np.array_equal(base, weights()["stages"]["base"])
    with Checkpoints(tmp_path, pipe) as checkpoints:
        checkpoints.save(1, {"params": after, "opt_state": state})
        _, found = checkpoints.restore(
            {"params": params, "opt_state": pipe.init(optimizer, params)}
        )
    assert same(found, {"params": after, "opt_state": state})


def traced(pipe: jp.Pipeline) -> Any:
    """The code of the step."""
    return pipe.trace(pipe.place(weights()), batch()).code


def test_w_of_frozen_weights_costs_nothing() -> None:
    """The weight gradient has one matmul for each of a and b, and none of the weight's size; a
    stage all frozen has none at all.
    """
    for frozen, count in ((FROZEN, 2), ((*FROZEN, "stages"), 0)):
        pipe = pipe_of("zb_h1", frozen=frozen)
        (kind,) = traced(pipe).kinds
        matmuls = [eqn for eqn in kind.weight_grad.eqns if eqn.primitive.name == "dot_general"]
        assert len(matmuls) == count
        # stays small
        assert not any(
            var.aval.shape == (WIDTH, WIDTH) and var.aval.dtype != jnp.int8
            for var in kind.hoist.outvars
        )


def test_what_is_trained_must_be_floating() -> None:
    with raises("parameter 'stages/0/base' is int8", "frozen="):
        pipe_of("1f1b", frozen=None).place(weights())
    with raises("frozen must be a function"):
        pipe_of("1f1b", frozen=3)
    seen: set[Any] = set()
    pipe_of(
        "1f1b", frozen=lambda path, leaf: seen.add((path, leaf.shape)) or leaf.dtype == jnp.int8
    ).place(weights())
    assert ("stages/base", (WIDTH, WIDTH)) in seen
    assert ("last/head", (WIDTH, 2)) in seen


def test_nothing_that_is_trained() -> None:
    """As where one tries what a frozen model gives: no gradient, and optimizer state without
    moments.
    """
    pipe = pipe_of("1f1b", frozen=["."])
    params = pipe.place(weights())
    loss, grads = pipe.value_and_grad(params, batch())
    assert abs(float(loss) - float(plain(weights(), batch()))) <= FLOAT64 * float(loss)
    assert jax.tree.leaves(grads) == []
    assert [leaf.shape for leaf in jax.tree.leaves(pipe.init(optax.adam(0.1), params))] == [()]
