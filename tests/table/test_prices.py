"""Measured prices: where the file is, what it may hold, and who reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows

import jaxpipe as jp
from jaxpipe.cli.main import main
from jaxpipe.lowering.target import (
    GUESSED,
    GUESSES,
    ON_HOST,
    RunsOn,
    Target,
    measured_prices,
)
from jaxpipe.planner.layer_cost import LayerCost
from jaxpipe.prices import prices_path, read_prices, write_prices

H100 = "NVIDIA H100 80GB HBM3"
COST = LayerCost(forward=1e-3, input_grad=1e-3, weight_grad=1e-3)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "prices.json"
    monkeypatch.setenv("JAXPIPE_PRICES", str(path))
    return path


def mesh_of(kind, platform="gpu"):
    device = SimpleNamespace(device_kind=kind, platform=platform, process_index=0)
    return SimpleNamespace(
        devices=np.array([device, device], object), shape={"pipe": 2}, axis_names=("pipe",)
    )


def target_of(kind):
    """The target of a mesh, with the prices of the file."""
    return Target.of(mesh_of(kind), ("pipe",), read_prices())


def test_without_a_file_prices_are_guesses(file):
    assert read_prices() == {}
    assert measured_prices({}, "NVIDIA A100", guess=GUESSED) is None
    target = Target.of(mesh_of("NVIDIA A100"), ("pipe",))
    assert target.overheads == GUESSED
    assert GUESSES in str(target.overheads)


def test_an_h100_has_the_prices_that_were_measured_on_one(file):
    """In a CUDA graph, and where the host decides; a transfer needs two GPUs."""
    graphs, host = (
        Target(communicates=tensor).measured({}, H100).overheads for tensor in (False, True)
    )
    assert graphs == replace(GUESSED, predicate=15e-6)
    assert host == replace(ON_HOST, predicate=33e-6)
    assert graphs.source == (
        f"measured on {H100}, one GPU, driver 580, JAX 0.11.2, November 2026; guessed: hop, sent"
    )
    assert GUESSES in planned().prices  # of no kind of device


def test_the_user_s_own_measurements_come_before_them(file):
    write_prices(H100, {"hop": 3e-5}, "today")
    found = target_of(H100).overheads
    assert found == replace(GUESSED, predicate=15e-6, hop=3e-5)
    assert found.source.startswith(f"measured on {H100}, today; measured on {H100}, one GPU, ")
    assert found.source.endswith("; guessed: sent")


def test_the_folder_of_settings_is_that_of_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXPIPE_PRICES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("platformdirs.PlatformDirs", Unix)
    assert prices_path() == tmp_path / "jaxpipe" / "prices.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr("platformdirs.PlatformDirs", MacOS)
    assert prices_path().parts[-4:] == (
        "Library",
        "Application Support",
        "jaxpipe",
        "prices.json",
    )
    monkeypatch.setattr("platformdirs.PlatformDirs", Windows)
    folders = {"CSIDL_APPDATA": str(tmp_path / "roaming")}
    monkeypatch.setattr("platformdirs.windows.get_win_folder", folders.__getitem__)
    assert prices_path() == tmp_path / "roaming" / "jaxpipe" / "prices.json"


def test_the_doctor_refuses_a_faulty_file_before_its_checks(file, monkeypatch, capsys):
    monkeypatch.setattr("jaxpipe.cli.commands.run", lambda *_, **__: pytest.fail("checks ran"))
    file.write_text("{")
    assert main(["doctor"]) == 2
    advice = "remove the file and run `jaxpipe doctor` again"
    assert f"{file} cannot be read as prices" in (shown := capsys.readouterr().err)
    assert advice in shown


def test_a_target_has_the_prices_of_its_kind_of_device(file):
    seconds = {"predicate": 1e-6, "predicate_on_host": 2e-5, "hop": 3e-5}
    assert write_prices(H100, seconds, "today") == file
    found = target_of(H100).overheads
    assert (found.predicate, found.hop, found.sent) == (1e-6, 3e-5, GUESSED.sent)
    assert found.source == f"measured on {H100}, today; guessed: sent"
    assert target_of("NVIDIA A100").overheads == GUESSED
    on_host = measured_prices(read_prices(), H100, guess=ON_HOST, on_host=True)
    assert on_host == replace(ON_HOST, predicate=2e-5, hop=3e-5)


def test_prices_of_other_kinds_stay(file):
    write_prices("cpu", {"hop": 1.0}, "monday")
    write_prices(H100, {"predicate": 2.0}, "tuesday")
    write_prices(H100, {"hop": 3.0}, "wednesday")
    assert read_prices() == {
        "cpu": {"hop": 1.0, "measured": "monday"},
        H100: {"predicate": 2.0, "hop": 3.0, "measured": "wednesday"},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as prices"),
        ("[]", "must hold one object for each kind"),
        ('{"cpu": 3}', "must hold one object for each kind"),
        ('{"cpu": {"hop": -1}}', "cpu: hop is -1, not seconds"),
        ('{"cpu": {"hop": "fast"}}', "cpu: hop is 'fast', not seconds"),
    ],
)
def test_a_file_of_something_else_is_refused(file, text, says):
    file.write_text(text)
    with pytest.raises(jp.CostError, match=says) as caught:
        read_prices()
    assert str(file) in str(caught.value)


def planned(**options):
    return jp.plan(
        "t" * 8,
        {"t": COST},
        devices=2,
        microbatches=4,
        schedules=("1f1b",),
        chunks=(1,),
        remat=(None,),
        **options,
    )


def test_plans_are_made_with_measured_prices_and_say_so(file):
    guessed = planned()
    assert GUESSES in guessed.prices
    write_prices(H100, {"predicate": 1e-3, "hop": 0.0, "sent": 0.0}, "today")
    slow = planned()
    assert slow.prices.endswith(f"(measured on {H100}, today)")
    assert slow.best.seconds > guessed.best.seconds


def test_two_kinds_of_gpu_leave_a_plan_without_a_mesh_to_guesses(file):
    write_prices(H100, {"hop": 1e-5}, "today")
    write_prices("NVIDIA A100", {"hop": 1e-5}, "today")
    assert GUESSES in planned().prices
    assert planned(mesh=RunsOn.ONE_CPU_PROCESS).prices == str(GUESSED)


def test_the_command_says_which_prices_it_used(file, capsys):
    write_prices(H100, {"hop": 1e-5}, "today")
    sizes = ["--layers", "8", "--width", "512", "--vocab", "1000", "-P", "2", "-M", "4"]
    assert main(["plan", *sizes, "--chunks", "1", "--schedules", "1f1b", "--json"]) == 0
    assert "measured on NVIDIA H100" in json.loads(capsys.readouterr().out)["prices"]
