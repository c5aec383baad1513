"""A seeded sample of the grid; `python -m tests.parity.grid` runs all of it."""

import os
from itertools import product

import pytest

import jaxpipe as jp
from tests.models import names
from tests.parity.cases import CHUNKS, DEVICES, LOW, MODELS, full_grid, sample
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


def test_the_grid_holds_every_combination_for_which_there_is_a_table():
    cases, undefined = full_grid()
    assert len(set(cases)) == len(cases)
    assert not set(cases) & set(undefined)
    mlp = {
        (c.schedule, c.devices, c.chunks)
        for c in (*cases, *undefined)
        if (c.model, c.dtype) == ("mlp", "float64")
    }
    assert mlp == set(product(jp.schedules.names(), DEVICES, CHUNKS))
    assert {(c.schedule, c.model) for c in cases} == set(product(jp.schedules.names(), names()))
    assert {(c.schedule, c.dtype) for c in cases} == set(
        product(jp.schedules.names(), ("float64", *LOW))
    )
