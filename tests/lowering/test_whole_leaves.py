"""Leaves of a batch without an axis of rows (`Model(whole=)`): a teacher's weights, the number of
the step, a temperature.  Every function is given them as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.debug import find_nonfinite
from jaxpipe.distributed import global_batch
from jaxpipe.eager import EagerExecutor
from tests.lowering.test_errors import raises
from tests.tolerance import FLOAT64, relative

WIDTH, M = 4, 4
WHOLE = ("teacher", "at/step", "heat")


def first(params: Any, microbatch: Any) -> Any:
    return microbatch["x"] @ params["e"] / microbatch["heat"]


def stage(params: Any, x: Any, *, microbatch: Any) -> Any:
    return x + jnp.tanh(x @ params["w"] + x @ microbatch["teacher"]["w"]) / microbatch["at"]["step"]


def last(params: Any, x: Any, microbatch: Any) -> Any:
    wanted = jnp.tanh(microbatch["x"] @ microbatch["teacher"]["w"])
    loss = jnp.mean((x * microbatch["heat"] - wanted - microbatch["at"]["y"]) ** 2)
    return loss, {"step": microbatch["at"]["step"] + 0 * jnp.int32(loss)}


FORMS: dict[str, dict[str, Any]] = {
    "alike": {},
    "data": {"sharding": jp.Sharding(data=("data",), fsdp="data")},
    "letters": {"layout": "Et|tL"},
    "slices": {},
}


def model_of(form: str) -> jp.Model:
    how: dict[str, Any] = {"has_metrics": True, "whole": WHOLE}
    if form == "letters":
        return jp.Model({"E": first, "t": stage, "L": last}, layers="EttL", **how)
    how |= {"time": ("x", "at/y")} if form == "slices" else {}
    return jp.Model(stage, first=first, last=last, **how)


def pipe_of(form: str = "alike", **how: Any) -> jp.Pipeline:
    shape, names = ((2, 2), ("data", "pipe")) if form == "data" else ((2,), ("pipe",))
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])
    slices = 2 if form == "slices" else 1
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M, slices=slices)
    return jp.Pipeline(model_of(form), schedule, mesh, **FORMS[form], **how)


def numbers(form: str = "alike", rows: int = 8) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and a batch."""
    draw = np.random.default_rng(0).normal
    time = (4,) if form == "slices" else ()
    own = {"w": draw(size=(2, WIDTH, WIDTH)) / 2}
    params = {
        "first": {"e": draw(size=(WIDTH, WIDTH))},
        "stages": {"t": own} if form == "letters" else own,
        "last": {},
    }
    batch = {
        "x": draw(size=(rows, *time, WIDTH)),
        "at": {"y": draw(size=(rows, *time, WIDTH)), "step": np.int32(3)},
        "teacher": {"w": draw(size=(WIDTH, WIDTH))},
        "heat": 0.5,
    }
    return jax.tree.map(jnp.asarray, params), batch


@pytest.mark.parametrize("form", FORMS)
def test_every_function_is_given_them(form):
    params, batch = numbers(form)
    pipe = pipe_of(form)
    placed = pipe.place(params)
    step = pipe.jit(pipe.value_and_grad)
    for number in (3, 7):
        rows = {**batch, "at": {**batch["at"], "step": np.int32(number)}, "heat": 1.0 / number}
        cut = {"microbatches": M * (2 if form == "data" else 1)}
        cut |= {"slices": pipe.schedule.slices}

        def plain(params: Any, rows: Any = rows, cut: Any = cut) -> Any:
            return pipe.model.loss(params, rows, **cut)

        (loss, metrics), grads = jax.value_and_grad(plain, has_aux=True)(params)
        assert float(metrics["step"]) == number
        wanted = np.asarray(loss), np.asarray(metrics["step"]), grads
        (loss, metrics), found = step(placed, rows)
        own = {key: pipe.canonical(found)[key] for key in params}
        assert relative((np.asarray(loss), np.asarray(metrics["step"]), own), wanted) <= FLOAT64
    assert step._cache_size() == 1, "a new value is a new program"
    eager = pipe_of(form, executor=EagerExecutor())
    (loss, metrics), found = eager.value_and_grad(placed, rows)
    own = {key: eager.canonical(found)[key] for key in params}
    assert relative((np.asarray(loss), np.asarray(metrics["step"]), own), wanted) <= FLOAT64


def test_forwards_tools_and_shapes():
    params, batch = numbers()
    pipe = pipe_of()
    placed = pipe.place(params)
    few = jax.tree.map(lambda leaf: leaf[:3] if np.ndim(leaf) and len(leaf) == 8 else leaf, batch)
    wanted = pipe.model.loss(params, few, microbatches=3)[0]
    assert relative(np.asarray(pipe.evaluate(placed, few)[0]), np.asarray(wanted)) <= FLOAT64
    fed = global_batch(pipe, batch, rows=8)  # of one process
    assert (fed["heat"], fed["x"].sharding.mesh) == (0.5, pipe.mesh)
    assert pipe.losses(placed, fed).shape == (M,)
    assert pipe.outputs(placed, batch).shape == (8, WIDTH)
    shapes = jax.eval_shape(lambda tree: tree, batch)
    compiled = pipe.lower(pipe.place(jax.eval_shape(lambda tree: tree, params)), shapes).compile()
    rows = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), batch, shapes)
    (loss, _), _ = compiled(placed, rows)
    assert relative(np.asarray(loss), np.asarray(pipe.loss(placed, batch)[0])) <= FLOAT64
    assert find_nonfinite(pipe, placed, batch) is None
    broken = find_nonfinite(pipe, placed, {**batch, "heat": 0.0})
    assert broken is not None
    assert (broken.function, broken.microbatch) == ("first", 0)


def test_a_cache_goes_on_with_them():
    def carried(params: Any, x: Any, *, carry: Any, microbatch: Any) -> Any:
        before = jnp.zeros((len(x), 1, WIDTH)) + carry
        sums = before + jnp.cumsum(x @ params["w"], axis=1)
        return x + sums * microbatch["heat"], sums[:, -1:]

    model = jp.Model(carried, time="x", whole="heat")
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(model, schedule, mesh)
    draw = np.random.default_rng(2).normal
    params = pipe.place({"stages": {"w": draw(size=(2, WIDTH, WIDTH))}})
    batch = {"x": draw(size=(4, 6, WIDTH)), "heat": np.float64(0.5)}
    wanted = np.asarray(pipe.outputs(params, batch))
    cache, found = pipe.empty_cache(params, {**batch, "x": batch["x"][:, :3]}, length=6), []
    for begin in (0, 3):
        rows = {**batch, "x": batch["x"][:, begin : begin + 3]}
        out, cache = pipe.outputs(params, rows, cache=cache, position=begin)
        found.append(np.asarray(out))
    assert relative(np.concatenate(found, axis=1), wanted) <= FLOAT64


def test_their_bytes_are_counted_once():
    """Rows are split over data shards, and the planner's costs take rows for each microbatch."""
    params, batch = numbers("data", rows=16)
    pipe = pipe_of("data")
    memory = jp.inspect.memory(pipe, pipe.place(params), batch)
    whole = WIDTH * WIDTH * 8 + 4 + 8
    assert memory["batch"] == 2 * 16 * WIDTH * 8 // 2 + whole
    params, batch = numbers("letters", rows=2)
    costs = jp.measure(model_of("letters"), params, batch, repeats=1)
    assert (costs["L"].batch, costs["L"].hoisted) == (2 * 2 * WIDTH * 8, whole)
    params, batch = numbers(rows=2)
    assert len(jp.measure(model_of("alike"), params, batch, repeats=1).forward) == 2


def test_numbers_of_python_keep_their_types():
    """A float of Python widens no bfloat16, in either executor."""

    def mean(params: Any, x: Any, microbatch: Any) -> Any:
        return jnp.mean(x * microbatch["heat"])

    def kept(params: Any, x: Any, *, microbatch: Any) -> Any:
        return x @ params * microbatch["heat"]

    model = jp.Model(kept, last=mean, whole="heat")
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    params = {"stages": jnp.ones((2, 4, 4), jnp.bfloat16) / 4, "last": {}}
    batch = {"x": jnp.ones((4, 4), jnp.bfloat16), "heat": 0.5}
    for executor in (None, EagerExecutor()):
        pipe = jp.Pipeline(model, schedule, mesh, executor=executor)
        loss, _ = pipe.value_and_grad(pipe.place(params), batch)
        assert float(loss) == 0.125  # powers of two are exact
    rows = {"x": batch["x"][:2], "heat": 0.5}
    assert len(jp.measure(model, params, rows, repeats=1).forward) == 2


def test_what_does_not_fit():
    pipe, (params, batch) = pipe_of(), numbers()
    placed = pipe.place(params)
    with raises("the batch has no 'teacher', which whole= of the model names"):
        pipe.lower(placed, {key: leaf for key, leaf in batch.items() if key != "teacher"})
    with raises("the batch has no leaves besides those in whole= of the model"):
        pipe.lower(placed, {"teacher": batch["teacher"], "at": {"step": 1}, "heat": 1.0})
    with raises("batch['more'] has 3 rows", "name those without an axis of rows", "whole=(...)"):
        pipe.lower(placed, {**batch, "more": np.ones(3)})
    with raises(
        "batch['at']['rate'] is a plain number: name values that all rows share in "
        "jaxpipe.Model(..., whole=('at/rate',))"
    ):
        pipe.lower(placed, {**batch, "at": {**batch["at"], "rate": 0.1}})
    with raises("time= has 'x/0' and whole= has 'x'", "name it in one of them"):
        jp.Model(stage, time=("x/0",), whole=("x",))
    assert jp.Model(stage, whole="step").whole == ("step",)
