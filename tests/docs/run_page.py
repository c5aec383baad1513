"""Run a page of documentation as one program:  python tests/docs/run_page.py PAGE.md

Blocks of ```python run in order in one namespace; a block of ```text right behind one is what it
prints.  In blocks of ```console every line that starts with "$ " is a command, and the lines behind
it are what it prints.  `...` stands for anything. A block behind a line `<!-- not run: why -->` is
left alone.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
NOT_RUN = "<!-- not run:"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: its text, the line number of its first line, and whether it is to be run."""

    language: str
    text: str
    line: int
    runs: bool
    follows: bool  # nothing but blank lines between the block before and this one


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.splitlines()
    # since: where the block before ended, if only blank lines came behind it
    at, since, runs = 0, 0, True
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if not fence:
            if lines[at].strip():
                since, runs = 0, not lines[at].startswith(NOT_RUN)
            at += 1
            continue
        end = next(k for k in range(at + 1, len(lines)) if lines[k].strip() == "```")
        cut = len(fence["indent"])
        text = "".join(line[cut:] + "\n" for line in lines[at + 1 : end])
        yield Block(fence["language"], text, at + 2, runs, since > 0)
        at, since, runs = end + 1, end + 1, True


def differs(want: str, got: str, where: str) -> str | None:
    """What a reader of the page would see otherwise, or None."""
    if doctest.OutputChecker().check_output(want, got, OPTIONS):
        return None
    return f"{where}: the page says\n{want}but it is\n{got}"


def run_python(block: Block, page: Path, names: dict[str, object]) -> str:
    """What the block prints; an error's traceback shows the page's own lines."""
    name = f"{page}:{block.line}"
    linecache.cache[name] = (len(block.text), None, block.text.splitlines(keepends=True), name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, name, "exec"), names)
    return printed.getvalue()


def run_console(block: Block, page: Path) -> list[str]:
    """Run each command of the block; what is not as the page says."""
    faults = []
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "160",
    }
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, want = part.partition("\n")
        done = subprocess.run(
            command,
            shell=True,
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
            check=False,
        )
        fault = (
            differs(want, done.stdout + done.stderr, f"{page}:{block.line}: {command}")
            if want.strip()
            else None
        )
        if fault:
            faults.append(fault)
        elif not want.strip() and done.returncode:
            faults.append(
                f"{page}:{block.line}: {command} ended with status {done.returncode}: {done.stderr}"
            )
    return faults


def main(path: str) -> int:
    """Run the page; print how many blocks ran, and every difference."""
    page = Path(path).resolve()
    names: dict[str, object] = {"__name__": "__main__"}
    faults: list[str] = []
    printed: str | None = None
    ran = checked = 0
    for block in blocks(page.read_text()):
        if block.language == "python" and block.runs:
            try:
                printed = run_python(block, page, names)
            except Exception:
                print(f"{page}:{block.line}\n{traceback.format_exc()}")
                return 1
            ran += 1
        elif block.language == "text" and block.follows and printed is not None:
            checked += 1
            fault = differs(block.text, printed, f"{page}:{block.line}")
            faults += [fault] if fault else []
            printed = None
        elif block.language == "console" and block.runs:
            ran += 1
            faults += run_console(block, page)
    print(
        "\n".join(
            [
                *faults,
                f"{page.name}: {ran} blocks ran, {checked} outputs compared, {len(faults)} differ",
            ]
        )
    )
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
