"""Which results that README and docs cite are out of date, and their commands.

    python -m benchmarks.regenerate           lists them; exit status 1 where one is out of date
    python -m benchmarks.regenerate --run     regenerates those: `make results`, from a clean commit

A result is up to date where its head has the fingerprint of today's engines and a clean commit.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.engines import ROOT, engines
from benchmarks.machine import commit

_CITED = re.compile(r"(results/|`)([a-z_0-9]+\.txt)")  # with its folder, or by its name alone
_COMMAND = re.compile(
    r"((?:[A-Z_]+=\S+ )*python -m [\w.]+ (?:(?!python -m)[\w\s./,=-])*?-o benchmarks/results/"
    r"([a-z_0-9]+\.txt))"
)
_HEAD = 8  # lines of a result
PARITY = ("python -m tests.parity", "python -m tests.parity.report")
# What `make test-gpu` runs; on a machine without a GPU the result says that it is of CPU devices.
GPU_REAL = (
    "RESULTS=benchmarks/results/gpu_real.txt "
    "python -m pytest -n 0 -m 'slow or exhaustive' tests/gpu_real",
)


class State(NamedTuple):
    """A cited result: why it is out of date (empty where it is not), and its commands."""

    name: str
    why: str
    commands: tuple[str, ...]


def cited(root: Path = ROOT) -> list[str]:
    """The names of the results that pages cite."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    known = commands(root)
    found = {match for page in pages for match in _CITED.findall(page.read_text())}
    # A name alone may be another file's.
    return sorted({name for folder, name in found if folder == "results/" or name in known})


def commands(root: Path = ROOT) -> Mapping[str, tuple[str, ...]]:
    """Name of a result -> its commands, as the docstrings of the benchmarks have them."""
    found = {"parity.txt": PARITY, "gpu_real.txt": GPU_REAL}
    for path in sorted((root / "benchmarks").glob("*.py")):
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        found |= {name: (command,) for command, name in _COMMAND.findall(text)}
    return found


def out_of_date(text: str, now: str) -> str:
    """Why a result of this text is; empty where it is not."""
    head = "\n".join(text.splitlines()[:_HEAD])
    mine = re.search(r"engines ([0-9a-f]{16})", head)
    if re.search(r"commit \w+-dirty", head):
        return "from a commit with changes"
    if mine is None:
        return "without a fingerprint of the engines"
    return "" if mine[1] == now else f"of engines {mine[1]}; today's are {now}"


def states(root: Path = ROOT) -> Iterator[State]:
    """Of every cited result."""
    known, now = commands(root), engines(root)
    for name in cited(root):
        path = root / "benchmarks" / "results" / name
        why = out_of_date(path.read_text(), now) if path.exists() else "not there"
        yield State(name, why, known.get(name, ()))


def main(argv: Sequence[str] | None = None) -> int:
    """List, or regenerate; 1 where a result is out of date afterwards."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="regenerate what is out of date")
    run = parser.parse_args(argv).run
    # results that are written here do not count as changes
    if run and commit().endswith("-dirty"):
        print("commit your changes first: results name the commit that they are of")
        return 1
    start = commit()
    for state in states():
        print(f"{state.name}: {state.why or 'up to date'}", flush=True)
        for command in state.commands if run and state.why else ():
            print(f"  {command}", flush=True)
            python = command.replace("python ", f"{sys.executable} ", 1)
            environment = {**os.environ, "JAXPIPE_RESULTS_COMMIT": start}
            subprocess.run(python, shell=True, check=True, cwd=ROOT, env=environment)
    return int(any(state.why for state in states()))


if __name__ == "__main__":
    raise SystemExit(main())
