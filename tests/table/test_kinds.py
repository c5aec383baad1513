"""The declarations of the kinds: complete, consistent, and the only place where kinds
are listed.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import jaxpipe as jp
from jaxpipe import Kind
from jaxpipe.engine.costs import StageCosts
from jaxpipe.render.svg import DARK, LIGHT, SHADES
from jaxpipe.table.kinds import (
    BESIDE,
    COMPUTE,
    KEPT,
    KINDS,
    LINKED,
    MESSAGES,
    TRANSFERS,
    kinds_where,
    makers,
    readers,
)

PACKAGE = Path(jp.__file__).parent


def test_each_kind_is_declared_at_its_number():
    assert [spec.kind for spec in KINDS] == list(Kind)
    assert sorted(COMPUTE + TRANSFERS + BESIDE) == list(Kind)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_each_kind_is_read_as_it_is_printed(kind):
    action = jp.Action(12, kind, 3)
    assert str(action) == f"12{kind.name}3"
    assert jp.table.parse_action(str(action)) == action


def test_what_is_read_is_made_and_what_travels_has_its_transfers():
    assert all(makers(value) and readers(value) for value in KEPT)
    assert {message.value for message in MESSAGES} == {
        spec.needs for spec in KINDS if spec.needs is not None
    }
    for message in MESSAGES:
        assert makers(message.value), "somebody makes it"
        steps = {
            KINDS[kind].came_from
            for kind in (*message.users, *makers(message.value), message.send, message.receive)
        }
        assert len(steps) == 1, "all of one pass"
        assert message.value not in KEPT


def test_each_time_and_colour_is_declared_for_what_takes_time():
    names = {field.name for field in fields(StageCosts)}
    timed = (*COMPUTE, *LINKED)
    assert {KINDS[kind].cost for kind in timed} <= names & {
        field.name for field in fields(jp.Costs)
    }
    assert kinds_where(lambda spec: spec.cost) == timed
    assert tuple(SHADES) == timed
    for page in (LIGHT, DARK):
        assert len({shades[page] for shades in SHADES.values()}) == len(timed)


def named_kinds(path: Path) -> set[str]:
    """The members of Kind that a file names."""
    tree = ast.parse(path.read_text())
    attributes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    return {node.attr for node in attributes if node.value.id == "Kind"}


@pytest.mark.parametrize("room", ["table", "engine", "render", "cli"])
def test_no_other_file_lists_kinds(room):
    """A rule may be about the forward alone; two kinds in a file would be the start of a second
    list.
    """
    files = [
        path
        for path in (PACKAGE / room).glob("*.py")
        if path.name not in ("kinds.py", "effects.py")
    ]
    assert files
    assert {
        path.name: named_kinds(path) - {"F"} for path in files if named_kinds(path) - {"F"}
    } == {}


def test_the_list_that_is_looked_for_would_be_seen():
    assert named_kinds(PACKAGE / "transforms" / "rewrites.py") == {"B", "I", "W"}
