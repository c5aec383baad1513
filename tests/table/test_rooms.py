"""The rooms of jaxpipe import downwards only, and those below the boundary need neither jax nor
torch.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.environment import python
from tests.rooms import (
    OPTIONAL,
    PACKAGE,
    WITH_JAX,
    WITHOUT_JAX,
    between_rooms,
    floors,
    graph,
    imports,
    modules,
    names_in_two_files,
    room,
    undeclared,
)

TESTS = Path(__file__).parents[1]
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


def test_rooms_import_what_they_declare():
    assert undeclared() == []


def test_an_undeclared_import_is_found(tmp_path: Path):
    for name, text in (
        ("table/__init__.py", "IMPORTS = ('errors',)"),
        ("table/schedule.py", "from ..lowering.plan import Plan"),
        ("lowering/plan.py", ""),
        ("attic.py", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert undeclared(tmp_path) == [
        "room 'attic' is not in tests/rooms.py",
        "table/__init__.py says IMPORTS = ['errors']; its files import ['lowering']",
    ]


def test_rooms_have_at_most_twelve_levels_and_no_circles():
    levels, circles = floors(between_rooms())
    assert circles == []
    assert levels <= 12


def test_nothing_is_imported_by_a_text_that_hides_it():
    """But on first use at the roof, and by the process of a check, whose name it is given."""
    named = {name for name, path in modules().items() if "import_module" in path.read_text()}
    assert named == {"__init__", "doctor.machine"}


def test_the_core_imports_no_optional_room():
    core = {name: t for name, t in between_rooms().items() if name not in OPTIONAL}
    # The only exception is asked for by an argument: build("auto", search=seconds).
    needed = {(name, target) for name, targets in core.items() for target in targets & OPTIONAL}
    assert needed == {("schedules", "solver")}


CORE = """
import jax, jax.numpy as jnp, jaxpipe as jp
model = jp.Model(lambda p, x: jnp.tanh(x @ p), last=lambda p, x, microbatch: jnp.mean(x**2))
schedule = jp.schedules.build("zb_h1", devices=2, microbatches=2)
pipe = jp.Pipeline(model, schedule, jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2]))
params = pipe.place({"stages": jnp.ones((2, 3, 3)), "last": {}})
loss, grads = pipe.value_and_grad(params, {"x": jnp.ones((4, 3))})
print(float(loss) > 0, jp.__file__)
"""


def test_optional_rooms_can_be_deleted(tmp_path: Path):
    """A copy without them trains."""
    copy = tmp_path / "jaxpipe"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in OPTIONAL:
        shutil.rmtree(copy / name, ignore_errors=True)
        (copy / f"{name}.py").unlink(missing_ok=True)
    done = python(
        "-c",
        CORE,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["True", str(copy / "__init__.py")]


def test_files_import_in_no_circle():
    assert floors(graph())[1] == []
    assert floors({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == (2, [["b", "c"]])


def test_files_have_at_most_fifteen_levels():
    """Of what is imported at once: a plan imports the pipeline when it makes one."""
    assert floors(graph(late=False))[0] <= 15


def test_a_name_has_one_meaning(tmp_path: Path):
    assert names_in_two_files() == {}
    (tmp_path / "a.py").write_text("class _Part:\n    pass\n")
    (tmp_path / "b.py").write_text("Part: TypeAlias = int\n")
    assert names_in_two_files(tmp_path) == {"Part": ["a", "b"]}


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


def test_rooms_below_the_boundary_read_no_file():
    """What a machine's prices are is an argument; the file is for the outermost calls."""
    found = {
        f"{name}: {target}"
        for name, path in modules().items()
        if room(name) in WITHOUT_JAX and room(name) not in ("prices", "cli")
        for target, inside in imports(name, path)
        if target in ("os", "pathlib", "platformdirs") or (inside and room(target) == "prices")
    }
    # `plan` and `plan_mesh` are outermost calls.
    assert found == {"planner.plan: prices", "planner.published: prices"}


def test_tests_without_jax_import_no_room_with_jax():
    """Else `make test-tables` refuses them all."""
    found = {
        f"{folder}/{path.name}: {target}"
        for folder in ("table", "schedules")
        for path in (TESTS / folder).glob("test_*.py")
        for target, _ in imports(path.stem, path)
        if target.startswith("jaxpipe.") and room(target.removeprefix("jaxpipe.")) in WITH_JAX
    }
    assert found == set()


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
    python("-c", PROBE.format(names=names), timeout=120)
