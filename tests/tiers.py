"""Marks for cases of `pytest.mark.parametrize`: which tier runs them (CONTRIBUTING.md lists the
tiers).
"""

from __future__ import annotations

import os
from typing import Any

import pytest

# XLA:CPU has no code for conversions of half precisions where the instruction set has none.
needs_half = pytest.mark.skipif(
    "--xla_cpu_max_isa=SSE4_2" in os.environ.get("XLA_FLAGS", ""),
    reason="no float16 on the CPU with SSE4_2",
)

# Schedules with the same kinds of actions, chunks and directions as another one, in another order:
# the same blocks and pools.  tests/parity/test_grid.py runs every schedule.
SAME_ACTIONS = {
    "auto": "zb_h1",
    "looped_bfs": "interleaved_1f1b",
    "v_half": "zbv",
    "v_min": "zbv",
    "zb_1p": "zb_h1",
    "zb_h2": "zb_h1",
}


def by_actions(name: str, *case: Any) -> Any:
    """A case of a schedule: of `make test-slow` where no other schedule has the same actions."""
    return (exhaustive if name in SAME_ACTIONS else slow)(name, *case)


def slow(*case: Any) -> Any:
    """A case of `make test-slow`."""
    return pytest.param(*case, marks=pytest.mark.slow)


def exhaustive(*case: Any) -> Any:
    """A case that is run by hand: `pytest -m exhaustive`."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)
