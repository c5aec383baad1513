"""The README shows what the code does: its grid, its table of schedules, its snippet."""

from __future__ import annotations

import math
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

import jaxpipe as jp
from tests.environment import python, quick

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ROW = re.compile(
    r"^\| (`.+`) \| (any|\d+).* \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|", re.MULTILINE
)


def test_the_grid_is_that_of_1f1b():
    grid = str(jp.schedules.build("1f1b", devices=4, microbatches=8))
    assert textwrap.indent(grid, "    ") in README


def rows():
    return [
        (name, *numbers)
        for names, *numbers in ROW.findall(README)
        for name in re.findall(r"`(\w+)`", names)
    ]


def test_every_schedule_is_named():
    assert {name for name, *_ in rows()} == set(jp.schedules.names()) - {"no_pipelining"}
    assert "`no_pipelining`" in README


@pytest.mark.parametrize(("name", "chunks", "makespan", "bubble", "peak"), rows())
def test_a_row_of_the_table_is_what_simulate_finds(name, chunks, makespan, bubble, peak):
    schedule = jp.schedules.build(name, devices=4, microbatches=8)
    share = 4 / schedule.num_stages  # a stage's part of a quarter of the model
    costs = jp.Costs(forward=share, input_grad=share, weight_grad=share, transfer=0)
    timeline = jp.simulate(schedule, costs)
    assert timeline.makespan == float(makespan)
    # the README has one decimal
    assert 100 * timeline.bubble == pytest.approx(float(bubble), abs=0.05)
    assert share * max(timeline.peak_activations) == float(peak)
    assert chunks == "any" or schedule.num_chunks == int(chunks)


def test_the_snippet_runs_as_it_stands(tmp_path):
    snippet = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    pasted = tmp_path / "pasted.py"
    pasted.write_text(snippet)
    done = python(pasted, env=quick())
    assert not done.stderr  # no warnings
    losses = [
        float(text) for text in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)
    ]
    assert len(losses) == 20
    assert losses[0] == pytest.approx(math.log(100), abs=0.1)  # the first guess is uniform
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_the_walk_from_measure_to_a_profiled_step_runs_after_it(tmp_path):
    program, walk = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    pasted = tmp_path / "pasted.py"
    pasted.write_text(program.replace("range(20)", "range(1)") + walk)
    done = python(pasted, env=quick())
    assert re.search(r"^plan +layout +seconds", done.stdout, re.MULTILINE)
    assert re.search(r"^the step took .* than the .* planned", done.stdout, re.MULTILINE)


def test_the_line_that_installs_names_extras_that_there_are():
    (extra,) = re.findall(r'pip install -e "\.\[(\w+)\]"', README)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = project["optional-dependencies"][extra]
    assert any(need.startswith("optax") for need in needs)  # which the snippet imports
