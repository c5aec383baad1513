"""Programs for TPUs are compiled without 64-bit types, as they are used: a TPU has none, so XLA
makes two numbers of every loop counter.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def without_64_bits() -> Iterator[None]:
    with jax.enable_x64(False):
        yield
