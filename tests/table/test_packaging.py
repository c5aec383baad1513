"""What pyproject.toml promises: the version of the package, and a dependency or an extra for
everything that is imported.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import jaxpipe as jp
from jaxpipe import version
from tests.rooms import imports, modules, room

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
# Where the name to import is not the name to install.
INSTALLED_BY = {"orbax": "orbax-checkpoint", "jaxlib": "jax"}


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def test_the_version_is_written_once():
    assert "version" not in PROJECT["project"]
    assert (
        PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "jaxpipe.version.__version__"
    )
    assert jp.__version__ == version.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", jp.__version__)


def test_everything_imported_is_a_dependency_or_the_extra_of_its_room():
    extras = PROJECT["project"]["optional-dependencies"]
    needed: dict[str, set[str]] = {}
    for name, path in modules().items():
        found = {target.split(".")[0] for target, inside in imports(name, path) if not inside}
        needed.setdefault(room(name), set()).update(
            found - set(sys.stdlib_module_names) - {"jaxpipe"}
        )
    used = {place: {INSTALLED_BY.get(n, n) for n in found} for place, found in needed.items()}
    core = names(PROJECT["project"]["dependencies"])
    for extra in ("flax", "checkpoint", "solver"):
        assert used.pop(extra) <= core | names(extras[extra]), extra
    assert set().union(*used.values()) == core


def test_the_license_is_there():
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in text
