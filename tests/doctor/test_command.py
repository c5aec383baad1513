"""The whole command, as a person runs it: on virtual CPU devices, and as two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jaxpipe.cli.checks import CHECKS, Scope, Verdict, run_pair
from tests.pod.jobs import free_port

COMMAND = [sys.executable, "-m", "jaxpipe", "doctor", "--json", "--devices", "2", "--steps", "4"]


@pytest.mark.slow
def test_every_check_runs_on_two_virtual_devices(tmp_path):
    """No line is wrong; times of a loaded machine may be slow."""
    prices = tmp_path / "prices.json"
    done = subprocess.run(
        [*COMMAND, "--minutes", "9"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAXPIPE_PRICES": str(prices)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["item"]: line for line in json.loads(done.stdout)["lines"]}
    tried = {item for item, line in lines.items() if line["verdict"] != "not tried"}
    assert {"versions", "numbers: zbv", "predicate", "hops", "memory"} <= tried
    assert {"a step against its plan", "numbers: interleaved_1f1b, offload"} <= tried
    assert sum(item.startswith("numbers: ") for item in tried) == 6
    assert 0 < json.loads(prices.read_text())["cpu"]["predicate"] < 1


@pytest.mark.slow
def test_two_processes_share_a_check():
    address = f"127.0.0.1:{free_port()}"
    several = ["--coordinator", address, "--processes", "2", "--only", "numbers: one"]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    running = [
        subprocess.Popen(
            [*COMMAND, *several, "--process", str(process), "--no-prices"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": flags},
        )
        for process in range(2)
    ]
    for process in running:
        out, _ = process.communicate(timeout=300)
        (line,) = json.loads(out)["lines"]
        assert (line["item"], line["verdict"]) == ("numbers: 1f1b", "ok"), line


@pytest.mark.slow
def test_two_processes_stand_in_for_two_devices(monkeypatch):
    """What the doctor does where there is one GPU, with two CPU devices in its place."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    monkeypatch.setenv("XLA_FLAGS", flags)
    checks = [check.on_one_gpu for check in CHECKS if check.on_one_gpu]
    lines = [line for check in checks for line in run_pair(check, Scope(steps=4), 120).lines]
    title = ", two processes on one GPU"
    assert [(line.item, line.verdict) for line in lines] == [
        (f"hops{title}", Verdict.OK),
        (f"numbers: 1f1b{title}", Verdict.OK),
    ]
