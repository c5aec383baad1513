"""Residuals in the memory of the host: the numbers are those of residuals on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.flat import flat_pipeline
from tests.tiers import slow


def stage(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    return jax.lax.scan(layer, x, params)[0]


def last(params, x, microbatch):
    return jnp.mean((x - microbatch["y"]) ** 2)


def run(schedule, function=stage, **options):
    pipe = flat_pipeline(
        function,
        schedule=schedule,
        mesh=jax.make_mesh((schedule.num_devices,), ("pipe",)),
        last=last,
        **options,
    )
    rng = np.random.default_rng(0)
    params = pipe.place(
        {"stages": rng.standard_normal((schedule.num_stages, 2, 4, 4)) / 3, "last": {}}
    )
    batch = {
        "x": rng.standard_normal((2 * schedule.num_microbatches, 4)),
        "y": np.zeros((2 * schedule.num_microbatches, 4)),
    }
    return pipe, params, batch


@pytest.mark.parametrize(
    ("name", "devices", "chunks"),
    [("gpipe", 2, 1), slow("interleaved_1f1b", 4, 2), slow("1f1b", 8, 1), slow("dualpipev", 4, 2)],
)
def test_numbers_are_equal_and_both_memories_are_reported(name, devices, chunks):
    schedule = jp.schedules.build(name, devices=devices, microbatches=12, chunks=chunks)
    plain, params, batch = run(schedule)
    away, *_ = run(schedule, offload="residuals")
    (loss, grads), (expected, expected_grads) = (
        away.value_and_grad(params, batch),
        plain.value_and_grad(params, batch),
    )
    # Moved, not computed with: float64, a few units in the last place for another order of the same
    # sums.
    np.testing.assert_allclose(loss, expected, rtol=1e-14)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-16), grads, expected_grads
    )
    report, before = (jp.inspect.report(pipe, params, batch) for pipe in (away, plain))
    slots = report["slots"]
    assert slots.host > 0
    assert slots.residual_input < before["slots"].residual_input
    entry = report["slot_bytes"]["residual_input"] + report["slot_bytes"]["residual_weight"]
    assert report["pool_bytes"]["host"] == slots.host * entry
    assert report["predicted"]["host"] == (slots.host + 1) * entry
    saved = {
        pool: getattr(before["slots"], pool) - getattr(slots, pool)
        for pool in ("residual_input", "residual_weight")
    }
    saved_bytes = sum(count * report["slot_bytes"][pool] for pool, count in saved.items())
    assert before["predicted"]["total"] - report["predicted"]["total"] == saved_bytes - 2 * entry


def test_offload_that_moves_nothing_warns():
    pipe, params, batch = run(
        jp.schedules.build("1f1b", devices=4, microbatches=8), offload="residuals"
    )
    with pytest.warns(
        UserWarning, match="offload moves nothing to the host: schedule '1f1b' over 4 devices"
    ):
        jax.eval_shape(pipe.value_and_grad, params, batch)


@pytest.mark.parametrize("inside", [False, True], ids=["of the pipeline", "of a layer"])
@pytest.mark.parametrize("policy", ["names", slow("dots")])
def test_policies_that_offload_are_followed(policy, inside):
    """By `remat=`, or by `jax.checkpoint` in the stage itself: numbers as without, and what the
    forward keeps waits on the host.
    """
    policies = {
        "names": jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["h"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    }

    def layer(x, w):
        h = checkpoint_name(jnp.tanh(x @ w), "h")
        return x + jnp.sin(h) @ w, None

    def stage_of(body):
        return lambda params, x: jax.lax.scan(body, x, params)[0]

    schedule = jp.schedules.build("gpipe", devices=2, microbatches=8)
    if inside:
        pipe, params, batch = run(
            schedule, stage_of(jax.checkpoint(layer, policy=policies[policy]))
        )
    else:
        pipe, params, batch = run(schedule, stage_of(layer), remat=policies[policy])
    plain, *_ = run(schedule, stage_of(layer))
    (loss, grads), (expected, expected_grads) = (
        pipe.value_and_grad(params, batch),
        plain.value_and_grad(params, batch),
    )
    # Float64; what is computed again is computed by other code, a few units in the last place
    # apart.
    np.testing.assert_allclose(loss, expected, rtol=1e-14)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15), grads, expected_grads
    )
    assert jp.inspect.report(pipe, params, batch)["slots"].host == 8


@pytest.mark.slow
def test_the_eager_executor_moves_them_too():
    schedule = jp.schedules.build("gpipe", devices=2, microbatches=8)
    pipe, params, batch = run(schedule, offload=jp.Offload.RESIDUALS, executor=EagerExecutor())
    plain, *_ = run(schedule, executor=EagerExecutor())
    # The same operations in the same order.
    assert pipe.value_and_grad(params, batch)[0] == plain.value_and_grad(params, batch)[0]


def test_a_wrong_choice_is_refused():
    schedule = jp.schedules.build("gpipe", devices=2, microbatches=2)
    with pytest.raises(
        jp.PipelineError, match="offload must be \"residuals\" or None; got 'weights'"
    ):
        run(schedule, offload="weights")
