"""Typed keys of random numbers, and leaves without elements, are values as others are: in x, in
state, in outputs and costs, on every executor; where a mean of keys is wanted, it is refused.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused

M, ROWS, WIDTH = 4, 8, 3
draw = np.random.default_rng(0).standard_normal
X = draw((ROWS, WIDTH))
KEYS = jax.random.split(jax.random.key(0), ROWS)
CONSTANT = jax.random.key(7)


def with_key(params: Any, x: Any) -> Any:
    """Drops numbers by each row's key, and passes another key on."""
    halves = jax.vmap(jax.random.split)(x["key"])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (WIDTH,)))(halves[:, 0])
    return {**x, "h": jnp.tanh(x["h"] @ params["w"]) * keep, "key": halves[:, 1]}


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((x["h"] if isinstance(x, dict) else x) ** 2)


def pipe_of(stage: Any, *, data: int = 1, name: str = "zb_h1", **how: Any) -> jp.Pipeline:
    options = {key: how.pop(key) for key in ("executor", "memory") if key in how}
    microbatches = M // data
    return jp.Pipeline(
        jp.Model(stage, **{"last": last, **how}),
        jp.schedules.build(name, devices=2, microbatches=microbatches),
        mesh_of(2, data=data),
        sharding=jp.Sharding(data=("data",) if data > 1 else ()),
        **options,
    )


def params_of(pipe: jp.Pipeline) -> Any:
    numbers = np.random.default_rng(1).standard_normal((pipe.schedule.num_stages, WIDTH, WIDTH))
    return {"stages": {"w": numbers}, "first": {}, "last": {}}


def plain(stage: Any, pipe: jp.Pipeline, x: Any) -> Any:
    """The stages one after the other, of all rows at once."""
    for weights in params_of(pipe)["stages"]["w"]:
        x = stage({"w": weights}, x)
    return x


EXECUTORS = {"spmd": None, "eager": EagerExecutor()}


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_outputs_have_keys_and_leaves_without_elements(executor: str, data: int) -> None:
    pipe = pipe_of(with_key, data=data, executor=EXECUTORS[executor])
    x = {"h": X, "key": KEYS, "empty": np.zeros((ROWS, 0)), "none": np.zeros((ROWS, 2, 0), int)}
    found = pipe.outputs(pipe.place(params_of(pipe)), {"x": x})
    wanted = plain(with_key, pipe, x)
    words = jax.random.key_data
    assert np.array_equal(words(found["key"]), words(wanted["key"]))
    assert found["empty"].shape == (ROWS, 0)
    assert found["none"].shape == (ROWS, 2, 0)
    # sums of a few terms of order one
    assert np.max(np.abs(jax.device_get(found["h"]) - wanted["h"])) <= FLOAT64


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_outputs_have_keys_where_stages_are_placed_otherwise(name: str) -> None:
    pipe = pipe_of(with_key, name=name)
    x = {"h": X, "key": KEYS}
    found = pipe.outputs(pipe.place(params_of(pipe)), {"x": x})["key"]
    wanted = plain(with_key, pipe, x)["key"]
    assert np.array_equal(jax.random.key_data(found), jax.random.key_data(wanted))


@pytest.mark.parametrize("length", [0, 3])
def test_outputs_of_slices_without_elements(length: int) -> None:
    """Once as a leaf of time, once as one of whole sequences."""
    pipe = jp.Pipeline(
        jp.Model(lambda p, x: {**x, "h": x["h"] @ p["w"]}, time=("x/h", "x/key", "x/late")),
        jp.schedules.build("1f1b", devices=2, microbatches=2, slices=2),
        mesh_of(2),
    )
    keys = jax.random.split(jax.random.key(0), (2, 4))
    shapes = {"late": (2, 4, length), "whole": (2, length)}
    x = {name: np.zeros(shape) for name, shape in shapes.items()} | {"key": keys}
    x["h"] = draw((2, 4, WIDTH))
    found = pipe.outputs(pipe.place(params_of(pipe)), {"x": x})
    assert {name: found[name].shape for name in shapes} == shapes
    assert np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(keys))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_stage_may_return_a_key_that_is_a_constant(executor: str) -> None:
    """JAX cannot convert a concrete key, so nothing that stores one may try to."""

    def stage(params: Any, x: Any, *, state: Any) -> Any:
        own = jax.random.normal(state["key"], (WIDTH,)) + jax.random.normal(x["key"], (WIDTH,))
        return {"h": jnp.tanh(x["h"] @ params["w"]) + own, "key": CONSTANT}, {"key": CONSTANT}

    first = lambda params, microbatch: {"h": microbatch["x"], "key": CONSTANT}  # noqa: E731
    pipe = pipe_of(stage, first=first, executor=EXECUTORS[executor])
    params, state = params_of(pipe), {"key": jax.random.split(CONSTANT, 2)}
    (loss, after), _ = pipe.value_and_grad(
        pipe.place(params), {"x": X}, state=pipe.place_state(state)
    )
    wanted, _ = pipe.model.loss(params, {"x": X}, microbatches=M, state=state)
    assert abs(loss - wanted) <= FLOAT64 * abs(wanted)
    words = jax.random.key_data(pipe.canonical_state(after)["key"])
    assert np.array_equal(words, jnp.stack([jax.random.key_data(CONSTANT)] * 2))


def test_costs_of_a_model_whose_x_has_keys_and_leaves_without_elements() -> None:
    x = {"h": X[:2], "key": KEYS[:2], "empty": np.zeros((2, 0))}
    pipe = pipe_of(with_key)
    costs = jp.measure(pipe.model, params_of(pipe), {"x": x}, repeats=1)
    assert costs.transfer >= 0
    assert min(costs.forward) > 0


def test_keys_in_the_state_are_refused_on_a_data_axis() -> None:
    def stage(params: Any, x: Any, *, state: Any) -> Any:
        key, own = jax.random.split(state["key"])
        return jnp.tanh(x @ params["w"]) + jax.random.normal(own, x.shape), {"key": key}

    state = {"key": jax.random.split(jax.random.key(1), 2)}
    for data in (1, 2):
        pipe = pipe_of(stage, data=data)
        params, placed = pipe.place(params_of(pipe)), pipe.place_state(state)
        if data == 1:
            pipe.value_and_grad(params, {"x": X}, state=placed)
            continue
        for call in (pipe.value_and_grad, pipe.evaluate, pipe.outputs):
            with refused("(?s)0/key.*2 data shards would draw the same numbers.*ctx.rng"):
                call(params, {"x": X}, state=placed)


NOT_ARRAYS = {"text": "s", "object": object(), "array of texts": np.array(["s"])}


@pytest.mark.parametrize("what", NOT_ARRAYS)
@pytest.mark.parametrize("where", ["first", "stage", "last"])
def test_what_a_function_returns_must_be_arrays(where: str, what: str) -> None:
    odd = NOT_ARRAYS[what]

    def stage(params: Any, x: Any) -> Any:
        return {"h": x["h"] @ params["w"], "odd": odd if where == "stage" else x["odd"]}

    pipe = pipe_of(
        stage,
        first=lambda p, mb: {"h": mb["x"], "odd": odd if where == "first" else mb["x"][0, 0]},
        last=lambda p, x, mb: (last(p, x, mb), {"odd": odd if where == "last" else 1.0}),
        has_metrics=True,
    )
    params, out = params_of(pipe), "out[1]['odd']" if where == "last" else "out['odd']"
    text = rf"(?s)`{where}` returns out, which is no tree of arrays.*"
    text += out.replace("[", r"\[").replace("]", r"\]")
    with refused(text):
        pipe.value_and_grad(pipe.place(params), {"x": X})
    with refused(text):
        pipe.model.loss(params, {"x": X}, microbatches=M)


@pytest.mark.parametrize("returned", [CONSTANT, jax.random.split(CONSTANT, 3)], ids=["one", "3"])
def test_metrics_that_are_keys_are_refused(returned: Any) -> None:
    pipe = pipe_of(
        lambda p, x: x @ p["w"],
        last=lambda p, x, mb: (last(p, x, mb), {"key": returned}),
        has_metrics=True,
    )
    params, text = params_of(pipe), r"keys of random numbers as metrics\['key'\].*leave them out"
    for call in (pipe.value_and_grad, pipe.evaluate):
        with refused(text):
            call(pipe.place(params), {"x": X})
    with refused(text):
        pipe.model.loss(params, {"x": X}, microbatches=M)


@pytest.mark.parametrize("count", [CONSTANT, None, np.zeros(0), 1j], ids=str)
def test_a_count_that_is_no_number_is_refused(count: Any) -> None:
    pipe = pipe_of(
        lambda p, x: x @ p["w"],
        last=lambda p, x, mb: (last(p, x, mb), count),
        loss=jp.Loss.SUM_OVER_COUNT,
    )
    with refused("scalar count; the count is .*: take its sum"):
        pipe.value_and_grad(pipe.place(params_of(pipe)), {"x": X})
