"""Marks for cases of `pytest.mark.parametrize`: which tier runs them (CONTRIBUTING.md lists the
tiers).
"""

from __future__ import annotations

from typing import Any

import pytest


def slow(*case: Any) -> Any:
    """A case of `make test-slow`."""
    return pytest.param(*case, marks=pytest.mark.slow)


def exhaustive(*case: Any) -> Any:
    """A case that is run by hand: `pytest -m exhaustive`."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)
