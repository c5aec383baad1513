"""Pipelines on a real GPU against the plain function in float64; on CPU devices where there is
none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.pod.jobs import free_port, start
from tests.tolerance import FLOAT64

from . import HAS_GPU, MARK, RESULTS, environment
from .cases import JOBS

COUNTS = {job: processes for job, (processes, _) in JOBS.items()} | {"training": 2, "loops": 1}
# A step in a CUDA graph, with predicates on the host, and with sums that have an order.
MODES = ("cpu", "graphs", "host", "deterministic")
SECONDS = 1500.0


def modes(mode: str) -> object:
    """A mode, skipped where there is no device for it."""
    missing = "a GPU is there" if mode == "cpu" else f"no GPU: {mode}"
    return pytest.param(mode, marks=pytest.mark.skipif((mode == "cpu") == HAS_GPU, reason=missing))


def jobs() -> list[object]:
    """Every job; the first is quick, and keeps the others true."""
    quick = "1f1b"
    tiers = {job: pytest.mark.slow if job == quick else pytest.mark.exhaustive for job in COUNTS}
    return [pytest.param(job, marks=tier) for job, tier in tiers.items()]


def ran(
    module: str, settings: dict[str, object], count: int, mode: str, folder: Path
) -> list[list[dict[str, object]]]:
    """The results of the processes of a job, which all end well."""
    worker = [sys.executable, "-u", "-m", f"tests.gpu_real.{module}"]
    commands = [[*worker, json.dumps({**settings, "process": i})] for i in range(count)]
    with start(commands, folder, [environment(i, mode) for i in range(count)]) as running:
        codes = running.wait(SECONDS)
        logs = [running.log(i).splitlines() for i in range(count)]
    found = [
        [json.loads(line.removeprefix(MARK)) for line in log if line.startswith(MARK)]
        for log in logs
    ]
    RESULTS.setdefault((str(settings["job"]), mode), []).extend(found[0])
    assert codes == [0] * count, running.everything()
    return found


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("mode", [modes(mode) for mode in MODES])
@pytest.mark.parametrize("job", jobs())
def test_numbers_are_those_of_the_plain_function(job, mode, tmp_path):
    count = COUNTS[job]
    settings = {
        "job": job,
        "mode": mode,
        "address": f"127.0.0.1:{free_port()}",
        "processes": count,
        "folder": str(tmp_path / "checkpoints"),
    }
    found = ran("worker", settings, count, mode, tmp_path)
    assert len(found[0]) == (len(JOBS[job][1]) if job in JOBS else len(found[0])) > 0
    assert not [(i, each) for i, lines in enumerate(found) for each in lines if wrong(each, mode)]


@pytest.mark.exhaustive
@pytest.mark.skipif(not HAS_GPU, reason="no GPU: mocked ranks")
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_a_rank_alone_compiles_and_ends(schedule, rank, tmp_path):
    settings = {"job": "one rank", "schedule": schedule, "pipe": 8, "rank": rank}
    ((line,),) = ran("one_rank", settings, 1, "graphs", tmp_path)
    assert line["other bits"] == [0]


def wrong(found: dict[str, object], mode: str) -> bool:
    """Whether a number is far from the plain one, or bits differ that must not."""
    far = not all(float(found.get(name, 0)) <= FLOAT64 for name in ("loss", "grads"))
    loss, *grads = found.get("other bits", [0])
    # A scatter adds in any order on a GPU, unless it is told not to.
    return far or bool(loss) or (mode in ("cpu", "deterministic") and any(grads))
