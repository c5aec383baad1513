"""How long a program takes, again from its definition."""

from __future__ import annotations

import random

from hypothesis import given

import jaxpipe as jp
from jaxpipe.lowering.assign_ticks import assign_ticks
from jaxpipe.lowering.cost_model import cost_matrix, least_makespan, program_makespan
from jaxpipe.lowering.requirements import collect
from jaxpipe.lowering.segments import Span, find_segments, segments_of
from tests.passes import KEEP_ORDER, every_ticks, exchanges, random_segments
from tests.strategies import schedules


def simulated(costs, segments, transfer):
    """`program_makespan` again, from its definition: tick by tick, device by device, no trip left out."""
    time, tick, made_in = [0.0] * costs.shape[1], 0, exchanges(segments)
    for segment in segments:
        due = {}
        while tick < segment.stop:
            exchange = made_in[tick]
            time = [t + took for t, took in zip(time, costs[tick], strict=True)]
            met = {delay: [p for p in exchange if p.delay == delay] for delay in {p.delay for p in exchange}}
            for delay, permutes in met.items():
                ends = [(pair, p) for p in permutes for pair in p.pairs]
                until = [max([t, *(time[e] for pair, _ in ends if d in pair for e in pair)]) for d, t in enumerate(time)]
                lasts = [transfer * len({id(p) for pair, p in ends if d in pair}) for d in range(len(time))]
                # What is in flight at the end of the segment is awaited there.
                due.setdefault(min(tick + delay, segment.stop - 1), []).append([t + more for t, more in zip(until, lasts, strict=True)])
            for done in due.pop(tick, []):
                time = [max(both) for both in zip(time, done, strict=True)]
            tick += 1
    return max(time, default=0.0)


@given(schedule=schedules())
def test_the_makespan_of_a_program(schedule):
    rng = random.Random(schedule.to_csv())
    costs = jp.Costs(forward=rng.randint(1, 3), input_grad=2, weight_grad=rng.randint(1, 2))
    for name, ticks in every_ticks(schedule):
        matrix, facts = cost_matrix(ticks, costs), collect(ticks)
        segments = random_segments(rng, ticks)
        assert program_makespan(matrix, segments, transfer=0.25) == simulated(matrix, segments, 0.25)
        # Nothing can be shorter than the ticks unrolled, and what keeps the order of the rows than the table.
        least = least_makespan(facts, matrix)
        assert least == program_makespan(matrix, segments_of([Span(0, ticks.num_ticks, ticks.num_ticks)], facts))
        assert least <= program_makespan(matrix, segments)
        if name in KEEP_ORDER:
            assert least >= jp.simulate(schedule, costs).makespan


def test_equal_trips_are_simulated_once():
    ticks = assign_ticks(jp.schedules.build("1f1b", devices=4, microbatches=100))
    for segments in (find_segments(ticks), segments_of([Span(0, ticks.num_ticks, 1)], collect(ticks))):
        assert program_makespan(cost_matrix(ticks), segments) == simulated(cost_matrix(ticks), segments, 0.0)
