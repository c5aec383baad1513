"""Two layers that run as one: attention's scores of one are used up before those of the other are made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxpipe.jaxprs import InSlots, run_both_in_slots
from jaxpipe.jaxprs.stagger import LARGE, Stagger, find_stagger

WIDTH, LAYERS = 4, 3
NAMES = ("down", "key", "query", "up")  # in the order of the body's inputs


def layer(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
    """Attention, then an MLP: scores are len(x) / WIDTH times as large as x."""
    query = x @ p["query"]
    scores = jax.nn.softmax(query @ (x @ p["key"]).T)
    x = x + scores @ x
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None


def run(x: Any, params: dict[str, Any]) -> Any:
    return jax.lax.scan(layer, x, params)[0]


def params(key: int) -> dict[str, Any]:
    shapes = {"down": (4 * WIDTH, WIDTH), "key": (WIDTH, WIDTH), "query": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)}
    keys = jax.random.split(jax.random.key(key), len(shapes))
    return {name: jax.random.normal(k, (LAYERS, *dims)) for k, (name, dims) in zip(keys, shapes.items(), strict=True)}


def traced(length: int) -> core.ClosedJaxpr:
    return jax.make_jaxpr(run)(jnp.zeros((length, WIDTH)), params(0))


def body_of(length: int) -> core.Jaxpr:
    (scan,) = (eqn for eqn in traced(length).eqns if eqn.primitive.name == "scan")
    body: core.Jaxpr = scan.params["jaxpr"].jaxpr
    return body


def found(length: int, scanned: tuple[bool, ...]) -> tuple[core.Jaxpr, Stagger | None]:
    body = body_of(length)
    return body, find_stagger(body, body, carried=body.invars[:1], scanned=scanned)


def test_what_scores_need_last_waits_for_the_sum_of_attention_and_x() -> None:
    body, stagger = found(2 * LARGE * WIDTH, (True,) * 4)
    assert stagger is not None
    assert NAMES[stagger.value] == "key"
    (made,) = (eqn for eqn in body.eqns if stagger.after in eqn.outvars)
    assert made.primitive.name == "add"
    assert body.invars[0] in made.invars


def test_what_must_be_read_early_is_not_chosen() -> None:
    _, stagger = found(2 * LARGE * WIDTH, (True, False, True, True))
    assert stagger is not None
    assert NAMES[stagger.value] == "query"
    assert found(2 * LARGE * WIDTH, (True, False, False, True))[1] is None  # nothing else that the scores need


def test_where_no_array_is_large_both_are_left_to_run_side_by_side() -> None:
    assert found(LARGE * WIDTH, (True,) * 4)[1] is None


@pytest.mark.parametrize("length", [2 * LARGE * WIDTH, WIDTH])
def test_both_give_what_each_gives(length: int) -> None:
    jaxpr = traced(length).jaxpr
    xs = [jax.random.normal(jax.random.key(k), (length, WIDTH)) for k in (1, 2)]
    ps = [params(k) for k in (3, 4)]
    arguments = [[x, *(p[name] for name in NAMES)] for x, p in zip(xs, ps, strict=True)]
    code = jax.make_jaxpr(lambda a, b: run_both_in_slots(InSlots(jaxpr, a, {}, {}), InSlots(jaxpr, b, {}, {})))(*arguments)
    waits = "lt" in {eqn.primitive.name for scan in code.eqns if scan.primitive.name == "scan" for eqn in scan.params["jaxpr"].eqns}
    assert waits == (length > LARGE * WIDTH)
    outs = jax.jit(core.jaxpr_as_fun(code))(*arguments[0], *arguments[1])
    for out, x, p in zip(outs, xs, ps, strict=True):
        # The same operations on the same numbers, maybe fused otherwise: 3 layers of sums of up to 128 float64 terms.
        np.testing.assert_allclose(out, run(x, p), rtol=1e-12, atol=1e-12)
