"""The rooms of jaxpipe import downwards only, and those below the boundary need neither jax nor
torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rooms import (
    OPTIONAL,
    PACKAGE,
    ROOF,
    WITHOUT_JAX,
    climbing,
    floors,
    graph,
    imports,
    modules,
    room,
)

PROBE = """
import importlib, sys

def heavy():
    found = ("jax", "jaxlib", "torch", "flax", "optax", "orbax")
    return sorted(m for m in sys.modules if m.split(".")[0] in found)

for name in {names!r}:
    importlib.import_module(name)
assert not heavy(), ("imported", heavy()[:5])
import jaxpipe as jp
whole = jp.add_transfers(jp.check(jp.schedules.build("1f1b", devices=2, microbatches=3)))
jp.simulate(jp.Schedule.from_json(whole.to_json()), jp.Costs(transfer=1)).critical_path
jp.engine.simulate_steps(whole), str(whole)
from jaxpipe.cli.main import main
assert main(["compare", "1f1b", "gpipe", "-P", "2", "-M", "2"]) == 0
assert not heavy(), ("used", heavy()[:5])
"""


def test_no_import_climbs():
    assert climbing() == []


def test_a_climbing_import_is_found(tmp_path: Path):
    for name, text in (
        ("table/check.py", "from ..lowering.plan import Plan"),
        ("lowering/plan.py", ""),
        ("attic.py", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert climbing(tmp_path) == [
        "attic: room 'attic' is not declared in tests/rooms.py",
        "table.check imports lowering.plan, which is above it",
    ]


def test_no_room_needs_an_optional_one():
    needed = {
        f"{name} imports {target}"
        for name, targets in graph().items()
        if name not in ROOF and room(name) not in OPTIONAL
        for target in targets
        if room(target) in OPTIONAL
    }
    assert needed == set()


def test_files_import_in_no_circle():
    assert floors(graph())[1] == []
    assert floors({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == (2, [["b", "c"]])


def test_rooms_below_the_boundary_name_no_jax():
    heavy = {"jax", "jaxlib", "torch", "flax", "optax", "orbax"}
    named = {
        f"{name}: {target}"
        for name, path in modules().items()
        if room(name) in WITHOUT_JAX
        for target, inside in imports(name, path)
        if not inside and target.split(".")[0] in heavy
    }
    assert named == set()


def test_every_room_says_what_it_is_for():
    for folder in (p for p in PACKAGE.iterdir() if (p / "__init__.py").exists()):
        assert '"""' in (folder / "__init__.py").read_text(), folder


def test_neither_jax_nor_torch_is_loaded():
    names = [
        f"jaxpipe.{name.removesuffix('.__init__')}"
        for name in modules()
        if room(name) in WITHOUT_JAX
    ]
    assert len(names) > 50
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(names=names)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
