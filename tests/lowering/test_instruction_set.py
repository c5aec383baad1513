"""`make test-numeric ISA=...` compiles for that instruction set, here and in the programs that
tests start.
"""

import os
import re

import jax
import jax.numpy as jnp
import pytest

from tests.environment import COUNT_FLAG, outside

ASKED = re.search(r"--xla_cpu_max_isa=(\S+)", os.environ.get("XLA_FLAGS", ""))


@pytest.mark.skipif(
    ASKED is None or ASKED[1] not in ("SSE4_2", "AVX"), reason="neither SSE4_2 nor AVX is asked for"
)
def test_products_and_sums_are_not_fused():
    """(1 + e)^2 = 1 + 2 e + e^2: rounding the product loses e^2, a fused multiply-add keeps it."""
    e = 2.0**-30
    lost = jax.jit(lambda x: x * x - (1 + 2 * e))(jnp.full(8, 1 + e, jnp.float64))
    assert not lost.any()


def test_programs_that_tests_start_keep_the_instruction_set(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_max_isa=AVX2 {COUNT_FLAG}=8")
    assert outside()["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    monkeypatch.setenv("XLA_FLAGS", f"{COUNT_FLAG}=8")
    assert "XLA_FLAGS" not in outside()
