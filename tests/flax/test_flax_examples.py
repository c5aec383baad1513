"""The flax examples, and the one about checkpoints, as a person runs them: each ends in its own assertion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# One device, float32, no flags; without LLVM's optimisations compiling takes half as long.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")} | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("flax_nnx", "by the nnx model itself; 9"),
        pytest.param("flax_linen", "by the linen model itself", marks=pytest.mark.slow),
        pytest.param("checkpoint_layouts", "by 1f1b, 4 devices: differs by 0.0e+00", marks=pytest.mark.slow),
    ],
)
def test_an_example_runs_to_its_end(name: str, says: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
