"""What the machine is, for the head of a table of results."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.engines import engines


def describe(*packages: str) -> list[str]:
    """Lines that say what was measured on: processor, cores, memory, load when asked, versions,
    engines and commit.
    """
    load = os.getloadavg()[0]
    return [
        f"{_processor()}, {os.cpu_count()} cores, {_memory()}, {platform.system()} "
        f"{platform.machine()}, load {load:.1f} at the start",
        ", ".join(
            [
                f"Python {platform.python_version()}",
                *(f"{p} {_version(p)}" for p in ("jax", "jaxlib", *packages)),
            ]
        ),
        f"engines {engines()}, commit {commit()}",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB memory"
    except (ValueError, OSError):
        return "unknown memory"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit(root: Path = Path(__file__).parent) -> str:
    """The commit of a checkout, this one, with -dirty where it has changes.

    JAXPIPE_RESULTS_COMMIT goes before it: results that were written do not count as changes.
    """
    given = os.environ.get("JAXPIPE_RESULTS_COMMIT")
    if given:
        return given
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
