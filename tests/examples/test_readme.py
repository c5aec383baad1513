"""The README shows what the code does: its grid, its table of schedules, its snippet."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp

README = (Path(__file__).parents[2] / "README.md").read_text()
ROW = re.compile(r"^\| (`.+`) \| (any|\d+).* \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|", re.MULTILINE)


def test_the_grid_is_that_of_1f1b():
    grid = str(jp.schedules.build("1f1b", devices=4, microbatches=8))
    assert textwrap.indent(grid, "    ") in README


def rows():
    return [(name, *numbers) for names, *numbers in ROW.findall(README) for name in re.findall(r"`(\w+)`", names)]


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
    assert 100 * timeline.bubble == pytest.approx(float(bubble), abs=0.05)  # the README has one decimal
    assert share * max(timeline.peak_activations) == float(peak)
    assert chunks == "any" or schedule.num_chunks == int(chunks)


def test_the_snippet_runs():
    snippet = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    keys = jax.random.split(jax.random.key(0), 4)
    given = {
        "table": jax.random.normal(keys[0], (10, 6)),
        "w1": jax.random.normal(keys[1], (4, 6, 12)),
        "w2": jax.random.normal(keys[2], (4, 12, 6)),
        "head": jax.random.normal(keys[3], (6, 1)),
        "tokens": jnp.arange(16) % 10,
        "target": jnp.ones((16, 1)),
    }
    names = dict(given)
    exec(snippet, names)
    assert jnp.isfinite(names["loss"])
    assert jax.tree.map(jnp.shape, names["grads"]) == jax.tree.map(jnp.shape, names["params"])
