"""A pipeline on versions with known faults, which are not installed here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe import known_faults
from jaxpipe.lowering.target import RunsOn, Target
from jaxpipe.spmd import xla
from jaxpipe.spmd.xla import options_for


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


def test_a_version_that_hangs_is_refused_where_devices_run(versions, monkeypatch):
    monkeypatch.setattr(Target, "platform", "gpu")
    versions["nccl"] = "2.30.7"
    with pytest.raises(jp.PipelineError, match=r"jaxpp/issues/11.*install NCCL"):
        pipeline()
    versions["nccl"] = "2.31.2"
    pipeline()


def test_a_slow_version_warns(versions, monkeypatch):
    monkeypatch.setattr(Target, "platform", "gpu")
    monkeypatch.setattr(xla, "_MANY", 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    versions["jaxlib"] = "0.12.0"
    with pytest.warns(UserWarning, match=r"xla/pull/40505.*keep the pipe axis inside a node"):
        pipeline()
    versions["jaxlib"] = "0.13.0"
    pipeline()


def test_an_option_that_a_version_cannot_take_is_left_out(versions):
    name = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
    versions["jaxlib"] = "0.11.2"
    without = options_for(Target(RunsOn.GPUS))
    versions["jaxlib"] = "0.12.0"
    assert options_for(Target(RunsOn.GPUS)) == without | {name: True}
