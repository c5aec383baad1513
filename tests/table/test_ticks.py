"""Ticks: every action in one of them, after what it needs, in the order of its row."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given

import jaxpipe as jp
from jaxpipe.engine.costs import Costs
from jaxpipe.engine.simulate import simulate
from jaxpipe.lowering.plan import plan_of
from jaxpipe.lowering.target import NO_OVERHEADS
from jaxpipe.lowering.ticks import W_THEN_F, assign_ticks, followed, joined_ticks, modulo_ticks
from jaxpipe.table.kinds import Kind, parts
from tests.passes import KEEP_ORDER, every_ticks, inputs, places
from tests.strategies import schedules


@given(schedules())
def test_every_action_is_in_one_tick_behind_what_it_needs(schedule):
    wanted = Counter(a for _, _, a in schedule.actions())
    for name, ticks in every_ticks(schedule):
        assert Counter(a for row in ticks.cells for cell in row for a in parts(cell)) == wanted
        where = places(ticks)
        for action, makers in inputs(schedule).items():
            for maker, _ in makers:
                assert where[maker][1] < where[action][1], (name, maker, action)


@given(schedules())
def test_rows_keep_their_order(schedule):
    for name, ticks in every_ticks(schedule):
        for row, placed in zip(schedule.rows, ticks.cells, strict=True):
            before, after = ([a for cell in each for a in parts(cell)] for each in (row, placed))
            if name in KEEP_ORDER:
                assert after == before
            for forward in (True, False):
                assert [a for a in after if (a.kind is Kind.F) is forward] == [
                    a for a in before if (a.kind is Kind.F) is forward
                ]


@given(schedules())
def test_the_fewest_ticks_are_the_longest_path(schedule):
    makers = inputs(schedule)
    rows = [[parts(cell) for cell in row if cell is not None] for row in schedule.rows]
    depth = {}
    while any(cell[0] not in depth for row in rows for cell in row):
        for row in rows:
            for before, cell in zip(((), *row), row, strict=False):
                needs = [
                    *before,
                    *(maker for a in cell for maker, payload in makers[a] if payload is not None),
                ]
                if cell[0] not in depth and all(a in depth for a in needs):
                    depth |= dict.fromkeys(cell, 1 + max((depth[a] for a in needs), default=0))
    assert assign_ticks(schedule).num_ticks == max(depth.values(), default=0)


def test_a_table_that_waits_for_itself_has_no_program():
    broken = jp.Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1")
    with pytest.raises(
        jp.ScheduleError,
        match=r"deadlock.*device 0 is at 0B0 and waits for 1B0.*device 1 is at 1F1",
    ):
        plan_of(broken)


def test_turns_keep_kinds_apart():
    ticks = modulo_ticks(
        jp.schedules.build("interleaved_1f1b", devices=4, microbatches=8, chunks=2)
    )
    rows = ticks.cells
    kinds = [{a.kind for row in rows for a in parts(row[t])} for t in range(ticks.num_ticks)]
    assert ticks.period == 2
    assert set().union(*kinds[::2]) == {Kind.F}
    assert set().union(*kinds[1::2]) == {Kind.B}


def test_shifted_turns_put_neighbours_in_opposite_turns():
    ticks = modulo_ticks(jp.schedules.build("1f1b", devices=4, microbatches=8), shift=1)
    for device, row in enumerate(ticks.cells):
        for tick, cell in enumerate(row):
            assert cell is None or cell.kind is (Kind.F, Kind.B)[(tick - device) % 2]


def test_a_weight_gradient_shares_the_tick_of_the_forward_after_it():
    """Where a device's steady state is F, I, W, it has two ticks of three."""
    schedule = jp.schedules.build("zb_h1", devices=4, microbatches=16)
    fewest, joined = assign_ticks(schedule), joined_ticks(schedule)
    shared = [
        cell for row in joined.cells for cell in row if cell is not None and len(parts(cell)) == 2
    ]
    assert {part.kind for cell in shared for part in parts(cell)} == {Kind.F, Kind.W}
    assert len(shared) > 0.6 * schedule.num_devices * schedule.num_microbatches
    assert joined.num_ticks < 0.8 * fewest.num_ticks


@pytest.mark.parametrize("name", ["zb_1p", "zb_h1", "interleaved_zb"])
def test_a_weight_gradient_is_one_block_with_a_forward_whose_collectives_it_hides(name):
    schedule = jp.schedules.build(name, devices=4, microbatches=16)
    apart, together = plan_of(schedule), plan_of(schedule, as_one=True)
    assert not apart.program().pairs.any()
    program = together.program()
    weights = program.ticks.backward.kind == Kind.W
    assert (program.pairs & weights).sum() == 0.75 * weights.sum()
    # the W awaits the input of the F: a forward's time for each device but the first
    assert (apart.makespan, together.makespan) == (simulate(schedule).makespan, apart.makespan + 3)


def test_where_nothing_is_hidden_a_weight_gradient_is_a_block_of_its_own():
    schedule = jp.schedules.build("zb_h1", devices=4, microbatches=16)
    for costs in (Costs(), Costs(overlap=2.5)):
        plan = plan_of(schedule, costs=costs, as_one=True, overheads=NO_OVERHEADS)
        assert plan.program().pairs.any() == (costs.overlap is not None)


def test_without_weight_gradients_nothing_shares_a_tick():
    schedule = jp.schedules.build("interleaved_1f1b", devices=4, microbatches=8, chunks=2)
    assert not followed(schedule, W_THEN_F).any()
    assert np.array_equal(joined_ticks(schedule).when, assign_ticks(schedule).when)
