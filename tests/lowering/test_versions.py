"""A pipeline on versions with known faults, which are not installed here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe import known_faults
from jaxpipe.lowering.target import RunsOn, Target
from jaxpipe.spmd.xla import features_of, options_for


@pytest.fixture
def versions(monkeypatch):
    """What is installed, by package."""
    given: dict[str, str] = {}
    monkeypatch.setattr(known_faults, "installed_version", given.get)
    return given


def pipeline(**options):
    model = jp.Model(lambda w, x: x @ w, last=lambda p, x, mb: jnp.mean(x))
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    return jp.Pipeline(model, schedule, mesh, **options)


def test_a_slow_version_warns_and_another_does_not(versions):
    versions["jaxlib"] = "0.11.0"
    with pytest.warns(UserWarning, match="jax/issues/40101.*install jaxlib"):
        pipeline()
    versions["jaxlib"] = "0.10.2"
    pipeline()


def test_wrong_gradients_of_offload_are_refused_on_gpus(versions, monkeypatch):
    monkeypatch.setattr(Target, "platform", "gpu")
    versions["jaxlib"] = "0.11.0"
    memory = jp.Memory(offload="residuals")
    with pytest.raises(jp.PipelineError, match="xla/pull/46231"):
        pipeline(memory=memory)
    pipeline()
    versions["jaxlib"] = "0.10.2"
    pipeline(memory=memory)


def test_an_option_that_a_version_cannot_take_is_left_out(versions):
    name = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
    versions["jaxlib"] = "0.11.1"
    without = options_for(Target(RunsOn.GPUS))
    versions["jaxlib"] = "0.10.2"
    assert options_for(Target(RunsOn.GPUS)) == without | {name: True}


def test_flags_of_the_environment_count(monkeypatch):
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    found = features_of(Target(RunsOn.GPUS), mesh, jp.Offload.NOTHING)
    flag = "--xla_gpu_collective_permute_connected_components=true"
    monkeypatch.setenv("XLA_FLAGS", flag)
    more = features_of(Target(RunsOn.GPUS), mesh, jp.Offload.NOTHING)
    assert more - found == {known_faults.Feature.COMPONENTS}
