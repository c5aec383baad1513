"""`Timeline.over`: where a run lost time against its plan."""

from __future__ import annotations

import json
import random

import pytest

import jaxpipe as jp


def run_of(schedule, **costs):
    return jp.simulate(schedule, jp.Costs(**costs))


def test_a_slow_stage_is_named():
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    planned = run_of(schedule)
    ran = run_of(schedule, forward=[1, 1, 2, 1], input_grad=[1, 1, 2, 1], weight_grad=[1, 1, 2, 1])
    compared = ran.over(planned)
    assert compared.losses[0].cause == "stage 2"
    assert compared.sentence.startswith(f"the step took {ran.makespan:.4g}, ")
    assert "in stage 2" in compared.sentence
    assert compared.rows()[2] == ("2", "48", "24", "2.000", "7", "9")
    assert compared.error == pytest.approx(planned.makespan / ran.makespan - 1)


def test_a_slow_transfer_is_no_slow_stage():
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    compared = run_of(schedule, transfer=0.5).over(run_of(schedule))
    assert compared.losses[0].cause == "transfers"
    assert not any(loss.time for loss in compared.losses if loss.cause.startswith("stage"))


@pytest.mark.parametrize("seed", range(8))
def test_losses_add_up_to_the_difference(seed):
    rng = random.Random(seed)
    schedule = jp.schedules.build(
        rng.choice(("1f1b", "zb_h1", "zbv", "1f1b_overlap", "dualpipev")), devices=4, microbatches=8
    )
    ran, planned = (
        run_of(
            schedule,
            forward=[rng.randint(1, 5) for _ in range(schedule.num_stages)],
            input_grad=rng.randint(1, 5),
            weight_grad=rng.randint(1, 5),
            transfer=rng.random(),
        )
        for _ in range(2)
    )
    assert sum(loss.time for loss in ran.over(planned).losses) == pytest.approx(
        ran.makespan - planned.makespan
    )


def test_a_run_of_whole_backwards_compares_with_a_plan_of_halves():
    split = jp.schedules.build("zb_h1", devices=2, microbatches=4)
    merged = jp.merge_backward(split)
    assert run_of(merged).over(run_of(split)).error == pytest.approx(
        run_of(split).makespan / run_of(merged).makespan - 1
    )


def test_another_table_is_refused():
    ran = run_of(jp.schedules.build("1f1b", devices=2, microbatches=4))
    with pytest.raises(jp.ScheduleError, match="cannot be compared"):
        ran.over(run_of(jp.schedules.build("1f1b", devices=2, microbatches=5)))


def test_the_page_and_the_trace_hold_both():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    ran, planned = run_of(schedule, forward=[1, 2]), run_of(schedule)
    page = jp.render.to_html(ran, over=planned)
    assert page.count("<svg") == 2
    assert "the step took" in page
    assert jp.render.to_html(ran).count("<svg") == 1
    trace = json.loads(jp.render.to_trace(ran, over=planned))
    names = {
        event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    }
    assert names == {"device 0", "device 1", "device 0 (planned)", "device 1 (planned)"}
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 2 * schedule.encoded.num_actions
    assert {event["pid"] for event in slices} == {0, 1, 2, 3}


@pytest.mark.parametrize("times", [1e-15, 1e-3, 1e3, 1e15, 0])
def test_a_plan_of_quite_another_length_is_drawn(times):
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    ran, planned = (
        run_of(schedule),
        run_of(schedule, forward=times, input_grad=times, weight_grad=times),
    )
    page = jp.render.to_html(ran, over=planned)
    assert page.count("<svg") == 2
    assert "Planned (at another scale)" in page
    assert "another scale" not in jp.render.to_html(ran, over=ran)
    jp.render.to_trace(ran, over=planned)
