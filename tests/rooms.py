"""The rooms of jaxpipe, and a count of what imports what: `python -m tests.rooms [folder
of the package]`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxpipe"
# Rooms without JAX, and the others.  A file beside the rooms is a room of its own.
WITHOUT_JAX = (
    *(
        "errors",
        "version",
        "known_faults",
        "table",
        "engine",
        "solver",
        "transforms",
        "schedules",
        "layouts",
    ),
    *("megatron", "program", "lowering", "prices", "planner", "render", "cli"),
)
WITH_JAX = (
    *("arrays", "jaxprs", "model", "storage", "stage", "spmd", "eager"),
    *("derivatives", "fingerprint", "steps", "pipeline", "vocabulary", "optimizers"),
    *("debug",),
    *("checkpoint", "distributed", "flax", "inspect", "measuring", "doctor", "modules"),
)
ROOMS = (*WITHOUT_JAX, *WITH_JAX)
# The core imports none of these rooms: they may be deleted.
OPTIONAL = frozenset(
    {
        *("solver", "megatron", "planner", "render", "cli", "eager", "vocabulary", "optimizers"),
        *("debug", "checkpoint", "distributed", "flax", "inspect"),
        *("measuring", "doctor", "modules"),
    }
)
ROOF = ("__init__", "__main__")  # re-export and start; nothing imports them


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every file by its dotted name below the package: "table.check", "pipeline"."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in sorted(package.rglob("*.py"))
    }


def imports(name: str, path: Path, *, late: bool = True) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether it is in the package) of all that a file imports; `late`: also when
    its functions are called, and for types.
    """
    package = name.split(".")[:-1]
    for node in _import_statements(path, late=late):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif not node.level:
            yield node.module or "", False
        else:
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import megatron` names modules, not things in one.
            yield from (
                ((f"{target}.{alias.name}".strip("."), True) for alias in node.names)
                if not node.module
                else [(target, True)]
            )


def names_in_two_files(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Classes and aliases of types, without underscores, that more than one file defines."""
    found: dict[str, set[str]] = {}
    for file, path in modules(package).items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                found.setdefault(ast.unparse(node.target).strip("_"), set()).add(file)
            elif isinstance(node, ast.ClassDef):
                found.setdefault(node.name.strip("_"), set()).add(file)
    return {name: sorted(files) for name, files in found.items() if len(files) > 1}


@cache
def _import_statements(path: Path, *, late: bool) -> list[ast.Import | ast.ImportFrom]:
    module = ast.parse(path.read_text())
    nodes = ast.walk(module) if late else module.body
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def graph(package: Path = PACKAGE, *, late: bool = True) -> dict[str, set[str]]:
    """Which files of the package each file imports (see `imports`); a package's `__init__` goes by
    the package's name.
    """
    found = modules(package)
    names = {name.removesuffix(".__init__") for name in found}
    wanted = {
        name.removesuffix(".__init__"): {
            t for t, inside in imports(name, path, late=late) if inside
        }
        for name, path in found.items()
    }
    return {
        name: {t for t in targets if t in names and t != name} for name, targets in wanted.items()
    }


def room(name: str) -> str:
    """The room of a file."""
    return name.split(".")[0]


def between_rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Which rooms each room imports."""
    found: dict[str, set[str]] = {}
    for name, targets in graph(package).items():
        if name not in ROOF:
            found.setdefault(room(name), set()).update(map(room, targets))
    return {name: targets - {name, ""} for name, targets in found.items()}


def declared(name: str, package: Path = PACKAGE) -> set[str] | None:
    """The rooms that a room's `__init__` says it imports; None for a file beside the rooms."""
    path = package / name / "__init__.py"
    if not path.exists():
        return None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "IMPORTS":
            return set(ast.literal_eval(node.value))
    return set()


def undeclared(package: Path = PACKAGE) -> list[str]:
    """Rooms that nobody knows, and rooms that import others than their `__init__` declares."""
    faults = []
    for name, targets in between_rooms(package).items():
        if name not in ROOMS:
            faults.append(f"room {name!r} is not in tests/rooms.py")
        said = declared(name, package)
        if said is not None and said != targets:
            faults.append(
                f"{name}/__init__.py says IMPORTS = {sorted(said)}; its files import "
                f"{sorted(targets)}"
            )
    return faults


def floors(edges: dict[str, set[str]]) -> tuple[int, list[list[str]]]:
    """(longest chain of imports, circles): how many floors a reader climbs, and groups of files
    that import each other.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in edges[name]:
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            at = stack.index(name)
            groups.append(stack[at:])
            del stack[at:]

    for name in edges:
        if name not in index:
            visit(name)
    floor: dict[str, int] = {}
    for members in groups:  # Tarjan's order: what a group imports comes before it
        below = [floor[t] for name in members for t in edges[name] if t not in members]
        floor.update(dict.fromkeys(members, 1 + max(below, default=0)))
    return max(floor.values(), default=0), [members for members in groups if len(members) > 1]


def main(package: Path) -> None:
    """Print files, floors and circles, of files and of rooms."""
    files = graph(package)
    at_once = graph(package, late=False)
    for what, edges in (
        ("files", files),
        ("files, without late imports", at_once),
        ("rooms", between_rooms(package)),
    ):
        high, circles = floors(edges)
        print(f"{what}: {len(edges)}, floors: {high}, circles: {len(circles)}")
        for circle in circles:
            print("  " + " <-> ".join(sorted(circle)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
