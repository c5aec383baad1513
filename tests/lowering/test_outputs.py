"""`Pipeline.outputs`: what the last stage returns for every row, in the rows' order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64

M, ROWS, WIDTH = 4, 2, 3
LARGE = 0.3


def stage(params, x):
    h = jnp.tanh(x["h"] @ params["w"])
    return {"h": h, "large": jnp.max(h, axis=-1) > LARGE, "id": x["id"]}


def first(params, microbatch):
    return {
        "h": microbatch["x"] * params["scale"],
        "large": microbatch["x"][:, 0] > 0,
        "id": microbatch["id"],
    }


@pytest.mark.parametrize(("name", "data"), [("1f1b", 1), ("zbv", 2), ("dualpipe", 1)])
def test_outputs_are_those_of_the_model_row_by_row(name, data):
    schedule = jp.schedules.build(name, devices=2, microbatches=M)
    rng = np.random.default_rng(0)
    rows = M * ROWS * data
    batch = {"x": rng.standard_normal((rows, WIDTH)), "id": np.arange(rows)}
    canonical = {
        "first": {"scale": np.ones(WIDTH)},
        "stages": {"w": rng.standard_normal((schedule.num_stages, WIDTH, WIDTH))},
    }
    pipe = jp.Pipeline(
        jp.Model(stage, first=first),
        schedule,
        mesh_of(2, data=data),
        sharding=jp.Sharding(data=("data",) if data > 1 else ()),
    )
    found = pipe.outputs(pipe.place(canonical), batch)
    wanted = first(canonical["first"], batch)
    for s in range(schedule.num_stages):
        wanted = stage({"w": canonical["stages"]["w"][s]}, wanted)
    assert found["id"].tolist() == batch["id"].tolist()
    # A row at the threshold could come out either way where programs round otherwise; there is
    # none.
    assert np.min(np.abs(np.max(wanted["h"], axis=-1) - LARGE)) > 1e-6
    assert found["large"].tolist() == np.asarray(wanted["large"]).tolist()
    assert np.max(np.abs(jax.device_get(found["h"]) - wanted["h"])) <= FLOAT64


@pytest.mark.parametrize("table", ["gpipe", "1f1b"])
def test_a_checkpointed_stage_may_index_its_parameters(table):
    """Eager parameters are arrays of numpy, which take no traced index."""
    schedule = jp.schedules.build(table, devices=2, microbatches=2)
    w = np.random.default_rng(0).standard_normal((2, WIDTH, WIDTH))
    model = jp.Model(lambda w, x: x + w[jnp.argmax(x, axis=-1)])
    memory = jp.Memory(remat=jax.checkpoint_policies.nothing_saveable)
    pipe = jp.Pipeline(model, schedule, mesh_of(2), memory=memory, executor=EagerExecutor())
    x = np.random.default_rng(1).standard_normal((4, WIDTH))
    wanted = x
    for each in w:
        wanted = wanted + each[np.argmax(wanted, axis=-1)]
    found = pipe.outputs(pipe.place({"stages": w}), {"x": x})
    assert np.max(np.abs(np.asarray(found) - wanted)) <= FLOAT64


def test_the_plain_loss_may_index_arrays_of_numpy():
    """Its loop over microbatches traces the index."""
    table, tokens = np.arange(6.0).reshape(3, 2), np.array([2, 0, 1, 2])
    first = lambda table, microbatch: table[microbatch["tokens"]]  # noqa: E731
    model = jp.Model(lambda w, x: x * w, first=first, last=lambda _, x, microbatch: jnp.mean(x))
    params = {"first": table, "stages": np.ones(1), "last": {}}
    found = model.loss(params, {"tokens": tokens}, microbatches=2)
    assert abs(found - table[tokens].mean()) <= FLOAT64
