"""Hypothesis for this tier: no deadline on the single example (machines are shared), and few enough for the tier to take seconds.

`HYPOTHESIS_PROFILE=thorough` tries many more.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("table", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "table"))
