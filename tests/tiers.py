"""Marks for cases of `pytest.mark.parametrize`: which tier runs them (CONTRIBUTING.md lists the
tiers).
"""

from __future__ import annotations

from typing import Any

import pytest

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
