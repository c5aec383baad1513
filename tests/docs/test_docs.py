"""The documentation says what the code says: every public name has an entry, and docstring examples
run.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

import jaxpipe as jp
from tests.docstrings import files_with_examples, run_examples
from tests.rooms import ROOF, ROOMS, WITH_JAX, WITHOUT_JAX

DOCS = Path(__file__).parents[2] / "docs"


def test_api_page_is_fresh() -> None:
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert (DOCS / "api.md").read_text() == maker.page(), "run python docs/make_api.py"


def test_every_public_name_has_an_entry() -> None:
    text = (DOCS / "api.md").read_text()
    missing = [name for name in jp.__all__ if f"`jp.{name}" not in text]
    assert not missing


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


def test_every_public_name_is_in_the_reference_of_the_site() -> None:
    text = (DOCS / "reference.md").read_text()
    missing = []
    for name in jp.__all__:
        value = getattr(jp, name)
        home = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{name}"
        if f"::: {home}\n" not in text:
            missing.append(home)
    assert missing == []
