"""`spread_last`: an L on every device for every microbatch, where nobody waits; and what the simulator makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import random_schedule, randoms

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Schedule
from jaxpipe.table.action import parts


def read(text: str) -> Schedule:
    return Schedule.from_csv(text)


def with_stages(rng) -> Schedule:
    """A random table in which every device may have a share."""
    while True:
        schedule = random_schedule(rng, recompute=True)
        if schedule.num_stages >= schedule.num_devices:
            return schedule


def naive_times(schedule: Schedule, length: float, hop: float) -> dict[Action, float]:
    """When each action ends if F, B, I, W and R take 1, an L `length` and a transfer `hop`: tried again until nothing moves."""
    ends: dict[Action, float] = {}
    last, many = schedule.num_stages - 1, schedule.num_devices > 1
    place = {a: d for d, _, a in schedule.actions()}
    head, free = [0] * schedule.num_devices, [0.0] * schedule.num_devices

    def after(action: Action, device: int) -> float | None:
        end = ends.get(action)
        return None if end is None else end + (hop if place[action] != device else 0)

    def ready(device: int, cell) -> float | None:
        found = [free[device]]
        for stage, kind, m in parts(cell):
            if kind is Kind.F and stage:
                found.append(after(Action(stage - 1, Kind.F, m), device))
            if kind in (Kind.B, Kind.I) and stage < last:
                source = Action(stage + 1, Kind.B, m)
                found.append(after(source if source in place else source._replace(kind=Kind.I), device))
            if kind in (Kind.B, Kind.I) and stage == last:
                found.append(None if Action(0, Kind.L, m) not in ends else ends[Action(0, Kind.L, m)] + (hop if many else 0))
        return None if None in found else max(found)

    while any(h < len(row) for h, row in zip(head, schedule.rows, strict=True)):
        heads = [row[h] if h < len(row) else None for h, row in zip(head, schedule.rows, strict=True)]
        shares = {cell.microbatch for cell in heads if isinstance(cell, Action) and cell.kind is Kind.L}
        if len(shares) == 1 and all(isinstance(cell, Action) and cell.kind is Kind.L for cell in heads):
            (m,) = shares
            begin = max(*free, ends[Action(last, Kind.F, m)] + (hop if many else 0))
            for d in range(schedule.num_devices):
                ends[Action(d, Kind.L, m)] = free[d] = begin + length
                head[d] += 1
            continue
        for d, cell in enumerate(heads):
            if cell is None or (isinstance(cell, Action) and cell.kind is Kind.L):
                head[d] += cell is None and head[d] < len(schedule.rows[d])
                continue
            start = ready(d, cell)
            if start is not None:
                free[d] = start + len(parts(cell))
                ends.update(dict.fromkeys(parts(cell), free[d]))
                head[d] += 1
    return ends


@given(randoms())
def test_the_simulator_lets_all_devices_do_their_shares_at_once(rng):
    length, hop = rng.choice((0.5, 3)), rng.choice((0, 0.25))
    costs = Costs(backward=1, last=length, transfer=hop)
    table = jp.spread_last(with_stages(rng), costs=costs)
    timeline = jp.simulate(table, costs)
    texts = [str(action) for _, _, action in table.actions()]
    assert {str(a): end for a, end in naive_times(table, length, hop).items()} == {text: timeline.end[text] for text in texts}
    assert timeline.end[timeline.critical_path[-1]] == timeline.makespan


def test_a_meeting_waits_for_the_last_device_and_the_transfer_and_the_backward_for_it():
    table = read("0F0,0F1,0L0,0B0,0L1,0B1\n1F0,1L0,1B0,1F1,1L1,1B1\n")
    t = jp.simulate(table, Costs(forward=[3, 1], last=2, transfer=0.5))
    # 1F0 ends at 4.5, its output is everywhere at 5; device 0 is free at 6.
    assert (t.start["0L0"], t.start["1L0"], t.end["1L0"], t.start["1B0"]) == (6, 6, 8, 8.5)
    assert t.critical_path[:4] == ("0F0", "0F1", "1L0", "1B0")
    assert "1L0" in str(jp.simulate_steps(table))


@pytest.mark.parametrize("name", jp.schedules.names())
def test_no_schedule_of_the_catalogue_waits_at_its_meetings(name):
    """The step is that of the model without `last`, and all L: the share that every device must do anyway.

    Allowed is what the issue asks for, 3 %, but for the pairs of dualpipev, which last twice as long as an F.
    """
    plain = jp.schedules.build(name, devices=4, microbatches=16, chunks=jp.schedules.describe(name).chunks.natural)
    spread = jp.spread_last(plain, costs=Costs(last=0.5))
    most = 1.06 if name == "dualpipev" else 1.03
    assert jp.simulate(spread, Costs(last=0.5)).makespan <= most * jp.simulate(plain).makespan + 0.5 * 16
    assert jp.simulate(spread).peak_activations == jp.simulate(plain).peak_activations
    assert jp.check(spread) is spread
    assert Schedule.from_csv(spread.to_csv()).rows == spread.rows
    assert all(cell.stage == d for d, row in enumerate(spread.rows) for cell in row if isinstance(cell, Action) and cell.kind is Kind.L)


def test_a_backward_that_would_keep_others_waiting_is_split_unless_told_not_to():
    plain = jp.schedules.build("1f1b", devices=4, microbatches=16)
    kinds = [{a.kind for _, _, a in jp.spread_last(plain, split=split).actions()} for split in (None, True, False)]
    assert kinds == [{Kind.F, Kind.I, Kind.W, Kind.L}] * 2 + [{Kind.F, Kind.B, Kind.L}]
    whole, apart = (jp.simulate(jp.spread_last(plain, split=split)).makespan for split in (False, True))
    assert whole > 1.15 * apart
    alone = jp.schedules.build("gpipe", devices=4, microbatches=16)
    assert {a.kind for _, _, a in jp.spread_last(alone).actions()} == {Kind.F, Kind.B, Kind.L}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (jp.add_transfers(jp.schedules.build("gpipe", devices=2, microbatches=2)), "SEND and RECV"),
        (read("0F0,0B0\n\n"), "1 stages on 2 devices"),
        (read("0B0,0F0\n"), "before"),
    ],
)
def test_what_cannot_be_spread_is_refused(table, message):
    with pytest.raises(jp.ScheduleError, match=message):
        jp.spread_last(table)


def test_a_table_with_l_has_no_transfers():
    with pytest.raises(jp.ScheduleError, match="remove_spread"):
        jp.add_transfers(read("0F0,0L0,0B0\n1F0,1L0,1B0\n"))
