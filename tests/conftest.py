"""Runs before any test module is imported: eight virtual CPU devices and float64, without importing jax.

The rooms that need no JAX are tested by directories that never import it, so they run in seconds; `-m no_jax` selects them.
Environment variables, not `jax.config`, carry the settings, so that tests which start a subprocess hand them on.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

NUM_DEVICES = 8
# Compare numbers of compiled programs: what is run under several instruction sets (`make test-numeric ISA=AVX2`).
NUMERIC = ("axes", "checkpoint", "flax", "lowering", "models", "parity", "precision", "unlike")
# XLA's names for --xla_cpu_max_isa.
INSTRUCTION_SETS = ("SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX", "AMX_FP16")
NO_JAX = ("table", "schedules", "passes", "render", "simulate")
COUNT_FLAG = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")
if COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COUNT_FLAG}={NUM_DEVICES}".strip()

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    asked = re.search(r"--xla_cpu_max_isa=(\S*)", os.environ["XLA_FLAGS"])
    if asked and asked[1] not in INSTRUCTION_SETS:
        # XLA would ignore it, and the tests would run with the machine's own.
        raise pytest.UsageError(f"there is no instruction set {asked[1]!r}; XLA_FLAGS must name one of {', '.join(INSTRUCTION_SETS)}")
    config.addinivalue_line("markers", "no_jax: tests of the rooms that need neither jax nor torch")
    config.addinivalue_line("markers", "numeric: tests that compare numbers of compiled programs, for runs under several instruction sets")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        room = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if room in NO_JAX:
            item.add_marker(pytest.mark.no_jax)
        if room in NUMERIC:
            item.add_marker(pytest.mark.numeric)
