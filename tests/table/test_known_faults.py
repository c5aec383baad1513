"""Versions with known faults: what is refused, what only warns, and the form of the list."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import jaxpipe as jp
from jaxpipe import known_faults
from jaxpipe.known_faults import (
    TESTED,
    FaultEffect,
    Feature,
    KnownFault,
    faults_for,
    is_in,
    read_faults,
    refuse_faults,
)

FAULTS = read_faults()
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def versions(monkeypatch) -> dict[str, str | None]:
    """What is installed, by package."""
    given: dict[str, str | None] = {}
    monkeypatch.setattr(known_faults, "installed_version", given.get)
    return given


def example(fault: KnownFault) -> tuple[str, str]:
    """A version that has the fault, and one that has not."""
    bounds = re.findall(r"(==|>=|<)([\d.]+)", fault.versions)
    (low,) = [number for op, number in bounds if op != "<"][:1] or ["0.1"]
    return low, "99.0"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_each_fault_is_found_for_its_versions_platform_and_feature(fault, versions):
    bad, good = example(fault)
    platform = "gpu" if fault.platform == "any" else fault.platform
    other = "tpu"

    def found(version, platform=platform, feature=fault.feature):
        versions[fault.package] = version
        return fault in faults_for(platform, {feature})

    assert found(bad)
    assert not found(good)
    assert not found(None), "a package that is not installed"
    assert found(bad, platform=other) == (fault.platform == "any")
    assert not any(found(bad, feature=feature) for feature in set(Feature) - {fault.feature})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_wrong_hanging_and_failing_versions_are_refused_with_thread_and_workaround(fault, versions):
    platform = "gpu" if fault.platform == "any" else fault.platform

    def given():
        versions[fault.package] = example(fault)[0]
        refuse_faults(platform, {fault.feature})

    if fault.effect is FaultEffect.AVOIDED:
        given()
    elif fault.effect is FaultEffect.SLOW:
        with pytest.warns(UserWarning, match=re.escape(fault.what)):
            given()
    else:
        with pytest.raises(jp.PipelineError) as caught:
            given()
        for part in (fault.thread or "", fault.workaround, fault.effect.value):
            assert part in str(caught.value)


def test_all_faults_are_listed_at_once(versions, monkeypatch):
    versions |= {"jaxlib": "0.12.0", "nccl": "2.30.7"}
    more = replace(FAULTS[0], effect=FaultEffect.WRONG, what="another fault")
    monkeypatch.setattr(known_faults, "read_faults", lambda: (*FAULTS, more))
    with pytest.raises(jp.PipelineError) as caught:
        refuse_faults("gpu", {Feature.GRAPHS, Feature.SEVERAL_DEVICES})
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("number", "versions", "inside"),
    [
        ("0.11.0", "==0.11.0", True),
        ("0.11", "==0.11.0", True),
        ("0.11.0rc1", "==0.11.0", True),
        ("0.11.10", "<0.11.2", False),
        ("0.10", ">=0.11,<0.12", False),
        ("0.11.2", ">=0.11,<0.12", True),
        ("0.12", ">=0.11,<0.12", False),
        ("0.12.0.1", ">=0.11,<0.13", True),
        ("2.30.7.1", "==2.30.7", False),
        ("0.11.2+cuda13", "==0.11.2", True),
        ("no number", "<0.11", False),
    ],
)
def test_ranges_compare_numbers(number, versions, inside):
    assert is_in(number, versions) is inside


def test_every_range_can_be_read_and_every_thread_is_public():
    for fault in FAULTS:
        assert is_in("0.0", fault.versions) in (True, False)
        assert all(re.fullmatch(r"(==|>=|<)[\d.]+", part) for part in fault.versions.split(","))
        public = r"https://github.com/[\w-]+/[\w-]+/(pull|issues)/\d+"
        assert fault.reproducer or re.fullmatch(public, fault.thread)
        assert fault.platform in ("gpu", "cpu", "tpu", "any")
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


def test_no_fault_is_of_versions_that_are_not_allowed():
    for fault in FAULTS:
        allowed = TESTED.get(fault.package, "")
        minors = (f"0.{minor}.9" for minor in range(30))
        assert not allowed or any(is_in(n, allowed) and is_in(n, fault.versions) for n in minors)


@pytest.mark.skipif(find_spec("jax") is None, reason="they run jax, in a process of their own")
def test_reproducers_run(tmp_path):
    """On CPUs they find nothing wrong."""
    for number, fault in enumerate(fault for fault in FAULTS if fault.reproducer):
        path = tmp_path / f"{number}.py"
        path.write_text("\n".join(fault.reproducer))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, path], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["bare", "right", "counted", "right"]


def test_versions_that_nobody_has_run_are_not_allowed():
    (jax,) = [need for need in PROJECT["dependencies"] if need.startswith("jax>")]
    assert jax == f"jax{TESTED['jax']}" == "jax>=0.11.2,<0.13"
