"""A seeded sample of the grid; `python -m tests.parity.grid` runs all of it."""

import os

import pytest

from tests.parity.cases import full_grid, sample
from tests.parity.measure import measure

SEED = int(os.environ.get("PARITY_SEED", "0"))
COUNT = int(os.environ.get("PARITY_CASES", "20"))


@pytest.mark.timeout(240, method="thread")
@pytest.mark.parametrize("case", sample(SEED, COUNT), ids=str)
def test_a_sampled_case_agrees(case):
    found = measure(case)
    assert found.passed, found


@pytest.mark.slow
def test_the_grid_holds_every_schedule_model_and_precision():
    cases, _ = full_grid()
    assert len(cases) == len(set(cases)) > 800
    assert {c.model for c in cases} >= {"mlp", "mlp_nnx", "gpt", "conv", "moe", "rnn"}
    assert {c.dtype for c in cases} == {"float64", "float32", "bfloat16"}
