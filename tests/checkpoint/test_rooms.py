"""A checkpoint goes on with another number of stages that are whole at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from tests.axes.model import canonical, first, last, stage
from tests.tolerance import same

LAYOUTS = {"even": ("Et*8L", None), "uneven": ("Et*7L", "Et|tt|tt|ttL")}


def pipeline(name: str, max_active: int | None) -> jp.Pipeline:
    layers, layout = LAYOUTS[name]
    model = jp.Model({"E": first, "t": stage, "L": last}, layers=layers)
    table = jp.schedules.build("interleaved_1f1b", devices=2, microbatches=2, chunks=2)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", "data"))
    sharding = jp.Sharding(data="data", fsdp="data", max_active=max_active)
    return jp.Pipeline(model, table, mesh, layout=layout, sharding=sharding)


def start(pipe: jp.Pipeline, params: Any) -> dict[str, Any]:
    """Parameters, and the state of Adam after a step whose gradients they are."""
    placed, adam = pipe.place(params), optax.adam(0.1)
    return {"params": placed, "opt_state": adam.update(placed, pipe.init(adam, placed), placed)[1]}


def moments(pipe: jp.Pipeline, state: dict[str, Any]) -> Any:
    adam = state["opt_state"][0]
    return [pipe.canonical(tree) for tree in (state["params"], adam.mu, adam.nu)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("saved", "restored"), [(None, 1), (1, None)])
def test_a_checkpoint_is_read_under_another_one(
    tmp_path: Path, name: str, saved: int | None, restored: int | None
) -> None:
    params = canonical(int(LAYOUTS[name][0][3]))
    params["stages"] = {"t": params["stages"]}
    one, other = pipeline(name, saved), pipeline(name, restored)
    before = start(one, params)
    with Checkpoints(tmp_path, one, layer_axis=True) as checkpoints:
        checkpoints.save(1, before)
    zeros = jax.tree.map(np.zeros_like, params)
    with Checkpoints(tmp_path, other, layer_axis=True) as checkpoints:
        number, after = checkpoints.restore(start(other, zeros))
    assert number == 1
    assert same(moments(other, after), moments(one, before))
