"""The blocks of a Llama, split over heads, hidden units, vocabulary and time, give the numbers of
one device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from benchmarks.llama import Model, Shape, layered, layered_specs, parameters, specs
from tests.axes.model import build, like_truth, mesh, worst_error
from tests.flat import flat_pipeline
from tests.oracle import oracle_value_and_grad
from tests.parity.tolerance import FLOAT64

TINY = Shape(
    width=8, heads=4, kv_heads=2, head_dim=4, hidden=12, vocab=16, layers=2, rows=2, time=6
)
M = 4


def arrays(shape: Shape, stages: int) -> Any:
    rng = np.random.default_rng(0)
    tree = parameters(shape, stages, jnp.float64)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape) / np.sqrt(shape.width), tree)


def tokens(shape: Shape, microbatches: int) -> dict[str, Any]:
    found = np.random.default_rng(1).integers(
        0, shape.vocab, (2, 2 * shape.rows * microbatches, shape.time)
    )
    return {"tokens": found[0], "targets": found[1]}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1f1b", {"remat_layer": True, "sequence": True}),
        pytest.param(
            "zb_h1", {"remat_layer": True, "sequence": True}, marks=pytest.mark.exhaustive
        ),
        pytest.param("zb_h1", {}, marks=pytest.mark.exhaustive),
        pytest.param("1f1b", {}, marks=pytest.mark.exhaustive),
        pytest.param("1f1b", {"sequence": True}, marks=pytest.mark.exhaustive),
        pytest.param("1f1b", {"remat_layer": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_tensor_parallel_llama_equals_one_device(name: str, options: dict[str, Any]) -> None:
    check(TINY, name, options)


@pytest.mark.slow
def test_stages_of_unlike_numbers_of_layers_keep_what_is_split() -> None:
    """One layer, two, one, and a last stage without any: inputs and residuals lie split over the
    tensor axis.
    """
    schedule, shape = build("interleaved_1f1b", M), replace(TINY, layers=1)
    model, plain = (
        Model(shape, compute=jnp.float64, **how)
        for how in ({"remat_layer": True, "sequence": True}, {"tensor": False})
    )
    whole = arrays(replace(shape, layers=4), 1)
    pipe = jp.Pipeline(
        model.by_letters("EttttL"),
        schedule,
        mesh(),
        layout="Et|tt|t|L",
        sharding=jp.Sharding(data=("data",), specs=layered_specs()),
    )
    params, rows = pipe.place(layered(whole)), tokens(shape, M)
    loss, grads = pipe.value_and_grad(params, rows)
    functions = {"first": plain.first, "stage": plain.stage, "last": plain.last}
    wanted_loss, wanted = jax.jit(
        lambda p, b: oracle_value_and_grad(p, b, **functions, microbatches=1)
    )(whole, rows)
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    found = like_truth(pipe.canonical(grads))
    assert worst_error(found, layered(wanted)) <= FLOAT64


def check(shape: Shape, name: str, options: dict[str, Any]) -> None:
    """A step agrees with that of one device."""
    schedule = build(name, M)
    model = Model(shape, compute=jnp.float64, **options)
    how = {"data_axes": ("data",), "fsdp": "data", "specs": specs()}
    pipe = flat_pipeline(
        model.stage, schedule=schedule, mesh=mesh(), first=model.first, last=model.last, **how
    )
    params, rows = arrays(shape, schedule.num_stages), tokens(shape, M)
    loss, grads = pipe.value_and_grad(pipe.place(params), rows)
    plain = Model(shape, tensor=False, compute=jnp.float64)
    functions = {"first": plain.first, "stage": plain.stage, "last": plain.last}
    wanted_loss, wanted = jax.jit(
        lambda p, b: oracle_value_and_grad(p, b, **functions, microbatches=1)
    )(params, rows)
    assert abs(loss - wanted_loss) <= FLOAT64 * abs(wanted_loss)
    assert worst_error(like_truth(pipe.canonical(grads)), wanted) <= FLOAT64
