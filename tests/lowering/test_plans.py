"""Every way to lay a table out in ticks gives the same numbers, also those that would not be
chosen.
"""

import random
from functools import lru_cache
from unittest import mock

import pytest
from strategies import random_schedule

import jaxpipe as jp
from jaxpipe.lowering.plan import Plan, plan_of
from jaxpipe.lowering.ticks import assign_ticks, joined_ticks, modulo_ticks
from jaxpipe.steps import StepRunner
from tests.models import twin
from tests.parity.engines import case_data, jaxpipe_step, pipeline, truth, worst_error
from tests.parity.tolerance import FLOAT64
from tests.passes import cuts
from tests.tiers import slow

TICKS = {
    "lock-step": assign_ticks,
    "modulo": modulo_ticks,
    "shifted modulo": lambda schedule: modulo_ticks(schedule, shift=1),
    "joined": joined_ticks,
}


@lru_cache
def model_of(stages):
    return twin("mlp", stages, width=2, features_in=2, features_out=1)


def agrees(schedule, how):
    """Run the table with these ticks and compare with the oracle."""
    ticks = TICKS[how](schedule)
    follows(schedule, Plan(ticks, cuts(ticks)[-1]))


def follows(schedule, plan):
    """Run the table by this plan and compare with the oracle."""
    model, count = model_of(schedule.num_stages), schedule.num_microbatches
    pipe = pipeline(schedule, model)
    with mock.patch.object(StepRunner, "plan", plan):
        found = jaxpipe_step(pipe, *case_data(model, count, 1))
    assert worst_error(found, truth(model, count, 1)) <= FLOAT64


@pytest.mark.parametrize("how", [*TICKS])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "dualpipe", "interleaved_zb"])
def test_named_tables_give_the_same_numbers_in_every_layout(name, how):
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    agrees(schedule, how)


@pytest.mark.parametrize(
    "name", ["zb_h1", slow("zbv"), slow("interleaved_1f1b"), slow("dualpipev")]
)
def test_what_is_in_flight_between_trips_gives_the_same_numbers(name):
    """The plans of GPUs, on other devices."""
    schedule = jp.schedules.build(name, devices=4, microbatches=12)
    plan = plan_of(schedule)
    assert any(segment.in_flight for segment in plan.segments) or name == "dualpipev", (
        "DualPipe's steady state has no slack"
    )
    ends = [
        (t.written.block, s.templates[t.written.tick].blocks)
        for s in plan.segments
        for t in s.transits
    ]
    assert any(block < len(blocks) for block, blocks in ends) or name not in ("zb_h1", "zbv"), (
        "written before a block that needs it"
    )
    follows(schedule, plan)


@pytest.mark.parametrize("how", [*TICKS])
def test_random_tables_give_the_same_numbers_in_every_layout(how):
    rng, run = random.Random(23), 0
    while run < 4:
        schedule = random_schedule(rng)
        if schedule.forward_only or sum(c is not None for row in schedule.rows for c in row) > 20:
            continue
        agrees(schedule, how)
        run += 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("how", [*TICKS])
def test_long_random_tables_give_the_same_numbers_in_every_layout(how, seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    if schedule.forward_only:
        pytest.skip("nothing to differentiate")
    agrees(schedule, how)
