"""Hypothesis for this tier: no deadline on the single example (machines are shared), and few enough for the tier to take seconds."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("table", deadline=None, max_examples=50)
settings.load_profile("table")
