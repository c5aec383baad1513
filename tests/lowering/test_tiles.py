"""Programs for TPUs on CPU devices, with pools in tiles and large sums by parts: the numbers are
those of one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.lowering.target import RunsOn, Target
from jaxpipe.storage import plan
from tests.axes import model as axes_model
from tests.axes.model import SPECS, batch, build, canonical, like_truth, truth, worst_error
from tests.parity.tolerance import FLOAT64
from tests.tiers import slow

TILE = (2, 4)


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every test below has functions of its own: equal pipelines would share compiled code.
    monkeypatch.setattr(RunsOn, "tile", TILE)
    monkeypatch.setattr(Target, "on_tpus", True)  # accumulators in order, sums by parts
    monkeypatch.setattr(plan, "PART", 64)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zb_h1", {}),
        ("1f1b", {"data_axes": ("data",)}),
        slow("zb_h1", {"specs": SPECS, "data_axes": ("data",)}),
        slow("1f1b", {"specs": SPECS}),
        slow("dualpipe", {}),
    ],
    ids=str,
)
def test_numbers_of_one_device(name: str, options: dict[str, Any]) -> None:
    schedule = build(name)
    pipe = axes_model.pipeline(
        schedule, stage=lambda params, x: axes_model.stage(params, x), **options
    )
    params = pipe.place(canonical(schedule.num_stages))
    pools = str(pipe.trace(params, batch(4)).function.jaxpr)
    assert f",{TILE[0]},{TILE[1]}]" in pools
    assert "layout_constraint" in pools
    loss, grads = pipe.value_and_grad(params, batch(4))
    wanted = truth(schedule.num_stages, 4)
    found = (loss, like_truth(pipe.canonical(grads)))
    assert worst_error(found[0], wanted[0]) <= FLOAT64
    assert worst_error(found[1], like_truth(wanted[1])) <= FLOAT64


@pytest.mark.parametrize("offload", [None, slow("residuals")])
def test_unlike_stages_and_scans(offload: str | None) -> None:
    """Pools that kinds of stages share hold raveled values; residuals are written row by row."""

    def narrow(w: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ w)

    def wide(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w["a"]) @ w["b"] + x, None

        return jax.lax.scan(layer, x, params)[0]

    def last(params: Any, x: Any, microbatch: Any) -> Any:
        return jnp.mean(jnp.square(x - microbatch["y"]))

    model = jp.Model({"n": narrow, "w": wide, "L": last}, layers="nnwwL")
    schedule = jp.schedules.build("gpipe", devices=2, microbatches=6)
    pipe = jp.Pipeline(
        model,
        schedule,
        jax.make_mesh((2,), ("pipe",)),
        layout="nn|wwL",
        memory=jp.Memory(offload=offload),
    )
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape) / 3

    params = {
        "stages": {"n": draw(2, 8, 8), "w": {"a": draw(2, 3, 8, 13), "b": draw(2, 3, 13, 8)}},
        "last": {},
    }
    rows = {"x": draw(24, 8), "y": draw(24, 8)}
    loss, grads = pipe.value_and_grad(pipe.place(params), rows)
    expected, wanted = jax.value_and_grad(model.loss)(params, rows)
    assert worst_error(loss, expected) <= FLOAT64
    found = pipe.canonical(grads)
    assert worst_error(found["stages"], wanted["stages"]) <= FLOAT64
