"""Every rule of `check`: a good table passes; break one thing, and that rule (and only what follows
from it) is reported.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from naive import deferred, is_complete, is_well_placed, runs, runs_with_transfers
from strategies import random_schedule, randoms, schedules

import jaxpipe as jp
from jaxpipe import Action, Kind, Overlap, Placement, Schedule, ScheduleError, Transfers
from jaxpipe.table.text import MARK

Rows = list[list[object]]

# 1F1B on two devices with three microbatches, the same with transfers, with a split backward, a V
# of two devices, and DualPipe's placement.
PLAIN = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
ALONE = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
SENT = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n"
)
SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
VEE = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
BOTH_WAYS = "0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n"
PAIRED = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
AGAIN = "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1B1\n"
SPREAD = "0F0,0F1,0L0,0B0,0L1,0B1\n1F0,1L0,1B0,1F1,1L1,1B1\n"
ENDS = "0E0,0F0,0L0,0E1,0B0,0F1,0L1,0G0,0B1,0G1\n1E0,1F0,1L0,1E1,1B0,1F1,1L1,1G0,1B1,1G1\n"
GATHERED = (
    "0UNSHARD,0F0,0RESHARD,2UNSHARD,2F0,2B0,2REDUCE_GRAD,2RESHARD,0UNSHARD,0I0,0W0,0REDUCE_GRAD,"
    "0RESHARD\n1UNSHARD,1F0,1B0,1REDUCE_GRAD,1RESHARD\n"
)
GOOD = {
    "gathered": GATHERED,
    "reduced alone": "0F0,0B0,0REDUCE_GRAD,0F1,0B1,0REDUCE_GRAD\n",
    "gathered forwards": "0UNSHARD,0F0,0F1,0RESHARD\n",
    "spread": SPREAD,
    "both ends spread": ENDS,
    "again": AGAIN,
    "plain": PLAIN,
    "sent": SENT,
    "split": SPLIT,
    "vee": VEE,
    "both ways": BOTH_WAYS,
    "paired": PAIRED,
    "forward": "0F0,0F1\n1F0,1F1\n",
}


def faults(schedule: Schedule, **options) -> list[jp.errors.Violation]:
    with pytest.raises(ScheduleError) as caught:
        jp.check(schedule, **options)
    assert caught.value.violations
    return list(caught.value.violations)


def broken(text: str, change: Callable[[Rows], object]) -> Schedule:
    """A good table with one change; placement and M stay those of the good one."""
    good = Schedule.from_csv(text)
    rows = [list(row) for row in good.rows]
    change(rows)
    return good.with_rows(rows)


def put(device: int, position: int, cell: str) -> Callable[[Rows], object]:
    return lambda rows: rows[device].__setitem__(position, jp.table.parse_cell(cell))


def insert(device: int, position: int, cell: str) -> Callable[[Rows], object]:
    return lambda rows: rows[device].insert(position, jp.table.parse_cell(cell))


def drop(device: int, position: int) -> Callable[[Rows], object]:
    return lambda rows: rows[device].pop(position)


def keep(kinds: str) -> Callable[[Rows], object]:
    return lambda rows: [
        row.__setitem__(slice(None), [cell for cell in row if cell.kind.name in kinds])
        for row in rows
    ]


def swap(device: int, one: int, other: int) -> Callable[[Rows], object]:
    def change(rows: Rows) -> None:
        row = rows[device]
        row[one], row[other] = row[other], row[one]

    return change


def move(source: tuple[int, int], target: tuple[int, int]) -> Callable[[Rows], object]:
    return lambda rows: rows[target[0]].insert(target[1], rows[source[0]].pop(source[1]))


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_good_tables_pass(text):
    schedule = Schedule.from_csv(text)
    assert jp.check(schedule) is schedule


# table, change, the rules that are then broken, and a cell that must be pointed at (None: no cell
# is at fault)
MUTATIONS = {
    "range: a microbatch too high": (PLAIN, insert(1, 6, "1F3"), {"range"}, (1, 6)),
    "range: a stage too high": (PLAIN, insert(0, 0, "2F0"), {"range"}, (0, 0)),
    "range: a negative microbatch": (
        PLAIN,
        lambda rows: rows[0].append(Action(0, Kind.F, -1)),
        {"range"},
        (0, 6),
    ),
    "range: a negative stage": (
        PLAIN,
        lambda rows: rows[0].append(Action(-1, Kind.B, 0)),
        {"range"},
        (0, 6),
    ),
    "duplicate: an F twice": (PLAIN, insert(0, 1, "0F0"), {"duplicate"}, (0, 1)),
    "duplicate: a B on two devices": (
        BOTH_WAYS,
        insert(1, 4, "0B0"),
        {"duplicate", "placement"},
        (1, 4),
    ),
    "duplicate: an R twice": (AGAIN, insert(0, 3, "0R0"), {"duplicate"}, (0, 3)),
    "duplicate: a SEND twice": (SENT, insert(0, 2, "0SEND_F0"), {"duplicate"}, (0, 2)),
    "completeness: no F": ("0F0,0F1\n1F0,1F1\n", drop(1, 1), {"completeness"}, None),
    "completeness: no B": (PLAIN, drop(0, 5), {"completeness"}, (0, 3)),
    "completeness: I without W": (SPLIT, drop(1, 4), {"completeness"}, (1, 1)),
    "completeness: W without I": (SPLIT, drop(0, 4), {"completeness"}, (0, 4)),
    "completeness: B besides I and W": (SPLIT, insert(0, 6, "0B1"), {"completeness"}, (0, 6)),
    "completeness: B besides W": (PLAIN, insert(0, 6, "0W1"), {"completeness"}, (0, 6)),
    "completeness: R without F": (AGAIN, drop(0, 1), {"completeness"}, None),
    "completeness: R without B": (AGAIN, drop(0, 5), {"completeness"}, (0, 1)),
    "completeness: R and no backward": (
        "0F0,0F1\n1F0,1F1\n",
        insert(0, 2, "0R1"),
        {"completeness"},
        (0, 1),
    ),
    "completeness: nothing at all": (
        PLAIN,
        lambda rows: [row.clear() for row in rows],
        {"completeness"},
        None,
    ),
    "order: B before F": (PLAIN, swap(1, 4, 5), {"order"}, (1, 4)),
    "order: I before F": (SPLIT, swap(1, 2, 3), {"order"}, (1, 2)),
    "order: W before I": (SPLIT, swap(0, 4, 5), {"order"}, (0, 4)),
    "order: R before F": (AGAIN, move((0, 4), (0, 1)), {"order"}, (0, 1)),
    "order: B before R": (AGAIN, swap(0, 2, 3), {"order"}, (0, 2)),
    "order: I before R": (AGAIN.replace("1B0", "1I0,1W0"), swap(1, 1, 2), {"order"}, (1, 1)),
    "order: a stage before the one that hands over to it": (VEE, swap(1, 2, 3), {"order"}, (1, 2)),
    "placement: a stage elsewhere": (PLAIN, move((1, 5), (0, 5)), {"placement"}, (0, 5)),
    "placement: B not where its F was": (BOTH_WAYS, move((0, 3), (1, 4)), {"placement"}, (1, 4)),
    "placement: W not where its F was": (
        BOTH_WAYS.replace("1B0", "1I0,1W0"),
        move((1, 2), (0, 4)),
        {"placement"},
        (0, 4),
    ),
    "placement: R not where its F was": (
        BOTH_WAYS.replace("1B1", "1R1,1B1"),
        move((0, 2), (1, 0)),
        {"placement"},
        (1, 0),
    ),
    "placement: R elsewhere": (AGAIN, move((1, 1), (0, 3)), {"placement"}, (0, 3)),
    "overlap: an F with its own B": (
        PLAIN,
        lambda rows: rows[1].__setitem__(slice(4, 6), [pair("1F2", "1B2")]),
        {"overlap"},
        (1, 4),
    ),
    "overlap: an F with a W": (
        SPLIT,
        lambda rows: rows[1].__setitem__(
            slice(2, 5), [jp.table.parse_cell("1I1"), pair("1F1", "1W0")]
        ),
        {"overlap", "order"},
        (1, 3),
    ),
    "overlap: an F with an R": (
        AGAIN,
        lambda rows: rows[1].__setitem__(
            slice(1, 4), [pair("1F1", "1R0"), jp.table.parse_cell("1B0")]
        ),
        {"overlap"},
        (1, 1),
    ),
    "overlap: backward first": (
        PAIRED,
        lambda rows: rows[1].__setitem__(1, pair("1B0", "1F1")),
        {"overlap"},
        (1, 1),
    ),
    "transfer: no SEND": (SENT, drop(0, 1), {"transfer"}, (1, 1)),
    "transfer: no RECV": (SENT, drop(1, 3), {"transfer"}, (1, 4)),
    "transfer: SEND before its producer": (SENT, swap(0, 0, 1), {"transfer"}, (0, 0)),
    "transfer: RECV after its consumer": (SENT, swap(1, 0, 1), {"transfer"}, (1, 1)),
    "transfer: SEND on another device": (SENT, move((0, 1), (1, 0)), {"transfer"}, (1, 0)),
    "transfer: RECV on another device": (SENT, move((1, 0), (0, 8)), {"transfer"}, (0, 8)),
    "transfer: one on the device itself": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,2F0,2B0,1B0,1SEND_B0\n",
        insert(1, 2, "1SEND_F0"),
        {"transfer"},
        (1, 2),
    ),
    "completeness: an L is missing": (SPREAD, drop(0, 2), {"completeness"}, (1, 1)),
    "duplicate: an L twice": (SPREAD, insert(0, 3, "0L0"), {"duplicate"}, (0, 3)),
    "placement: an L of another device": (SPREAD, move((1, 1), (0, 2)), {"placement"}, (0, 2)),
    "order: L before the last F": (SPREAD, swap(1, 0, 1), {"order"}, (1, 0)),
    "order: the last B before L": (SPREAD, swap(1, 1, 2), {"order"}, (1, 1)),
    "deadlock: L in another order": (SPREAD, swap(0, 2, 4), {"deadlock"}, (0, 2)),
    "deadlock: L before what another device needs for its own": (
        SPREAD,
        move((0, 4), (0, 1)),
        {"deadlock"},
        (0, 1),
    ),
    "gather: no U before an F": (GATHERED, drop(1, 0), {"gather"}, (1, 0)),
    "gather: no U before an I": (GATHERED, drop(0, 8), {"gather"}, (0, 8)),
    "gather: a W after the D": (GATHERED, move((0, 10), (0, 12)), {"gather", "reduce"}, (0, 12)),
    "gather: a B after the D": (GATHERED, move((0, 5), (0, 7)), {"gather", "reduce"}, (0, 7)),
    "gather: a U twice": (GATHERED, insert(1, 1, "1U0"), {"gather"}, (1, 0)),
    "gather: no D": (GATHERED, drop(0, 12), {"gather"}, (0, 8)),
    "gather: a D twice": (GATHERED, insert(0, 13, "0D0"), {"gather"}, (0, 13)),
    "gather: a U that nothing uses": (
        GATHERED,
        lambda rows: rows[0].extend(map(jp.table.parse_action, ("2U0", "2D0"))),
        {"gather"},
        (0, 13),
    ),
    "gather: the number of another run": (
        "0U0,0F0,0F1,0D0\n",
        put(0, 0, "0U1"),
        {"gather"},
        (0, 0),
    ),
    "placement: a U elsewhere": (GATHERED, move((1, 0), (0, 1)), {"placement", "gather"}, (0, 1)),
    "range: a U too high": (GATHERED, put(1, 0, "1U1"), {"range", "gather"}, (1, 0)),
    "reduce: no X": (GATHERED, drop(0, 11), {"reduce"}, (0, 10)),
    "reduce: X before the last W": (GATHERED, swap(0, 10, 11), {"reduce"}, (0, 11)),
    "reduce: X before the only B": (GATHERED, swap(1, 2, 3), {"reduce"}, (1, 3)),
    "reduce: X twice": (GATHERED, insert(1, 5, "1X0"), {"reduce"}, (1, 5)),
    "reduce: the number of another run": (
        "0F0,0F1,0B0,0B1,0X0\n",
        put(0, 4, "0X1"),
        {"reduce"},
        (0, 4),
    ),
    "completeness: an E is missing": (ENDS, drop(1, 0), {"completeness"}, (0, 0)),
    "completeness: no G at all": (ENDS, keep("EFLB"), {"completeness"}, (0, 0)),
    "completeness: no E at all": (ENDS, keep("FLBG"), {"completeness"}, (0, 5)),
    "placement: an E of another device": (ENDS, move((1, 0), (0, 1)), {"placement"}, (0, 1)),
    "order: the first F before E": (ENDS, swap(0, 0, 1), {"order"}, (0, 0)),
    "order: G before the first B": (ENDS, swap(0, 8, 9), {"order"}, (0, 8)),
    "deadlock: E in another order": (ENDS, swap(1, 0, 3), {"deadlock"}, (0, 0)),
    "deadlock: a forward too early": (ALONE, swap(1, 1, 2), {"deadlock"}, (0, 1)),
    "deadlock: a RECV before what its SEND waits for": (
        SENT,
        swap(0, 2, 4),
        {"deadlock", "transfer"},
        (0, 2),
    ),
    "deadlock: only where both sides wait": (SENT, swap(1, 3, 4), {"deadlock"}, (1, 3)),
}


def pair(forward: str, backward: str) -> Overlap:
    """A pair that the parser would refuse."""
    return Overlap(jp.table.parse_action(forward), jp.table.parse_action(backward))


@pytest.mark.parametrize(("text", "change", "rules", "cell"), MUTATIONS.values(), ids=MUTATIONS)
def test_each_rule_sees_its_break(text, change, rules, cell):
    jp.check(Schedule.from_csv(text))
    schedule = broken(text, change)
    found = faults(schedule)
    assert {v.rule for v in found} == rules, "\n".join(map(str, found))
    cells = {(v.device, v.position) for v in found} | {other for v in found for other in v.others}
    assert (cell or (None, None)) in cells, cells


def test_the_memory_cap_sees_its_break():
    schedule = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    assert jp.check(schedule, max_activations=3) is schedule
    assert jp.check(schedule, max_activations=[3, 1]) is schedule
    (fault,) = faults(schedule, max_activations=2)
    assert (fault.rule, fault.device, fault.position) == ("memory", 0, 2)
    assert "holds 3" in fault.message
    assert [v.device for v in faults(schedule, max_activations=[2, 0])] == [0, 1]
    (fault,) = faults(schedule, max_activations=[3])
    assert "1 entries for 2 devices" in fault.message


def test_a_table_without_a_row_is_refused_under_a_memory_cap_too():
    text = '{"format": "jaxpipe.schedule", "version": 1, "num_devices": 1, '
    text += '"num_microbatches": 1, "stage_to_device": [0]}'
    empty = Schedule.from_json(text)
    found = {v.rule for v in faults(empty, max_activations=1)}
    assert {"completeness", "placement"} <= found


def test_the_memory_cap_counts_until_w_or_until_i():
    schedule = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    assert jp.check(schedule, max_activations=1, release=jp.table.Release.INPUT_GRAD) is schedule
    (fault,) = faults(schedule, max_activations=1)
    assert fault.position == 2


def test_a_pair_holds_what_its_forward_makes_and_what_its_backward_needs():
    (fault,) = faults(Schedule.from_csv(PAIRED), max_activations=[2, 1])
    assert (fault.device, fault.position) == (1, 1)


def test_every_rule_that_the_docstring_names_has_a_mutation():
    named = re.search(r"The rules are named (.*?)\.", jp.check.__doc__, re.DOTALL)[1]
    elsewhere = {"memory", "slice", "reverse"}  # the last two: tests/schedules/test_slices.py
    tested = {name.split(":")[0] for name in MUTATIONS} | elsewhere
    assert set(re.findall(r"\w+", named)) - {"and"} == tested


def test_all_broken_rules_are_reported_at_once():
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1,0B1\n1F1,1B1,1B0,1F0,5F0,(1F1;1B1)OVERLAP_F_B\n")
    rules = {v.rule for v in faults(schedule)}
    assert rules == {"duplicate", "completeness", "order", "overlap", "deadlock"}


def test_the_message_shows_the_grid_with_the_cells_marked():
    with pytest.raises(ScheduleError) as caught:
        jp.check(broken(PLAIN, swap(1, 4, 5)))
    lines = str(caught.value).splitlines()
    assert lines[0] == "the schedule breaks 1 rule:"
    assert "1B2 comes before 1F2" in lines[1]
    assert "[1B2]" in lines[-1]
    assert "[1F2]" in lines[-1]
    assert lines[-1].endswith(MARK)
    assert lines[-2].startswith("device 0")
    assert MARK not in lines[-2]


def test_a_deadlock_is_told_as_the_cycle_of_who_waits_for_whom():
    (fault,) = faults(broken(ALONE, swap(1, 1, 2)))
    assert "device 0 is at 0B0 and waits for 1B0, which comes later on device 1" in fault.message
    assert "device 1 is at 1F1 and waits for 0F1, which comes later on device 0" in fault.message
    assert {(fault.device, fault.position), *fault.others} == {(0, 1), (1, 2), (1, 1), (0, 2)}


def test_every_deadlock_is_told():
    # Two pairs of devices, each with crossed forwards, in one table.
    rows = Schedule.from_csv("0F0,0F1\n1F1,1F0,2F0,2F1\n3F1,3F0\n").rows
    schedule = Schedule.from_rows(rows)
    jp.check(schedule)  # orders differ, but nobody waits in a circle
    crossed = Schedule.from_csv(
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0,2F1,2B1,2F0,2B0\n3F0,3B0,3F1,3B1\n"
    )
    assert sum(v.rule == "deadlock" for v in faults(crossed)) >= 2


def test_a_rendezvous_deadlock_says_so_and_a_buffered_one_does_not():
    both = faults(broken(SENT, swap(1, 3, 4)))
    assert "rendezvous" in both[0].message
    plain = [v for v in faults(broken(SENT, swap(0, 2, 4))) if v.rule == "deadlock"]
    assert all("rendezvous" not in v.message for v in plain)


# Laxer transfers: what the caller asks for decides.  Device 1 sends before it receives: safe only
# where a SEND returns at once.
CROSSED = broken(SENT, swap(1, 3, 4))
# Device 0 receives before it sends what the other needs for its answer: safe only where a RECV is
# posted.
POSTED = Schedule.from_csv("0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")


@pytest.mark.parametrize(
    ("schedule", "runs_under", "how"),
    [
        (CROSSED, [Transfers.ASYNC, Transfers.BUFFERED], "rendezvous"),
        (POSTED, [Transfers.ASYNC], "buffered"),
    ],
    ids=["crossed", "posted"],
)
def test_the_transfers_that_are_asked_for_decide(schedule, runs_under, how):
    for transfers in Transfers:
        if transfers in runs_under:
            assert jp.check(schedule, transfers=transfers) is schedule
            assert jp.simulate(schedule, transfers=transfers).makespan > 0
            continue
        for refuses in (jp.check, jp.simulate):
            with pytest.raises(ScheduleError) as caught:
                refuses(schedule, transfers=transfers)
            assert [v.rule for v in caught.value.violations] == ["deadlock"]
            assert f"({how})" in caught.value.violations[0].message
    assert schedule.violations, "strict by default"


def test_steps_are_counted_where_the_asked_for_transfers_run():
    assert len(jp.engine.simulate_steps(CROSSED)) == 10
    for schedule, transfers in ((CROSSED, Transfers.RENDEZVOUS), (POSTED, Transfers.BUFFERED)):
        with pytest.raises(ScheduleError, match="wait for each other"):
            jp.engine.simulate_steps(schedule, transfers=transfers)


@pytest.mark.parametrize("call", [jp.check, jp.simulate, jp.engine.simulate_steps])
def test_a_word_is_no_kind_of_transfer(call):
    with pytest.raises(
        ScheduleError,
        match=r"one of Transfers\.ASYNC, Transfers\.BUFFERED, Transfers\.RENDEZVOUS, not "
        r"'rendezvous'",
    ):
        call(CROSSED, transfers="rendezvous")


def test_a_typing_error_does_not_take_all_memory():
    found = faults(Schedule.from_csv("0F0,0F1000000000\n"))
    assert "possible typo" in found[0].message
    with pytest.raises(ScheduleError, match="possible typo"):
        Schedule.from_csv("0F0,1000000000F0\n")
    assert found[0].position == 1


def test_the_placement_itself_is_checked():
    rows = Schedule.from_csv("0F0\n1F0\n").rows
    wrong = Schedule(rows, Placement(((0,), (2,)), 3), 1)
    assert {v.rule for v in faults(wrong)} == {"placement"}
    assert any("2 rows" in v.message for v in faults(wrong))
    assert any("device 2" not in v.message and "[2]" in v.message for v in faults(wrong))
    assert faults(Schedule(rows, Placement(((0,), ()), 2), 1))


@pytest.mark.parametrize("cell", ["0F0", 3, (0, Kind.F, 0), Overlap("0F0", "0B1")])
def test_a_cell_of_another_type_is_named(cell):
    with pytest.raises(ScheduleError) as caught:
        Schedule(((Action(0, Kind.F, 0), cell),), Placement.loop(devices=1), 1)
    assert [(v.rule, v.position) for v in caught.value.violations] == [("cell", 1)]


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ScheduleError, match=f"kind {len(Kind)}"):
        jp.check(Schedule(((Action(0, len(Kind), 0),),), Placement.loop(devices=1), 1))


def test_a_long_report_is_cut_but_its_violations_are_not():
    schedule = Schedule.from_csv("0F0,0F1\n1F1,1F0\n")
    with pytest.raises(ScheduleError) as caught:
        jp.check(Schedule(schedule.rows, schedule.placement, 400))
    assert len(caught.value.violations) == 796
    assert "... and 696 more" in str(caught.value)


@given(schedules(recompute=True))
def test_random_valid_tables_pass(schedule):
    assert jp.check(schedule) is schedule


def shaken(rng: random.Random, schedule: Schedule) -> Schedule:
    """A table with a few cells swapped, moved, dropped or doubled."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(rng.randint(1, 2)):
        filled = [row for row in rows if len(row) > 1]
        if not filled:
            break
        row = rng.choice(filled)
        a, b = rng.sample(range(len(row)), 2)
        what = rng.randrange(8)
        if what < 5:
            row[a], row[b] = row[b], row[a]
        elif what == 5:
            rng.choice(rows).insert(0, row.pop(a))
        elif what == 6:
            row.pop(a)
        else:
            row.insert(b, row[a])
    return schedule.with_rows(rows)


def agrees(schedule: Schedule, *, valid: bool, transfers: Transfers = Transfers.RENDEZVOUS) -> None:
    found = schedule.violations_under(transfers)
    assert (not found) == valid, "\n".join(map(str, found)) or "no violation"


@given(randoms())
def test_check_says_what_running_the_table_says(rng):
    schedule = shaken(rng, random_schedule(rng, recompute=True))
    pairs_ok = all(v.rule != "overlap" for v in schedule.violations)
    good = is_complete(schedule) and is_well_placed(schedule) and runs(schedule) and pairs_ok
    agrees(schedule, valid=good)


@given(randoms())
def test_check_says_what_running_the_table_with_transfers_says(rng):
    schedule = random_schedule(rng, recompute=True)
    whole = jp.add_transfers(schedule) if rng.random() < 0.5 else deferred(schedule)
    if rng.random() < 0.7:
        row = rng.choice(whole.rows)
        if len(row) < 2:
            return
        where, d = rng.randrange(len(row) - 1), whole.rows.index(row)
        rows = [list(r) for r in whole.rows]
        rows[d][where], rows[d][where + 1] = rows[d][where + 1], rows[d][where]
        whole = whole.with_rows(rows)
    if not whole.has_transfers:
        return
    runs_under = [runs_with_transfers(whole, transfers) for transfers in Transfers]
    assert runs_under == sorted(runs_under, reverse=True), (
        "what runs under one kind of transfer runs under the laxer ones"
    )
    for transfers, valid in zip(Transfers, runs_under, strict=True):
        agrees(whole, valid=valid, transfers=transfers)


def test_a_table_of_slices_without_an_action_is_incomplete():
    found = Schedule(((),), jp.Placement.loop(devices=1), 2, slices=2).violations
    assert [violation.rule for violation in found] == ["completeness"]
