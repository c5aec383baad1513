"""`measure`: seconds and bytes of every stage, estimates marked as such, JSON both ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp

WIDTH, ROWS, M = 64, 16, 4


def layer(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


LAYERS = {
    "E": lambda w, microbatch: microbatch["x"] @ w,
    "t": layer,
    "L": lambda w, x, microbatch: jnp.mean((x @ w) ** 2),
}


def shapes(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = {
    "first": shapes(WIDTH, WIDTH),
    "stages": {
        "t": {"up": shapes(6, WIDTH, 4 * WIDTH), "down": shapes(6, 4 * WIDTH, WIDTH)},
    },
    "last": shapes(WIDTH, 10),
}
BATCH = {"x": shapes(ROWS * M, WIDTH)}


@pytest.fixture(scope="module")
def pipe():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    return jp.Pipeline(layers=LAYERS, layout="Etttt|ttL", schedule=schedule, mesh=jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2]))


def test_measured_costs_are_seconds_of_each_stage(pipe):
    """Times differ with the machine; sizes do not."""
    costs = jp.measure(pipe, pipe.place(PARAMS), BATCH, repeats=3)
    assert costs.unit.startswith("seconds, measured on")
    times = costs.for_stages(2)
    assert all(t > 0 for t in (*times.forward, *times.input_grad, *times.weight_grad, *times.backward))
    # The residuals of a layer are its hidden values alone; the stage's own input comes with them, and those of its inner layers.
    hidden = ROWS * 4 * WIDTH * 4
    assert times.activation[0] >= 4 * hidden + ROWS * WIDTH * 4
    assert times.checkpoint == (ROWS * WIDTH * 4,) * 2
    again = jp.Costs.from_json(costs.to_json())
    assert again == costs
    assert again.unit == costs.unit
    assert jp.simulate(pipe.schedule, costs).makespan > 0


def test_estimates_count_flops_and_say_so(pipe):
    peak = jp.Peak(flops=1e9, bandwidth=1e30, link=1e6, latency=1.0)
    costs = jp.measure(pipe, pipe.place(PARAMS), BATCH, peak=peak)
    assert costs.unit.startswith("seconds, estimated for 1e+09 flops")
    times = costs.for_stages(2)
    matmul = 2 * ROWS * WIDTH * 4 * WIDTH / 1e9
    # tanh and sums come on top of two matmuls a layer: (4 + 2) / (4 * 64) of them and less.
    assert times.forward[0] == pytest.approx(4 * 2 * matmul + 2 * ROWS * WIDTH * WIDTH / 1e9, rel=0.05)
    assert times.weight_grad[0] == pytest.approx(4 * 2 * matmul, rel=0.05)
    assert costs.transfer == 1 + ROWS * WIDTH * 4 / 1e6


@pytest.mark.slow
def test_layers_are_measured_apart_and_planned():
    microbatch = {"x": shapes(ROWS, WIDTH)}
    costs = jp.measure_layers(LAYERS, PARAMS, microbatch, peak=jp.Peak(flops=1e12, bandwidth=1e30))
    assert set(costs) == set("EtL")
    assert costs["t"].parameters == costs["t"].gradients == 2 * 4 * WIDTH * WIDTH * 4
    assert costs["t"].boundary == ROWS * WIDTH * 4
    assert costs["t"].residuals >= ROWS * 4 * WIDTH * 4
    plans = jp.plan("Et*6,L", costs, devices=2, microbatches=M, chunks=(1,), schedules=("1f1b",), remat=(None,))
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    built = plans.best.pipeline(LAYERS, mesh=mesh)
    # What the plan says of parameters and pools, against the compiled program's own account.
    report = built.compile_report(built.place(PARAMS), BATCH)
    held = plans.best.parts
    residuals = sum(report["pool_bytes"][pool] for pool in ("residual_input", "residual_weight"))
    assert held.residuals == residuals
    assert held.batch == BATCH["x"].size * 4
    # The traced model's own account, which a plan can be given instead.
    traced = jp.plan(
        "Et*6,L",
        costs,
        devices=2,
        microbatches=M,
        chunks=(1,),
        schedules=("1f1b",),
        remat=(None,),
        traced=jp.traced_memory(LAYERS, PARAMS, {"x": shapes(ROWS, WIDTH)}, mesh=mesh),
    )
    assert traced.best.traced == report["predicted"]
    gradients = 2 * (costs["t"].gradients * 3 + costs["E"].gradients + costs["L"].gradients)
    assert max(traced.best.memory) == report["predicted"]["total"] + gradients, "Adam's two moments"


def test_costs_as_json_that_make_no_sense():
    for text, message in (("[", "not costs as JSON"), ("[1]", "one object"), ('{"speed": 1}', "there are no costs 'speed'")):
        with pytest.raises(jp.CostError, match=message):
            jp.Costs.from_json(text)


def test_no_rounds_are_refused(pipe):
    with pytest.raises(jp.PipelineError, match="repeats must be at least 1"):
        jp.measure(pipe, pipe.place(PARAMS), BATCH, repeats=0)
