"""`lower_bound`: no schedule goes below it, some reach it, and a smaller cap never lowers it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

import jaxpipe as jp
from jaxpipe.engine import bounds
from jaxpipe.engine.bounds import preemptive_one_machine, timeline_bound
from tests.strategies import random_schedule, randoms

NAMES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "1f1b_overlap",
    "zb_h1",
    "zb_h2",
    "zbv",
    "v_half",
    "v_min",
    "dualpipe",
    "dualpipev",
    "auto",
)


def bound_of(schedule, costs):
    peak = max(jp.simulate(schedule, costs).peak_activations)
    shape = {"placement": schedule.placement, "microbatches": schedule.num_microbatches}
    return jp.lower_bound(costs, max_activations=peak, **shape)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_no_schedule_is_below_it(name, seed):
    rng = random.Random(seed)
    devices, microbatches = rng.choice((2, 4)), rng.randint(4, 9)
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    per_stage = [rng.randint(1, 9) for _ in range(schedule.num_stages)]
    costs = jp.Costs(
        forward=per_stage,
        input_grad=rng.randint(1, 9),
        weight_grad=rng.randint(0, 9),
        transfer=rng.choice((0, 1, 2.5)),
        backward=rng.choice((None, 2, 11)),
        overlap=rng.choice((None, 7, [2 * f for f in per_stage])),
        release=rng.choice(tuple(jp.table.Release)),
    )
    assert bound_of(schedule, costs) <= jp.simulate(schedule, costs).makespan + 1e-9


@given(randoms())
def test_no_random_table_is_below_it(rng):
    """Any placement, also of devices without stages, any mix of whole, split and paired backwards;
    with R the bound has no cap.
    """
    schedule = random_schedule(rng, recompute=True)
    if schedule.forward_only:
        return
    times = {
        name: rng.choice((rng.randint(0, 9), 0.1 * rng.randint(0, 90)))
        for name in ("forward", "input_grad", "weight_grad")
    }
    costs = jp.Costs(
        **times,
        backward=rng.choice((None, 1, 9)),
        overlap=rng.choice((None, 3)),
        transfer=rng.choice((0, 1)),
    )
    timeline = jp.simulate(schedule, costs)
    bound, cap = timeline_bound(timeline)
    assert bound <= timeline.makespan + 1e-9
    assert (cap is None) == any(action.kind is jp.Kind.R for *_, action in schedule.actions())


def test_tables_with_recompute_go_below_a_cap_alone():
    """An R makes room: under one activation a device, microbatches no longer go through one
    by one.
    """
    table = jp.add_recompute(
        jp.schedules.build("1f1b", devices=4, microbatches=8), max_activations=1
    )
    timeline = jp.simulate(table)
    assert max(timeline.peak_activations) == 1
    assert (
        jp.lower_bound(placement=table.placement, microbatches=8, max_activations=1)
        > timeline.makespan
    )
    assert timeline_bound(timeline) == (
        jp.lower_bound(placement=table.placement, microbatches=8),
        None,
    )


def test_a_microbatch_goes_through_one_device_of_a_stage():
    """A table that exists: both devices have both stages, and hold one activation at most."""
    rows = [[*map(jp.table.parse_cell, row)] for row in (("0F0", "0B0"), ("1F0", "1B0"))]
    table = jp.Schedule.from_rows(rows, placement=jp.Placement.bidirectional(devices=2))
    timeline = jp.simulate(table)
    assert timeline.peak_activations == (1, 1)
    assert timeline_bound(timeline) == (5, 1)
    mixed = jp.Placement.explicit([(0, 1), 0, 0], devices=2)
    # three F, three I, one W
    assert jp.lower_bound(placement=mixed, microbatches=1, max_activations=2) == 7
    with pytest.raises(jp.ScheduleError, match="less than the 2 that one microbatch needs"):
        jp.lower_bound(placement=mixed, microbatches=1, max_activations=1)


def test_devices_without_stages_have_bounds_too(monkeypatch):
    placement = jp.Placement.explicit([0, 2], devices=3)
    assert jp.lower_bound(placement=placement, microbatches=2, max_activations=1) == 2 * (2 + 3)
    monkeypatch.setattr(bounds, "_MOST_PAIRS", 0)
    assert jp.lower_bound(placement=placement, microbatches=2, max_activations=2) == 2 * 3 + 1


def test_it_is_reached_where_the_optimum_is_known():
    for devices, chunks, microbatches in ((4, 1, 8), (3, 2, 7), (2, 2, 5)):
        found = jp.lower_bound(
            devices=devices,
            chunks=chunks,
            microbatches=microbatches,
            max_activations=chunks * devices,
        )
        # of ZB-1p and its V-shaped form (Qi et al. 2024)
        assert found == 3 * chunks * microbatches + devices - 1
    # One place: every microbatch goes all the way before the next one starts.
    assert jp.lower_bound(devices=4, microbatches=3, max_activations=1) == 3 * (4 + 4 + 1)


def test_less_memory_never_lowers_it():
    costs = jp.Costs(forward=10, input_grad=13, weight_grad=9, transfer=1)
    found = [
        jp.lower_bound(costs, devices=4, chunks=2, microbatches=8, max_activations=cap)
        for cap in range(2, 17)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 * found[-1]


def test_interruption_is_all_that_the_one_machine_problem_leaves_out():
    """Against every order of a few jobs: never above the best, and equal to it where all heads are
    0.
    """
    rng = random.Random(1)
    for _ in range(50):
        jobs = [
            (rng.choice((0, rng.randint(0, 9))), rng.randint(1, 5), rng.randint(0, 9))
            for _ in range(5)
        ]
        assert preemptive_one_machine(jobs) <= _best(jobs)
        late = [(0, length, tail) for _, length, tail in jobs]
        assert preemptive_one_machine(late) == _best(late)


def _best(jobs, time=0):
    if not jobs:
        return 0
    found = []
    for i, (head, length, tail) in enumerate(jobs):
        end = max(time, head) + length
        found.append(max(end + tail, _best(jobs[:i] + jobs[i + 1 :], end)))
    return min(found)


def test_arguments_that_make_no_sense():
    with pytest.raises(
        jp.ScheduleError, match="devices must be a whole number of at least 1, not None"
    ):
        jp.lower_bound(microbatches=4)
    with pytest.raises(jp.ScheduleError, match="less than the 3"):
        jp.lower_bound(devices=2, chunks=3, microbatches=4, max_activations=2)


def test_a_large_table_has_a_bound_too():
    assert jp.lower_bound(devices=64, chunks=4, microbatches=2048) == 3 * 4 * 2048 + 63


@pytest.mark.parametrize("name", NAMES)
def test_no_steady_state_is_below_its_bound(name):
    """`timeline.period` of named schedules: at least a device's work, and what their
    memory allows.
    """
    costs = jp.Costs(forward=2, input_grad=3, weight_grad=1, transfer=0.5)
    schedule = jp.schedules.build(name, devices=3 if "dual" not in name else 2, microbatches=40)
    timeline = jp.simulate(schedule, costs)
    bound = jp.lower_bound(
        costs,
        placement=schedule.placement,
        max_activations=max(timeline.peak_activations),
        objective=jp.table.Objective.PERIOD,
    )
    if timeline.period is None:
        assert name in ("gpipe", "dualpipe", "dualpipev", "zbv", "v_half", "v_min")
        return
    assert timeline.period >= bound - 1e-9
    # As much longer as the table gets by more microbatches.
    longer = jp.simulate(
        jp.schedules.build(name, devices=schedule.num_devices, microbatches=64), costs
    )
    assert (longer.makespan - timeline.makespan) / 24 == pytest.approx(timeline.period, rel=0.02)


def test_periods_that_are_known():
    unit = jp.simulate(jp.schedules.build("1f1b", devices=4, microbatches=12))
    assert unit.period == 3
    # all F, then all B
    assert jp.simulate(jp.schedules.build("gpipe", devices=4, microbatches=12)).period is None
    # Groups of 4 microbatches go through a chunk at a time; within a group, starts are half a
    # period apart.
    assert (
        jp.simulate(
            jp.schedules.build("interleaved_1f1b", devices=4, chunks=2, microbatches=32)
        ).period
        == 6
    )
    with pytest.raises(jp.ScheduleError, match=r"objective must be one of Objective\.MAKESPAN"):
        jp.lower_bound(devices=2, microbatches=2, objective="period")
