"""Every example in a docstring of the rooms without JAX runs."""

from __future__ import annotations

import pytest

from tests.docstrings import files_with_examples, run_examples
from tests.rooms import WITHOUT_JAX
from tests.tiers import slow

LONG = ("planner.plan",)


@pytest.mark.parametrize(
    "name", [slow(name) if name in LONG else name for name in files_with_examples(WITHOUT_JAX)]
)
def test_docstring_examples_run(name):
    run_examples(name)
