"""Far too much, far too long, far too deep on the command line: refused by name, without a
traceback.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from frugal import quick, small

from jaxpipe import Schedule
from jaxpipe.cli.main import main
from jaxpipe.errors import MAX_PAIRS, MAX_TEXT
from tests.excess import CSV, DIGITS, JSON

SHAPE = ("-P", "2", "-M", "2")
BAD_USAGE = {
    "microbatches beyond all": (
        "show 1f1b -P 2 -M 99999999999",
        f"the nearest that works is microbatches={MAX_PAIRS // 2}",
    ),
    "devices beyond all": ("show 1f1b -P 99999999999 -M 2", "at most 4,096 devices"),
    "chunks beyond all": ("show interleaved_1f1b -P 2 -M 2 -V 99999999999", "ask for fewer chunks"),
    "auto beyond all": ("show auto -P 2 -M 99999999999", "the nearest that works is"),
    "a placement beyond all": (
        "show auto -P 99999999999 -M 2 --option placement=loop",
        "are too many",
    ),
    "every schedule beyond all": ("compare -P 2 -M 99999999999", "left out: zbv cannot be built"),
    "devices of 5,000 digits": (
        f"show 1f1b -P {DIGITS} -M 2",
        "(5,000 characters) is not a whole number",
    ),
    "full-width devices": ("show 1f1b -P \uff12 -M 2", "is not a whole number"),
    "devices with an underscore": ("show 1f1b -P 1_0 -M 2", "is not a whole number"),
    "forward_only as an option": (
        "show 1f1b -P 2 -M 2 --option forward_only=true",
        "write --forward-only",
    ),
    "devices as an option": ("show 1f1b -P 2 -M 2 --option devices=3", "write --devices"),
    "a name as an option": ("show 1f1b -P 2 -M 2 --option name=gpipe", "is the schedule's name"),
    "a flag as an option, compared": (
        "compare 1f1b -P 2 -M 2 --option forward_only=true",
        "write --forward-only",
    ),
    "an option twice": (
        "show auto -P 2 -M 2 --option max_activations=3 --option max_activations=4",
        "is given twice",
    ),
    "100,000 brackets as an option": (
        f"show auto -P 2 -M 2 --option max_activations={'(' * 100_000}",
        "max_activations must be",
    ),
    "100,000 signs as an option": (
        f"show auto -P 2 -M 2 --option max_activations={'-' * 100_000}1",
        "max_activations must be",
    ),
    "5,000 digits as an option": (
        f"show auto -P 2 -M 2 --option max_activations={DIGITS}",
        "max_activations must be",
    ),
    "a placement with a word": (
        "show auto -P 2 -M 2 --option placement=True,1",
        "loop, vee, or the device of each stage",
    ),
    "a placement over 2^63": (
        f"show auto -P 2 -M 2 --option placement=0,{2**64}",
        "loop, vee, or the device of each stage",
    ),
    "a cost of 5,000 digits": (
        f"simulate 1f1b -P 2 -M 2 --costs {DIGITS},1,1",
        "forward holds inf",
    ),
    "a full-width cost": ("simulate 1f1b -P 2 -M 2 --costs \uff12,1,1", "is not a number"),
    "a cost that is no number": (
        "simulate 1f1b -P 2 -M 2 --costs nan,1,1",
        "'nan' is not a number",
    ),
    "a cap of 5,000 digits": (f"check t.csv --max-activations {DIGITS}", "is not a whole number"),
    "a picture of a light-year": (
        "show 1f1b -P 2 -M 2 --format svg --width 1e300",
        "give 320 to 100,000 pixels",
    ),
    "a width that is no number": (
        "show 1f1b -P 2 -M 2 --format svg --width nan",
        "'nan' is not a number",
    ),
    "a file without end": ("check /dev/zero", f"/dev/zero: more than {MAX_TEXT:,} characters"),
    "a file name with a zero": ("check a\0b.csv", "is not a file name"),
    "an output name with a zero": ("show 1f1b -P 2 -M 2 -o \0.csv", "is not a file name"),
    "a title that no file can hold": (
        "show 1f1b -P 2 -M 2 --format svg --title \udcff",
        "a picture cannot show",
    ),
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Exit status and what was printed, having taken little."""
    status, printed = 0, io.StringIO()

    def attempt() -> None:
        nonlocal status
        printed.seek(printed.truncate(0))
        monkeypatch.setattr(sys, "stdout", printed)
        monkeypatch.setattr(sys, "stderr", printed)
        try:
            status = main(arguments)
        except SystemExit as stop:  # argparse's own exit
            status = stop.code

    assert quick(attempt)
    assert small(attempt)
    return status, printed.getvalue()


@pytest.mark.parametrize(("line", "message"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_the_command_line_is_refused(monkeypatch, line, message):
    if "/dev/" in line and not Path("/dev/zero").exists():
        pytest.skip("no endless file here")
    status, printed = run(monkeypatch, *line.split(" "))
    assert status == 2
    assert message in printed
    assert len(printed) < 20_000


@pytest.mark.slow
@pytest.mark.parametrize("name", CSV)
def test_the_command_line_refuses_the_same_csv(monkeypatch, tmp_path, name):
    text, message = CSV[name]
    (tmp_path / "t.csv").write_text(text, encoding="utf-8", newline="")
    status, printed = run(monkeypatch, "check", str(tmp_path / "t.csv"))
    # Reading a file turns a lone carriage return into a line's end.
    assert status == 1
    assert message in printed or "carriage" in name
    assert len(printed) < 300_000, "the grid has a line a device"


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
def test_the_command_line_refuses_the_same_json(monkeypatch, tmp_path, name):
    text, message = JSON[name]
    (tmp_path / "t.json").write_text(text, encoding="utf-8")
    status, printed = run(monkeypatch, "check", str(tmp_path / "t.json"))
    assert status == 1
    assert message in printed


def test_text_that_the_terminal_cannot_write_is_no_traceback(monkeypatch, tmp_path):
    schedule = Schedule.from_rows(Schedule.from_csv("0F0").rows, name="\ud800")
    (tmp_path / "t.json").write_text(schedule.to_json())
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    )
    complaints = io.StringIO()
    monkeypatch.setattr(sys, "stderr", complaints)
    assert main(["simulate", str(tmp_path / "t.json")]) == 2
    assert "cannot be written as utf-8" in complaints.getvalue()
