"""Slots: the whole program run with symbols, where every read finds what it should and no pool is
too large.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given

import jaxpipe as jp
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.slots import assign_slots
from jaxpipe.lowering.ticks import assign_ticks
from jaxpipe.program.verify import faults, verify
from tests.passes import cut, every_ticks, random_liveness, random_segments
from tests.strategies import few, random_schedule, schedules
from tests.tiers import exhaustive, slow


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (3, 6),
        *(slow(seed, 25) for seed in range(3)),
        *(exhaustive(seed, 25) for seed in range(100, 140)),
    ],
)
def test_random_tables_run_right(seed, count):
    """Every read finds what it should, whatever the table, the ticks, the segments and the
    liveness; and no pool is too large.
    """
    rng = random.Random(seed)
    for _ in range(count):
        schedule = random_schedule(rng, recompute=rng.random() < 0.4)
        for _, ticks in every_ticks(schedule):
            liveness = random_liveness(rng)
            program = assign_slots(ticks, random_segments(rng, ticks), liveness=liveness)
            assert faults(program) == ()


@pytest.mark.parametrize(("seed", "count"), [(8, 2), slow(7, 12)])
def test_what_is_chosen_for_random_tables_runs_right(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        verify(plan_of(random_schedule(rng)).program())


NAMED = [
    (name, 2, (3,))
    for name in ("1f1b", "interleaved_1f1b_overlap", "zb_h2", "zbv", "dualpipe", "auto")
]
NAMED += [slow(name, 2, (1, 3, 8)) for name in jp.schedules.names()] + [
    exhaustive(name, 4, (1, 3, 8)) for name in jp.schedules.names()
]


@pytest.mark.parametrize(("name", "devices", "counts"), NAMED)
def test_named_tables_run_right(name, devices, counts):
    for microbatches in counts:
        try:
            schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
        except jp.ScheduleError:
            continue  # not defined for so few microbatches
        verify(plan_of(schedule).program())


@few
@given(schedules())
def test_residual_slots_are_the_simulated_peak(schedule):
    program = assign_slots(assign_ticks(schedule), cut(assign_ticks(schedule)))
    if schedule.forward_only:
        # the least that a pool can have
        assert program.slots.residual_weight == program.slots.residual_input == 1
        return
    for found, release in (
        (program.slots.residual_weight, jp.table.Release.WEIGHT_GRAD),
        (program.slots.residual_input, jp.table.Release.INPUT_GRAD),
    ):
        peak = max(jp.simulate(schedule, jp.Costs(release=release)).peak_activations)
        # The simulator lets both halves of a pair run at once; the program runs the backward first,
        # and may reuse its slot.
        assert found == peak or (schedule.encoded.pairs.size and found == peak - 1)
