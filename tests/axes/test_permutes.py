"""Blocks that permute, on CPU devices: every call gives the numbers of one device.

XLA:CPU ends the process where devices wait in permutes of different blocks, so each case runs in a
process of its own.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jaxpipe as jp
from jaxpipe.spmd.block import TOKEN, settled
from tests.axes.model import (
    SPECS,
    batch,
    build,
    canonical,
    first,
    last,
    like_truth,
    mesh,
    pipeline,
    worst_error,
)
from tests.environment import python
from tests.oracle import oracle_outputs, oracle_value_and_grad
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tiers import slow

M, SECONDS = 4, 300
SPLIT = PartitionSpec(None, "tensor")
SIDES = {"stages": [SPLIT, SPLIT]}


def hidden(params: Any, x: Any) -> Any:
    return params["gain"] * jnp.tanh(x @ params["w"] + params["b"]) + jnp.sum(params["odd"])


def rolled(params: Any, x: Any) -> Any:
    return x + jnp.roll(hidden(params, x), 1, axis=1) @ params["v"]


def sliced(params: Any, x: Any) -> Any:
    """As of a matmul for several things at once."""
    gate, up = jnp.split(hidden(params, x), 2, axis=1)
    return x + (gate * up) @ params["v"][: gate.shape[1]]


def concatenated(params: Any, x: Any) -> Any:
    h = hidden(params, x)
    return x + jnp.concatenate([h[:, 5:], h[:, :5]], axis=1) @ params["v"]


def weights_rolled(params: Any, x: Any) -> Any:
    """Once a step; but of the gradient, in every backward."""
    return x + hidden(params, x) @ jnp.roll(params["v"], 1, axis=0)


def last_rolled(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(jnp.roll(x @ params["head"], 1, axis=1) - microbatch["y"]))


STAGES = {f.__name__: f for f in (rolled, sliced, concatenated, weights_rolled)}


def partitioner(name: str, schedule: str) -> None:
    """In a process of its own: a stage, or a last, that the partitioner permutes for."""
    table = build(schedule, M)
    functions = {"stage": STAGES.get(name, rolled), "last": last_rolled if name == "last" else last}
    if name == "last":
        functions["stage"] = lambda params, x: x + hidden(params, x) @ params["v"]
    check(
        table, functions, mesh("pipe", "data", "tensor"), {"data_axes": ("data",), "specs": SPECS}
    )


def ring(axis: str, schedule: str) -> None:
    """In a process of its own: a stage that passes rows along the data axis, or columns."""
    table = build(schedule, M)
    pairs = [(0, 1), (1, 0)]

    def over_data(params: Any, x: Any) -> Any:
        return x + hidden(params, lax.ppermute(x, "data", pairs)) @ params["v"]

    def over_tensor(params: Any, x: Any) -> Any:
        passed = jax.shard_map(
            lambda h: lax.ppermute(h, "tensor", pairs),
            in_specs=SPLIT,
            out_specs=SPLIT,
            axis_names={"tensor"},
        )
        return x + passed(hidden(params, x)) @ params["v"]

    def plain(params: Any, x: Any) -> Any:
        if axis == "data":  # microbatch m of either shard
            return x + hidden(params, jnp.roll(x, x.shape[0] // 2, axis=0)) @ params["v"]
        return x + jnp.roll(hidden(params, x), params["v"].shape[0] // 2, axis=1) @ params["v"]

    functions = {"stage": over_data if axis == "data" else over_tensor, "last": last}
    options = {"data_axes": ("data",)} if axis == "data" else {}
    check(
        table,
        functions,
        Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", axis)),
        options,
        plain=plain,
    )


def check(
    table: jp.Schedule,
    functions: dict[str, Any],
    on: Mesh,
    options: dict[str, Any],
    plain: Any = None,
) -> None:
    pipe = pipeline(table, mesh=on, **functions, **options)
    weights, rows = canonical(table.num_stages), batch(M)
    params, plainly = (
        pipe.place(weights),
        {"first": first, **functions, "stage": plain or functions["stage"]},
    )
    shards = math.prod(on.shape[name] for name in options.get("data_axes", ()))
    # Microbatch m is the m-th part of every shard.
    together = jax.tree.map(
        lambda a: a.reshape(shards, M, -1, a.shape[-1]).swapaxes(0, 1).reshape(a.shape), rows
    )
    wanted_loss, wanted = oracle_value_and_grad(weights, together, **plainly, microbatches=M)
    loss, grads = pipe.value_and_grad(params, rows)
    assert worst_error(like_truth(pipe.canonical(grads)), wanted) <= FLOAT64
    for found in (loss, pipe.loss(params, rows), pipe.evaluate(params, rows)):
        assert abs(found - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    cut = jax.tree.map(lambda a: a.reshape(M, -1, a.shape[-1]), together)
    outputs = [
        oracle_outputs(
            weights, jax.tree.map(lambda a, m=m: a[m], cut), first=first, stage=plainly["stage"]
        )
        for m in range(M)
    ]
    found = pipe.outputs(params, rows).reshape(shards, M, -1, outputs[0].shape[-1]).swapaxes(0, 1)
    assert worst_error(found.reshape(M, *outputs[0].shape), np.stack(outputs)) <= FLOAT64
    with refused("cannot be profiled on CPU devices"):
        jp.inspect.profile(pipe, params, rows)


def forwards() -> None:
    """In a process of its own: outputs of stages of which the second sorts, so that the first is
    split as that one wants it.
    """
    functions = [
        lambda p, x: jnp.sort((x + jnp.roll(x[:, ::-1], 1, axis=-1)) @ p["w"], axis=-1),
        lambda p, x: jnp.sort(x @ p["w"], axis=-1),
    ]
    on = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", "tensor"))
    pipe = jp.Pipeline(
        jp.Model(functions),
        jp.schedules.build("gpipe", devices=2, microbatches=3),
        on,
        sharding=jp.Sharding(specs=SIDES, replicated=("tensor",)),
    )
    weights = [{"w": w} for w in np.random.default_rng(0).standard_normal((2, 4, 4))]
    x = np.random.default_rng(1).standard_normal((9, 4))
    wanted = functions[1](weights[1], functions[0](weights[0], x))
    assert worst_error(pipe.outputs(pipe.place({"stages": weights}), {"x": x}), wanted) <= FLOAT64


def run(call: str) -> None:
    code = f"from tests import conftest; from tests.axes import test_permutes; test_permutes.{call}"
    python("-c", code, timeout=SECONDS)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("rolled", "1f1b"),
        *(slow(n, "1f1b") for n in ("sliced", "concatenated", "weights_rolled", "last")),
        slow("sliced", "zb_h1"),
    ]
    + [slow("rolled", name) for name in ("interleaved_1f1b", "dualpipe")],
)
def test_what_the_partitioner_permutes_for(name: str, schedule: str) -> None:
    run(f"partitioner({name!r}, {schedule!r})")


@pytest.mark.parametrize(
    ("axis", "schedule"), [("data", "1f1b"), slow("tensor", "1f1b"), slow("data", "zb_h1")]
)
def test_a_stage_that_permutes_itself(axis: str, schedule: str) -> None:
    run(f"ring({axis!r}, {schedule!r})")


def test_forwards_alone_permute() -> None:
    run("forwards()")


def test_a_flag_that_travels_is_awaited_as_numbers_are() -> None:
    state = settled([jnp.ones(2, bool)], {TOKEN: jnp.ones((), bool)})
    assert not state[TOKEN]  # it depends on what has come


def test_what_lies_raveled_beside_other_kinds_is_whole_until_it_is_read() -> None:
    """Else the partitioner cuts it in its pool as its reader wants it, by permutes in the block of
    one device.
    """

    def layer(params: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ params["w"])

    def sorting(params: Any, x: Any) -> Any:
        return jnp.sort(x @ params["w"], axis=-1)

    pipe = jp.Pipeline(
        jp.Model(
            {
                "a": layer,
                "b": sorting,
                "L": lambda params, x, microbatch: jnp.mean((x @ params["w"]) ** 2),
            },
            layers="abbbaaL",
        ),
        jp.schedules.build("interleaved_1f1b", devices=2, microbatches=2, chunks=2),
        Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", "tensor")),
        layout="a|bb|b|aaL",
        sharding=jp.Sharding(specs={"stages": SPLIT, "last": SPLIT}),
    )
    params = pipe.place(
        {"stages": {k: {"w": jnp.ones((3, 2, 2))} for k in "ab"}, "last": {"w": jnp.ones((2, 2))}}
    )
    text = pipe.lower(params, {"x": jnp.ones((2, 2))}).compile().as_text()
    permutes = [line for line in text.splitlines() if " collective-permute(" in line]
    assert permutes
    assert all("exchange" in line for line in permutes)
