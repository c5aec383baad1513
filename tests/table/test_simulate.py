"""`simulate` against hand-made examples, published formulas, and a plain second simulation of
random tables.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from naive import times
from strategies import random_schedule, randoms, schedules

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Overlap, Schedule, Transfers
from jaxpipe.table import parse_action
from jaxpipe.table.kinds import parts

ONE_F_ONE_B = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
PAIRED = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
TWO_BY_TWO = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
)
ELEVEN_STEPS = (
    "0F0 | 0SEND_F0 1RECV_F0 | 0F1 | 0SEND_F1 1RECV_F1 | 1F0 | 1B0 | 0RECV_B0 "
    "1SEND_B0 | 0B0 1F1 | 1B1 | 0RECV_B1 1SEND_B1 | 0B1"
)


def read(text: str) -> Schedule:
    return Schedule.from_csv(text)


def test_one_f_one_b_by_hand():
    # Device 0: F0 0-1, F1 1-2, wait, B0 4-6, F2 6-7, B1 7-9, wait, B2 10-12; device 1: F0 1-2, B0
    # 2-4, F1 4-5, B1 5-7, F2 7-8, B2 8-10.
    t = jp.simulate(read(ONE_F_ONE_B), Costs())
    assert [t.start[a] for a in ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2")] == [0, 1, 4, 6, 7, 10]
    assert [t.end[a] for a in ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2")] == [2, 4, 5, 7, 8, 10]
    assert (t.makespan, t.span, t.busy) == (12, 12, (9, 9))
    assert t.bubble == pytest.approx(1 - 18 / 24, abs=1e-15)  # exact but for one rounding
    assert t.idle == ((0, 3, 0), (1, 0, 2))
    assert t.peak_activations == (2, 1)
    assert t.critical_path == ("0F0", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "0B2")
    assert t.memory(1) == ((1, 1), (4, 0), (4, 1), (7, 0), (7, 1), (10, 0))


def test_recomputation_by_hand():
    # Device 0: F0 0-2, F1 2-4, R0 4-7, wait, B0 9-13, R1 13-16, B1 16-20; device 1: F0 2-4, R0 4-5,
    # B0 5-9, F1 9-11, B1 11-15.
    table = read("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1B1\n")
    t = jp.simulate(
        table, Costs(2, 2, 2, recompute=[3, 1], checkpoint=[0.5, 0.25], activation=[4, 8])
    )
    assert [t.start[a] for a in ("0F0", "0F1", "0R0", "0B0", "0R1", "0B1")] == [0, 2, 4, 9, 13, 16]
    assert [t.end[a] for a in ("1F0", "1R0", "1B0", "1F1", "1B1")] == [4, 5, 9, 11, 15]
    assert t.busy == (18, 13)
    assert t.peak_activations == (1, 1)
    assert t.memory(0) == ((0, 0.5), (2, 1), (4, 4.5), (13, 0.5), (13, 4), (20, 0))
    assert t.memory(1) == ((2, 0.25), (4, 8), (9, 0), (9, 8), (15, 0))
    assert t.peak_memory == (4.5, 8)


def test_a_recomputation_takes_a_forward_and_keeps_no_input_unless_told():
    table = read("0F0,0R0,0B0\n")
    assert jp.simulate(table, Costs(forward=5)).makespan == 5 + 5 + 2
    assert jp.simulate(table).memory(0) == ((1, 1), (4, 0))


def test_recomputed_activations_die_where_others_do():
    # F0 0-1, R0 1-2, I0 2-3, F1 3-4, W0 4-5, R1 5-6, I1 6-7, W1 7-8.
    table = read("0F0,0R0,0I0,0F1,0W0,0R1,0I1,0W1\n")
    assert jp.simulate(table, Costs(release=jp.table.Release.WEIGHT_GRAD)).memory(0) == (
        (1, 1),
        (5, 0),
        (5, 1),
        (8, 0),
    )
    assert jp.simulate(table, Costs(release=jp.table.Release.INPUT_GRAD)).memory(0) == (
        (1, 1),
        (3, 0),
        (5, 1),
        (7, 0),
    )


def test_a_transfer_delays_what_crosses_devices_and_nothing_else():
    t = jp.simulate(read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"), Costs(transfer=0.5))
    assert [t.start[a] for a in ("0F0", "1F0", "2F0", "3F0", "3B0", "2B0", "1B0", "0B0")] == [
        0,
        1.5,
        2.5,
        4,
        5,
        7.5,
        9.5,
        12,
    ]


def test_a_list_of_transfers_is_read_at_the_stage_that_sends():
    t = jp.simulate(read("0F0,0B0\n1F0,1B0\n2F0,2B0\n"), Costs(transfer=[1, 10, 100]))
    assert [t.start[a] for a in ("1F0", "2F0", "1B0", "0B0")] == [2, 13, 116, 128]


def test_costs_for_each_stage_and_kind():
    costs = Costs(forward=[1, 2], input_grad=[3, 4], weight_grad=[5, 6])
    t = jp.simulate(read("0F0,0I0,0W0\n1F0,1B0\n"), costs)
    assert {a: (t.start[a], t.end[a]) for a in t.start} == {
        "0F0": (0, 1),
        "0I0": (13, 16),
        "0W0": (16, 21),
        "1F0": (1, 3),
        "1B0": (3, 13),
    }
    fused = jp.simulate(read("0F0,0B0\n"), Costs(input_grad=3, weight_grad=4, backward=5))
    assert fused.makespan == 6


def test_a_pair_costs_its_halves_unless_told():
    schedule = read(PAIRED)
    t = jp.simulate(schedule, Costs(forward=2, input_grad=1, weight_grad=2))
    pair = "(1F1;1B0)OVERLAP_F_B"
    assert t.start[pair] == t.start["1F1"] == t.start["1B0"] == 4
    assert t.end[pair] == t.end["1F1"] == t.end["1B0"] == 9
    assert jp.simulate(schedule, Costs(forward=2, overlap=3)).end[pair] == 7
    assert jp.simulate(schedule, Costs(forward=2, overlap=[9, 4])).end[pair] == 8
    # What a pair makes is there at its end, whichever half made it.
    assert t.start["0B0"] == t.end[pair]


def test_the_memory_of_a_pair_holds_both_halves():
    assert jp.simulate(read(PAIRED)).peak_activations == (2, 2)


def test_activation_sizes_and_their_release():
    schedule = read("0F0,0F1,0I0,0I1,0W0,0W1\n")
    late = jp.simulate(schedule, Costs(activation=3))
    assert (late.peak_activations, late.peak_memory) == ((2,), (6,))
    assert late.memory(0) == ((0, 3), (1, 6), (5, 3), (6, 0))
    early = jp.simulate(schedule, Costs(activation=3, release=jp.table.Release.INPUT_GRAD))
    assert early.memory(0) == ((0, 3), (1, 6), (3, 3), (4, 0))
    sized = jp.simulate(read("0F0,1F0,1B0,0B0\n"), Costs(activation=[5, 7]))
    assert sized.peak_memory == (12,)


def test_the_memory_cap_names_every_device_that_goes_over():
    schedule = read(ONE_F_ONE_B)
    assert jp.simulate(schedule, Costs(activation=2), max_memory=4).peak_memory == (4, 2)
    with pytest.raises(jp.ScheduleError) as caught:
        jp.simulate(schedule, Costs(activation=2), max_memory=1)
    assert [v.rule for v in caught.value.violations] == ["memory", "memory"]
    assert "device 0 may hold 1 of activations, but holds 4 at its peak" in str(caught.value)


def test_a_forward_only_table_keeps_nothing():
    t = jp.simulate(read("0F0,0F1\n1F0,1F1\n"))
    assert t.peak_activations == (1, 1)
    assert t.memory(0) == ((0, 1), (1, 0), (1, 1), (2, 0))
    assert t.makespan == 3


def test_idle_cells_are_not_waited_for():
    assert jp.simulate(read("0F0,,,0B0\n")).makespan == 3


def test_a_device_without_work_is_all_idle():
    schedule = Schedule.from_rows(
        [*read("0F0,0B0\n").rows, ()], placement=jp.Placement.loop(devices=1)
    )
    schedule = Schedule(schedule.rows, jp.Placement.explicit([0], devices=2), 1)
    t = jp.simulate(schedule)
    assert t.idle == ((0, 0, 0), (3, 0, 0))
    assert (t.bubble, t.span, t.peak_activations) == (0.5, 3, (1, 0))


def test_span_is_shorter_than_the_makespan_where_ends_interlock():
    t = jp.simulate(read("0F0\n1F0\n"), Costs(forward=[1, 5]))
    assert (t.makespan, t.span) == (6, 5)


def test_whole_costs_give_whole_times():
    t = jp.simulate(read(ONE_F_ONE_B), Costs(forward=2))
    assert isinstance(t.makespan, int)
    assert isinstance(jp.simulate(read(ONE_F_ONE_B), Costs(forward=2.0)).makespan, float)


def test_zero_costs():
    t = jp.simulate(read(ONE_F_ONE_B), Costs(forward=0, input_grad=0, weight_grad=0))
    assert (t.makespan, t.bubble, t.peak_activations) == (0, 0.0, (2, 1))


def test_times_are_found_by_text_and_by_value():
    t = jp.simulate(read(PAIRED))
    assert t.start["0F1"] == t.start[Action(0, Kind.F, 1)] == 1
    assert t.start[Overlap(Action(1, Kind.F, 1), Action(1, Kind.B, 0))] == t.start["1F1"]
    assert len(t.start) == len(list(t.start)) == 9
    assert dict(t.start.items())["(1F1;1B0)OVERLAP_F_B"] == t.start["1B0"]
    for missing in (
        "0F9",
        "9F0",
        "0W0",
        "(0F1;0B0)OVERLAP_F_B",
        "(1F1;1B1)OVERLAP_F_B",
        "junk",
        "",
        "0F-1",
    ):
        assert missing not in t.start
    with pytest.raises(KeyError):
        t.end["0F9"]


def test_a_broken_table_is_refused_with_its_violations():
    with pytest.raises(jp.ScheduleError) as caught:
        jp.simulate(read("0F0,0F1\n1F1,1F0,1B0\n"))
    assert caught.value.violations


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ({"forward": [1, 2, 3]}, "Costs.forward has 3 entries, but the schedule has 2 stages"),
        ({"activation": [1], "transfer": [1]}, "Costs.transfer has 1 entries"),
        ({"overlap": (1, 2, 3)}, "Costs.overlap has 3"),
    ],
)
def test_lists_of_the_wrong_length_are_named(costs, text):
    with pytest.raises(jp.CostError) as caught:
        jp.simulate(read(ONE_F_ONE_B), Costs(**costs))
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == len(costs)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "1", [1, -2], [None, 1], ["1", 1]])
def test_costs_that_are_no_costs_are_refused(bad):
    with pytest.raises(jp.CostError, match="forward"):
        Costs(forward=bad)


def test_costs_take_numpy():
    t = jp.simulate(
        read(ONE_F_ONE_B), Costs(forward=np.array([1.0, 2.0]), input_grad=np.float64(1))
    )
    assert t.makespan == 15


def test_the_eleven_steps():
    steps = jp.engine.simulate_steps(read(TWO_BY_TWO))
    assert str(steps) == ELEVEN_STEPS
    assert len(steps) == 11
    assert steps.rows[1][:4] == (None, parse_action("1RECV_F0"), None, parse_action("1RECV_F1"))


def test_steps_where_send_and_recv_wait_for_each_other():
    schedule = read("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n")
    assert (
        str(jp.engine.simulate_steps(schedule))
        == "0F0 | 0SEND_F0 1RECV_F0 | 0F1 1F0 | 0SEND_F1 1RECV_F1 | 1F1"
    )
    late = read("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert str(jp.engine.simulate_steps(late)) == str(
        jp.engine.simulate_steps(late, transfers=Transfers.RENDEZVOUS)
    )


def test_steps_of_a_compute_only_table_and_of_a_pair():
    assert (
        str(jp.engine.simulate_steps(read(PAIRED)))
        == "0F0 | 0F1 1F0 | (1F1;1B0)OVERLAP_F_B | 0B0 1B1 | 0B1"
    )


def test_who_waits_for_a_message():
    schedule, costs = read(TWO_BY_TWO), Costs(transfer=1)
    posted = jp.simulate(schedule, costs)
    assert (posted.start["1RECV_F1"], posted.end["1RECV_F1"], posted.start["1F0"]) == (0, 3, 2)
    held = jp.simulate(schedule, costs, transfers=Transfers.BUFFERED)
    assert (held.start["1RECV_F1"], held.end["1RECV_F1"], held.start["1F0"]) == (2, 3, 3)
    both = jp.simulate(schedule, costs, transfers=Transfers.RENDEZVOUS)
    assert (both.start["0SEND_F0"], both.end["0SEND_F0"], both.start["0F1"]) == (1, 2, 2)
    assert (posted.makespan, held.makespan, both.makespan) == (11, 12, 14)
    assert posted.critical_path[-2:] == ("1SEND_B1", "0B1")
    assert both.critical_path[0] == "0F0"


# Published closed forms.


@pytest.mark.parametrize("devices", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_and_peak_of_gpipe_and_1f1b(name, devices, microbatches):
    """Makespan (M + P - 1)(f + b) and peak min(P - d, M) or M (Narayanan et al. 2021,
    section 2.2).
    """
    t = jp.simulate(jp.schedules.build(name, devices=devices, microbatches=microbatches), Costs())
    assert t.makespan == (microbatches + devices - 1) * 3
    # one division each way
    assert t.bubble == pytest.approx((devices - 1) / (microbatches + devices - 1), abs=1e-12)
    peaks = [
        microbatches if name == "gpipe" else min(devices - d, microbatches) for d in range(devices)
    ]
    assert t.peak_activations == tuple(peaks)


# Random tables, random costs, against the plain simulation.


def random_costs(rng: random.Random, stages: int) -> Costs:
    def some() -> object:
        return rng.choice((rng.randint(0, 5), [rng.randint(0, 5) for _ in range(stages)]))

    optional = {
        key: some()
        for key in ("backward", "overlap", "recompute", "checkpoint")
        if rng.random() < 0.5
    }
    return Costs(
        forward=some(),
        input_grad=some(),
        weight_grad=some(),
        transfer=some(),
        activation=some(),
        **optional,
    )


def entry(cost: object, stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost


def plain_times(schedule: Schedule, costs: Costs) -> dict[Action, tuple[float, float]]:
    def duration(cell) -> float:
        if isinstance(cell, Overlap):
            if costs.overlap is None:
                return duration(cell.forward) + duration(cell.backward)
            return entry(costs.overlap, cell.forward.stage)
        if cell.kind is Kind.B and costs.backward is None:
            return entry(costs.input_grad, cell.stage) + entry(costs.weight_grad, cell.stage)
        by_kind = {
            Kind.F: costs.forward,
            Kind.B: costs.backward,
            Kind.I: costs.input_grad,
            Kind.W: costs.weight_grad,
        }
        by_kind[Kind.R] = costs.forward if costs.recompute is None else costs.recompute
        return entry(by_kind[cell.kind], cell.stage)

    return times(schedule, duration, lambda producer: entry(costs.transfer, producer.stage))


@given(randoms())
def test_random_tables_as_simulated_plainly(rng):
    schedule = random_schedule(rng, recompute=True)
    costs = random_costs(rng, schedule.num_stages)
    t = jp.simulate(schedule, costs)
    assert {
        parse_action(a): (t.start[a], t.end[a]) for a in t.start if "(" not in a
    } == plain_times(schedule, costs)


@given(randoms())
def test_idle_and_busy_fill_the_time(rng):
    schedule = random_schedule(rng, recompute=True)
    t = jp.simulate(schedule, random_costs(rng, schedule.num_stages))
    for device in range(schedule.num_devices):
        assert min(t.idle[device]) >= 0
        assert sum(t.idle[device]) + t.busy[device] == t.makespan
    room = schedule.num_devices * t.makespan
    # a sum of small integers
    assert t.bubble == (pytest.approx(sum(map(sum, t.idle)) / room, abs=1e-12) if room else 0)
    assert t.span <= t.makespan


@given(randoms())
def test_the_critical_path_leads_from_zero_to_the_makespan(rng):
    schedule = random_schedule(rng, recompute=True)
    costs = random_costs(rng, schedule.num_stages)
    whole = rng.random() < 0.5
    mode = rng.choice(list(Transfers)) if whole else Transfers.ASYNC
    t = jp.simulate(jp.add_transfers(schedule) if whole else schedule, costs, transfers=mode)
    path = t.critical_path
    assert t.start[path[0]] == 0 or "RECV" in path[0]
    assert t.end[path[-1]] == t.makespan
    latest = max(entry(costs.transfer, s) for s in range(schedule.num_stages))
    for before, after in itertools.pairwise(path):
        compute = "SEND" not in after and "RECV" not in after
        if compute:
            assert t.end[before] <= t.start[after] <= t.end[before] + latest
    if not whole and latest == 0:
        assert all(t.end[before] == t.start[after] for before, after in itertools.pairwise(path))


@given(randoms())
def test_memory_over_time_is_what_is_alive(rng):
    schedule = random_schedule(rng, recompute=True)
    costs = random_costs(rng, schedule.num_stages)
    t = jp.simulate(schedule, costs)
    for device, row in enumerate(schedule.rows):
        steps = t.memory(device)
        assert [s.time for s in steps] == sorted(s.time for s in steps)
        assert not steps or steps[-1].held == 0
        actions = [a for cell in row for a in parts(cell)]
        # between the whole times at which things change
        moment = rng.uniform(0, float(t.makespan) + 1) + 1e-6
        ends = {(a.stage, a.microbatch): t.end[a] for a in actions if a.kind in (Kind.B, Kind.W)}
        if schedule.forward_only:
            ends = {(a.stage, a.microbatch): t.end[a] for a in actions}
        again = {(a.stage, a.microbatch): t.start[a] for a in actions if a.kind is Kind.R}
        started = [
            (a.stage, a.microbatch) for a in actions if a.kind is Kind.F and t.start[a] <= moment
        ]
        inputs = [stage for stage, m in started if moment < again.get((stage, m), -1)]
        alive = [
            stage for stage, m in started if again.get((stage, m), -1) <= moment < ends[stage, m]
        ]
        held = [s.held for s in steps if s.time <= moment]
        kept = sum(entry(costs.activation, s) for s in alive) + sum(
            entry(costs.checkpoint, s) for s in inputs
        )
        assert (held[-1] if held else 0) == kept
        assert t.peak_memory[device] == max((s.held for s in steps), default=0)


@given(schedules(recompute=True))
def test_no_costs_but_one_make_steps(schedule):
    """With every cell at cost 1 and transfers free, times are steps."""
    costs = Costs(forward=1, input_grad=1, weight_grad=1, backward=1, overlap=1)
    assert jp.simulate(schedule, costs).makespan == len(jp.engine.simulate_steps(schedule))
