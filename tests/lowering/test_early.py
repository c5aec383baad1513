"""Rows that a scan stores before attention makes its scores, and not at the end of a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxpipe.jaxprs import Entry, Slot, run_in_slots
from jaxpipe.jaxprs.early import Early, find_early
from jaxpipe.jaxprs.stagger import LARGE

WIDTH, LAYERS = 4, 3
LONG = 2 * LARGE * WIDTH  # its scores are large
NAMES = ("down", "key", "query", "up")  # in the order of the body's inputs
ROWS = ("hidden", "power", "heavy", "mixed")  # in the order of the body's outputs


def layer(x: Any, p: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An MLP, then attention, and four things that are kept of them."""
    hidden = jnp.tanh(x @ p["up"])
    x = x + hidden @ p["down"]
    query = x @ p["query"]
    mixed = jax.nn.softmax(query @ (x @ p["key"]).T) @ x
    # The trace comes to these after the scores; `power` needs nothing but `hidden`, `heavy` a matmul more, `mixed` the scores.
    kept = {"0 hidden": hidden, "1 power": jnp.exp(hidden), "2 heavy": hidden @ p["down"], "3 mixed": mixed}
    return x + mixed, kept


def run(x: Any, params: dict[str, Any]) -> Any:
    return jax.lax.scan(layer, x, params)


def params() -> dict[str, Any]:
    shapes = {"down": (4 * WIDTH, WIDTH), "key": (WIDTH, WIDTH), "query": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(k, (LAYERS, *dims)) for k, (name, dims) in zip(keys, shapes.items(), strict=True)}


def traced(length: int) -> core.ClosedJaxpr:
    return jax.make_jaxpr(run)(jnp.zeros((length, WIDTH)), params())


def found(length: int) -> tuple[core.Jaxpr, dict[int, core.Var], tuple[Early, ...]]:
    (scan,) = (eqn for eqn in traced(length).eqns if eqn.primitive.name == "scan")
    body: core.Jaxpr = scan.params["jaxpr"].jaxpr
    rows = dict(enumerate(body.outvars[1:]))
    return body, rows, find_early(body, rows, carried=body.invars[:1])  # type: ignore[arg-type]


def test_rows_that_need_neither_the_scores_nor_a_matmul_are_stored_before_them() -> None:
    body, _, (early,) = found(LONG)
    assert [ROWS[k] for k in early.rows] == ["hidden", "power"]
    waits = body.eqns[early.equation]
    assert waits.outvars[0].aval.shape == (LONG, LONG)
    assert waits.invars[early.operand].aval.shape in ((LONG, WIDTH), (WIDTH, LONG))


def test_where_no_array_is_large_all_rows_are_stored_at_the_end() -> None:
    assert found(LARGE * WIDTH)[2] == ()


def test_rows_smaller_than_what_is_carried_are_not_worth_it() -> None:
    body, rows, _ = found(LONG)
    small = next(v for eqn in body.eqns for v in eqn.outvars if v.aval.shape == (LONG, WIDTH))
    assert find_early(body, {0: small}, carried=body.invars[:1])
    assert not find_early(body, {0: small}, carried=[*body.invars[:1], rows[0]])


def pools_of(jaxpr: core.Jaxpr) -> tuple[list[Any], dict[int, Slot]]:
    """A pool of two slots for each thing that is kept, and its second slot."""
    entries = [Entry(tuple(v.aval.shape)) for v in jaxpr.outvars[1:]]
    pools = [jnp.full((2, *entry.kept), -1.0) for entry in entries]
    return pools, {k + 1: Slot(pool, jnp.int32(1), entry) for k, (pool, entry) in enumerate(zip(pools, entries, strict=True))}


@pytest.mark.parametrize("length", [LONG, WIDTH])
def test_slots_hold_what_a_scan_stacks(length: int) -> None:
    jaxpr, p, x = traced(length).jaxpr, params(), jax.random.normal(jax.random.key(1), (length, WIDTH))
    wanted, stacks = run(x, p)
    pools, writes = pools_of(jaxpr)
    out, *after = jax.jit(lambda *inputs: run_in_slots(jaxpr, inputs, writes=writes))(x, *(p[name] for name in NAMES))
    # The same operations on the same numbers, maybe fused otherwise: 3 layers of sums of up to 128 float64 terms.
    np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-12)
    for pool, slot, stack in zip(after, writes.values(), stacks.values(), strict=True):
        np.testing.assert_allclose(slot._replace(pool=pool).load(), stack, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(pool[0], pools[0][0, 0, 0])


def trip_of(writes_of: Any) -> core.Jaxpr:
    """The body of the loop that `run_in_slots` makes."""
    jaxpr, p = traced(LONG).jaxpr, params()
    arguments = [jnp.zeros((LONG, WIDTH)), *(p[name] for name in NAMES)]
    code = jax.make_jaxpr(lambda *inputs: run_in_slots(jaxpr, inputs, writes=writes_of(jaxpr)))(*arguments)
    (scan,) = (eqn for eqn in code.eqns if eqn.primitive.name == "scan")
    body: core.Jaxpr = scan.params["jaxpr"].jaxpr
    return body


def stores_before_scores(body: core.Jaxpr) -> int:
    """On how many stores the first scores depend."""
    maker = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    scores = next(eqn for eqn in body.eqns if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == (LONG, LONG))
    todo, seen = [scores], []
    while todo:
        eqn = todo.pop()
        if not any(eqn is other for other in seen):
            seen.append(eqn)
            todo.extend(maker[v] for v in eqn.invars if isinstance(v, core.Var) and v in maker)
    return sum(eqn.primitive.name == "dynamic_update_slice" for eqn in seen)


def test_scores_wait_for_the_stores() -> None:
    assert stores_before_scores(trip_of(lambda jaxpr: pools_of(jaxpr)[1])) == 2


def test_a_pool_that_the_layer_reads_is_written_at_its_end() -> None:
    """XLA reads a row where it is used, which may be after an early write of the same pool: it would copy the pool."""

    def both(pool: Any, x: Any, p: Any) -> Any:
        def body(x: Any, each: Any) -> Any:
            p, old = each
            x, kept = layer(x, p)
            return x + old @ p["down"], kept["0 hidden"]

        return jax.lax.scan(body, x, (p, pool))

    entry = Entry((LAYERS, LONG, 4 * WIDTH))
    pool, old = jnp.zeros((2, *entry.kept)), jnp.zeros((LAYERS, LONG, 4 * WIDTH))
    p, x = params(), jnp.zeros((LONG, WIDTH))
    jaxpr = jax.make_jaxpr(both)(old, x, p).jaxpr

    def stores(read: Any) -> int:
        slot = Slot(pool, jnp.int32(1), entry)
        arguments = [old, x, *(p[name] for name in NAMES)]
        reads = {0: Slot(read, jnp.int32(0), entry)}
        code = jax.make_jaxpr(lambda *inputs: run_in_slots(jaxpr, inputs, reads=reads, writes={1: slot}))(*arguments)
        (scan,) = (eqn for eqn in code.eqns if eqn.primitive.name == "scan")
        return stores_before_scores(scan.params["jaxpr"].jaxpr)

    assert stores(pool) == 0
    assert stores(jnp.zeros_like(pool)) == 1
