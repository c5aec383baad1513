"""Weight gradients in the dtype of their accumulators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.jaxprs.equations import every_equation
from jaxpipe.jaxprs.flat import flatten
from jaxpipe.jaxprs.products import with_fp8_rows, with_wide_products
from jaxpipe.stage.code import run

HALF, WIDE = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
USES = {
    "heads": ((8, 2, 4), lambda w, x: jnp.einsum("btd,dhe->bthe", x, w)),
    "transposed": ((5, 8), lambda w, x: x @ w.T),
    "plain": ((8, 5), lambda w, x: x @ w),
    "experts": ((3, 8, 6), lambda w, x: jnp.einsum("ebd,edf->ebf", x, w)),
    "flat": ((16, 5), lambda w, x: x @ w.reshape(2, 8, 5)[1]),
}


def gradient(use: str, dtype: Any) -> tuple[Any, list[Any]]:
    """The gradient of a weight of this dtype that is used in bfloat16, and numbers."""
    shape, product = USES[use]
    draw = np.random.default_rng(0).standard_normal
    w, x = jnp.asarray(draw(shape), dtype), jnp.asarray(draw((3, 4, 8)), HALF)

    def gradients(w: Any, x: Any, dy: Any) -> Any:
        return jax.vjp(lambda w: product(w.astype(HALF), x), w)[1](dy)[0]

    dy = jnp.asarray(draw(jax.eval_shape(product, w.astype(HALF), x).shape), HALF)
    return flatten(jax.make_jaxpr(gradients)(w, x, dy)).jaxpr, [w, x, dy]


def names(jaxpr: Any) -> list[str]:
    last = jaxpr.outvars[0]
    needed = [eqn for eqn in jaxpr.eqns if last in eqn.outvars]
    return [eqn.primitive.name for eqn in needed]


@pytest.mark.parametrize("dtype", [HALF, WIDE])
@pytest.mark.parametrize("use", ["heads", "plain", "experts", "transposed"])
def test_a_product_is_made_in_float32_at_once(use, dtype):
    jaxpr, values = gradient(use, dtype)
    wide = with_wide_products(jaxpr, {0: WIDE})
    assert names(wide) == ["dot_general"]
    (found,), (before,) = run(wide, *values), run(jaxpr, *values)
    assert found.dtype == WIDE
    exact = [jnp.asarray(v, jnp.float64) for v in values]
    product = USES[use][1]
    truth = jax.vjp(lambda w: product(w, exact[1]), exact[0])[1](exact[2])[0]
    off, off_before = (np.abs(np.asarray(v, float) - truth).max() for v in (found, before))
    # Products of bfloat16 numbers are exact in float32, of which a sum of 12 terms is rounded.
    assert off <= 12 * 2.0**-24 * np.abs(truth).max() * 12
    assert off < off_before


@pytest.mark.parametrize(
    ("use", "totals"),
    [("flat", {0: WIDE}), ("plain", {0: HALF}), ("plain", {0: None}), ("plain", {})],
)
def test_other_gradients_stay(use, totals):
    """Of a part of a weight, which is padded; or in an accumulator of another dtype."""
    jaxpr, _ = gradient(use, WIDE)
    assert str(with_wide_products(jaxpr, totals)) == str(jaxpr)


def test_a_product_that_is_read_twice_stays():
    def twice(x, y):
        product = x @ y
        return product.astype(WIDE), jnp.sin(product)

    ones = jnp.ones((4, 4), HALF)
    jaxpr = jax.make_jaxpr(twice)(ones, ones).jaxpr
    assert str(with_wide_products(jaxpr, {0: WIDE})) == str(jaxpr)


def test_equations_before_the_backward_stay():
    ones = jnp.ones((4, 4), HALF)
    jaxpr = jax.make_jaxpr(lambda x, y: (x @ y).astype(WIDE))(ones, ones).jaxpr
    assert names(with_wide_products(jaxpr, {0: WIDE})) == ["dot_general"]
    assert str(with_wide_products(jaxpr, {0: WIDE}, start=2)) == str(jaxpr)


def test_a_gradient_that_is_a_number_stays():
    """That of a weight without an effect is a zero, not a variable."""
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    jaxpr = flatten(jax.make_jaxpr(lambda w, x: (0.0, x @ w))(w, x)).jaxpr
    assert with_wide_products(jaxpr, {0: WIDE}).outvars[0] is jaxpr.outvars[0]


FP8 = jnp.dtype(jnp.float8_e4m3fn)


@pytest.mark.parametrize("use", ["heads", "plain", "experts", "transposed"])
def test_a_weight_in_fp8_has_what_is_summed_over_last(use):
    """All numbers are whole and below 4, so that products and sums are exact.  x stays as it is."""
    shape, product = USES[use]
    draw = np.random.default_rng(0).integers
    x, w = (jnp.asarray(draw(-3, 4, dims), FP8) for dims in ((3, 4, 8), shape))
    jaxpr = flatten(jax.make_jaxpr(product)(w, x)).jaxpr
    changed = with_fp8_rows(jaxpr, [True, False])
    (dot,) = (eqn for eqn in changed.eqns if eqn.primitive.name == "dot_general")
    ((side, summed, batch),) = (
        each
        for each in zip(dot.invars, *dot.params["dimension_numbers"], strict=True)
        if each[0] not in jaxpr.invars[1:]
    )
    assert summed == (side.aval.ndim - 1,)
    assert batch == tuple(range(len(batch)))
    (found,), (wanted,) = run(changed, w, x), run(jaxpr, w, x)
    assert (found == wanted).all()
    neither = [False, False]
    assert with_fp8_rows(jaxpr, neither) is jaxpr


def test_a_weight_in_a_scan_is_transposed_where_inputs_alone_determine_it():
    def layers(stack, x):
        return jax.lax.scan(lambda x, w: ((x @ w).astype(FP8), x @ w.T), x, stack)

    stack, x = jnp.ones((2, 4, 4), FP8), jnp.ones((3, 4), FP8)
    jaxpr = flatten(jax.make_jaxpr(layers)(stack, x)).jaxpr

    def turns(known):
        every = every_equation(with_fp8_rows(jaxpr, known))
        return sum(eqn.primitive.name == "transpose" for eqn in every)

    # one that the user wrote, and another that undoes it
    assert [turns([False, False]), turns([False, True]), turns([True, False])] == [1, 1, 3]
    changed = with_fp8_rows(jaxpr, [True, False])
    assert all((a == b).all() for a, b in zip(run(changed, stack, x), run(jaxpr, stack, x)))
