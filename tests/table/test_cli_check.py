"""`jaxpipe check`: every violation with the marked grid, and exit status 1 for a wrong file."""

from __future__ import annotations

import json
import sys

import pytest
from golden import check_golden

import jaxpipe as jp
from tests.table.tables_of_text import DEADLOCK, DUPLICATE, GOOD, table


def test_check_good(run, tmp_path):
    result = run("check", table(tmp_path, GOOD))
    assert result.status == 0
    assert result.out.startswith(
        f"{tmp_path / 't.csv'} is valid: 2 devices, 2 stages, 2 microbatches, 8 actions"
    )
    facts = json.loads(run("check", table(tmp_path, GOOD), "--json").out)
    assert (facts["ok"], facts["devices"], facts["violations"]) == (True, 2, [])


def test_check_prints_every_violation_and_the_marked_grid(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(tmp_path, DUPLICATE)
    result = run("check", "t.csv")
    assert (result.status, result.err) == (1, "")
    check_golden("cli_check_duplicate.txt", result.out)
    facts = json.loads(run("check", "t.csv", "--json").out)
    assert facts["ok"] is False
    assert [v["rule"] for v in facts["violations"]] == ["duplicate", "completeness"]
    assert (facts["violations"][0]["device"], facts["violations"][0]["position"]) == (0, 4)


def test_check_prints_more_violations_than_an_error_does(run, tmp_path):
    text = ",".join(f"0F{m}" for m in range(300)) + "\n"
    text += ",".join(f"1F{m}" for m in range(150)) + ",1B0\n"
    with pytest.raises(jp.ScheduleError) as raised:
        jp.check(jp.Schedule.from_csv(text))
    result = run("check", table(tmp_path, text))
    assert result.status == 1
    assert len(raised.value.violations) > 100
    assert all(str(v) in result.out for v in raised.value.violations)


def test_check_deadlock(run, tmp_path):
    result = run("check", table(tmp_path, DEADLOCK))
    assert result.status == 1
    assert "deadlock" in result.out
    assert result.out.count("<-- ERROR HERE") == 2


def test_check_marks_what_is_no_action(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(tmp_path, GOOD.replace("0B0", "0Q0").replace("1F1", "1F0junk"))
    result = run("check", "t.csv")
    assert result.status == 1
    check_golden("cli_check_no_action.txt", result.out)


def test_check_marks_what_is_no_action_in_json_and_wide_tables(run, tmp_path):
    text = jp.schedules.build("1f1b", devices=2, microbatches=2).to_json().replace('"1F1"', '"1Q1"')
    result = run("check", table(tmp_path, text, "t.json"))
    assert result.status == 1
    assert result.out.splitlines()[-1] == "device 1 | 1F0   1B0   [1Q1] 1B1  <-- ERROR HERE"
    wide = jp.schedules.build("gpipe", devices=2, microbatches=100).to_csv().replace("1F80", "1Q80")
    lines = run("check", table(tmp_path, wide)).out.splitlines()
    assert lines[-1].startswith("device 1 | ...    1F72")
    assert lines[-1].count("1F") == 16, "eight on each side"
    assert "[1Q80]" in lines[-1]
    torchs = "0UNSHARD,0F0,0Q0\n"
    assert (
        run("check", table(tmp_path, torchs)).out.splitlines()[-1]
        == "device 0 | 0UNSHARD 0F0      [0Q0]  <-- ERROR HERE"
    )


def test_broken_json_is_a_wrong_schedule(run, tmp_path):
    for text in ("{", "[]", '{"rows": 3}'):
        result = run("check", table(tmp_path, text, "t.json"))
        assert result.status == 1
        assert "JSON" in result.out


def test_check_shows_a_wide_table_around_its_marks(run, tmp_path):
    text = jp.schedules.build("gpipe", devices=2, microbatches=100).to_csv().replace("1F80", "1F81")
    result = run("check", table(tmp_path, text))
    assert result.status == 1
    assert "..." in result.out
    assert result.out.count("[1F81]") == 2


def test_check_reads_standard_input(run, monkeypatch, tmp_path):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(GOOD))
    assert run("check", "-").status == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(DUPLICATE))
    assert run("check", "-").status == 1


CROSSED = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


def test_check_and_simulate_take_the_transfers(run, tmp_path):
    path = table(tmp_path, CROSSED)
    result = run("check", path)
    assert result.status == 1
    assert "(rendezvous)" in result.out
    result = run("check", path, "--transfers", "buffered")
    assert result.status == 0
    assert result.out.endswith("it cannot deadlock where a SEND returns at once (buffered)\n")
    assert (
        json.loads(run("check", path, "--transfers", "async", "--json").out)["transfers"] == "async"
    )
    assert run("check", table(tmp_path, GOOD), "--transfers", "buffered").out.endswith(
        "it cannot deadlock\n"
    )
    path = table(tmp_path, CROSSED)
    assert run("simulate", path).status == 0
    assert run("simulate", path, "--transfers", "rendezvous").status == 1
    for transfers in (jp.Transfers.ASYNC, jp.Transfers.BUFFERED):
        facts = json.loads(
            run(
                "simulate", path, "--transfers", transfers.value, "--costs", "1,1,1,1", "--json"
            ).out
        )
        expected = jp.simulate(
            jp.Schedule.from_csv(CROSSED), jp.Costs(transfer=1), transfers=transfers
        )
        assert facts["makespan"] == expected.makespan


def test_check_caps_activations(run, tmp_path):
    path = table(tmp_path, GOOD)
    assert run("check", path, "--max-activations", 2).status == 0
    result = run("check", path, "--max-activations", 1)
    assert result.status == 1
    assert "memory" in result.out
    assert run("check", path, "--max-activations", -1).status == 2


@pytest.mark.parametrize(
    "command", [("show",), ("simulate",), ("simulate", "--json"), ("compare",)]
)
def test_a_wrong_file_is_status_1_everywhere(run, tmp_path, command):
    result = run(*command, table(tmp_path, DUPLICATE))
    assert result.status == 1
    assert result.out == ""
    assert "t is invalid, 2 violations:" in result.err
    assert "<-- ERROR HERE" in result.err


@pytest.mark.parametrize("text", ["", "\n", ",,\n"])
def test_an_empty_table_is_wrong(run, tmp_path, text):
    result = run("check", table(tmp_path, text))
    assert result.status == 1
    assert "holds no action" in result.out
