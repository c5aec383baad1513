"""Every way to lay a table out in ticks gives the same numbers, also those that this mesh would not choose."""

import random
from functools import lru_cache

import pytest
from strategies import random_schedule

import jaxpipe as jp
from jaxpipe.lowering.assign_ticks import assign_ticks, modulo_ticks
from jaxpipe.lowering.balanced_ticks import balanced_ticks
from jaxpipe.lowering.cost_model import Sync
from jaxpipe.lowering.fuse_ticks import fuse_ticks
from jaxpipe.lowering.plan import Plan
from jaxpipe.lowering.segments import find_segments
from tests.models import twin
from tests.parity.engines import case_data, jaxpipe_step, pipeline, truth, worst_error
from tests.parity.tolerance import FLOAT64

TICKS = {
    "lock-step": assign_ticks,
    "turns": modulo_ticks,
    "shifted turns": lambda schedule: modulo_ticks(schedule, shift=1),
    "level": balanced_ticks,
    "fused": lambda schedule: fuse_ticks(schedule, more_memory=False),
    "fused, more memory": lambda schedule: fuse_ticks(schedule, more_memory=True),
}


@lru_cache
def model_of(stages):
    return twin("mlp", stages, width=2, features_in=2, features_out=1)


def agrees(schedule, how, sync):
    """Run the table with these ticks; False where they do not exist for it."""
    ticks = TICKS[how](schedule)
    if ticks is None:
        return False
    model, count = model_of(schedule.num_stages), schedule.num_microbatches
    pipe = pipeline(schedule, model)
    # The pipeline would choose a plan by the kind of mesh: give it ours.
    pipe.__dict__["_plan"] = Plan(ticks, find_segments(ticks, sync=sync))
    assert worst_error(jaxpipe_step(pipe, *case_data(model, count, 1)), truth(model, count, 1)) <= FLOAT64
    return True


@pytest.mark.parametrize("how", [*TICKS])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "dualpipe", "interleaved_zb"])
def test_named_tables_give_the_same_numbers_in_every_layout(name, how):
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    if not agrees(schedule, how, Sync.PAIRS):
        pytest.skip(f"{name} cannot run with {how} ticks")


@pytest.mark.parametrize("how", [*TICKS])
def test_random_tables_give_the_same_numbers_in_every_layout(how):
    rng, run = random.Random(23), 0
    while run < 4:
        schedule = random_schedule(rng)
        if schedule.forward_only or sum(c is not None for row in schedule.rows for c in row) > 20:
            continue
        run += agrees(schedule, how, rng.choice(list(Sync)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("how", [*TICKS])
def test_long_random_tables_give_the_same_numbers_in_every_layout(how, seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    if schedule.forward_only or not agrees(schedule, how, rng.choice(list(Sync))):
        pytest.skip(f"this table cannot run with {how} ticks")
