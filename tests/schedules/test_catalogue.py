"""Every named schedule, over a sweep of P, V and M: it is valid, and has the makespan and the peak
that its docstring states.
"""

from __future__ import annotations

import itertools
import random

import pytest

import jaxpipe as jp
from jaxpipe.schedules._orders import even_groups
from jaxpipe.schedules.registry import describe
from tests.tiers import slow

DEVICES = (1, 2, 3, 4, 5, 8)
# A formula is a test for each P: a mistake in one shows at few devices already, the larger ones
# take most of the time.
each_devices = pytest.mark.parametrize("devices", [1, 2, 3, *map(slow, (4, 5, 8))])
each_size = pytest.mark.parametrize("size", ["small", slow("large")])
# (F, I, W) of every proportion, and those with W no longer than F or I, for which the zero-bubble
# formulas hold.
TIMES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (10, 13, 9), (3, 8, 5))
SHORT_W = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (10, 13, 9), (4, 7, 3), (2, 2, 1))


def build(name, devices, microbatches, chunks=None, **options):
    return jp.schedules.build(
        name, devices=devices, microbatches=microbatches, chunks=chunks, **options
    )


def chunk_counts(name):
    allowed = describe(name).chunks
    return [v for v in (1, 2, 3) if allowed.nearest(v) == v]


def device_counts(name, size):
    found = [p for p in DEVICES if p % 2 == 0 or not describe(name).even_devices]
    if name == "auto":
        found = [1, 2, 3]  # it tries dozens of orders: it has tests of its own
    return found[:2] if size == "small" else found[2:]


def microbatch_counts(devices):
    return sorted(
        {1, 2, 3, devices - 1, devices, devices + 1, 2 * devices - 1, 2 * devices, 3 * devices + 2}
        - {0}
    )


def costs_of(times, **more):
    return jp.Costs(forward=times[0], input_grad=times[1], weight_grad=times[2], **more)


@each_size
@pytest.mark.parametrize("name", jp.schedules.names())
def test_valid_over_a_sweep(name, size):
    for devices, chunks in itertools.product(device_counts(name, size), chunk_counts(name)):
        for microbatches in microbatch_counts(devices):
            schedule = build(name, devices, microbatches, chunks)
            jp.check(schedule)
            assert (schedule.num_devices, schedule.num_microbatches, schedule.name) == (
                devices,
                microbatches,
                name,
            )
            assert schedule.num_stages == (devices if name == "dualpipe" else devices * chunks)
            assert not schedule.forward_only


@each_size
@pytest.mark.parametrize("name", jp.schedules.names())
def test_forward_only_over_a_sweep(name, size):
    for devices, chunks in itertools.product(device_counts(name, size), chunk_counts(name)):
        for microbatches in microbatch_counts(devices):
            schedule = build(name, devices, microbatches, chunks, forward_only=True)
            jp.check(schedule)
            assert schedule.forward_only
            assert all(action.kind is jp.Kind.F for _, _, action in schedule.actions())
            assert schedule.num_stages == (devices if name == "dualpipe" else devices * chunks)


@pytest.mark.parametrize("name", jp.schedules.names())
def test_forward_only_wastes_nothing(name):
    """On a loop all wait P - 1 steps; a V comes back to device 0 another P - 1 steps after its last
    turn.
    """
    for devices, microbatches in ((2, 4), (4, 8), (4, 11), (8, 24)):
        schedule = build(name, devices, microbatches, forward_only=True)
        busiest = max(len(row) for row in schedule.rows)
        vee = schedule.num_chunks == 2 and schedule.placement == jp.Placement.vee(devices=devices)
        assert jp.simulate(schedule).makespan <= busiest + (devices - 1) * (2 if vee else 1)


def test_no_pipelining_has_one_device_at_work():
    for devices, chunks, times in itertools.product((1, 2, 4), (1, 2), TIMES):
        timeline = jp.simulate(build("no_pipelining", devices, 5, chunks), costs_of(times))
        assert timeline.peak_activations == (chunks,) * devices
        assert timeline.makespan <= 5 * devices * chunks * sum(times)
        assert devices == 1 or timeline.busy == pytest.approx([5 * chunks * sum(times)] * devices)


@each_devices
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_chunk_formulas(name, devices):
    for m in microbatch_counts(devices):
        schedule = build(name, devices, m)
        for times in TIMES:
            timeline = jp.simulate(schedule, costs_of(times))
            assert timeline.makespan == (m + devices - 1) * sum(times)
            assert timeline.bubble == pytest.approx((devices - 1) / (m + devices - 1))
            assert timeline.peak_activations == tuple(
                m if name == "gpipe" else min(devices - d, m) for d in range(devices)
            )


@each_devices
@pytest.mark.parametrize("lean", [False, True])
def test_interleaved_1f1b_formulas(lean, devices):
    for chunks, m in itertools.product((1, 2, 3), microbatch_counts(devices)):
        schedule = build("interleaved_1f1b", devices, m, chunks, lean=lean)
        for times in TIMES:
            timeline = jp.simulate(schedule, costs_of(times))
            hop = 1 if lean else 2
            longest = max(even_groups(devices, m))
            peaks = [(chunks - 1) * longest + hop * (devices - 1 - d) + 1 for d in range(devices)]
            assert timeline.peak_activations == tuple(min(chunks * m, peak) for peak in peaks)
            if m >= devices:
                assert timeline.makespan == (chunks * m + devices - 1) * sum(times)
                assert timeline.bubble == pytest.approx((devices - 1) / (chunks * m + devices - 1))


def test_lean_keeps_the_makespan_with_fewer_activations():
    for devices, chunks, m in itertools.product((2, 4, 8), (2, 3), (2, 4, 9, 16)):
        megatron, lean = (
            jp.simulate(build("interleaved_1f1b", devices, m, chunks, lean=lean))
            for lean in (False, True)
        )
        assert lean.makespan == megatron.makespan
        assert all(
            a <= b for a, b in zip(lean.peak_activations, megatron.peak_activations, strict=True)
        )
    assert (lean.peak_activations[0], megatron.peak_activations[0]) == (24, 31)


def test_interleaved_group_size_is_megatrons():
    """Megatron-Core's order for five microbatches in groups of three, two chunks, on the first of
    two ranks (+ forward, - backward).
    """
    row = build("interleaved_1f1b", 2, 5, group_size=3).rows[0]
    chunk = [(a.stage // 2 + 1) * (1 if a.kind is jp.Kind.F else -1) for a in row]
    assert chunk == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]


@pytest.mark.parametrize("devices", [2, *map(slow, (4, 5))])
def test_any_group_size_is_valid(devices):
    for name, chunks in itertools.product(
        ("interleaved_1f1b", "interleaved_1f1b_overlap"), (1, 2, 3)
    ):
        for m, size in itertools.product(range(1, 3 * devices), range(devices, 2 * devices + 2)):
            jp.check(build(name, devices, m, chunks, group_size=size))


@each_devices
def test_looped_bfs_formulas(devices):
    for chunks, m in itertools.product((1, 2, 3), microbatch_counts(devices)):
        schedule = build("looped_bfs", devices, m, chunks)
        for times in TIMES:
            timeline = jp.simulate(schedule, costs_of(times))
            assert timeline.peak_activations == (chunks * m,) * devices
            if m >= devices:
                assert timeline.makespan == (chunks * m + devices - 1) * sum(times)


@each_devices
def test_overlapped_formulas(devices):
    for chunks, m in itertools.product((1, 2, 3), microbatch_counts(devices)):
        schedule = build(
            "1f1b_overlap" if chunks == 1 else "interleaved_1f1b_overlap", devices, m, chunks
        )
        for times, share in itertools.product(TIMES[::2], (None, 0, 3 / 4)):
            both = sum(times)
            pair = None if share is None else max(times[0], both - times[0], both * share)
            timeline = jp.simulate(schedule, costs_of(times, overlap=pair))
            longest = m if chunks == 1 else max(even_groups(devices, m))
            ahead = (chunks - 1) * longest
            peaks = [min(chunks * m, ahead + 2 * (devices - d)) for d in range(devices)]
            assert timeline.peak_activations == tuple(peaks)
            if m >= devices:
                assert timeline.makespan == pytest.approx(
                    (devices + ahead) * both + (chunks * m - ahead - 1) * (pair or both)
                )


def test_the_steady_state_of_overlapped_schedules_is_pairs():
    for name in ("1f1b_overlap", "interleaved_1f1b_overlap", "dualpipe", "dualpipev"):
        schedule = build(name, 4, 32)
        for row in schedule.rows:
            pairs = sum(isinstance(cell, jp.Overlap) for cell in row)
            assert pairs >= len(row) / 2


@each_devices
def test_zb_h1_and_zb_1p_formulas(devices):
    for name, m in itertools.product(("zb_h1", "zb_1p"), microbatch_counts(devices)):
        schedule = build(name, devices, m)
        for times in SHORT_W:
            f, i, w = times
            timeline = jp.simulate(schedule, costs_of(times))
            assert timeline.peak_activations == (min(devices, m),) * devices
            if m >= devices:
                assert timeline.makespan == m * (f + i + w) + (devices - 1) * (f + i - w)


@each_devices
def test_zb_h2_formulas(devices):
    for m in microbatch_counts(devices):
        schedule, saving = build("zb_h2", devices, m), build("zb_h1", devices, m)
        for times in SHORT_W[:4]:
            f, i, w = times
            timeline = jp.simulate(schedule, costs_of(times))
            assert timeline.peak_activations == (min(2 * devices - 1, m),) * devices
            if m >= 2 * devices - 1:
                assert timeline.span == m * (f + i + w) + (devices - 1) * (f + i - 2 * w)
            assert timeline.makespan <= jp.simulate(saving, costs_of(times)).makespan


@each_devices
def test_interleaved_zb_formulas(devices):
    for chunks, m in itertools.product((1, 2, 3), microbatch_counts(devices)):
        schedule = build("interleaved_zb", devices, m, chunks)
        for times in SHORT_W:
            f, i, w = times
            timeline = jp.simulate(schedule, costs_of(times))
            longest = max(even_groups(devices, m))
            assert (
                timeline.peak_activations
                == (min(chunks * m, (chunks - 1) * longest + devices),) * devices
            )
            if m >= devices:
                assert timeline.makespan == chunks * m * (f + i + w) + (devices - 1) * (f + i - w)


@each_devices
def test_zbv_formulas(devices):
    for m in microbatch_counts(devices):
        timeline = jp.simulate(build("zbv", devices, m))
        assert max(timeline.peak_activations) <= 2 * devices
        if m >= 2 * devices - 1:
            assert timeline.makespan == 6 * m + devices - 1
            assert timeline.span == 6 * m


@pytest.mark.parametrize("devices", [1, 2, 3, 4, *map(slow, (5, 6, 7, 9, 12))])
def test_v_half_and_v_min_formulas(devices):
    for m in (1, 2, devices, 2 * devices, 3 * devices + 1):
        half, least = (jp.simulate(build(name, devices, m)) for name in ("v_half", "v_min"))
        assert max(half.peak_activations) <= 2 * ((devices + 2) // 2)
        assert max(least.peak_activations) <= 2 * ((devices + 4) // 3)
        if m >= 2 * devices and devices >= 3:
            assert half.makespan <= 6 * m + 3 * devices - 4
        if m >= devices and devices >= 2:
            assert least.makespan <= 6 * m + 4 * devices - 5


@pytest.mark.parametrize("devices", [2, 4, *map(slow, (6, 8))])
def test_dualpipe_formulas(devices):
    for m in range(1, 2 * devices + 6):
        timeline = jp.simulate(build("dualpipe", devices, m))
        assert max(timeline.peak_activations) <= devices + 1
        if m >= 2 * devices and m % 2 == 0:
            # F&B + B - 3 W is 2 where F, I and W take 1.
            assert [timeline.makespan - busy for busy in timeline.busy] == [
                (devices // 2 - 1) * 2
            ] * devices


@each_devices
def test_dualpipev_formulas(devices):
    for m in range(1, 2 * devices + 6):
        timeline = jp.simulate(build("dualpipev", devices, m))
        assert max(timeline.peak_activations) <= 2 * devices + 1
        if m >= 2 * devices:
            assert timeline.makespan == 6 * m + (devices - 1) * 2


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 6))])
def test_v_schedules_keep_their_cap_at_any_cost(seed):
    rng = random.Random(seed)
    caps = {
        "zbv": lambda p: 2 * p,
        "v_half": lambda p: 2 * ((p + 2) // 2),
        "v_min": lambda p: 2 * ((p + 4) // 3),
    }
    for name, cap in caps.items():
        for _ in range(2):
            devices, m = rng.randint(1, 6), rng.randint(1, 20)
            costs = jp.Costs(
                forward=[rng.randint(1, 9) for _ in range(2 * devices)],
                input_grad=rng.randint(0, 9),
                weight_grad=rng.random() * 5,
                transfer=rng.choice((0, 1, 0.25)),
            )
            jp.check(build(name, devices, m, costs=costs), max_activations=cap(devices))


@pytest.mark.parametrize(("devices", "microbatches"), [(3, 8), *(slow(p, 24) for p in (3, 4, 6))])
@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min", "interleaved_zb"])
def test_costs_shorten_v_schedules(name, devices, microbatches):
    """An order made for equal costs loses where they differ; the same schedule fitted to them must
    not.
    """
    costs = jp.Costs(forward=10, input_grad=20, weight_grad=10)
    blind, fitted = (
        jp.simulate(build(name, devices, microbatches, **options), costs).makespan
        for options in ({}, {"costs": costs})
    )
    assert fitted <= blind
    assert (name, devices) != ("v_min", 6) or fitted < 0.95 * blind
