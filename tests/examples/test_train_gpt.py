"""examples/train_gpt.py as a person runs it: a short training, a kill and a resume, --verify, and
flags that do not fit.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.environment import python
from tests.tiers import exhaustive, slow

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TINY = (
    "--pipe 2 --microbatches 2 --layers 2 --width 16 --heads 2 --context 16 --vocab 256 "
    "--batch 4 --warmup 4"
)
STEPS, EVERY = 40, 4


def run(flags, *more, status=0):
    return python(SCRIPT, *flags.split(), *more, status=status)


def losses_of(folder: Path) -> list[str]:
    with (folder / "losses.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, in the process-wide default precision of the example."""
    out = tmp_path_factory.mktemp("whole")
    done = run(TINY, "--steps", STEPS, "--save-every", EVERY, "--out", out)
    return out / "run-1", done.stdout


def test_a_run_leaves_losses_picture_sample_and_checkpoints(whole):
    folder, output = whole
    assert len(losses_of(folder)) == STEPS
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().startswith("def")
    assert {p.name for p in (folder / "checkpoints").iterdir()} >= {"36", "40"}
    assert f"step    {STEPS}/{STEPS}" in output
    assert "tokens/s" in output


def test_the_loss_goes_down(whole):
    losses = list(map(float, losses_of(whole[0])))
    assert losses[0] == pytest.approx(5.545, abs=0.02)  # ln 256: the first guess is uniform
    assert sum(losses[-3:]) / 3 < losses[0] - 0.1


@pytest.mark.slow  # tests/checkpoint/test_interrupted.py kills a smaller one
def test_a_killed_run_resumes_to_the_same_losses_bit_for_bit(whole, tmp_path):
    flags = f"{TINY} --steps 100000 --save-every {EVERY} --out"
    command = [sys.executable, SCRIPT, *flags.split(), tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    folder = tmp_path / "run-1"
    try:
        deadline = time.monotonic() + 240
        # it has this name once it is whole
        while not (folder / "checkpoints" / str(EVERY)).exists():
            assert process.poll() is None, "the run ended before its first checkpoint"
            assert time.monotonic() < deadline, "no checkpoint within 240 s"
            time.sleep(0.002)
    finally:
        process.kill()  # SIGKILL: it cannot tidy up
        process.wait()
    resumed = run("--steps", STEPS, "--resume", folder)
    start = int(re.search(r"resuming after step (\d+)", resumed.stdout)[1])
    assert start >= EVERY
    assert start < STEPS, "the run got past the end before it was killed: nothing was resumed"
    assert losses_of(folder) == losses_of(whole[0])


@pytest.mark.parametrize(
    "flags",
    [
        slow("--dtype float64"),
        exhaustive("--dtype float64 --schedule gpipe --data 2 --tied --layers 4"),
        slow("--dtype float64 --tied --spread-head --vocab 255"),
        slow("--dtype float32 --schedule interleaved_1f1b --chunks 2 --layers 4"),
    ],
)
def test_verify_finds_the_three_ways_equal(flags):
    done = run(f"{TINY} --verify --steps 4 {flags}")
    found = re.findall(
        r"pipeline vs (.+), largest of 4 steps: .*relative (\S+)\), gradient .*relative (\S+), in",
        done.stdout,
    )
    assert [name for name, *_ in found] == ["plain JAX", "torch_ref"]
    # Adam divides by the root of v, so that entries with tiny gradients carry their rounding on:
    # the example's own limit of 10^4 machine epsilons of an array's largest entry is what four
    # steps are held to.
    limit = 1e4 * np.finfo("float64").eps if "float64" in flags else 1e-3
    assert all(float(value) < limit for _, *values in found for value in values)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--schedule 1f1bb", ["1f1bb", "1f1b"]),
        ("--layers 3 --batch 5 --heads 3", ["use --layers 4", "use --batch 6", "use --width 18"]),
        ("--verify --dtype bfloat16", ["float64 or float32"]),
    ],
)
def test_flags_that_do_not_fit_are_told_what_to_write(flags, says):
    done = run(f"{TINY} {flags}", status=None)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert all(text in done.stderr for text in says), done.stderr


def test_a_resumed_run_cannot_change_its_model(whole):
    done = run("--width 32 --resume", whole[0], status=None)
    assert done.returncode != 0
    assert "leave out --width 32 (was 16)" in done.stderr
