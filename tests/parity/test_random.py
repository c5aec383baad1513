"""Any table, not only the named ones: on random valid tables all engines agree; a mutated one is refused, or runs and agrees."""

import random
from collections import Counter
from functools import lru_cache

import pytest
from strategies import random_schedule

import jaxpipe as jp
from tests.models import to_tree, twin
from tests.parity.engines import case_data, jaxpipe_step, pipeline, torch_step, truth, worst_error
from tests.parity.mutations import mutated
from tests.parity.tolerance import FLOAT64

ROWS = 1
# A random table repeats nothing, so its program is as long as the table: the default run takes short ones.
SHORT = 20
# Turns a hang, also one in compiled code, into a failure.
STUCK = pytest.mark.timeout(240, method="thread")


@lru_cache
def model_of(stages):
    return twin("mlp", stages, width=2, features_in=2, features_out=1)


def length(schedule):
    return sum(cell is not None for row in schedule.rows for cell in row)


def short_table(seed):
    """The first short table that this seed draws."""
    rng = random.Random(seed)
    while True:
        schedule = random_schedule(rng)
        if length(schedule) <= SHORT:
            return schedule


def torch_agrees(schedule):
    model, count = model_of(schedule.num_stages), schedule.num_microbatches
    found = torch_step(schedule, model, *case_data(model, count, ROWS))
    right = truth(model, count, ROWS)
    if schedule.forward_only:
        assert abs(found.loss - right.loss) <= FLOAT64 * right.loss
    else:
        assert worst_error(found, right) <= FLOAT64


def jaxpipe_agrees(schedule):
    model, count = model_of(schedule.num_stages), schedule.num_microbatches
    weights, batch = case_data(model, count, ROWS)
    pipe, right = pipeline(schedule, model), truth(model, count, ROWS)
    if schedule.forward_only:
        assert abs(float(pipe.evaluate(pipe.place(to_tree(weights)), batch)) - right.loss) <= FLOAT64 * right.loss
    else:
        assert worst_error(jaxpipe_step(pipe, weights, batch), right) <= FLOAT64


def accepted_mutations(rng, tables, count):
    """Of `count` mutations of these tables: those that check accepts and that differ, and how often each rule refused one."""
    rules, accepted = Counter(), []
    for _ in range(count):
        table = rng.choice(tables)
        other = mutated(rng, table)
        if other.violations:
            with pytest.raises(jp.ScheduleError):
                jp.check(other)
            rules.update({violation.rule for violation in other.violations})
        elif [[c for c in row if c] for row in other.rows] != [[c for c in row if c] for row in table.rows]:
            accepted.append(other)
    return accepted, rules


@STUCK
@pytest.mark.parametrize("seed", range(24))
def test_engines_agree_on_random_tables(seed):
    schedule = jp.check(short_table(seed))
    torch_agrees(schedule)
    jaxpipe_agrees(schedule)


@STUCK
def test_a_mutated_table_is_refused_or_runs_and_agrees():
    rng = random.Random(5)
    accepted, rules = accepted_mutations(rng, [short_table(seed) for seed in range(100, 140)], 1000)
    assert {"duplicate", "completeness", "placement", "order", "deadlock"} <= rules.keys()
    assert len(accepted) > 50
    for schedule in accepted[:40]:
        torch_agrees(schedule)
    for schedule in rng.sample(accepted, 6):
        jaxpipe_agrees(schedule)


@pytest.mark.slow
@STUCK
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_engines_agree_on_random_tables_of_any_length(seed):
    schedule = jp.check(random_schedule(random.Random(seed)))
    torch_agrees(schedule)
    jaxpipe_agrees(schedule)


@pytest.mark.slow
@pytest.mark.timeout(3600, method="thread")
def test_ten_thousand_mutations_of_named_and_random_tables():
    rng = random.Random(11)
    tables = [random_schedule(rng) for _ in range(150)]
    for name in jp.schedules.names():
        tables += [jp.schedules.build(name, devices=devices, microbatches=4) for devices in (2, 4)]
    accepted, rules = accepted_mutations(rng, tables, 10_000)
    print(f"\nrefused by rule: {dict(rules)}; accepted and different: {len(accepted)}")
    for schedule in accepted:
        torch_agrees(schedule)
    for schedule in rng.sample([s for s in accepted if length(s) <= 40], 60):
        jaxpipe_agrees(schedule)
