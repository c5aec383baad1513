"""A schedule can be designed, checked and drawn without JAX: the rooms that need neither jax nor torch load neither."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROOMS = (
    *("action", "check", "costs", "critical", "encode", "errors", "grid", "layout", "memory", "placement", "quiet", "rules", "runorder"),
    *("schedule", "schedules", "simulate", "steps", "textio", "timeline", "passes", "render"),
)
PROBE = """
import importlib, pkgutil, sys
names = ["jaxpipe"]
for room in {rooms!r}:
    module = importlib.import_module(f"jaxpipe.{{room}}")
    names.append(module.__name__)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"jaxpipe.{{room}}."):
        importlib.import_module(found.name)
        names.append(found.name)
{use}
heavy = sorted(m for m in sys.modules if m.split(".")[0] in ("jax", "jaxlib", "torch", "flax"))
assert not heavy, heavy[:5]
print(len(names))
"""
USE = """
import jaxpipe as jp
whole = jp.add_transfers(jp.check(jp.schedules.build("1f1b", devices=2, microbatches=3)))
jp.simulate(jp.Schedule.from_json(whole.to_json()), jp.Costs(transfer=1)).critical_path
jp.simulate_steps(whole), str(whole)
"""


@pytest.mark.parametrize("use", ["", USE], ids=["imported", "used"])
def test_neither_jax_nor_torch_is_loaded(use):
    done = subprocess.run([sys.executable, "-c", PROBE.format(rooms=ROOMS, use=use)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(ROOMS) + 10  # the folders' modules were found
