"""The makespan of a lowered program simulated: by hand, against a second simulator, and for the
catalogue.
"""

import random

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.lowering.plan import Plan, cost_parts, plan_of, program_makespan
from jaxpipe.lowering.target import Overheads
from jaxpipe.program.segments import Payload, Permute, Segment, TickPart, TickTemplate, room_of
from tests.passes import simulated

SPLIT_OR_OVERLAPPED = [
    "1f1b_overlap",
    "interleaved_1f1b_overlap",
    "zb_1p",
    "zb_h1",
    "zb_h2",
    "zbv",
    "v_half",
    "v_min",
    "interleaved_zb",
]
KEEP_THEIR_MAKESPAN = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", *SPLIT_OR_OVERLAPPED]


def tick(*pairs, delay=0):
    """A position whose only content is a permute of these pairs."""
    return TickTemplate((), (Permute(Payload.ACTIVATION, pairs, delay),) if pairs else ())


def once(*templates):
    return (Segment(0, 1, templates),)


def test_only_the_two_ends_of_a_pair_wait():
    costs = np.array([[[1.0, 1, 5]], [[5, 1, 1]]])
    segments = once(tick((0, 1)), tick())
    assert program_makespan(costs, segments) == 6


def test_the_sender_waits_for_the_receiver_too():
    costs = np.array([[[1.0, 3]], [[2, 1]]])
    assert program_makespan(costs, once(tick((0, 1)), tick())) == 5
    assert program_makespan(costs, once(tick((1, 0)), tick())) == 5


def test_waiting_spreads_one_neighbour_a_tick():
    costs = np.array([[[0.0, 0, 7]], [[1, 1, 1]], [[1, 1, 1]]])
    chain = tick((0, 1), (1, 2))
    assert program_makespan(costs, once(chain, tick(), tick())) == 9
    # Device 0 hears of device 2's delay only through device 1: one tick later.
    assert program_makespan(costs[..., :2], once(tick((0, 1)), tick((0, 1)), tick())) == 2


def test_a_late_transfer_is_awaited_late():
    costs = np.array([[[1.0, 3]], [[1, 0]]])
    assert program_makespan(costs, once(tick((0, 1)), tick())) == 4
    assert program_makespan(costs, once(tick((0, 1), delay=1), tick())) == 3


def test_each_permute_of_a_device_lasts():
    costs = np.array([[[1.0, 1, 1]]])
    two = TickTemplate(
        (), (Permute(Payload.ACTIVATION, ((0, 1),)), Permute(Payload.COTANGENT, ((1, 0),)))
    )
    assert program_makespan(costs, once(two), Overheads(predicate=0.0, hop=0.25)) == 1.5
    assert program_makespan(costs, once(tick((0, 1))), Overheads(predicate=0.0, hop=0.25)) == 1.25
    assert program_makespan(costs, once(tick()), Overheads(predicate=0.0, hop=0.25)) == 1


def test_no_ticks_take_no_time():
    assert program_makespan(np.zeros((0, 1, 3)), ()) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_second_simulator_agrees_on_random_programs(seed):
    rng = random.Random(seed)
    devices, segments, start = rng.randint(1, 5), [], 0
    for _ in range(rng.randint(1, 3)):
        period, repeats = rng.randint(1, 3), rng.randint(1, 12)
        templates = tuple(_random_position(rng, devices, room_of(period, j)) for j in range(period))
        segments.append(Segment(start, repeats, templates))
        start = segments[-1].stop
    # Whole costs are exact in floating point; half of the programs have equal trips, which are the
    # ones that get skipped.
    costs = np.array(
        [[[rng.randint(0, 4) for _ in range(devices)] for _ in TickPart] for _ in range(start)],
        float,
    )
    if seed % 2:
        for s in segments:
            costs[s.start : s.stop] = np.tile(
                costs[s.start : s.start + s.period], (s.repeats, 1, 1)
            )
    transfer = rng.choice([0.0, 0.25])
    assert program_makespan(costs, segments, Overheads(predicate=0.0, hop=transfer)) == simulated(
        costs, segments, transfer
    )


@pytest.mark.parametrize("seed", range(6))
def test_cycles_of_different_trips_are_simulated_once(seed):
    """A steady state that comes back after several trips, as an interleaved one does: between
    ramps, over in the middle of a cycle.
    """
    rng = random.Random(seed)
    devices, period, length, repeats = 3, rng.randint(1, 2), rng.randint(2, 9), 90
    templates = tuple(_random_position(rng, devices, room_of(period, j)) for j in range(period))
    cycle = [
        [[[rng.randint(0, 4) for _ in range(devices)] for _ in TickPart] for _ in templates]
        for _ in range(length)
    ]
    trips = [cycle[trip % length] for trip in range(repeats)]
    for trip in (0, 1, 2, 70 + rng.randint(0, 15)):
        trips[trip] = [[[5] * devices for _ in TickPart] for _ in templates]
    costs, segments = (
        np.array(trips, float).reshape(-1, len(TickPart), devices),
        [Segment(0, repeats, templates)],
    )
    assert program_makespan(costs, segments, Overheads(predicate=0.0, hop=0.25)) == simulated(
        costs, segments, 0.25
    )


def _random_position(rng, devices, room):
    return TickTemplate((), _random_permutes(rng, devices, room))


def _random_permutes(rng, devices, room):
    permutes = []
    for payload in Payload:
        ends = list(range(devices))
        rng.shuffle(ends)
        pairs = tuple(zip(ends[: len(ends) // 2], ends[len(ends) // 2 :], strict=False))
        if pairs and rng.random() < 0.7:
            permutes.append(Permute(payload, pairs, rng.randint(0, room)))
    return tuple(permutes)


@pytest.mark.parametrize("name", jp.schedules.names())
def test_a_second_simulator_agrees_on_the_catalogue(name):
    schedule = jp.schedules.build(name, devices=4, microbatches=6)
    plan = plan_of(schedule)
    costs = cost_parts(plan.ticks, jp.Costs(forward=3, input_grad=4, weight_grad=2, backward=5))
    assert program_makespan(costs, plan.segments) == simulated(costs, plan.segments, 0.0)


@pytest.mark.parametrize("name", jp.schedules.names())
def test_bounds(name):
    """No device is faster than its own work."""
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    plan = plan_of(schedule)
    work = cost_parts(plan.ticks).sum(axis=(0, 1))
    assert max(work) <= plan.makespan
    assert work.tolist() == [3 * schedule.num_stages / 4 * 8] * 4, (
        "the work of the program is the table's"
    )


def ratio(plan: Plan) -> float:
    return plan.makespan / jp.simulate(plan.ticks.schedule).makespan


@pytest.mark.parametrize("microbatches", [8, 32])
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", KEEP_THEIR_MAKESPAN)
def test_the_program_keeps_the_makespan_of_the_table(name, devices, microbatches):
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    assert ratio(plan_of(schedule)) <= 1
