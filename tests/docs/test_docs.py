"""The documentation says what the code says: every public name has an entry, and docstring examples run."""

from __future__ import annotations

import doctest
import importlib.util
from pathlib import Path

import pytest

import jaxpipe as jp
from jaxpipe import distributed, pipeline
from jaxpipe.layouts import layout
from jaxpipe.table import action, placement, schedule

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


@pytest.mark.parametrize("module", [action, layout, placement, schedule, pipeline, distributed], ids=lambda m: m.__name__)
def test_docstring_examples_run(module) -> None:
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
