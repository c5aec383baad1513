"""Puts the repository's root on the path, so that these tests can share the benchmarks' way of asking torch for its tables."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
