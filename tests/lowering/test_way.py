"""The way of a batch: trace, lower, emit, and the calls between `value_and_grad` and a permute."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.model.arguments import StepArguments
from jaxpipe.program.verify import verify
from jaxpipe.stage.model_code import lower, trace

MOST_STOPS = 8
BATCH = {"x": np.ones((8, 4), np.float32)}


def model(calls: Counter[str]) -> jp.Model:
    """A model whose functions count their calls."""

    def first(p: Any, microbatch: Any) -> Any:
        calls["first"] += 1
        return microbatch["x"] @ p

    def stage(p: Any, x: Any) -> Any:
        calls["stage"] += 1
        return x + jnp.tanh(x @ p["w"])

    def last(p: Any, x: Any, microbatch: Any) -> Any:
        calls["last"] += 1
        return jnp.mean((x @ p - microbatch["x"]) ** 2)

    return jp.Model(stage, first=first, last=last)


def piped(
    calls: Counter[str], name: str, *, tensor: int = 1
) -> tuple[jp.Pipeline, dict[str, Any], dict[str, Any]]:
    """A pipeline of two devices along the pipe axis, its parameters and a batch."""
    axes = {"pipe": 2} | ({"tensor": tensor} if tensor > 1 else {})
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[: 2 * tensor])
    specs = {"stages": {"w": PartitionSpec(None, "tensor")}} if tensor > 1 else None
    schedule = jp.schedules.build(name, devices=2, microbatches=4)
    pipe = jp.Pipeline(model(calls), schedule, mesh, sharding=jp.Sharding(specs=specs))
    square = np.eye(4, dtype=np.float32)
    weights = {"w": np.stack([square] * schedule.num_stages)}
    return pipe, pipe.place({"first": square, "stages": weights, "last": square}), BATCH


CALLS: dict[str, Callable[[jp.Pipeline, Any, Any], Any]] = {
    "value_and_grad": lambda pipe, *arguments: pipe.value_and_grad(*arguments),
    "lower": lambda pipe, *arguments: pipe.lower(*arguments),
    "evaluate": lambda pipe, *arguments: pipe.evaluate(*arguments),
    "grad of loss": lambda pipe, *arguments: jax.grad(pipe.loss)(*arguments),
}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("call", CALLS)
def test_the_functions_of_a_model_run_once_in_a_compile(call: str, name: str, tensor: int) -> None:
    """Also where an axis is left to the partitioner, which asks for the splits of slots first."""
    calls: Counter[str] = Counter()
    CALLS[call](*piped(calls, name, tensor=tensor))
    assert calls == {"first": 1, "stage": 1, "last": 1}


def test_the_first_permute_is_a_few_calls_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[list[str]] = []
    permute, package = lax.ppermute, Path(jp.__file__).parent

    def noted(*arguments: Any, **keywords: Any) -> Any:
        frames = traceback.extract_stack()
        own = [f for f in frames if package in Path(f.filename).parents]
        ways.append([f"{Path(f.filename).relative_to(package)}:{f.name}" for f in own])
        return permute(*arguments, **keywords)

    monkeypatch.setattr(lax, "ppermute", noted)
    pipe, params, batch = piped(Counter(), "1f1b")
    pipe.value_and_grad(params, batch)
    assert len(ways[0]) <= MOST_STOPS, ways[0]
    # docs/how_it_works.md lists them in this order
    text = Path("docs/how_it_works.md").read_text().split("## The way of a batch")[1]
    files = [f"`jaxpipe/{way.partition(':')[0]}`" for way in dict.fromkeys(ways[0])]
    places = [text.find(file) for file in dict.fromkeys(files)]
    assert -1 not in places
    assert places == sorted(places)


def test_trace_lower_and_emit_are_steps_of_their_own() -> None:
    calls: Counter[str] = Counter()
    pipe, params, batch = piped(calls, "zbv")
    traced = pipe.trace(params, batch)
    setup, arguments = traced.setup, StepArguments(params | {"shared": {}}, batch)
    code = trace(setup, setup.shapes(arguments))
    assert calls == {"first": 2, "stage": 2, "last": 2}
    assert [str(kind.backward) for kind in code.kinds] == [
        str(kind.backward) for kind in traced.code.kinds
    ]
    program = lower(setup, code)
    assert verify(program) is program
    assert str(program) == str(traced.program)
    results, grads = jax.jit(traced.run)(arguments)
    loss, own = pipe.value_and_grad(params, batch)
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-6)  # two compiled programs, float32
    assert jax.tree.structure(grads["stages"]) == jax.tree.structure(own["stages"])
    assert calls == {"first": 3, "stage": 3, "last": 3}
