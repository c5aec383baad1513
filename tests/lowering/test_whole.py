"""What a user expects of the whole object: a name for what is compiled once, batches of any size,
keys as given, a readable profile.
"""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.flat import flat_pipeline
from tests.lowering.test_errors import WIDTH, batch_of, last, params_of, pipe_of, stage
from tests.parity.engines import mesh_of
from tests.tolerance import same


def plain_loss(rows: Any) -> float:
    x = rows["x"]
    for w in params_of()["stages"]["w"]:
        x = np.tanh(x @ w)
    return float(np.mean((x - rows["y"]) ** 2))


def test_an_equal_pipeline_is_compiled_once() -> None:
    traced = []

    def counted(params: Any, x: Any) -> Any:
        traced.append(1)
        return stage(params, x)

    def build(**changes: Any) -> jp.Pipeline:
        how = {
            "schedule": jp.schedules.build("1f1b", devices=2, microbatches=3),
            "mesh": mesh_of(2),
            "last": last,
            "data_axes": [],
        }
        return flat_pipeline(counted, **{**how, **changes})

    first, second = build(), build()
    params = first.place(params_of())
    one = first.value_and_grad(params, batch_of())
    count = len(traced)
    two = second.value_and_grad(params, batch_of())
    assert len(traced) == count
    # one program, run twice
    assert same(one, two)
    jax.eval_shape(build(accumulate_dtype=None).value_and_grad, params, batch_of())
    assert len(traced) > count


def programs() -> int:
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.parametrize("call", ["value_and_grad", "outputs", "loss", "jit"])
def test_a_dropped_pipeline_is_freed_with_its_programs(call: str) -> None:
    """At once, as `jax.jit` of a dropped function is; what a stage closes over goes with it."""
    refs, counts = [], []
    gc.collect()  # what other tests have left
    for k in range(3):
        held = jnp.full((WIDTH, WIDTH), 0.1 * k)
        pipe = pipe_of(lambda p, x, held=held: stage(p, x @ held))
        params, batch = pipe.place(params_of()), batch_of()
        if call == "loss":
            jax.value_and_grad(pipe.loss)(params, batch)
        elif call == "jit":
            pipe.jit(lambda p, b, pipe=pipe: pipe.value_and_grad(p, b))(params, batch)
        else:
            getattr(pipe, call)(params, batch)
        before = programs()
        refs += [weakref.ref(pipe), weakref.ref(held)]
        del pipe, held, params, batch
        counts.append((programs(), len(jax.live_arrays())))
        assert programs() < before
    assert [ref() for ref in refs] == [None] * 6
    assert counts[2] <= counts[1]  # the first one compiles what all of them use


# Of `ticks`: the loop over trips, and reading and unpacking a row, beside which is the last one of
# the trip before.
OF_A_TRIP = {
    "while",
    "body",
    "cond",
    "closed_call",
    "dynamic_slice",
    "slice",
    "squeeze",
    "reshape",
    "concatenate",
    "convert_element_type",
}
OF_A_TRIP |= {"add", "lt"}


def test_every_operation_lies_in_a_named_scope() -> None:
    pipe = pipe_of(schedule=jp.schedules.build("zb_h1", devices=2, microbatches=3))
    text = pipe.lower(pipe.place(params_of()), batch_of()).compile().as_text()
    for scope in ("F chunk 0", "I chunk 0", "W chunk 0", "exchange"):
        assert scope in text, scope
    inside = [
        name.split("/shard_map/")[1]
        for name in re.findall(r'op_name="(jit\(step\)[^"]*)"', text)
        if "/shard_map/" in name
    ]
    # those that XLA has made up
    inside = [name for name in inside if not re.search(r"[.]\d+$", name)]
    assert {name.split("/")[0] for name in inside} == {"prepare", "ticks", "finish"}
    # Between blocks and exchanges a trip only reads its row of the table.
    rest = {
        name.split("/")[-1]
        for name in inside
        if name.startswith("ticks/")
        and not re.search(r"/([FIW] chunk 0|exchange|exchange_with_slack)(/|$)", name)
    }
    assert rest <= OF_A_TRIP, rest


def test_a_scope_names_the_stage_where_only_one_runs_the_code() -> None:
    functions = [lambda p, x: jnp.tanh(x @ p["w"]), lambda p, x: x @ p["w"]]
    pipe = pipe_of(functions)
    params = pipe.place({"stages": [{"w": np.ones((WIDTH, WIDTH))}] * 2, "last": {}})
    text = pipe.lower(params, batch_of()).as_text(debug_info=True)
    assert all(scope in text for scope in ("F stage 0", "F stage 1", "B stage 1"))


def test_canonical_has_the_keys_that_were_given() -> None:
    pipe = pipe_of()
    params = pipe.place(params_of())
    assert set(params) == {"stages", "last"}
    assert set(pipe.canonical(params)) == {"stages", "last"}
    _, grads = jax.eval_shape(pipe.value_and_grad, params, batch_of())
    assert jax.tree.structure(grads) == jax.tree.structure(params)


@pytest.mark.parametrize("executor", [None, EagerExecutor()], ids=["compiled", "eager"])
def test_evaluation_takes_a_batch_of_any_size(executor: Any) -> None:
    pipe = pipe_of(executor=executor)
    params = pipe.place(params_of())
    rng = np.random.default_rng(0)
    for rows in (4, 5):  # of 3 microbatches: two of 2 rows; one of 5
        batch = {key: rng.standard_normal((rows, WIDTH)) for key in ("x", "y")}
        assert float(pipe.evaluate(params, batch)) == pytest.approx(plain_loss(batch), rel=1e-12)
    assert pipe.losses(params, batch).shape == (1,)
    assert pipe.outputs(params, batch).shape == (5, WIDTH)


def test_a_pipeline_says_what_it_is() -> None:
    assert (
        repr(pipe_of())
        == "Pipeline(schedule='1f1b', 2 stages, 3 microbatches, mesh=(pipe=2), axis='pipe', with "
        "last)"
    )
