"""The documentation says what the code says: every public name has an entry, and docstring examples
run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jaxpipe as jp
from tests.docstrings import files_with_examples, run_examples
from tests.rooms import ROOF, ROOMS, WITH_JAX, WITHOUT_JAX

DOCS = Path(__file__).parents[2] / "docs"


def test_only_public_names_are_shown() -> None:
    assert dir(jp) == sorted(jp.__all__)
    assert all(hasattr(jp, name) for name in dir(jp))
    assert not [name for name in dir(jp) if name.startswith("_")]


@pytest.mark.parametrize("name", files_with_examples(WITH_JAX))
def test_docstring_examples_run(name: str) -> None:
    run_examples(name)


def test_every_file_with_an_example_is_in_one_of_the_tests() -> None:
    assert len(files_with_examples(ROOMS)) == len(files_with_examples(WITHOUT_JAX)) + len(
        files_with_examples(WITH_JAX)
    )
    assert not files_with_examples(ROOF)


def _entries(module: ModuleType, names: Iterable[str]) -> set[str]:
    """The lines by which the page of the site shows these names of a module."""
    values = [getattr(module, name) for name in names]
    return {
        f"::: {value.__name__ if inspect.ismodule(value) else _home(value)}" for value in values
    }


def _home(value: Any) -> str:
    return f"{value.__module__}.{value.__name__}"


def test_every_public_name_is_in_the_reference() -> None:
    shown = set((DOCS / "reference.md").read_text().splitlines())
    # Rooms have a heading, and an entry for each of their own names.
    rooms = [name for name in jp.__all__ if f"## jaxpipe.{name}" in shown]
    wanted = _entries(jp, [name for name in jp.__all__ if name not in rooms])
    modules = [line.removeprefix("## ") for line in shown if line.startswith("## jaxpipe.")]
    assert {"jaxpipe.planner", "jaxpipe.inspect", "jaxpipe.flax"} <= set(modules)
    for module in map(import_module, modules):
        own = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and callable(value)
            and (
                name in module.__all__
                if hasattr(module, "__all__")
                else str(getattr(value, "__module__", "")).startswith(module.__name__)
            )
        ]
        wanted |= _entries(module, own)
    assert wanted - shown == set()
    # Nothing is shown that is not there.
    assert {line for line in shown if line.startswith(":::")} - wanted == set()
