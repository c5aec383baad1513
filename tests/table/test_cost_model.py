"""How long a program takes, again from its definition."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given

import jaxpipe as jp
from jaxpipe.lowering.assign_ticks import assign_ticks
from jaxpipe.lowering.balanced_ticks import balanced_ticks
from jaxpipe.lowering.cost_model import cost_matrix, cost_parts, program_makespan
from jaxpipe.lowering.overheads import Overheads
from jaxpipe.lowering.requirements import collect
from jaxpipe.lowering.spans import Span, segments_of
from tests.passes import KEEP_ORDER, cuts, every_ticks, random_segments, simulated
from tests.strategies import schedules


@given(schedule=schedules())
def test_the_makespan_of_a_program(schedule):
    rng = random.Random(schedule.to_csv())
    costs = jp.Costs(forward=rng.randint(1, 3), input_grad=2, weight_grad=rng.randint(1, 2))
    for name, ticks in every_ticks(schedule):
        matrix, work = cost_matrix(ticks, costs), cost_parts(ticks, costs)
        assert np.array_equal(work.sum(axis=1), matrix)
        segments = random_segments(rng, ticks)
        found = program_makespan(work, segments, Overheads(predicate=0.0, hop=0.25))
        assert found == pytest.approx(simulated(work, segments, 0.25, ticks.forward_first))
        # What keeps the order of the rows takes no less than the table.  A program may send what an
        # I makes before the F of its pair.
        if name in KEEP_ORDER and not schedule.encoded.pairs.size:
            assert program_makespan(work, segments) >= jp.simulate(schedule, costs).makespan


def test_weight_gradients_after_input_gradients_without_a_forward_run_last():
    """Balanced ticks: F, I, W; a cotangent that is made by the I of such a tick is under way beside
    its W.
    """
    schedule = jp.Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n")
    ticks = balanced_ticks(schedule)
    costs = cost_parts(ticks, jp.Costs(forward=1, input_grad=2, weight_grad=2))
    segments = segments_of([Span(0, 4, 4), Span(4, 6, 2), Span(6, 8, 2)], collect(ticks))
    assert (
        program_makespan(costs, segments, Overheads(predicate=0.0, hop=0.25))
        == simulated(costs, segments, 0.25, forward_first=True)
        == 14.0
    )


def test_equal_trips_are_simulated_once():
    ticks = assign_ticks(jp.schedules.build("1f1b", devices=4, microbatches=100))
    for segments in cuts(ticks):
        assert program_makespan(cost_parts(ticks), segments) == simulated(
            cost_parts(ticks), segments, 0.0
        )
