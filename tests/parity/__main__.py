"""Everything that is too long for `make test`, in one command: the grid, the peer, training,
mutations, and the table of their results.

python -m tests.parity       goes on where it was stopped; what is done is kept in out/
"""

from __future__ import annotations

import subprocess
import sys

COMMANDS = ("grid", "peers", "training", "mutants", "report")


def main() -> int:
    """Run all commands; 1 if one of them failed."""
    return max(
        subprocess.run([sys.executable, "-m", f"tests.parity.{name}"], check=False).returncode != 0
        for name in COMMANDS
    )


if __name__ == "__main__":
    raise SystemExit(main())
