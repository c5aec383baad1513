"""`check` answers every table in a number of steps that is proportional to its cells."""

from __future__ import annotations

import pytest

import jaxpipe as jp
from jaxpipe import Action, Kind, Overlap, Schedule, Transfers
from jaxpipe.cli.main import main
from tests.steps import steps

# The most that any of these tables takes is 140 a cell: an invalid table has its faults listed and
# its grid drawn.
PER_CELL, FIXED = 300, 20_000


def answered(schedule: Schedule, transfers: Transfers = Transfers.RENDEZVOUS) -> jp.ScheduleError:
    """The error of `check`, found in few steps."""
    caught = []

    def call() -> None:
        with pytest.raises(jp.ScheduleError) as error:
            jp.check(schedule, transfers=transfers)
        caught.append(error.value)

    cells = sum(map(len, schedule.rows)) + schedule.num_devices
    steps(call, most=FIXED + PER_CELL * cells)
    return caught[0]


COLLECTIVE = {
    "shares behind a cycle": "0E0,0B0,0F0,0G0\n1E0,1F0,1G0,1B0\n",
    "a share first": "0E0,0E1,0F0,0F1,0B0,0G0,0B1,0G1\n1E0,1F1,1E1,1F0,1B0,1G1,1B1,1G0\n",
    "shares in opposite orders": "0L0,0L1,0F0,0F1,0B0,0B1\n1F0,1F1,1L1,1L0,1B0,1B1\n",
    "three shares in a circle": "0L0,0L1,0L2,0F0\n1L1,1L2,1L0,1F0\n2L2,2L0,2L1,2F0\n",
}


@pytest.mark.parametrize("text", COLLECTIVE.values(), ids=COLLECTIVE)
@pytest.mark.parametrize("transfers", Transfers)
def test_shares_that_are_never_done_together(text, transfers):
    found = answered(Schedule.from_csv(text), transfers)
    assert {"deadlock"} <= {violation.rule for violation in found.violations}


def test_every_cycle_of_shares_is_found():
    """Two microbatches in opposite orders, twice: each is a deadlock of its own."""
    rows = [
        [Action(d, Kind.L, m) for m in order]
        for d, order in enumerate(((0, 1, 2, 3), (1, 0, 3, 2)))
    ]
    rows = [
        [*(Action(d, Kind.F, m) for m in range(4)), *row, *(Action(d, Kind.B, m) for m in range(4))]
        for d, row in enumerate(rows)
    ]
    found = answered(Schedule.from_rows(rows))
    assert [v.rule for v in found.violations] == ["deadlock", "deadlock"]


PAIRS = [(Kind.F, Kind.L), (Kind.F, Kind.G), (Kind.E, Kind.F), (Kind.L, Kind.B)]


@pytest.mark.parametrize(("forward", "backward"), PAIRS)
def test_a_pair_with_a_share(forward, backward):
    """What waits for a pair waits for its second half, though that half has no place in a pair."""
    kinds = (Kind.E, Kind.G, Kind.L, Kind.F, Kind.B)
    row = [
        Overlap(Action(0, forward, 0), Action(0, backward, 0)),
        *(Action(0, k, 0) for k in kinds if k not in (forward, backward)),
    ]
    for first, other in ((row, kinds), (row, kinds[::-1]), (row[:1], (backward, forward))):
        found = answered(Schedule.from_rows([first, [Action(1, kind, 0) for kind in other]]))
        assert "overlap" in {violation.rule for violation in found.violations}


def ping_pong(devices: int, times: int) -> Schedule:
    """Two devices that wait for each other again and again, and others that wait for the end
    of it.
    """
    first = [Action(0, kind, m) for m in range(times) for kind in (Kind.B, Kind.F)]
    second = [Action(1, kind, m) for m in range(times) for kind in (Kind.F, Kind.B)]
    return Schedule.from_rows(
        [first, second, *([Action(2, Kind.F, times - 1)] for _ in range(2, devices))]
    )


def test_devices_that_wait_again_and_again():
    assert "deadlock" in {v.rule for v in answered(ping_pong(500, 250)).violations}
    few = answered(ping_pong(2, 40)).violations
    assert sum(v.rule == "deadlock" for v in few) == 40, "of few devices every cycle is found"


def test_very_many_devices_at_a_share_that_one_lacks():
    rows = [[Action(d, kind, 0) for kind in (Kind.F, Kind.L, Kind.B)] for d in range(1500)]
    rows[-1] = [*rows[-1][1:], rows[-1][0]]
    assert "order" in {v.rule for v in answered(Schedule.from_rows(rows)).violations}


@pytest.mark.parametrize("text", COLLECTIVE.values(), ids=COLLECTIVE)
def test_the_command_line_answers_too(tmp_path, capsys, text):
    (tmp_path / "t.csv").write_text(text)
    status = []
    steps(lambda: status.append(main(["check", str(tmp_path / "t.csv")])), most=2 * FIXED)
    assert status == [1]
    assert "devices wait for each other" in capsys.readouterr().out
