"""Every page runs as one program, as a reader would run it, and prints what it says it prints;
every link leads somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.environment import python, quick

from .run_page import blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("examples/**/README.md")])
ENVIRONMENT = quick()
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(#[\w-]+)?\)")
# Its snippets are fragments; tests/reference/test_ref_peer.py runs what they show.
FRAGMENTS = ("torch_peer.md",)


def runs(page: Path) -> bool:
    return page.name not in FRAGMENTS and any(
        b.language in ("python", "console") and b.runs for b in blocks(page.read_text())
    )


@pytest.mark.parametrize("page", [p for p in PAGES if runs(p)], ids=lambda p: p.stem)
def test_a_page_runs_and_prints_what_it_says(page, tmp_path):
    python(Path(__file__).with_name("run_page.py"), page, env=ENVIRONMENT, cwd=tmp_path)


def test_parts_of_examples_are_quoted_as_they_are():
    text = (DOCS / "whole_models.md").read_text()
    quoted = re.findall(r"<!-- not run: a part of (\S+) -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(quoted) == 4
    assert not [(name, part) for name, part in quoted if part not in (ROOT / name).read_text()]


def test_a_wrong_output_and_a_wrong_command_are_found(tmp_path):
    page = tmp_path / "page.md"
    text = "```python\nprint(1 + 1)\n```\n\n```text\n{}\n```\n\n```console\n$ echo one\n{}\n```\n"
    for first, second, wrong in (("2", "one", 0), ("3", "one", 1), ("3", "two", 2)):
        page.write_text(text.format(first, second))
        done = python(Path(__file__).with_name("run_page.py"), page, timeout=60, status=None)
        assert f"2 blocks ran, 1 outputs compared, {wrong} differ" in done.stdout, (
            done.stdout + done.stderr
        )
        assert done.returncode == (1 if wrong else 0)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md"], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = [target for target, _ in LINK.findall(prose) if not (page.parent / target).exists()]
    assert not broken


def test_every_page_is_reached_from_the_index():
    index = (DOCS / "README.md").read_text()
    missing = [
        page.name
        for page in DOCS.glob("*.md")
        if page.name != "README.md" and f"({page.name}" not in index
    ]
    assert not missing


def test_every_example_is_named_in_the_index():
    index = (DOCS / "README.md").read_text()
    missing = [
        path.name for path in (ROOT / "examples").glob("*.py") if f"`{path.name}`" not in index
    ]
    assert not missing


def test_several_hosts_names_only_flags_that_jaxlib_knows():
    """XLA ends the process for a flag that it does not know; a made-up one shows that this would be
    seen.
    """
    text = (DOCS / "several_hosts.md").read_text()
    named = sorted(set(re.findall(r"--xla_\w+", text)))
    assert len(named) > 10
    values = {
        "--xla_dump_to": "",
        "--xla_disable_hlo_passes": "",
        "--xla_gpu_enable_command_buffer": "",
    }
    values |= dict(re.findall(r"(--xla_\w+)=([\w-]+)", text))
    flags = [f"{flag}={values.get(flag, '1')}" for flag in named if flag != "--xla_dump_to"]
    for more, status in (([], 0), (["--xla_gpu_no_such_flag=1"], 1)):
        environment = ENVIRONMENT | {"XLA_FLAGS": " ".join([*flags, *more]), "JAX_PLATFORMS": "cpu"}
        done = python("-c", "import jax; jax.devices()", timeout=60, env=environment, status=None)
        assert bool(done.returncode) == bool(status), done.stderr
        assert ("no_such_flag" in done.stderr) == bool(status)


def test_the_site_builds(tmp_path):
    """Every link and anchor leads somewhere, or mkdocs refuses."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=f"{name} is not installed: the site is not built")
    python(
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        ROOT / "mkdocs.yml",
        "--site-dir",
        tmp_path,
        timeout=120,
    )
    assert (tmp_path / "getting_started" / "index.html").exists()
