"""What holds for every valid table: the encoding, the run order, the grid, and what costs can and
cannot change.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from strategies import random_schedule, randoms, schedules

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Overlap, Schedule, Transfers
from jaxpipe.table.kinds import parts
from jaxpipe.table.schedule import grid
from jaxpipe.table.text import MARK


def test_random_tables_are_of_every_sort():
    """The strategy that other tests rely on does make what it says."""
    tables = [random_schedule(random.Random(seed), recompute=True) for seed in range(200)]
    cells = [cell for s in tables for row in s.rows for cell in row]
    assert {a.kind for c in cells for a in parts(c)} == {Kind.F, Kind.B, Kind.I, Kind.W, Kind.R}
    assert any(c is None for c in cells)
    pairs = {c.backward.kind for c in cells if isinstance(c, Overlap)}
    assert pairs == {Kind.B, Kind.I}
    assert any(s.placement.is_bidirectional for s in tables)
    assert any(s.forward_only for s in tables)
    assert any(not row for s in tables for row in s.rows)
    assert {s.num_devices for s in tables} == {1, 2, 3, 4}
    assert any(
        a == b
        for s in tables
        for a, b in zip(s.stage_to_device, s.stage_to_device[1:], strict=False)
    )
    mixed = [{a.kind for row in s.rows for c in row for a in parts(c)} for s in tables]
    assert any({Kind.B, Kind.I} <= kinds for kinds in mixed)
    recomputed = [sum(a.kind is Kind.R for _, _, a in s.actions()) for s in tables]
    assert {n == 0 for n in recomputed} == {True, False}
    assert any(
        n == s.num_stages * s.num_microbatches for n, s in zip(recomputed, tables, strict=True)
    )
    assert any(
        0 < n < s.num_stages * s.num_microbatches for n, s in zip(recomputed, tables, strict=True)
    )
    assert not any(
        a.kind is Kind.R
        for seed in range(50)
        for _, _, a in random_schedule(random.Random(seed)).actions()
    )


def test_the_same_seed_makes_the_same_table():
    assert random_schedule(random.Random(7)) == random_schedule(random.Random(7))


@given(schedules(recompute=True))
def test_the_encoding_numbers_the_actions_in_order(schedule):
    table = schedule.encoded
    assert [(d, p, a) for d, p, a in schedule.actions()] == [
        (*table.cell_of(i), table.action(i)) for i in range(table.num_actions)
    ]
    assert [table.text(i) for i in range(table.num_actions)] == [
        str(a) for _, _, a in schedule.actions()
    ]
    for i in range(table.num_actions):
        stage, kind, m = table.action(i)
        assert table.at[kind, stage, m] == i
    for d, row in enumerate(schedule.rows):
        assert table.first[d + 1] - table.first[d] == sum(len(parts(c)) for c in row)


@given(schedules(recompute=True))
def test_the_producer_of_each_action(schedule):
    table = schedule.encoded
    for i in range(table.num_actions):
        stage, kind, m = table.action(i)
        expected: set[Action] = set()
        if kind is Kind.F and stage > 0:
            expected = {Action(stage - 1, Kind.F, m)}
        elif kind in (Kind.B, Kind.I) and stage < schedule.num_stages - 1:
            expected = {Action(stage + 1, Kind.B, m), Action(stage + 1, Kind.I, m)}
        producer = int(table.producer[i])
        assert (producer >= 0) == bool(expected)
        assert producer < 0 or table.action(producer) in expected


@given(randoms())
def test_a_run_order_keeps_rows_and_waits(rng):
    schedule = random_schedule(rng, recompute=True)
    mode = Transfers.ASYNC
    if rng.random() < 0.7:
        schedule, mode = jp.add_transfers(schedule), rng.choice(list(Transfers))
    run = schedule.run_order(mode)
    assert run.cycles == ()
    place = {number: k for k, number in enumerate(run.order)}
    table = schedule.encoded
    assert sorted(place) == list(range(table.num_actions))
    for d in range(schedule.num_devices):
        row = range(table.first[d], table.first[d + 1])
        assert [place[i] for i in row] == sorted(place[i] for i in row)
    for i in range(table.num_actions):
        if not schedule.has_transfers or table.kind[i] > Kind.W:
            producer = int(table.producer[i])
            assert producer < 0 or place[producer] < place[i]


@given(schedules(recompute=True))
def test_idle_cells_change_no_number(schedule):
    bare = schedule.with_rows([[c for c in row if c is not None] for row in schedule.rows])
    assert dict(jp.simulate(bare).start.items()) == dict(jp.simulate(schedule).start.items())
    assert jp.add_transfers(bare) == jp.add_transfers(schedule)


@given(randoms())
def test_dearer_actions_never_make_a_table_shorter(rng):
    schedule = random_schedule(rng, recompute=True)
    cheap = [rng.randint(0, 4) for _ in range(4)]
    dear = [c + rng.randint(0, 3) for c in cheap]
    assert (
        jp.simulate(schedule, Costs(*cheap)).makespan
        <= jp.simulate(schedule, Costs(*dear)).makespan
    )
    assert (
        jp.simulate(schedule, Costs(*(3 * c for c in cheap))).makespan
        == 3 * jp.simulate(schedule, Costs(*cheap)).makespan
    )


@given(schedules(recompute=True))
def test_the_makespan_is_at_least_the_busiest_device_and_the_longest_microbatch(schedule):
    t = jp.simulate(schedule)
    assert t.makespan >= max(t.busy)
    through = 1 if schedule.forward_only else 2
    assert t.makespan >= schedule.num_stages * through
    assert max(t.peak_activations) <= schedule.num_microbatches * schedule.num_chunks


@given(schedules(recompute=True))
def test_the_peak_is_a_cap_that_holds_and_one_less_does_not(schedule):
    peaks = jp.simulate(schedule).peak_activations
    assert jp.check(schedule, max_activations=peaks) is schedule
    tight = [max(0, peak - 1) for peak in peaks]
    with pytest.raises(jp.ScheduleError) as caught:
        jp.check(schedule, max_activations=tight)
    assert {v.device for v in caught.value.violations} == {
        d for d, peak in enumerate(peaks) if peak
    }
    assert {v.rule for v in caught.value.violations} == {"memory"}


@given(schedules(recompute=True))
def test_the_grid_draws_every_cell_once_and_no_input_late(schedule):
    lines = str(schedule).splitlines()
    assert len(lines) == schedule.num_devices + 1
    step_of: dict[str, int] = {}
    header = lines[0]
    starts = [i for i, c in enumerate(header) if c.isdigit() and not header[i - 1].isdigit()]
    for line, row in zip(lines[1:], schedule.rows, strict=True):
        drawn = line.split("|", 1)[1].split()
        assert drawn == [str(c) for c in row if c is not None]
        for step, start in enumerate(starts):
            text = line[start : starts[step + 1] if step + 1 < len(starts) else None].strip()
            for action in parts(jp.table.parse_cell(text)):
                step_of[str(action)] = step
    table = schedule.encoded
    for i in range(table.num_actions):
        producer = int(table.producer[i])
        assert producer < 0 or step_of[table.text(producer)] < step_of[table.text(i)]


def test_a_wide_grid_is_cut_to_its_marks():
    schedule = jp.schedules.build("gpipe", devices=3, microbatches=100)
    text = grid(schedule, marked={(1, 150)}, most_columns=30)
    lines = text.splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) < 200
    assert lines[2].endswith(MARK)
    assert f"[{schedule.rows[1][150]}]" in lines[2]
    assert sum(MARK in line for line in lines) == 1
    assert lines[0].count("...") == 2
    assert "..." not in grid(schedule)


def test_a_table_that_cannot_run_is_drawn_by_position():
    lines = str(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")).splitlines()
    drawn = [line.split("|")[1].split() for line in lines]
    assert drawn == [
        ["0", "1", "2", "3"],
        ["0F0", "0B0", "0F1", "0B1"],
        ["1F1", "1B1", "1F0", "1B0"],
    ]
