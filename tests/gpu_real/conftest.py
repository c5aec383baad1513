"""Writes what was measured into the file that `RESULTS` names: `make test-gpu` on a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.machine import describe
from benchmarks.output import Result

from . import HAS_GPU, RESULTS

COLUMNS = "job  mode  case  loss  gradients  runs with other bits  seconds"


def device() -> str:
    """What the programs ran on."""
    kinds = sorted({str(each["kind"]) for lines in RESULTS.values() for each in lines})
    if not HAS_GPU:
        return "NOT RUN ON A GPU: the jobs below ran on CPU devices, whose processes use gloo."
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return f"{', '.join(kinds)}, driver {driver[0] if driver else 'unknown'}"


def rows() -> list[tuple[str, ...]]:
    """A row for each case of each job."""
    return [
        (
            *key,
            str(each["case"]),
            f"{each['loss']:.1e}",
            f"{each['grads']:.1e}" if "grads" in each else "",
            " ".join(map(str, each.get("other bits", ()))),
            f"{each['seconds']:.0f}" if "seconds" in each else "",
        )
        for key, lines in RESULTS.items()
        for each in lines
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not RESULTS:
        return
    count = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed")}
    reports = terminalreporter.stats.get("skipped", [])
    skipped = sorted({str(each.longrepr[2]) for each in reports})
    path = os.environ.get("RESULTS")
    Result(
        title="Pipelines on a real device, beside plain JAX in float64 (make test-gpu)",
        machine=[device(), *describe()],
        columns=COLUMNS,
        rows=rows(),
        notes=[
            "loss, gradients: the largest difference, relative to the largest entry; the first",
            "process's.  Other bits: of the loss and of the gradients, against the first run.",
            f"{count['passed']} tests passed, {count['failed']} failed.",
            *skipped,
        ],
    ).write(Path(path) if path else None)
