"""A seeded sample of the grid; `python -m tests.parity.grid` runs all of it."""

import os
from itertools import combinations, product

import pytest

import jaxpipe as jp
from tests.models import names
from tests.parity.cases import LOW, MODELS, _case, _combinations, full_grid, is_defined, sample
from tests.parity.measure import measure

SEED = int(os.environ.get("PARITY_SEED", "0"))
# At least as many as there are schedules, so that all of them take part.
COUNT = max(int(os.environ.get("PARITY_CASES", "0")), len(jp.schedules.names()))


def takes_long(case):
    """To compile: larger models whose backward is split or paired."""
    return case.model != "mlp" and case.schedule in ("auto", "dualpipe", "zb_h1", "zbv")


@pytest.mark.timeout(240, method="thread")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow if takes_long(c) else ()) for c in sample(SEED, COUNT)],
    ids=str,
)
def test_a_sampled_case_agrees(case):
    found = measure(case)
    assert found.passed, found


@pytest.mark.parametrize("seed", [SEED, 101, 102])
def test_every_sample_has_all_schedules_models_and_precisions(seed):
    cases = sample(seed, COUNT)
    assert len(set(cases)) == COUNT
    assert {c.schedule for c in cases} == set(jp.schedules.names())
    assert {c.model for c in cases} == {"mlp", *MODELS}
    assert {c.dtype for c in cases} == {"float64", *LOW}


def test_the_grid_has_few_cases_and_all_have_tables():
    cases, undefined = full_grid()
    assert len(set(cases)) == len(cases) < 200
    assert all(map(is_defined, cases))
    assert not any(map(is_defined, undefined))
    assert {(c.schedule, c.model) for c in cases} == set(product(jp.schedules.names(), names()))


@pytest.mark.parametrize("keys", list(combinations(range(5), 2)))
def test_no_pair_of_the_grid_is_left_out(keys):
    """The pairs of the cases against those of all combinations."""
    wanted = {tuple(v[k] for k in keys) for v in _combinations() if is_defined(_case(v))}
    have = set(full_grid()[0])
    found = {tuple(v[k] for k in keys) for v in _combinations() if _case(v) in have}
    assert wanted <= found
