"""How long a program takes, again from its definition."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

import jaxpipe as jp
from jaxpipe.lowering.plan import cost_parts, program_makespan
from jaxpipe.lowering.target import Overheads
from jaxpipe.lowering.ticks import assign_ticks
from tests.passes import KEEP_ORDER, cuts, every_ticks, random_segments, simulated
from tests.strategies import schedules


@given(schedule=schedules())
def test_the_makespan_of_a_program(schedule):
    rng = random.Random(schedule.to_csv())
    costs = jp.Costs(forward=rng.randint(1, 3), input_grad=2, weight_grad=rng.randint(1, 2))
    for name, ticks in every_ticks(schedule):
        work = cost_parts(ticks, costs)
        segments = random_segments(rng, ticks)
        found = program_makespan(work, segments, Overheads(predicate=0.0, hop=0.25))
        assert found == pytest.approx(simulated(work, segments, 0.25))
        # What keeps the order of the rows takes no less than the table.  A program may send what an
        # I makes before the F of its pair.
        if name in KEEP_ORDER and not schedule.encoded.pairs.size:
            assert program_makespan(work, segments) >= jp.simulate(schedule, costs).makespan


def test_equal_trips_are_simulated_once():
    ticks = assign_ticks(jp.schedules.build("1f1b", devices=4, microbatches=100))
    for segments in cuts(ticks):
        assert program_makespan(cost_parts(ticks), segments) == simulated(
            cost_parts(ticks), segments, 0.0
        )
