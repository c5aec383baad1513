#!/usr/bin/env python3
"""Test jaxpipe with the lowest and with the highest versions that pyproject.toml allows of what it
runs with.

python .ci/versions.py lowest [ARGUMENTS OF PYTEST]       in .venv-lowest
python .ci/versions.py highest [ARGUMENTS OF PYTEST]      in .venv-highest
python .ci/versions.py nightly [ARGUMENTS OF PYTEST]      in .venv-nightly
python .ci/versions.py 0.13.0 [ARGUMENTS OF PYTEST]       in .venv-0.13.0, with that jax

The last form runs a version that pyproject.toml does not allow yet.  Where the tests pass it raises
the range in pyproject.toml and in jaxpipe/known_faults.py; look at the difference, and commit it.
`nightly` takes JAX's newest build from the index that JAX_NIGHTLY_INDEX names (JAX's guide to its
installation has it).

The environment is made on the first run, brought up to date on every run, and kept.  Without
arguments the quick choice below runs, some minutes on two cores: what meets jax, flax, optax and
orbax where they change.  The Python that runs this makes the environment; for `lowest` it should be
the oldest that is allowed, since old releases have no wheels for newer ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Extras that tests or tools need; their versions are not what this is about.
TOOLS = ("test", "dev", "gpu-compile")
# "jax>=0.11.2,<0.13", jax-cuda13-plugin>=..., and {"jax": ">=0.11.2,<0.13"}
OF_JAX = re.compile(r'(["\s](?:jax|jaxlib|jax-cuda13-\w+)(?:": ")?>=[\d.]+,)<[\d.]+')
RANGE = re.compile(r"^(?P<name>[\w-]+)>=(?P<lowest>[\w.]+),")
QUICK = (
    "tests/checkpoint/test_interrupted.py",
    "tests/checkpoint/test_layouts.py",
    "tests/checkpoint/test_meshes.py",
    "tests/extras",
    "tests/flax/test_linen.py",
    "tests/flax/test_nnx.py",
    "tests/lowering/test_contract.py",
    "tests/lowering/test_stage.py",
    "tests/models",
    "tests/parity/test_loss_contract.py",
    "tests/table/test_cli.py",
    "tests/table/test_cli_check.py",
    "tests/table/test_render.py",
)


def ranges() -> dict[str, str]:
    """Name -> lowest version, of everything that jaxpipe and its extras run with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        needs
        for name, needs in project.get("optional-dependencies", {}).items()
        if name not in TOOLS
    ]
    found = [RANGE.match(need) for needs in (project["dependencies"], *extras) for need in needs]
    return {match["name"]: match["lowest"] for match in found if match}


def torch() -> str:
    """The requirement of torch, which goes first and alone: pip takes a CPU build where one is at
    hand.
    """
    (need,) = re.findall(r'"(torch==[\w.]+)"', (ROOT / "pyproject.toml").read_text())
    return str(need)


def raised(text: str, version: str) -> str:
    """The text of a file, with ranges of jax's packages that reach to this version's minor."""
    major, minor = map(int, version.split(".")[:2])
    above = f"{major}.{minor + 1}"
    return OF_JAX.sub(lambda match: f"{match[1]}<{above}", text)


def raise_ranges(version: str) -> None:
    """Allow a version that was run."""
    for name in ("pyproject.toml", "jaxpipe/known_faults.py"):
        path = ROOT / name
        path.write_text(raised(path.read_text(), version))
        print(f"{name} allows jax {version} now")


def main(which: str, *arguments: str) -> int:
    """Make or update the environment, say what is in it, run the tests; the status of pytest."""
    new = re.fullmatch(r"\d+\.\d+\.\d+\w*", which) is not None
    if which not in ("lowest", "highest", "nightly") and not new:
        print(__doc__, file=sys.stderr)
        return 2
    folder = ROOT / f".venv-{which}"
    python = str(folder / "bin" / "python")
    if not Path(python).exists():  # not there, or left half made
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pinned = (
        [f"{name}=={version}" for name, version in ranges().items()] if which == "lowest" else []
    )
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pinned))
    newest = ["--upgrade", "--upgrade-strategy", "eager"] if which == "highest" else []
    subprocess.run([*pip, torch()], check=True)
    subprocess.run(
        [*pip, *newest, "--constraint", str(constraints), "--editable", f"{ROOT}[examples,test]"],
        check=True,
    )
    # pip says that jaxpipe does not allow these, and installs them
    if new:
        subprocess.run([*pip, f"jax=={which}", f"jaxlib=={which}"], check=True)
    if which == "nightly":
        index = ["--extra-index-url", os.environ["JAX_NIGHTLY_INDEX"]]
        subprocess.run([*pip, "--pre", "--upgrade", *index, "jax", "jaxlib"], check=True)
    subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "list", "--format", "freeze"],
        check=True,
    )
    status = subprocess.run(
        [python, "-m", "pytest", *(arguments or QUICK)], cwd=ROOT, check=False
    ).returncode
    if new and not status:
        raise_ranges(which)
    return status


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]) if len(sys.argv) > 1 else main(""))
