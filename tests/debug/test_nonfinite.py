"""find_nonfinite names the stage, microbatch, phase and leaf where the first NaN or infinity
arises, and tells what came in broken.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.debug import Nonfinite, Phase, find_nonfinite
from tests.flat import flat_pipeline

M, WIDTH = 4, 3


def first(params, mb):
    return {"h": mb["x"] * params["gain"], "id": mb["id"]}


def stage(params, x, *, shared, ctx):
    """sqrt has no finite gradient at 0, and log no finite value."""
    h = jnp.tanh(x["h"] @ params["w"] + shared["bias"])
    poison = jnp.where(ctx.stage == 2, params["poison"], 1.0) * jnp.ones_like(h)
    # forward, stage 2, the row with id 7
    h = h + jnp.where(x["id"][:, None] == 7, jnp.log(poison), 0.0)
    # backward only
    h = h + jnp.where(x["id"][:, None] == 5, jnp.sqrt(jnp.abs(params["root"])), 0.0)
    return {"h": h, "id": x["id"]}


def last(params, x, mb):
    return jnp.mean((x["h"] @ params["head"] - mb["y"]) ** 2)


def make(name="1f1b", data=1, **options):
    schedule = jp.schedules.build(name, devices=2, microbatches=M)
    shape, names = ((2, data), ("pipe", "data"))
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: 2 * data])
    pipe = flat_pipeline(
        stage, schedule=schedule, mesh=mesh, first=first, last=last, data_axes=("data",), **options
    )
    s = schedule.num_stages
    rng = np.random.default_rng(0)
    canonical = {
        "first": {"gain": np.ones(WIDTH)},
        "stages": {
            "w": rng.normal(size=(s, WIDTH, WIDTH)),
            "poison": np.ones((s, WIDTH)),
            "root": np.ones((s, WIDTH)),
        },
        "last": {"head": rng.normal(size=(WIDTH, 1))},
        "shared": {"bias": np.zeros(WIDTH)},
    }
    rows = 2 * M * data
    batch = {
        "x": rng.normal(size=(rows, WIDTH)),
        "id": np.zeros(rows, np.int32),
        "y": np.zeros((rows, 1)),
    }
    return pipe, canonical, batch


def found(pipe, canonical, batch) -> Nonfinite | None:
    return find_nonfinite(pipe, pipe.place(canonical), batch)


def test_where_all_is_finite_nothing_is_found():
    """A batch may hold infinities that no result depends on: masks, say."""
    pipe, canonical, batch = make()
    assert found(pipe, canonical, {**batch, "mask": np.full(2 * M, -np.inf)}) is None


def test_the_forward_that_makes_it_is_named():
    """The same call, whatever the schedule: 4 stages, the poison in stage 2, the row in microbatch
    3.
    """
    pipe, canonical, batch = make("zbv")
    canonical["stages"]["poison"][2] = -1.0
    batch["id"][3 * 2 + 1] = 7
    answer = found(pipe, canonical, batch)
    assert (answer.phase, answer.function, answer.stage, answer.microbatch, answer.shard) == (
        Phase.FORWARD,
        "stage",
        2,
        3,
        0,
    )
    assert answer.values == (f"output['h'] has {WIDTH} NaN and 0 infinite of {2 * WIDTH} values",)
    assert answer.inputs == ()
    assert str(answer) == (
        "not finite in the forward of stage 2, microbatch 3: output['h'] has 3 NaN and 0 "
        "infinite of 6 values "
        "(its inputs are all finite, so it is made here)"
    )


def test_a_gradient_that_only_the_backward_breaks_is_named():
    """The loss is finite, and so is every output: sqrt at 0."""
    pipe, canonical, batch = make()
    canonical["stages"]["root"][1, 0] = 0.0
    batch["id"][2] = 5
    assert jnp.isfinite(pipe.evaluate(pipe.place(canonical), batch))
    answer = found(pipe, canonical, batch)
    assert (answer.phase, answer.function, answer.stage, answer.microbatch) == (
        Phase.BACKWARD,
        "stage",
        1,
        0,
    )
    assert [value.split(" has")[0] for value in answer.values] == ["gradient of parameters['root']"]
    assert answer.inputs == ()


def test_the_data_shard_is_named():
    """Shard 1 of 2 has rows 8 to 15; its microbatch 1 has rows 10 and 11."""
    pipe, canonical, batch = make(data=2)
    batch["x"][11] = np.inf
    answer = found(pipe, canonical, batch)
    assert (answer.phase, answer.function, answer.stage, answer.microbatch, answer.shard) == (
        Phase.FORWARD,
        "first",
        0,
        1,
        1,
    )
    assert answer.inputs == ("microbatch['x'] has 0 NaN and 3 infinite of 6 values",)
    assert "`first` (with stage 0), microbatch 1, data shard 1" in str(answer)
    assert "so are already its inputs" in str(answer)


def test_parameters_that_are_broken_already_are_told_apart():
    pipe, canonical, batch = make()
    canonical["last"]["head"][0] = np.nan
    answer = found(pipe, canonical, batch)
    assert (answer.phase, answer.function, answer.stage, answer.microbatch) == (
        Phase.FORWARD,
        "last",
        1,
        0,
    )
    assert answer.inputs == ("parameters['head'] has 1 NaN and 0 infinite of 3 values",)


def test_a_step_that_cannot_run_raises_what_the_step_raises():
    pipe, canonical, batch = make()
    with pytest.raises(jp.PipelineError, match="which do not divide into 4 microbatches"):
        found(pipe, canonical, jax.tree.map(lambda leaf: leaf[:-1], batch))


def test_stages_with_state_are_refused_by_name():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(
        jp.Model(lambda p, x, *, state: (x * p, state), last=lambda p, x, mb: jnp.mean(x)),
        schedule,
        mesh,
    )
    params = pipe.place({"stages": np.ones(2), "last": {}})
    with pytest.raises(jp.PipelineError, match="no stage may take `state`"):
        find_nonfinite(pipe, params, {"x": np.ones((M, 3))})
