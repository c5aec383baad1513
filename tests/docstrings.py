"""The examples in docstrings: which files have some, and whether they run."""

from __future__ import annotations

import doctest
from collections.abc import Collection
from importlib import import_module

from tests.rooms import modules, room

PROMPT = ">>> "


def files_with_examples(rooms: Collection[str]) -> list[str]:
    """The dotted names of all files of these rooms that have an example."""
    return [
        name
        for name, path in modules().items()
        if room(name) in rooms and PROMPT in path.read_text()
    ]


def run_examples(name: str) -> None:
    """Run every example of a file; none is skipped, and none stands where doctest does not
    find it.
    """
    text = modules()[name].read_text()
    module = import_module(f"jaxpipe.{name}".removesuffix(".__init__"))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, "see what doctest printed"
    assert "doctest: +SKIP" not in text
    assert result.attempted == text.count(PROMPT), "an example is not in a docstring"
