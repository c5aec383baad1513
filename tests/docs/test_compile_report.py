"""docs/compile_report.md has today's plans and keys; what XLA adds is not compiled again here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jaxpipe.inspect import step_report

SPEC = importlib.util.spec_from_file_location(
    "make_compile_report", Path(__file__).parents[2] / "docs" / "make_compile_report.py"
)
assert SPEC is not None
assert SPEC.loader is not None
maker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(maker)
TEXT = maker.PAGE.read_text()
AGAIN = "run JAX_PLATFORMS=cpu python -m docs.make_compile_report"


@pytest.mark.parametrize("schedule", maker.catalogue(), ids=lambda schedule: schedule.name)
def test_the_plans_are_fresh(schedule) -> None:
    assert f"| {' | '.join(maker.plan_row(schedule))} |" in TEXT.splitlines(), AGAIN


def test_every_schedule_is_there_once_in_each_table() -> None:
    names = [
        line.split(" | ")[0].removeprefix("| ")
        for line in TEXT.splitlines()
        if line.startswith("| ")
    ]
    for schedule in maker.catalogue():
        assert names.count(schedule.name) == 2, AGAIN


def test_the_keys_are_fresh() -> None:
    keys = "\n".join(line.rstrip() for line in step_report.__doc__.strip().splitlines()[2:])
    assert keys in TEXT, AGAIN
