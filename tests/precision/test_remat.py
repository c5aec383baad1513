"""What a stage keeps for its backward, by `jax.checkpoint` policies: the numbers stay, the bytes shrink."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

import jaxpipe as jp
from tests.axes.model import worst_error
from tests.parity.tolerance import FLOAT64

WIDTH, HIDDEN, LAYERS, ROWS, MICROBATCHES = 6, 24, 2, 4, 4
ITEM = 8  # bytes of a float64
NAMED = jax.checkpoint_policies.save_only_these_names("hidden")


def layer(x: Any, p: Any) -> tuple[Any, None]:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    u = centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-5)
    hidden = checkpoint_name(jnp.tanh(u @ p["w"]), "hidden")
    return x + jnp.sin(hidden @ p["v"]), None


def stage(params: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, params)[0]


def stage_with_a_policy_of_its_own(params: Any, x: Any) -> Any:
    """A part of the stage: every layer keeps its input and what is named."""
    return jax.lax.scan(jax.checkpoint(layer, policy=NAMED), x, params)[0]


def last(_: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(x - microbatch["y"]))


@cache
def step(function: Any, remat: Any) -> tuple[Any, int]:
    """(loss, gradients) and the bytes of residuals that a microbatch keeps on a device."""
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=MICROBATCHES)
    mesh = Mesh(np.array(jax.devices()[:2]), ("pipe",))
    pipe = jp.Pipeline(function, schedule=schedule, mesh=mesh, last=last, remat=remat)
    rng = np.random.default_rng(0)
    own = {"w": rng.standard_normal((2, LAYERS, WIDTH, HIDDEN)), "v": rng.standard_normal((2, LAYERS, HIDDEN, WIDTH)) / 5}
    params = pipe.place({"stages": own, "last": {}})
    batch = {name: rng.standard_normal((ROWS * MICROBATCHES, WIDTH)) for name in "xy"}
    loss, grads = pipe.value_and_grad(params, batch)
    size = pipe.compile_report(params, batch)["slot_bytes"]
    return (loss, pipe.canonical(grads)), size["residual_input"] + size["residual_weight"]


CASES = {
    "nothing saved": (stage, "full", 0),
    # Of each layer: its input (the first layer's is the stage's, but a scan keeps one a layer) and the named array.
    "names, a layer": (stage_with_a_policy_of_its_own, None, LAYERS * ROWS * (WIDTH + HIDDEN) * ITEM),
    "names": (stage, NAMED, None),
    "matmuls": (stage, jax.checkpoint_policies.dots_saveable, None),
}


@pytest.mark.parametrize("case", [c if i < 2 else pytest.param(c, marks=pytest.mark.exhaustive) for i, c in enumerate(CASES)])
def test_the_numbers_stay_and_residuals_shrink(case: str) -> None:
    function, remat, wanted = CASES[case]
    (loss, grads), size = step(function, remat)
    (whole_loss, whole_grads), whole = step(stage, None)
    assert abs(loss - whole_loss) <= FLOAT64 * whole_loss
    assert worst_error(grads["stages"], whole_grads["stages"]) <= FLOAT64
    assert size < whole
    if wanted is not None:
        assert size == wanted
