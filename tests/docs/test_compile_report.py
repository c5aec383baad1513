"""docs/compile_report.md has today's plans and keys; what XLA adds is not compiled again here."""

from __future__ import annotations

import pytest

from docs.make_compile_report import PAGE, catalogue, plan_row
from jaxpipe import report

AGAIN = "run JAX_PLATFORMS=cpu python -m docs.make_compile_report"


@pytest.mark.parametrize("schedule", catalogue(), ids=lambda schedule: schedule.name)
def test_the_plans_are_fresh(schedule) -> None:
    assert f"| {' | '.join(plan_row(schedule))} |" in PAGE.read_text().splitlines(), AGAIN


def test_every_schedule_is_there_once_in_each_table() -> None:
    names = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for schedule in catalogue():
        assert names.count(schedule.name) == 2, AGAIN


def test_the_keys_are_fresh() -> None:
    keys = "\n".join(line.rstrip() for line in report.__doc__.strip().splitlines()[2:])
    assert keys in PAGE.read_text(), AGAIN
