"""Starts a program in several processes on loopback, waits for all of them, and leaves
none behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.environment import quick

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "pod" / "train.py"
# Virtual devices are asked for by flag, and in the example's own precision.
ENVIRONMENT = quick()


@dataclass
class Job:
    """Running processes; each writes to a log of its own."""

    processes: list[subprocess.Popen[str]]
    logs: list[Path]

    def wait(self, seconds: float) -> list[int]:
        """The exit status of each process; a failure, with all logs, where one still runs after so
        many seconds.
        """
        deadline = time.monotonic() + seconds
        for process, log in zip(self.processes, self.logs, strict=True):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"{log.name} still runs after {seconds} s\n{self.everything()}"
                ) from None
        return [process.returncode for process in self.processes]

    def log(self, process: int) -> str:
        """What a process has printed so far."""
        return self.logs[process].read_text(errors="replace")

    def everything(self) -> str:
        """All logs, for a failure's message."""
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in self.logs)

    def wait_for(self, text: str, process: int, seconds: float) -> None:
        """Return once a process has printed `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.log(process):
            assert self.processes[process].poll() is None, (
                f"process {process} ended before {text!r}\n{self.everything()}"
            )
            assert time.monotonic() < deadline, f"no {text!r} in {seconds} s\n{self.everything()}"
            time.sleep(0.02)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def start(
    commands: Sequence[Sequence[str]],
    folder: Path,
    environment: Sequence[dict[str, str]] | None = None,
) -> Iterator[Job]:
    """Start the commands together; whatever still runs at the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"process-{i}.log" for i in range(len(commands))]
    extra = environment or [{}] * len(commands)
    processes = []
    try:
        for command, log, more in zip(commands, logs, extra, strict=True):
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=ENVIRONMENT | more,
                        cwd=ROOT,
                        start_new_session=True,
                    )
                )
        yield Job(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def train_commands(processes: int, devices: int, flags: str) -> list[list[str]]:
    """`examples/pod/train.py` on loopback: so many processes of so many virtual CPU
    devices each.
    """
    base = [sys.executable, "-u", str(TRAIN), "--cpu-devices", str(devices), *flags.split()]
    if processes == 1:
        return [base]
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
    return [[*base, *where, "--process", str(i)] for i in range(processes)]
