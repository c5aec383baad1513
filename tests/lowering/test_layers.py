"""Scans over layers that are taken apart: which stacks, and what stays whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.jaxprs.equations import traced_once
from jaxpipe.jaxprs.layers import Layers, in_layers

LAYERS = 3
W = np.random.default_rng(0).standard_normal((LAYERS, 4, 4)) / 2
X = np.random.default_rng(1).standard_normal((2, 4))


def scan(w: Any, x: Any, **how: Any) -> Any:
    return jax.lax.scan(lambda x, row: (jnp.tanh(x @ row), x), x, w, **how)


CASES = {
    "scan": (lambda w, x: scan(w, x)[0], LAYERS),
    "backwards": (lambda w, x: scan(w, x, reverse=True), LAYERS),
    "cast": (lambda w, x: scan(w.astype(jnp.float32), x)[0], LAYERS),
    "jit": (lambda w, x: jax.jit(scan)(w, x)[1], LAYERS),
    "remat": (lambda w, x: jax.checkpoint(scan)(w, x)[0], LAYERS),
    "two scans": (lambda w, x: scan(w, scan(w, x)[0])[0], LAYERS),
    "parts": (lambda w, x: scan(w[1:], scan(w[:1], x)[0])[0], LAYERS),
    "numbers": (lambda w, x: x @ w[0] @ w[2], LAYERS),
    "in a scan": (lambda w, x: jax.lax.scan(lambda x, _: (scan(w, x)[0], x), x, None, 2)[0], 0),
    "whole": (lambda w, x: scan(w, x)[0] * jnp.sum(w), 0),
    "traced number": (lambda w, x: x @ w[jnp.int32(x[0, 0] > 0)], 0),
    "unused": (lambda w, x: x, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_gradients_stay(case):
    function, count = CASES[case]
    call, (w, x), counts = in_layers(traced_once(function, W, X), (W, X), [True], LAYERS)
    assert counts == [count]
    assert isinstance(w, Layers) == bool(count)
    assert x is X
    apart = Layers(tuple(map(jnp.asarray, W))) if count else W
    expected, found = function(W, X), call(apart, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)

    def loss(function: Any) -> Any:
        return lambda w: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(function(w, X)))

    gradient = jax.grad(loss(call))(apart)
    rows = jnp.stack(jax.tree.leaves(gradient)) if count else gradient
    np.testing.assert_allclose(rows, jax.grad(loss(function))(W), rtol=1e-5, atol=1e-7)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(call)(apart, X).eqns]
    assert ("scan" not in names) or not count


@pytest.mark.parametrize(("candidates", "limit"), [([False], LAYERS), ([True], LAYERS - 1)])
def test_others_stay_in_their_scan(candidates, limit):
    call, (w, _), counts = in_layers(traced_once(CASES["scan"][0], W, X), (W, X), candidates, limit)
    assert counts == [0]
    assert w is W
    assert "scan" in str(jax.make_jaxpr(call)(W, X))
