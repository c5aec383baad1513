"""Runs before any test module is imported: eight virtual CPU devices and float64, without importing
jax.

The rooms that need no JAX are tested by directories that never import it, so they run in seconds;
`-m no_jax` selects them, and then no other test is collected. Environment variables, not
`jax.config`, carry the settings, so that tests which start a subprocess hand them on.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import zlib
from importlib.util import find_spec
from itertools import compress
from operator import not_
from pathlib import Path

import pytest
from hypothesis import settings

from benchmarks import find_compilers

NUM_DEVICES = 8
# Compare numbers of compiled programs: what is run under several instruction sets (`make
# test-numeric ISA=AVX2`).
NUMERIC = (
    "axes",
    "checkpoint",
    "flax",
    "fuzz",
    "lowering",
    "models",
    "parity",
    "precision",
    "unlike",
)
# XLA's names for --xla_cpu_max_isa.
INSTRUCTION_SETS = (
    "SSE4_2",
    "AVX",
    "AVX2",
    "AVX512",
    "AVX512_VNNI",
    "AVX512_BF16",
    "AMX",
    "AMX_FP16",
)
NO_JAX = ("table", "schedules")
TIERS = ("slow", "exhaustive")  # the default run has neither
COUNT_FLAG = "--xla_force_host_platform_device_count"
# Most of the time of the tests is XLA's compile time.  These flags shorten it: no optimization by
# LLVM, and one module of code instead of one for a thread.
# `make test-numeric` runs the tests that compare numbers with the code of XLA:CPU as shipped.
FAST_COMPILES = (
    ("--xla_backend_optimization_level", "0"),
    ("--xla_cpu_parallel_codegen_split_count", "1"),
)

find_compilers()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")
# No prices of the machine's own: what the tests compare does not depend on them.
os.environ["JAXPIPE_PRICES"] = os.devnull + "/none"
for flag, value in ((COUNT_FLAG, str(NUM_DEVICES)), *FAST_COMPILES):
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()

# No deadline for the single example: machines are shared.  The quick examples are the same on every
# machine, the others new in every run.
settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("slow", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    asked = re.search(r"--xla_cpu_max_isa=(\S*)", os.environ["XLA_FLAGS"])
    if asked and asked[1] not in INSTRUCTION_SETS:
        # XLA would ignore it, and the tests would run with the machine's own.
        raise pytest.UsageError(
            f"there is no instruction set {asked[1]!r}; XLA_FLAGS must name one of "
            f"{', '.join(INSTRUCTION_SETS)}"
        )
    if _only_no_jax(config):
        # A sixth of these tests' time; what they leave behind in cycles is little.
        gc.disable()
    config.addinivalue_line(
        "markers", "no_jax: quick tests of the rooms that need neither jax nor torch"
    )
    config.addinivalue_line(
        "markers",
        "numeric: tests that compare numbers of compiled programs, for runs under several "
        "instruction sets",
    )
    config.addinivalue_line("markers", "torch: tests of rooms without jax that compare with torch")
    config.addinivalue_line(
        "markers",
        "property: tests of random examples, of which `HYPOTHESIS_PROFILE=slow` or `thorough` "
        "makes more",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    if find_spec("jax") is None:
        return (
            "jax is not installed: only "
            f"tests/{{{','.join(sorted(p for p in NO_JAX if (HERE / p).is_dir()))}}} are collected"
        )
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what would import jax where it is not installed, or where `-m no_jax` selects
    nothing of it.
    """
    parts = collection_path.relative_to(HERE).parts if collection_path.is_relative_to(HERE) else ()
    if not parts or parts[0] in NO_JAX or not (HERE / parts[0]).is_dir():
        return None
    return True if _only_no_jax(config) or find_spec("jax") is None else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="I/N",
        help="run the tests of this share alone, of N in all: 0/5 to 4/5 are disjoint",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = {*(HERE / "slow.txt").read_text(encoding="utf-8").splitlines()}
    if share := config.getoption("share"):
        number, count = map(int, share.split("/"))
        mine = [zlib.crc32(item.nodeid.encode()) % count == number for item in items]
        others = list(compress(items, map(not_, mine)))
        config.hook.pytest_deselected(items=others)
        items[:] = compress(items, mine)
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)
        room = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if room in NO_JAX and not any(map(item.get_closest_marker, (*TIERS, "torch"))):
            item.add_marker(pytest.mark.no_jax)
        if room in NUMERIC:
            item.add_marker(pytest.mark.numeric)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _only_no_jax(session.config) and "jax" in sys.modules:
        raise pytest.UsageError("a test without jax has imported jax")


def _only_no_jax(config: pytest.Config) -> bool:
    return re.fullmatch(r"\(?no_jax\)?( and .*)?", config.getoption("markexpr")) is not None
