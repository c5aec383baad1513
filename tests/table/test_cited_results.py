"""Results that pages cite: their commands, and when they are out of date."""

from __future__ import annotations

import pytest

from benchmarks.engines import ROOT, engines
from benchmarks.regenerate import cited, commands, out_of_date, states


def checkout(folder, *, code="x = 1\n", beside="y = 1\n", engine=None):
    """A checkout with one cited result."""
    for name, text in (
        ("jaxpipe/table/schedule.py", code),
        ("jaxpipe/cli/main.py", beside),
        ("README.md", "see benchmarks/results/speed.txt"),
        ("docs/page.md", ""),
        ("benchmarks/speed.py", '"""How fast.\n\n    A=1 python -m benchmarks.speed \\\n'),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "benchmarks/speed.py").write_text(
        '"""How fast.\n\n    A=1 python -m benchmarks.speed --more 1,2\n'
        '        -o benchmarks/results/speed.txt\n"""\n'
    )
    (folder / "torch_ref").mkdir(exist_ok=True)
    if engine is not None:
        (folder / "benchmarks/results").mkdir(exist_ok=True)
        text = f"a title\na machine\nengines {engine}, commit 0123456789\n"
        (folder / "benchmarks/results/speed.txt").write_text(text)
    engines.cache_clear()
    return folder


def test_the_fingerprint_changes_with_code_alone(tmp_path):
    first = engines(checkout(tmp_path))
    same = (
        {"code": '"""Says more."""\n# and more\nx = 1\n'},
        {"beside": "y = 2\n"},
    )
    assert {engines(checkout(tmp_path, **change)) for change in same} == {first}
    assert engines(checkout(tmp_path, code="x = 2\n")) != first


def test_the_fingerprint_stays_where_a_definition_moves(tmp_path):
    def of(check: str, rows: str) -> str:
        (tmp_path / "jaxpipe/table").mkdir(parents=True, exist_ok=True)
        (tmp_path / "jaxpipe/table/rows.py").write_text(rows)
        return engines(checkout(tmp_path, code=check))

    one, two, user = "def one(): return 1\n", "def two(): return 2\n", "def three(): return one()\n"
    apart = of("import jax\nfrom .rows import one\n" + user, one + two)
    assert of("from .rows import one, two\n" + user, "import jax\n" + two + one) == apart
    assert of("import jax\n" + one + user, "IMPORTS = ()\n" + two) == apart
    for changed in (
        ("import numpy\nfrom .rows import one\n" + user, one + two),
        ("import jax\nfrom .rows import two as one\n" + user, one + two),
        ("import jax\nfrom .rows import one\n" + user, one),
        ("import jax\nfrom .rows import one\n" + user, one + two.replace("2", "3")),
    ):
        assert of(*changed) != apart


def test_a_result_of_other_engines_is_out_of_date(tmp_path):
    now = engines(checkout(tmp_path))
    command = "A=1 python -m benchmarks.speed --more 1,2 -o benchmarks/results/speed.txt"

    def state(**given):
        (found,) = states(checkout(tmp_path, **given))
        assert (found.name, found.commands) == ("speed.txt", (command,))
        return found.why

    assert state() == "not there"
    assert state(engine=now) == ""
    assert state(engine="0" * 16) == f"of engines {'0' * 16}; today's are {now}"
    assert "today's are" in state(engine=now, code="x = 3\n")


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ("engines 0123456789abcdef, commit 0123456789-dirty", "from a commit with changes"),
        ("commit 0123456789", "without a fingerprint of the engines"),
        ("engines 0123456789abcdef (commit 0123456), jax", ""),
    ],
)
def test_heads_of_every_form_are_read(head, why):
    assert out_of_date(f"a title\n{head}\n", "0123456789abcdef") == why


def test_a_name_without_its_folder_is_cited_where_a_command_writes_it(tmp_path):
    root = checkout(tmp_path)
    (root / "README.md").write_text("")
    (root / "docs/page.md").write_text("`speed.txt` has them; `prompts.txt` is yours")
    assert cited(root) == ["speed.txt"]


def test_every_cited_result_has_a_command():
    known = commands(ROOT)
    assert len(cited(ROOT)) > 5
    assert [name for name in cited(ROOT) if name not in known] == []
