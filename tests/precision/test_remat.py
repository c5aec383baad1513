"""What a stage keeps for its backward, by `jax.checkpoint` policies: the numbers stay, the bytes
shrink.
"""

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
from jaxpipe.model.arguments import rematerialised
from jaxpipe.model.calls import Function
from tests.axes.model import worst_error
from tests.flat import flat_pipeline
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
    pipe = jp.Pipeline(jp.Model(function, last=last), schedule, mesh, memory=jp.Memory(remat=remat))
    rng = np.random.default_rng(0)
    own = {
        "w": rng.standard_normal((2, LAYERS, WIDTH, HIDDEN)),
        "v": rng.standard_normal((2, LAYERS, HIDDEN, WIDTH)) / 5,
    }
    params = pipe.place({"stages": own, "last": {}})
    batch = {name: rng.standard_normal((ROWS * MICROBATCHES, WIDTH)) for name in "xy"}
    loss, grads = pipe.value_and_grad(params, batch)
    size = jp.inspect.report(pipe, params, batch)["slot_bytes"]
    return (loss, pipe.canonical(grads)), size["residual_input"] + size["residual_weight"]


CASES = {
    "nothing saved": (stage, "full", 0),
    # Of each layer: its input (the first layer's is the stage's, but a scan keeps one a layer) and
    # the named array.
    "names, a layer": (
        stage_with_a_policy_of_its_own,
        None,
        LAYERS * ROWS * (WIDTH + HIDDEN) * ITEM,
    ),
    "names": (stage, NAMED, None),
    "matmuls": (stage, jax.checkpoint_policies.dots_saveable, None),
}


@pytest.mark.parametrize(
    "case",
    [c if i < 2 else pytest.param(c, marks=pytest.mark.exhaustive) for i, c in enumerate(CASES)],
)
def test_the_numbers_stay_and_residuals_shrink(case: str) -> None:
    function, remat, wanted = CASES[case]
    (loss, grads), size = step(function, remat)
    (whole_loss, whole_grads), whole = step(stage, None)
    assert abs(loss - whole_loss) <= FLOAT64 * whole_loss
    assert worst_error(grads["stages"], whole_grads["stages"]) <= FLOAT64
    assert size < whole
    if wanted is not None:
        assert size == wanted


def in_two_modes(params: Any, x: Any, *, ctx: jp.Context, training: bool, microbatch: Any) -> Any:
    """Reads `training` in Python, as the guide shows it."""
    assert ctx.axis is None
    return jnp.tanh(x @ params) if training else x + 0 * microbatch["y"]


@pytest.mark.parametrize("remat", ["full", NAMED], ids=["full", "names"])
@pytest.mark.parametrize("by_letters", [False, True], ids=["stages", "layers"])
def test_training_is_a_python_bool_under_remat(remat: Any, by_letters: bool) -> None:
    given: dict[str, Any] = {"stage": in_two_modes, "last": last}
    if by_letters:
        given = {"layers": {"t": in_two_modes, "L": last}, "layout": "t|tL"}
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=MICROBATCHES)
    mesh = Mesh(np.array(jax.devices()[:2]), ("pipe",))
    pipe = flat_pipeline(**given, schedule=schedule, mesh=mesh, remat=remat)
    own = np.ones((2, WIDTH, WIDTH))
    params = pipe.place({"stages": {"t": own} if by_letters else own, "last": {}})
    batch = {name: np.ones((ROWS * MICROBATCHES, WIDTH)) for name in "xy"}
    assert "tanh" in pipe.lower(params, batch).as_text()
    # In evaluation no stage changes x, which is what `last` compares it with.
    assert pipe.evaluate(params, batch) == 0


def test_a_stage_under_remat_is_named_where_it_was_written() -> None:
    def broken(params: Any, x: Any) -> Any:
        return x @ jnp.ones((1, 1)) + params

    (changed,) = rematerialised([Function.of(broken, "stage")], "full")
    with pytest.raises(TypeError) as caught:
        changed.run(jnp.ones(3), jnp.ones((2, 3)), keywords={})
    assert "broken, test_remat.py" in "".join(caught.value.__notes__)
