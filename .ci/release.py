#!/usr/bin/env python3
"""Tag the version that jaxpipe/version.py names:  python .ci/release.py [--dry-run]

It refuses, with everything that is missing, unless the checkout is clean, CHANGELOG.md has a
section of the version, every result that README and docs cite is up to date (`make results`), and
the wheel installs into an empty environment and trains.  The tag is not pushed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version(root: Path = ROOT) -> str:
    """What jaxpipe/version.py says."""
    (found,) = re.findall(r'__version__ = "([^"]+)"', (root / "jaxpipe/version.py").read_text())
    return str(found)


def missing(root: Path, changes: str, tags: str) -> list[str]:
    """What a release of this checkout lacks; `changes` and `tags` are those that git prints."""
    name = version(root)
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", name):
        found.append(f"jaxpipe/version.py says {name}: write the version of the release")
    if changes.strip():
        found.append(f"there are changes that are not committed:\n{changes.rstrip()}")
    if not re.search(rf"^## {re.escape(name)}\b", (root / "CHANGELOG.md").read_text(), re.M):
        found.append(f"CHANGELOG.md has no section ## {name}")
    if f"v{name}" in tags.split():
        found.append(f"the tag v{name} is there already")
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def main(*arguments: str) -> int:
    """Check, and tag."""
    if arguments not in ((), ("--dry-run",)):
        print(__doc__, file=sys.stderr)
        return 2
    faults = missing(ROOT, _git("status", "--porcelain"), _git("tag"))
    for command, fault in (
        ("benchmarks.regenerate", "results are out of date: make results"),
        (".ci/wheel.py", "the wheel cannot be used"),
    ):
        run = [command] if command.endswith(".py") else ["-m", command]
        if subprocess.run([sys.executable, *run], cwd=ROOT, check=False).returncode:
            faults.append(fault)
    if faults:
        print("this is no release yet:", *faults, sep="\n  ")
        return 1
    tag = f"v{version()}"
    if not arguments:
        _git("tag", "--annotate", tag, "--message", f"jaxpipe {version()}")
    print(f"{'would tag' if arguments else 'tagged'} {tag}; push it with: git push origin {tag}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
