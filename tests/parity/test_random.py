"""Any table, not only the named ones: on random valid tables all engines agree; a mutated one is
refused, or runs and agrees.
"""

import random

import pytest
from strategies import random_schedule

import jaxpipe as jp
from tests.parity.any_table import jaxpipe_error, length, torch_error
from tests.parity.mutants import draw
from tests.parity.tolerance import FLOAT64

# A random table repeats nothing, so its program is as long as the table: the default run takes
# short ones.
SHORT = 20
# Turns a hang, also one in compiled code, into a failure.
STUCK = pytest.mark.timeout(240, method="thread")


def short_table(seed):
    """The first short table that this seed draws."""
    rng = random.Random(seed)
    while True:
        schedule = random_schedule(rng)
        if length(schedule) <= SHORT:
            return schedule


def all_agree(schedule):
    assert torch_error(schedule) <= FLOAT64
    assert jaxpipe_error(schedule) <= FLOAT64


@STUCK
@pytest.mark.parametrize("seed", range(24))
def test_engines_agree_on_random_tables(seed):
    all_agree(jp.check(short_table(seed)))


@STUCK
def test_a_mutated_table_is_refused_or_runs_and_agrees():
    """`python -m tests.parity.mutants` does ten thousand."""
    rng = random.Random(5)
    drawn = draw(rng, [short_table(seed) for seed in range(100, 140)], 1000)
    assert {"duplicate", "completeness", "placement", "order", "deadlock"} <= drawn.rules.keys()
    assert drawn.refused + drawn.unchanged + drawn.doubled + len(drawn.accepted) == 1000
    assert len(drawn.accepted) > 50
    for schedule in drawn.accepted[:40]:
        assert torch_error(schedule) <= FLOAT64
    for schedule in rng.sample(drawn.accepted, 6):
        assert jaxpipe_error(schedule) <= FLOAT64


@pytest.mark.exhaustive
@STUCK
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_engines_agree_on_random_tables_of_any_length(seed):
    all_agree(jp.check(random_schedule(random.Random(seed))))
