"""Loops whose condition is only a flag count their trips; others stay as they are."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxpipe as jp
from jaxpipe.jaxprs.equations import every_equation, results_of
from jaxpipe.jaxprs.loops import counting, with_counted_loops


def bare(x):
    def body(state):
        _, number, x = state
        return number < 2, number + 1, x * 0.5 + 1

    return lax.while_loop(lambda state: state[0], body, (x < 1e30, 0, x))[2]


def once(x, flag=True):
    end = (jnp.asarray(flag), x)
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), c[1] + 1), end)[1]


def negated(x):
    return lax.while_loop(lambda c: ~c[0], lambda c: (~c[0], c[1] + 1), (x > 1e30, x))[1]


def two_flags(x):
    def body(c):
        return c[2] < 3, ~jnp.isnan(c[3]), c[2] + 1, c[3] * 2

    return lax.while_loop(lambda c: c[0] & c[1], body, (x < 9, x < 10, 0, x))[3]


def hidden(x):
    """The flag goes through a call and is compared with a literal."""
    ask = jax.jit(lambda c: c[0] == True)  # noqa: E712
    return lax.while_loop(ask, lambda c: (c[1] < 2, c[1] + 1), (x < 9, x))[1]


def nested(x):
    return lax.scan(lambda x, _: (lax.cond(x < 9, bare, once, x), None), x, None, length=2)[0]


def in_a_loop(x):
    def body(state):
        go, number, x = state
        return go & (number < 2), number + 1, bare(x)

    return lax.while_loop(lambda state: state[0], body, (x < 9, 0, x))[2]


def of_a_vmap(x):
    return jnp.sum(jax.vmap(bare)(x * jnp.arange(3.0)))


def of_constants(x):
    table = jnp.asarray(np.arange(4.0))
    body = lambda c: (c[1] < 3, c[1] + 1, c[2] + table[c[1]])  # noqa: E731
    return lax.while_loop(lambda c: c[0], body, (x < 9, 0, x))[2]


def counted(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))[1]


def fori(x):
    return lax.fori_loop(0, 3, lambda _, x: x * 0.5, x)


def compared(x):
    return lax.while_loop(lambda c: c[0] & (c[1] < 40), lambda c: (~c[0], c[1] + 1), (x < 9, x))[1]


CHANGED = (bare, once, negated, two_flags, hidden, nested, in_a_loop, of_a_vmap, of_constants)
KEPT = (counted, fori, compared)


def flags(jaxpr):
    """The loops without a comparison in their condition, calls not followed."""
    loops = [e for e in every_equation(jaxpr) if e.primitive.name == "while"]
    compare = {"lt", "le", "gt", "ge"}
    named = [{e.primitive.name for e in loop.params["cond_jaxpr"].jaxpr.eqns} for loop in loops]
    return sum(compare.isdisjoint(names) for names in named)


@pytest.mark.parametrize("function", CHANGED)
def test_a_loop_that_tests_a_flag_counts_and_gives_the_same_numbers(function):
    closed = jax.make_jaxpr(function)(1.5)
    changed = counting(closed.jaxpr)
    assert flags(closed.jaxpr) > 0
    assert flags(changed) == 0
    assert counting(changed) is changed
    (result,) = results_of(type(closed)(changed, closed.consts), 1.5)
    assert result == function(1.5)
    assert jax.jit(with_counted_loops(function))(1.5) == function(1.5)


@pytest.mark.parametrize("function", KEPT)
def test_other_loops_stay_the_same_objects(function):
    jaxpr = jax.make_jaxpr(function)(1.5).jaxpr
    assert counting(jaxpr) is jaxpr


def test_a_loop_that_is_not_entered_changes_nothing():
    assert jax.jit(with_counted_loops(partial(once, flag=False)))(1.5) == 1.5


def test_what_jit_knows_of_a_function_stays():
    def step(params, batch, *, scale, mode="a"):
        """Docs."""
        return {"x": bare(params["w"]) * scale, "y": (batch, 2.0 if mode == "a" else 3.0)}

    changed = with_counted_loops(step)
    assert (changed.__name__, changed.__doc__) == ("step", "Docs.")
    jitted = jax.jit(changed, static_argnames="mode", donate_argnames="params")
    for mode, want in (("a", 2), ("b", 3)):
        found = jitted({"w": jnp.float32(4)}, jnp.arange(2), scale=2, mode=mode)
        assert found["x"] == 2 * bare(4.0)
        assert found["y"][1] == want
        np.testing.assert_array_equal(found["y"][0], [0, 1])
    assert "while" in str(
        jax.make_jaxpr(jax.grad(lambda x: changed({"w": 1.0}, x, scale=x)["x"]))(1.0)
    )


def test_the_loops_of_a_stage_count():
    """In the program of a step, whichever `jax.jit` compiles it."""

    def stage(params, x):
        return jnp.tanh(x @ params) + lax.stop_gradient(bare(jnp.sum(lax.stop_gradient(x))))

    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(jp.Model(stage, last=lambda p, x, mb: jnp.mean(x)), schedule, mesh)
    params = pipe.place({"stages": jnp.ones((2, 3, 3)), "last": {}})
    traced = jax.make_jaxpr(pipe.value_and_grad)(params, {"x": jnp.ones((4, 3))})
    assert flags(traced.jaxpr) == 0
