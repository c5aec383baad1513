"""What users get wrong, case by case, and what is said: tests/goldens/messages_SECTION.txt."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import pytest

from tests.golden import check_golden
from tests.tiers import slow

for needed in ("flax", "orbax.checkpoint", "torch"):
    pytest.importorskip(needed)

from tests.docs import message_cases as cases  # noqa: E402  (it imports what is asked for above)

QUICK = (cases.Text, cases.CommandLine)
MOST_LINES, MOST_CHARACTERS = 12, 700  # of a message


def said(function: Callable[[], Any]) -> str:
    """What comes out of a case: warnings, and a value or an error with its notes."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            value = function()
            text = (
                "no error" if value is None else value if isinstance(value, str) else shown(value)
            )
        except Exception as error:
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return readable(
        "\n".join([*(f"{each.category.__name__}: {each.message}" for each in warned), text])
    )


def shown(value: Any) -> str:
    """Numbers to four digits."""
    return str(
        jax.tree.map(
            lambda leaf: float(f"{float(leaf):.4g}") if hasattr(leaf, "dtype") else leaf, value
        )
    )


def readable(text: str) -> str:
    """Without what differs from run to run; the first of a long text."""
    text = re.sub(r"/\S*/tmp\w+|/tmp/tmp\w+", "FOLDER", text)
    text = re.sub(r"(?:/[\w.\-]+)+/([\w\-]+\.py)", r"\1", text)
    text = re.sub(r"message_cases\.py:\d+", "message_cases.py", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text).strip()
    lines = [
        line.rstrip()
        for line in text.splitlines()
        if set(line.strip()) - {"-"} and "JAX has removed its internal" not in line
    ]
    shortened = [
        line
        if len(line) <= MOST_CHARACTERS
        else f"{line[:MOST_CHARACTERS]}... ({len(line):,} characters)"
        for line in lines[:MOST_LINES]
    ]
    more = f"\n... ({len(lines) - MOST_LINES:,} more lines)" if len(lines) > MOST_LINES else ""
    return "\n".join(shortened)[: 3 * MOST_CHARACTERS] + more


@pytest.mark.parametrize(
    "section",
    [each if each in QUICK else slow(each) for each in cases.SECTIONS],
    ids=lambda section: section.__name__,
)
def test_what_is_said(section: type) -> None:
    functions = {
        name: function for name, function in vars(section).items() if inspect.isfunction(function)
    }
    assert functions
    with jax.enable_x64(False):
        found = [
            f"# {name.replace('_', ' ')}\n{said(function)}\n"
            for name, function in functions.items()
        ]
    check_golden(f"messages_{section.__name__}.txt", "\n".join(found))
