"""docs/messages.md has what is said today, case by case."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import pytest

from tests.tiers import slow

for needed in ("flax", "orbax.checkpoint", "torch"):
    pytest.importorskip(needed)
SPEC = importlib.util.spec_from_file_location("make_messages", Path(__file__).parents[2] / "docs" / "make_messages.py")
assert SPEC is not None
assert SPEC.loader is not None
maker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(maker)
QUICK = (maker.cases.Text, maker.cases.CommandLine)


SECTIONS = [each if each in QUICK else slow(each) for each in maker.cases.SECTIONS]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_the_messages_are_fresh(section: type) -> None:
    text = maker.PAGE.read_text()
    with jax.enable_x64(False):
        found = [maker.entry(title, function, maker.said(function)) for own, title, function in maker.found() if own is section]
    assert found
    for entry in found:
        assert entry in text, "run JAX_PLATFORMS=cpu python docs/make_messages.py"
