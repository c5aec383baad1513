"""`defer_last`: H where a device would wait, the rules of H, what the simulator says, and the
programs made of such tables.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Schedule
from jaxpipe.lowering.plan import cost_parts, plan_of, program_makespan
from jaxpipe.program.verify import ProgramRule, faults
from tests.shares import changed, put
from tests.strategies import random_schedule

WHOLE = "0F0,0L0,0H0,0B0\n1F0,1L0,1B0,1H0\n"


def whole(name: str, devices: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """A table with L and whole backwards."""
    plain = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    return jp.spread_last(plain, costs=costs, split=False)


@pytest.mark.parametrize(
    ("table", "rule", "message"),
    [
        (WHOLE.replace(",0H0", ""), "completeness", "0H0 is missing"),
        (WHOLE.replace(",0L0", "").replace(",1L0", ""), "completeness", "the table has no L"),
        (WHOLE.replace("0L0,0H0", "0H0,0L0"), "order", "0H0 comes before 0L0, which it needs"),
        (
            WHOLE.replace(",0H0", "").replace(",1H0", ",1H0,0H0"),
            "placement",
            "it is the share of device 0",
        ),
        (WHOLE.replace("0H0", "0H0,0H0"), "duplicate", "0H0 is already"),
    ],
)
def test_the_rules_of_h(table, rule, message):
    assert jp.check(Schedule.from_csv(WHOLE)).to_csv() == WHOLE
    found = [v for v in Schedule.from_csv(table).violations if v.rule == rule]
    assert any(message in str(v) for v in found)


def test_an_l_is_shorter_by_what_its_h_does_and_nobody_waits_for_an_h():
    costs = Costs(last=3, last_weight_grad=1)
    t = jp.simulate(Schedule.from_csv(WHOLE), costs)
    assert (
        t.start["0L0"],
        t.end["0L0"],
        t.end["0H0"],
        t.start["1B0"],
        t.start["0B0"],
        t.makespan,
    ) == (2, 4, 5, 4, 6, 8)
    assert (
        jp.simulate(
            Schedule.from_csv(WHOLE.replace(",0H0", "").replace(",1H0", "")), costs
        ).makespan
        == 9
    )
    assert jp.simulate(Schedule.from_csv(WHOLE), Costs(last=3)).makespan == 8, "a third of L"


@pytest.mark.parametrize(
    ("name", "most", "gain"),
    [("1f1b", 1, 0.058), ("interleaved_1f1b", 2, 0.066), ("gpipe", 1, 0.004), ("zb_h1", 4, 0)],
)
def test_what_a_head_as_long_as_a_forward_gains(name, most, gain):
    """With whole backwards 1F1B waits for somebody's B before every L; zero-bubble tables have no
    time left to fill.
    """
    chunks = jp.schedules.describe(name).chunks.natural
    costs = Costs(forward=1 / chunks, input_grad=1 / chunks, weight_grad=1 / chunks)
    before = whole(name, 4, 16, costs)
    after = jp.defer_last(before, max_deferred=most, costs=costs)
    lengths = [jp.simulate(table, costs).makespan for table in (before, after)]
    assert lengths[1] <= (1 - gain) * lengths[0]
    assert (after == before) is (gain == 0)
    kept = 0
    for row in after.rows:
        left = 0
        for cell in row:
            left += (cell.kind is Kind.L) - (cell.kind is Kind.H)
            kept = max(kept, left)
    assert gain == 0 or kept == most
    assert jp.transforms.remove_spread(after).rows == jp.transforms.remove_spread(before).rows
    assert jp.defer_last(after, max_deferred=most, costs=costs) == after
    assert jp.spread_last(after, costs=costs, split=False) == before


def test_what_cannot_be_deferred_is_refused():
    table = jp.schedules.build("gpipe", devices=2, microbatches=2)
    for wrong, options, message in (
        (table, {}, "no L, whose work"),
        (jp.add_transfers(table), {}, "SEND and RECV"),
        (jp.spread_last(table), {"max_deferred": 0}, "at least 1"),
        (jp.spread_last(table), {"max_deferred": 1.5}, "whole number"),
    ):
        with pytest.raises(jp.ScheduleError, match=message):
            jp.defer_last(wrong, **options)
    assert jp.defer_last(
        jp.spread_last(jp.schedules.build("gpipe", devices=2, microbatches=2, forward_only=True))
    ).forward_only


def test_the_program_keeps_the_makespan_one_slot_and_no_predicate_around_l():
    """In the steady state of 1F1B every device does L, F, H, B, neighbours a B and an F apart."""
    table = jp.defer_last(whole("1f1b", 4, 16))
    plan = plan_of(table)
    program = plan.program()
    assert program_makespan(cost_parts(plan.ticks), plan.segments) == pytest.approx(
        jp.simulate(table).makespan
    )
    assert program.slots.share == 1
    assert sum(segment.num_collective_predicates for segment in program.segments) == 0
    assert faults(program) == ()


def test_a_slot_that_h_finds_wrong_is_found():
    program = plan_of(
        jp.check(
            Schedule.from_csv("0F0,0F1,0L0,0L1,0H0,0H1,0B0,0B1\n1F0,1L0,1F1,1L1,1B0,1B1,1H0,1H1\n")
        )
    ).program()
    assert program.slots.share == 2
    assert faults(program) == ()
    (share,) = program.ticks.collectives
    first, second = (int(t) for t in (share.kind[:, 0] == int(Kind.L)).nonzero()[0])
    assert share.share[first, 0] != share.share[second, 0]
    for tick, slot, rule in (
        (second, int(share.share[first, 0]), ProgramRule.VALUE),
        (first, 2, ProgramRule.SLOT),
    ):
        assert rule in {fault.rule for fault in faults(changed(program, share=put(tick, 0, slot)))}
    (late, _) = (int(t) for t in (share.kind[:, 0] == int(Kind.H)).nonzero()[0])
    wrong = (
        ("share", 1 - int(share.share[late, 0]), ProgramRule.VALUE),
        ("microbatch", 1 - int(share.microbatch[late, 0]), ProgramRule.ACTION),
        ("kind", int(Kind.W), ProgramRule.ACTION),
    )
    for name, value, rule in wrong:
        other = changed(program, **{name: put(late, 0, value)})
        assert rule in {fault.rule for fault in faults(other)}


def scattered(rng: Random) -> Schedule:
    """A random table with L, and every H somewhere after its L."""
    while True:
        schedule = random_schedule(rng, recompute=True)
        if schedule.num_stages >= schedule.num_devices and not schedule.forward_only:
            break
    rows = [list(row) for row in jp.spread_last(schedule, split=rng.choice((False, None))).rows]
    for device, row in enumerate(rows):
        for m in range(schedule.num_microbatches):
            row.insert(
                rng.randint(row.index(Action(device, Kind.L, m)) + 1, len(row)),
                Action(device, Kind.H, m),
            )
    return schedule.with_rows(rows)


# By seeds: tables are drawn until one has backwards, for which the smallest draws are far from
# enough.
@pytest.mark.slow
@given(st.integers(0, 2**31 - 1).map(Random))
def test_an_h_may_stand_anywhere_after_its_l(rng):
    """The program of any such table does what the table says; and `defer_last` takes its H away
    before it places its own.
    """
    table = jp.check(scattered(rng))
    assert Schedule.from_csv(table.to_csv()).rows == table.rows
    assert faults(plan_of(table).program()) == ()
    most = rng.randint(1, 3)
    assert jp.defer_last(table, max_deferred=most) == jp.defer_last(
        without_h(table), max_deferred=most
    )


def without_h(table: Schedule) -> Schedule:
    return table.with_rows(
        [
            [c for c in row if not isinstance(c, Action) or c.kind is not Kind.H]
            for row in table.rows
        ]
    )
