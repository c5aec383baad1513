"""The command line: what it prints, and its exit status: 0 success, 1 the schedule is invalid, 2
bad usage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from golden import check_golden

import jaxpipe as jp
from jaxpipe.cli.main import main
from tests.table.tables_of_text import DUPLICATE, GOOD, table
from tests.tiers import slow


def test_list_names_every_schedule(run):
    result = run("list")
    assert result.status == 0
    assert [line.split()[0] for line in result.out.splitlines()] == [
        "schedule",
        *jp.schedules.names(),
    ]
    facts = json.loads(run("list", "--json").out)
    assert [f["name"] for f in facts] == list(jp.schedules.names())
    assert all(f["summary"] and f["chunks"]["natural"] >= 1 for f in facts)


def test_list_tells_all_about_a_name(run):
    out = run("list", "interleaved_1f1b").out
    assert out.startswith("interleaved_1f1b\n\n")
    assert "--option group_size=" in out
    assert [f["name"] for f in json.loads(run("list", "gpipe", "1f1b", "--json").out)] == [
        "gpipe",
        "1f1b",
    ]


SHOW = ("show", "1f1b", "--devices", 2, "--microbatches", 3)


def test_show_prints_the_grid(run):
    result = run(*SHOW)
    assert (result.status, result.err) == (0, "")
    check_golden("cli_show_1f1b_2x3.txt", result.out)


def test_show_csv_is_torchs_form(run):
    assert (
        run(*SHOW, "--format", "csv").out
        == jp.schedules.build("1f1b", devices=2, microbatches=3).to_csv()
    )


def test_show_takes_shape_options(run):
    out = run(
        "show",
        "interleaved_1f1b",
        "-P",
        2,
        "-M",
        4,
        "-V",
        3,
        "--option",
        "group_size=4",
        "--format",
        "csv",
    ).out
    assert (
        out
        == jp.schedules.build(
            "interleaved_1f1b", devices=2, microbatches=4, chunks=3, group_size=4
        ).to_csv()
    )
    lean = run(
        "show", "interleaved_1f1b", "-P", 2, "-M", 4, "--option", "lean=true", "--format", "csv"
    ).out
    assert (
        lean
        == jp.schedules.build("interleaved_1f1b", devices=2, microbatches=4, lean=True).to_csv()
    )
    assert set("".join(run(*SHOW, "--forward-only", "--format", "csv").out.split())) <= set(
        "0123456789F,"
    )


def test_show_adds_transfers(run):
    out = run(*SHOW, "--transfers", "--format", "csv").out
    assert "0SEND_F0" in out
    assert jp.Schedule.from_csv(out).has_transfers


def test_costs_shape_the_schedules_that_are_made_to_measure(run):
    costs = jp.Costs(forward=4, input_grad=1, weight_grad=1)
    out = run("show", "zb_1p", "-P", 4, "-M", 8, "--costs", "4,1,1", "--format", "csv").out
    assert out == jp.schedules.build("zb_1p", devices=4, microbatches=8, costs=costs).to_csv()


@pytest.mark.parametrize(
    ("text", "stage_to_device"),
    [("loop", (0, 1, 0, 1)), ("vee", (0, 1, 1, 0)), ("1,0,0,1", (1, 0, 0, 1))],
)
def test_placement_of_a_schedule_made_to_measure(run, text, stage_to_device):
    out = run(
        "show",
        "auto",
        "-P",
        2,
        "-M",
        4,
        "-V",
        2,
        "--option",
        f"placement={text}",
        "--format",
        "csv",
    ).out
    assert jp.Schedule.from_csv(out).stage_to_device == stage_to_device


@pytest.mark.parametrize(
    ("suffix", "starts"),
    [
        ("svg", "<svg"),
        ("html", "<!DOCTYPE html>"),
        ("csv", "0F0,"),
        ("trace.json", '{"displayTimeUnit"'),
        ("txt", "         |"),
    ],
)
def test_show_writes_a_file_in_the_format_of_its_suffix(run, tmp_path, suffix, starts):
    path = tmp_path / f"s.{suffix}"
    result = run(*SHOW, "-o", path)
    assert (result.status, result.out, result.err) == (0, "", f"wrote {path}\n")
    assert path.read_text().startswith(starts)
    assert path.read_text().endswith("\n")


def test_show_svg_with_its_options(run):
    svg = run(
        *SHOW,
        "--format",
        "svg",
        "--title",
        "a < b",
        "--width",
        400,
        "--memory",
        "--critical-path",
        "--theme",
        "dark",
    ).out
    root = ElementTree.fromstring(svg)
    assert root.get("width") == "400"
    assert root.get("aria-label") == "a < b"
    assert {"memory", "critical"} <= {e.get("class") for e in root.iter()}
    assert "prefers-color-scheme" not in svg


def test_show_json_reads_back(run, tmp_path):
    path = tmp_path / "s.json"
    assert run("show", "dualpipe", "-P", 4, "-M", 8, "-o", path).status == 0
    assert (
        run("show", path, "--format", "csv").out
        == jp.schedules.build("dualpipe", devices=4, microbatches=8).to_csv()
    )
    assert run("check", path).status == 0
    shown = run("show", "dualpipe", "-P", 4, "-M", 8, "--json").out
    assert json.loads(shown) == json.loads(path.read_text())


def test_show_draws_files_too(run, tmp_path):
    assert run("show", table(tmp_path, GOOD), "--format", "csv").out == GOOD
    assert (
        "t: 2 devices, 2 microbatches" in run("show", table(tmp_path, GOOD), "--format", "svg").out
    )


def test_simulate_prints_the_numbers(run):
    result = run("simulate", "1f1b", "-P", 4, "-M", 8)
    assert (result.status, result.err) == (0, "")
    check_golden("cli_simulate_1f1b_4x8.txt", result.out)


def test_simulate_json_holds_everything(run):
    facts = json.loads(
        run("simulate", "1f1b", "-P", 4, "-M", 8, "--costs", "1,1,1,0", "--json").out
    )
    assert (facts["makespan"], facts["peak_activations"]) == (33, [4, 3, 2, 1])
    assert facts["bubble"] == pytest.approx(9 / 33)
    assert (facts["start"]["3F0"], facts["end"]["3B0"]) == (3, 6)
    assert len(facts["start"]) == 64
    assert facts["idle"][3] == {"warmup": 3, "waiting": 0, "drain": 6}
    assert facts["critical_path"][0] == "0F0"


@pytest.mark.parametrize(
    ("flags", "costs"),
    [
        (
            ["--costs", "2,1.5,1,0.25"],
            jp.Costs(forward=2, input_grad=1.5, weight_grad=1, transfer=0.25),
        ),
        (["--costs", "1:2:1:1,1,1"], jp.Costs(forward=[1, 2, 1, 1])),
        (["--backward", "1.5", "--activation", "2"], jp.Costs(backward=1.5, activation=2)),
        (["--release", "input_grad"], jp.Costs(release=jp.table.Release.INPUT_GRAD)),
    ],
)
def test_costs_on_the_command_line(run, flags, costs):
    facts = json.loads(run("simulate", "zb_h1", "-P", 4, "-M", 6, *flags, "--json").out)
    expected = jp.simulate(jp.schedules.build("zb_h1", devices=4, microbatches=6), costs)
    assert facts["makespan"] == expected.makespan
    assert facts["peak_memory"] == list(expected.peak_memory)


def test_overlap_cost(run):
    facts = json.loads(
        run("simulate", "1f1b_overlap", "-P", 2, "-M", 6, "--overlap", "2.5", "--json").out
    )
    schedule = jp.schedules.build("1f1b_overlap", devices=2, microbatches=6)
    assert facts["makespan"] == jp.simulate(schedule, jp.Costs(overlap=2.5)).makespan


def test_costs_of_recomputation(run, tmp_path):
    path = table(tmp_path, "0F0,0F1,0R0,0B0,0R1,0B1\n")
    facts = json.loads(
        run("simulate", path, "--recompute", "0.5", "--checkpoint", "0.25", "--json").out
    )
    assert facts["makespan"] == 2 + 2 * (0.5 + 2)
    assert facts["peak_memory"] == [1.25]
    assert "costs F 1, B 2, R 1, transfer 0" in run("simulate", path).out
    # two stages on one device: each is half of its model
    halves = table(tmp_path, "0F0,1F0,1R0,1B0,0R0,0B0\n")
    (compared,) = json.loads(run("compare", halves, "--recompute", "3", "--json").out)["schedules"]
    assert compared["makespan"] == 1 + 3 + 2


def test_compare_measures_one_model(run):
    result = run("compare", "1f1b", "interleaved_1f1b", "zb_h1", "-P", 4, "-M", 8, "-V", 2)
    assert (result.status, result.err) == (0, "")
    check_golden("cli_compare_4x8.txt", result.out)
    facts = json.loads(
        run("compare", "1f1b", "interleaved_1f1b", "-P", 4, "-M", 8, "-V", 4, "--json").out
    )
    one, four = facts["schedules"]
    # With V chunks a stage is 1/V of the model, so the same work takes (V M + P - 1) 3 / V
    # (Narayanan et al. 2021, section 2.2).
    assert (one["chunks"], one["makespan"]) == (1, (8 + 3) * 3)
    assert (four["chunks"], four["makespan"]) == (4, (4 * 8 + 3) * 3 / 4)
    assert max(four["peak_memory"]) == max(four["peak_activations"]) / 4
    busy = [s["makespan"] * (1 - s["bubble"]) for s in (one, four)]
    assert busy[0] == pytest.approx(busy[1]), "both do the same work"


def test_compare_without_names_takes_all_that_can_be_built(run):
    facts = json.loads(run("compare", "-P", 4, "-M", 8, "--json").out)
    assert [s["name"] for s in facts["schedules"]] == list(jp.schedules.names())
    assert facts["left_out"] == []
    result = run("compare", "-P", 3, "-M", 6)
    assert result.status == 0
    assert "left out: dualpipe cannot be built" in result.err
    assert "dualpipev" in result.out


def test_compare_reads_files_and_gives_options_to_those_that_know_them(run, tmp_path):
    path = table(tmp_path, GOOD)
    flags = ("-P", 2, "-M", 4, "--option", "group_size=4", "--json")
    facts = json.loads(run("compare", path, "1f1b", "interleaved_1f1b", *flags).out)
    assert [(s["name"], s["microbatches"]) for s in facts["schedules"]] == [
        ("t", 2),
        ("1f1b", 4),
        ("interleaved_1f1b", 4),
    ]


BAD_USAGE = [
    ((), "required: COMMAND"),
    (("draw",), "invalid choice"),
    (("show",), "required: NAME|FILE"),
    (("show", "1f1b"), "1f1b needs --devices and --microbatches"),
    (("show", "1f2b", "-P", 4, "-M", 8), "there is no schedule '1f2b'"),
    (("list", "nope"), "there is no schedule 'nope'"),
    (("show", "1f1b", "-P", 0, "-M", 8), "devices must be"),
    (("show", "1f1b", "-P", "x", "-M", 8), "'x' is not a whole number"),
    (("show", "1f1b", "-P", 4, "-M", 8, "-V", 2), "the nearest that works is chunks=1"),
    ((*SHOW, "--option", "group_size=4"), "group_size"),
    ((*SHOW, "--option", "group_size"), "must be KEY=VALUE"),
    (
        ("show", "auto", *SHOW[2:], "--option", "placement=ring"),
        "loop, vee, or the device of each stage",
    ),
    (
        ("show", "auto", *SHOW[2:], "--option", "objective=fast"),
        "on the command line makespan or period",
    ),
    (
        ("show", "auto", *SHOW[2:], "--option", "objective=period"),
        "give seconds for it, such as search=10",
    ),
    ((*SHOW, "--format", "png"), "invalid choice"),
    ((*SHOW, "-o", "x.png"), "no format is known for x.png"),
    ((*SHOW, "-o", "/nowhere/x.svg"), "/nowhere/x.svg: No such file"),
    ((*SHOW, "--format", "svg", "--width", "10"), "leaves no room"),
    (("simulate", *SHOW[1:], "--costs", "1,2"), "must be F,I,W,T"),
    (("simulate", *SHOW[1:], "--costs", "1,2,x,0"), "--costs: 'x' is not a number"),
    (("simulate", *SHOW[1:], "--costs", "1,-2,1,0"), "a cost is a finite number >= 0"),
    (
        ("simulate", *SHOW[1:], "--costs", "1:2:3,1,1,0"),
        "has 3 entries, but the schedule has 2 stages",
    ),
    (("simulate", *SHOW[1:], "--overlap", "fast"), "--overlap: 'fast' is not a number"),
    (("check", "/nowhere.csv"), "/nowhere.csv: No such file"),
    (("check", "."), "Is a directory"),
    (("compare", "1f1b", "nope", "-P", 4, "-M", 8), "there is no schedule 'nope'"),
    (("compare", "1f1b", "-P", 4, "-M", 8, "--costs", "1:1:1:1,1,1"), "one number for each cost"),
    (
        ("compare", "1f1b", "-P", 4, "-M", 8, "--option", "group_size=4"),
        "no schedule of these takes --option group_size",
    ),
    (("compare", "dualpipe", "-P", 3, "-M", 6), "devices must be even"),
    (("compare", "-P", 4), "needs --microbatches"),
    (
        ("show", "gpipe", "-P", 2, "-M", 2, "--json", "--format", "svg"),
        "give --json or --format svg, not both",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_USAGE, ids=lambda v: v if isinstance(v, str) else ""
)
def test_bad_usage_is_status_2(run, arguments, message):
    result = run(*arguments)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_a_file_has_its_own_shape(run, tmp_path):
    result = run("show", table(tmp_path, GOOD), "-P", 4, "--option", "a=1", "--forward-only")
    assert result.status == 2
    assert "--devices, --option, --forward-only cannot be given" in result.err


def test_a_binary_file_is_no_table(run, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00")
    result = run("check", path)
    assert result.status == 2
    assert "not a text file" in result.err


def test_a_byte_order_mark_does_no_harm(run, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert run("check", path).status == 0


def test_help_and_version(run):
    assert run("--help").status == 0
    assert run("--version").out == f"jaxpipe {jp.__version__}\n"
    for command in ("list", "show", "simulate", "check", "compare"):
        result = run(command, "--help")
        assert result.status == 0
        assert command in result.out


def process(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


@pytest.mark.slow
def test_python_m_jaxpipe_needs_no_jax():
    program = (
        "import sys, runpy; sys.modules['jax'] = sys.modules['torch'] = None; "
        "runpy.run_module('jaxpipe', run_name='__main__')"
    )
    result = process("-c", program, "compare", "1f1b", "gpipe", "-P", "2", "-M", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1].startswith("1f1b ")


@pytest.mark.slow
def test_python_m_jaxpipe_exit_status(tmp_path):
    assert process("-m", "jaxpipe", "check", str(table(tmp_path, DUPLICATE))).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "head"),
    [("show gpipe --format csv", "0F0,0F1,0F"), slow("simulate gpipe --json", '{"name": "')],
)
def test_a_closed_pipe_is_no_error(arguments, head):
    # More than the 64 KiB that a pipe holds, so that the write itself fails.
    command = f"{sys.executable} -m jaxpipe {arguments} -P 8 -M 800 | head -c 10"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, head, "")


def test_a_terminal_gets_a_ruled_table(monkeypatch):
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["compare", "1f1b", "gpipe", "-P", "2", "-M", "2"]) == 0
    text = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        text += piece
    os.close(reader)
    assert "─" in text.decode()
    assert "\x1b[1;32m1f1b" in text.decode(), "the best is set off"
