"""The launchers, with stand-ins for srun, mpirun and ssh that start the processes on
this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .jobs import ROOT, free_port, start
from .test_train import TINY, losses

POD = ROOT / "examples" / "pod"
FLAGS = f"{TINY} --pipe 2 --steps 2 --cpu-devices 1 --checkpoints".split()

# Each stand-in does what the real one does for the processes: their numbers in the environment, the
# first failure's status.
EACH = """
pids=()
for i in 0 1; do
  {environment} {run} &
  pids+=($!)
done
for pid in "${{pids[@]}}"; do wait "$pid" || status=$?; done
exit "${{status:-0}}"
"""
SRUN = EACH.format(
    environment="SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1 "
    "SLURM_STEP_NODELIST=127.0.0.1",
    run='"${@:3}"',  # behind --kill-on-bad-exit=1 --label
)
MPIRUN = EACH.format(
    environment="OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_LOCAL_RANK=$i",
    run='"${@:5}"',  # behind -np 2 --host 127.0.0.1:2
)
# the command is the last argument; -tt, options and the host come before it
SSH = 'exec bash -c "${@: -1}"\n'


@pytest.fixture
def path(tmp_path):
    """A PATH whose first folder holds the stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in (("srun", SRUN), ("mpirun", MPIRUN), ("ssh", SSH)):
        (folder / name).write_text(f"#!/bin/bash\necho {name} $@ >>{tmp_path}/calls\n{body}")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def launch(
    script: str, environment: dict[str, str], folder: Path, flags: list[str]
) -> tuple[int, str]:
    command = [str(POD / script), *flags, str(folder / "checkpoints")]
    with start([command], folder / "logs", [{"PYTHON": sys.executable} | environment]) as job:
        return job.wait(240)[0], job.log(0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["launch_slurm.sh", "launch_mpi.sh", "launch_ssh.sh"])
def test_a_launcher_starts_a_job_that_trains(script, tmp_path, path):
    environment = {
        # JAX makes the port of the job's number
        "launch_slurm.sh": {"SLURM_JOB_ID": str(free_port()), "SLURM_SUBMIT_DIR": str(ROOT)},
        "launch_mpi.sh": {
            "PROCESSES": "2",
            "HOSTS": "127.0.0.1:2",
            "COORDINATOR": f"127.0.0.1:{free_port()}",
        },
        "launch_ssh.sh": {
            "HOSTS": "127.0.0.1 localhost",
            "COORDINATOR": f"127.0.0.1:{free_port()}",
        },
    }[script]
    status, log = launch(script, environment | {"PATH": path}, tmp_path, FLAGS)
    assert status == 0, log
    assert "2 processes" in log
    assert sorted(losses(log.replace("\r", ""))) == [1, 2]


def test_launchers_hand_on_a_failure_and_slurm_tries_again(tmp_path, path):
    """`false` in the place of Python: every process fails at once."""
    environment = {"PATH": path, "PYTHON": "false", "SLURM_SUBMIT_DIR": str(ROOT), "RESTARTS": "1"}
    status, log = launch("launch_slurm.sh", environment, tmp_path, FLAGS)
    assert status == 1
    assert "attempt 1 of 1 ended with status 1" in log
    assert (tmp_path / "calls").read_text().count("srun") == 2


def test_launchers_say_what_they_need():
    bare = {"PATH": os.environ["PATH"]}
    for script, need in (
        ("launch_mpi.sh", "PROCESSES: how many processes"),
        ("launch_ssh.sh", "HOSTS: name the hosts"),
    ):
        done = subprocess.run([POD / script], capture_output=True, text=True, env=bare, check=False)
        assert done.returncode != 0
        assert need in done.stderr


@pytest.mark.parametrize("script", sorted(POD.glob("*.sh")), ids=lambda p: p.name)
def test_launchers_are_good_bash(script):
    assert os.access(script, os.X_OK)
    subprocess.run([shutil.which("bash") or "bash", "-n", script], check=True)
