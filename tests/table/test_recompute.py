"""`add_recompute`: an R before each backward, early only where that makes the table shorter, never
more ahead than asked.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from strategies import random_schedule, randoms, schedules
from test_simulate import random_costs

import jaxpipe as jp
from jaxpipe import Action, Costs, Kind, Schedule
from jaxpipe.table.kinds import parts

# Device 1 waits for its second microbatch while device 0 runs a long stage: room for a
# recomputation.
WAITS = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"


def read(text: str) -> Schedule:
    return Schedule.from_csv(text)


def most_ahead(schedule: Schedule) -> int:
    """The most R of a device that are done and not used yet while another action runs."""
    most = 0
    for row in schedule.rows:
        done: set[tuple[int, int]] = set()
        for cell in row:
            for action in parts(cell):
                if action.kind in (Kind.B, Kind.I):
                    done.discard(action[::2])
            most = max(most, len(done) if cell is not None else 0)
            if isinstance(cell, Action) and cell.kind is Kind.R:
                done.add(action[::2])
    return most


def test_the_count_of_what_is_ahead():
    assert most_ahead(read("0F0,0F1,0R0,0B0,0R1,0B1\n")) == 0
    assert most_ahead(read("0F0,0F1,0R0,0R1,0B0,0B1\n")) == 1
    assert most_ahead(read("0F0,0R0,0F1,0R1,0F2,0B0,0R2,0B1,0B2\n")) == 2


def test_an_r_goes_into_a_bubble_that_makes_the_table_shorter():
    costs = Costs(forward=[4, 1], recompute=[4, 2])
    latest = jp.add_recompute(read(WAITS), lead=0, costs=costs)
    assert latest.to_csv() == "0F0,0F1,0R1,0B1,0R0,0B0\n1F0,1F1,1R1,1B1,1R0,1B0\n"
    early = jp.add_recompute(read(WAITS), costs=costs)
    # Microbatch 1 comes first in the backward, but its forward is not done in the bubble: R keep
    # the order of their backwards.
    assert early == latest
    in_order = read("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    early = jp.add_recompute(in_order, costs=costs)
    assert str(early.rows[1][1]) == "1R0"
    # Without 1R0 in the bubble from 5 to 8, 1B0 ends at 13; with it there at 11, and everything
    # after it two earlier.
    before, after = (
        jp.simulate(t, costs) for t in (jp.add_recompute(in_order, lead=0, costs=costs), early)
    )
    assert (before.end["1B0"], after.end["1B0"]) == (13, 11)
    assert after.makespan < before.makespan


def test_a_bubble_that_saves_nothing_is_left_alone():
    """In 1F1B an R right before its B fills the wait for the gradient as it is, and holds the
    least.
    """
    schedule = jp.schedules.build("1f1b", devices=4, microbatches=8)
    assert jp.add_recompute(schedule, lead=None) == jp.add_recompute(schedule, lead=0)
    t = jp.simulate(jp.add_recompute(schedule), Costs(checkpoint=0.25))
    assert t.peak_activations == (1, 1, 1, 1)
    assert t.peak_memory[0] == 1 + 3 * 0.25
    # All of device 0's 8 recomputations but those of the steady state run in waits: the step grows
    # by less than they take.
    assert t.makespan < jp.simulate(schedule, Costs(input_grad=2)).makespan


def test_only_the_stages_asked_for():
    table = jp.add_recompute(jp.schedules.build("1f1b", devices=2, microbatches=2), stages=[0])
    assert table.to_csv() == "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n"
    whole = jp.add_recompute(table, stages=[1])
    assert {a[::2] for _, _, a in whole.actions() if a.kind is Kind.R} == {
        (s, m) for s in range(2) for m in range(2)
    }


def test_the_r_of_a_pair_stands_before_the_pair():
    table = jp.add_recompute(read("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"))
    assert ",".join(map(str, table.rows[1])) == "1F0,1R0,(1F1;1B0)OVERLAP_F_B,1R1,1B1"


@given(randoms())
@settings(max_examples=10)
def test_the_fewest_are_recomputed_that_make_room(rng):
    """Of all choices of R on a device, none smaller holds as little."""
    schedule = random_schedule(rng)
    if schedule.forward_only:
        return
    peaks, least = (
        max(jp.simulate(table).peak_activations)
        for table in (schedule, jp.add_recompute(schedule, lead=0))
    )
    most = rng.randint(least, max(least, peaks - 1))
    table = jp.add_recompute(schedule, lead=0, max_activations=most)
    assert max(jp.simulate(table).peak_activations) <= most
    assert (
        max(jp.simulate(jp.add_recompute(schedule, lead=1, max_activations=most)).peak_activations)
        <= most
    )
    for row in jp.transforms.remove_recompute(schedule).rows:
        passes = sorted({action[::2] for cell in row for action in parts(cell)})
        taken = sum(
            action[::2] in passes for _, _, action in table.actions() if action.kind is Kind.R
        )
        for fewer in (
            itertools.combinations(passes, taken - 1) if taken > 0 and len(passes) < 10 else ()
        ):
            assert most_held(row, fewer) > most


def most_held(row, recomputed):
    """The most activations that a row holds at once."""
    acts = [(at, action) for at, cell in enumerate(row) for action in parts(cell)]
    spans = []
    for each in {action[::2] for _, action in acts}:
        at = {action.kind: at for at, action in acts if action[::2] == each}
        use = at.get(Kind.B, at.get(Kind.I))
        spans.append((use if each in recomputed else at[Kind.F], at.get(Kind.W, use)))
    return max(sum(begin <= now <= end for begin, end in spans) for now in range(len(row)))


def test_what_cannot_be_recomputed_is_refused():
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    for bad, options, says in (
        (jp.add_transfers(schedule), {}, "remove_transfers"),
        (
            jp.schedules.build("1f1b", devices=2, microbatches=2, forward_only=True),
            {},
            "no backward",
        ),
        (schedule, {"stages": [0, 2, -1]}, r"stages=\[-1, 2\] do not exist; stages go from 0 to 1"),
        (schedule, {"lead": -1}, "lead=-1 must be 0 or more"),
        (schedule, {"max_activations": 0}, "max_activations=0 must be at least 1"),
        (
            schedule,
            {"max_activations": 2, "lead": None},
            "lead=None has no bound, so max_activations=2 cannot be kept",
        ),
        (read("0F0,0B0\n1B0,1F0\n"), {}, "1B0 comes before 1F0"),
    ):
        with pytest.raises(jp.ScheduleError, match=says):
            jp.add_recompute(bad, **options)
    with pytest.raises(jp.CostError, match="3 entries"):
        jp.add_recompute(schedule, costs=Costs(forward=[1, 2, 3]))


@given(randoms())
def test_a_valid_table_with_every_r_and_nothing_else_changed(rng):
    schedule = random_schedule(rng, recompute=True)
    if schedule.forward_only:
        return
    costs = random_costs(rng, schedule.num_stages)
    lead = rng.choice((0, 1, 2, None))
    stages = rng.sample(range(schedule.num_stages), rng.randint(0, schedule.num_stages))
    table = jp.add_recompute(schedule, stages=stages, lead=lead, costs=costs)
    assert jp.check(table) is table
    had = {a[::2] for _, _, a in schedule.actions() if a.kind is Kind.R}
    asked = {(s, m) for s in stages for m in range(schedule.num_microbatches)}
    assert {a[::2] for _, _, a in table.actions() if a.kind is Kind.R} == had | asked
    bare = jp.transforms.remove_recompute(schedule)
    assert jp.transforms.remove_recompute(table).rows == tuple(
        tuple(c for c in row if c is not None) for row in bare.rows
    )
    assert lead is None or most_ahead(table) <= lead
    latest = jp.add_recompute(schedule, stages=stages, lead=0, costs=costs)
    assert jp.simulate(table, costs).makespan <= jp.simulate(latest, costs).makespan
    assert jp.add_recompute(table, stages=stages, lead=lead, costs=costs) == table


def test_bubbles_do_make_some_tables_shorter():
    """What the property above compares is not always equal."""
    rng = random.Random(0)
    shorter = 0
    for _ in range(40):
        schedule = random_schedule(rng)
        if not schedule.forward_only:
            costs = random_costs(rng, schedule.num_stages)
            early, late = (
                jp.simulate(jp.add_recompute(schedule, lead=lead, costs=costs), costs)
                for lead in (None, 0)
            )
            shorter += early.makespan < late.makespan
    assert shorter > 5


@given(schedules(recompute=True))
def test_other_transforms_keep_r_where_it_is(schedule):
    def order(table: Schedule) -> list[list[str]]:
        """Each row's F and R, and that its backwards are there."""
        return [
            [str(a) for c in row for a in parts(c) if a.kind in (Kind.F, Kind.R)]
            for row in table.rows
        ]

    for change in (jp.split_backward, jp.merge_backward, jp.add_transfers):
        table = jp.check(change(schedule))
        assert order(table) == order(schedule)


def test_an_evaluation_recomputes_nothing():
    from jaxpipe.transforms.rewrites import forward_only

    table = forward_only(jp.add_recompute(jp.schedules.build("1f1b", devices=2, microbatches=2)))
    assert table.to_csv() == "0F0,0F1\n1F0,1F1\n"


def test_the_cap_counts_activations_from_r_on():
    table = read("0F0,0F1,0R0,0B0,0R1,0B1\n")
    assert jp.check(table, max_activations=1) is table
    with pytest.raises(jp.ScheduleError, match="holds 1 while 0R0 runs"):
        jp.check(table, max_activations=0)


def test_pictures_name_and_colour_it():
    t = jp.simulate(jp.add_recompute(jp.schedules.build("1f1b", devices=2, microbatches=2)))
    svg = jp.render.to_svg(t)
    assert "R  recompute" in svg
    assert "0R1: recompute of stage 0, microbatch 1" in svg
    assert "R 1" in svg, "its cost, in the heading"
    assert '"name":"0R1"' in jp.render.to_trace(t)
    assert "recompute" in jp.render.to_html(t)
