"""The environment of programs that tests start: what conftest.py sets for the tests themselves left
out, and the instruction set kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

COUNT_FLAG = "--xla_force_host_platform_device_count"


def outside(**more: str) -> dict[str, str]:
    """As a person has it: one device, float32, and the XLA flags that the tests were started with,
    the instruction set among them.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("XLA_FLAGS", "JAX_ENABLE_X64")
    }
    flags = " ".join(
        flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(COUNT_FLAG)
    )
    return kept | ({"XLA_FLAGS": flags} if flags else {}) | more


def quick() -> dict[str, str]:
    """The same, compiled without LLVM's optimisations, which takes half as long."""
    return outside(JAX_DISABLE_MOST_OPTIMIZATIONS="1")


def python(
    *arguments: object, timeout: float = 300, status: int | None = 0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A run of Python that has ended with this status; None: with any."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **more
    )
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done
