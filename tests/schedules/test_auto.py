"""`auto` and the list scheduling under it: never invalid, never over the cap, never longer than the
named schedules.
"""

from __future__ import annotations

import itertools
import random

import pytest

import jaxpipe as jp
from jaxpipe.schedules._list_scheduling import least_peaks, list_schedule, wave
from jaxpipe.table.kinds import Release
from tests.tiers import exhaustive, slow


def auto(devices, microbatches, chunks=1, **options):
    return jp.schedules.build(
        "auto", devices=devices, microbatches=microbatches, chunks=chunks, **options
    )


def random_costs(rng, stages):
    return jp.Costs(
        forward=[rng.randint(0, 6) for _ in range(stages)],
        input_grad=rng.randint(1, 6),
        weight_grad=rng.random() * 4,
        transfer=rng.choice((0, 0, 1, 2.5)),
    )


@pytest.mark.parametrize("seed", [*range(3), *map(slow, range(3, 25))])
def test_never_invalid_and_never_over_the_cap(seed):
    rng = random.Random(seed)
    devices, chunks, microbatches = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 9)
    cap = rng.randint(chunks, 2 * chunks * devices)
    costs = random_costs(rng, devices * chunks)
    jp.check(
        auto(devices, microbatches, chunks, costs=costs, max_activations=cap), max_activations=cap
    )


@pytest.mark.parametrize(
    ("devices", "chunks"),
    [(1, 1), (2, 1), (3, 2), *(slow(*size) for size in ((4, 1), (7, 1), (4, 2), (4, 3)))],
)
def test_optimal_at_equal_costs_with_1f1bs_memory(devices, chunks):
    for microbatches in (devices, 2 * devices + 1, 8 * devices):
        schedule = jp.check(auto(devices, microbatches, chunks), max_activations=chunks * devices)
        assert jp.simulate(schedule).makespan == 3 * chunks * microbatches + devices - 1


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 3), slow(3, 6), slow(3, 9), slow(4, 12)])
@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        "zb_h1",
        "zb_h2",
        "zb_1p",
        "interleaved_1f1b",
        "interleaved_zb",
        "zbv",
        "v_half",
        "v_min",
    ],
)
def test_never_longer_than_a_named_schedule_with_its_memory(name, devices, microbatches):
    costs = jp.Costs(forward=10, input_grad=13, weight_grad=9)
    named = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    timeline = jp.simulate(named, costs)
    cap = max(timeline.peak_activations)
    ours = auto(devices, microbatches, named.num_chunks, costs=costs, max_activations=cap)
    assert jp.simulate(ours, costs).makespan <= timeline.makespan


NAMED = [n for n in jp.schedules.names() if n not in ("auto", "no_pipelining", "dualpipe")]


@pytest.mark.parametrize("begin", [0, *(slow(at) for at in range(12, 120, 12))])
def test_never_longer_than_any_named_schedule_at_any_costs(begin):
    """Stages that differ, B below, at and above I + W, transfers, any cap: of each named schedule
    the table without costs, and that for the costs.
    """
    compared = 0
    for seed in range(begin, begin + 12):
        rng = random.Random(seed)
        devices, chunks = rng.randint(2, 6), rng.choice((1, 1, 2, 2, 3, 4))
        stages = devices * chunks
        shape = {"devices": devices, "chunks": chunks}
        shape["microbatches"] = rng.randint(devices, 3 * devices)
        forward, both = rng.randint(1, 9), (rng.randint(1, 9), rng.randint(0, 9))
        costs = jp.Costs(
            forward=rng.choice((forward, [rng.randint(1, 9) for _ in range(stages)])),
            input_grad=both[0],
            weight_grad=both[1],
            backward=rng.choice((None, 0.5 * sum(both), 0.9 * sum(both), 1.2 * sum(both))),
            transfer=rng.choice((0, 0, 0.5, 2)),
        )
        cap = rng.choice((None, rng.randint(chunks, 2 * stages)))
        table = auto(**shape, costs=costs, max_activations=cap)
        mine = jp.simulate(jp.check(table, max_activations=cap), costs).makespan
        for name in NAMED:
            known = jp.schedules.describe(name)
            if known.chunks.nearest(chunks) != chunks:
                continue
            fitted = {"costs": costs} if any(o.name == "costs" for o in known.options) else {}
            for given in ({}, fitted):
                other = jp.simulate(jp.schedules.build(name, **shape, **given), costs)
                if cap is None or max(other.peak_activations) <= cap:
                    compared += 1
                    assert mine <= other.makespan * (1 + 1e-9), (seed, name)
    assert compared > 12


@pytest.mark.slow
def test_more_memory_is_never_slower_by_much_and_little_memory_still_runs():
    spans = [
        jp.simulate(auto(4, 16, 2, max_activations=cap)).makespan for cap in (2, 3, 4, 6, 8, 16)
    ]
    assert spans[-1] == spans[-2] == 6 * 16 + 3
    assert all(later <= 1.02 * sooner for sooner, later in itertools.pairwise(spans))


def test_a_cap_below_one_microbatch_is_refused():
    with pytest.raises(jp.ScheduleError, match=r"the nearest that works is max_activations=3"):
        auto(4, 8, 3, max_activations=2)


def test_a_given_placement_is_kept():
    loop, odd = jp.Placement.loop(devices=2, chunks=2), jp.Placement.explicit([0, 0, 1, 1])
    for placement in (loop, odd):
        assert jp.check(auto(2, 5, 2, placement=placement)).placement == placement
    with pytest.raises(jp.ScheduleError, match="4 stages"):
        auto(2, 5, 1, placement=loop)
    with pytest.raises(jp.ScheduleError, match="two devices"):
        auto(2, 5, 1, placement=jp.Placement.bidirectional(devices=2))


@pytest.mark.slow
def test_release_at_the_input_gradient_is_used():
    """Where W needs no activations, a late W holds nothing, and the cap is met with a shorter
    schedule.
    """
    at_weight, at_input = (
        jp.Costs(release=release) for release in (Release.WEIGHT_GRAD, Release.INPUT_GRAD)
    )
    long = jp.simulate(auto(4, 16, max_activations=3, costs=at_weight), at_weight)
    schedule = jp.check(
        auto(4, 16, max_activations=3, costs=at_input),
        max_activations=3,
        release=Release.INPUT_GRAD,
    )
    assert jp.simulate(schedule, at_input).makespan < long.makespan


@pytest.mark.parametrize("seed", range(20))
def test_squeeze_says_what_simulate_finds(seed):
    """Makespan and peak of a squeezed order, against the simulator; every rule; random caps and
    costs.
    """
    rng = random.Random(seed)
    devices, chunks, microbatches = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 8)
    placement = rng.choice((jp.Placement.loop, jp.Placement.vee))(devices=devices, chunks=chunks)
    costs = random_costs(rng, devices * chunks)
    pace = {"out": rng.choice((1, 1.5, 2)), "back": rng.choice((1, 2))}
    maker = wave(placement, **pace, pause=rng.choice((0, 3)), period=rng.choice((3, 8, 40)))
    order = maker(microbatches)
    caps = [least + rng.randint(0, 3) for least in least_peaks(order)]
    found = list_schedule(order, costs, caps)
    timeline = jp.simulate(jp.check(found.schedule, max_activations=caps), costs)
    # A device that waited for a better action may run the rows a little sooner than it was planned.
    assert timeline.makespan <= found.makespan + 1e-9
    assert max(timeline.peak_activations) == found.peak


def with_weights(row):
    """Each W right behind its I."""
    for action in row:
        yield action
        if action.kind is jp.Kind.I:
            yield jp.Action(action.stage, jp.Kind.W, action.microbatch)


def test_squeezing_never_lengthens_a_figure_at_equal_costs():
    for devices in (2, 3, 5):
        placement = jp.Placement.vee(devices=devices)
        order = wave(placement, out=1, back=1, pause=2 if devices % 3 == 0 else 0, period=6)(12)
        plain = order.with_rows([list(with_weights(row)) for row in order.rows])
        caps = [2 * ((devices + 4) // 3)] * devices
        found = list_schedule(order, jp.Costs(), caps)
        assert found.makespan <= jp.simulate(plain).makespan


@pytest.mark.parametrize(("cap", "most"), [exhaustive(13, 1.25), (16, 1.14), (20, 1.04)])
def test_caps_below_1f1b_with_four_chunks(cap, most):
    """32 activations are those of 1F1B; the tables are 24.3, 11.2 and 3.4 % above the bound."""
    costs = jp.Costs(forward=1, input_grad=1.2, weight_grad=0.9, transfer=0.02)
    shape = {"devices": 8, "chunks": 4, "microbatches": 32, "max_activations": cap}
    table = jp.check(jp.schedules.build("auto", **shape, costs=costs))
    timeline = jp.simulate(table, costs)
    assert max(timeline.peak_activations) <= cap
    assert timeline.makespan <= most * table.certificate.bound
