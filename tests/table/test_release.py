"""What a release promises: the wheel holds jaxpipe alone, ranges can be raised, and the import is
quick.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name):
    """A program of .ci as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(path, *names):
    with zipfile.ZipFile(path, "w") as file:
        for name in ("jaxpipe-1.dist-info/METADATA", *names):
            file.writestr(name, "")
    return path


def test_a_wheel_holds_jaxpipe_alone_with_its_data(tmp_path):
    check, good = tool("wheel").check, tool("wheel").DATA
    check(wheel(tmp_path / "good.whl", *good))
    with pytest.raises(SystemExit, match="torch_ref"):
        check(wheel(tmp_path / "more.whl", *good, "torch_ref/__init__.py"))
    with pytest.raises(SystemExit, match=r"lacks \['jaxpipe/known_faults.json'\]"):
        check(wheel(tmp_path / "less.whl", *good[:2]))


def test_the_data_of_the_wheel_is_what_the_code_reads():
    for name in tool("wheel").DATA:
        assert (ROOT / name).is_file()


def test_a_version_that_was_run_raises_every_range_of_jax():
    raised = tool("versions").raised
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count(">=0.11.2,<0.13") == 3
    higher = raised(text, "0.13.1")
    assert higher == text.replace(">=0.11.2,<0.13", ">=0.11.2,<0.14")
    assert raised(higher, "0.13.1") == higher
    code = (ROOT / "jaxpipe/known_faults.py").read_text()
    assert '{"jax": ">=0.11.2,<0.14", "jaxlib": ">=0.11.2,<0.14"}' in raised(code, "0.13.0")


def test_the_import_takes_little_beside_numpy_and_jax():
    """CPU seconds of one import; 0.11 where this was written."""
    heavy = "import time, numpy, rich.console\n"
    heavy += "import jax\n" if importlib.util.find_spec("jax") else ""
    code = heavy + "begin = time.process_time()\nimport jaxpipe\nprint(time.process_time() - begin)"
    took = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(2)
    ]
    assert min(took) < 0.3


def test_a_release_names_everything_that_is_missing(tmp_path):
    missing = tool("release").missing
    (tmp_path / "jaxpipe").mkdir()
    for version, log, changes, tags, count in (
        ("0.1.0", "## 0.1.0\n", "", "v0.0.9\n", 0),
        ("0.1.0.dev1", "## Unreleased\n", " M README.md\n", "v0.1.0.dev1\n", 4),
        ("0.1.0", "## 0.1.01\n", "", "", 1),
        ("0.1.0", "## 0.1.0\n", "", "v0.1.0\n", 1),
    ):
        (tmp_path / "jaxpipe/version.py").write_text(f'__version__ = "{version}"\n')
        (tmp_path / "CHANGELOG.md").write_text(log)
        assert len(missing(tmp_path, changes, tags)) == count, (version, log)
