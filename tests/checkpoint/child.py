"""A training run that dies: python -m tests.checkpoint.child FOLDER LOSSES.

It saves after every step, and after the fourth it is killed while that save is still being written.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from jaxpipe.checkpoint import Checkpoints
from tests.checkpoint import runs

KILLED_AFTER = 4


def main(folder: str, losses: str) -> None:
    pipe, tx = runs.pipeline("1f1b", 2, mesh=runs.explicit_mesh(2)), runs.optimizer()
    state, step = runs.start(pipe, tx), runs.stepper(pipe, tx)
    checkpoints = Checkpoints(folder, pipe)
    for number in range(100):
        state, loss = step(state, number)
        with Path(losses).open("a") as file:
            file.write(f"{loss!r}\n")
        checkpoints.save(number + 1, state)
        if number + 1 == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
