"""Benchmarks: each is one command that prints one table, `python -m benchmarks.NAME [-o FILE]`;
results are in `results/`.
"""

import os
import sys


def find_compilers() -> None:
    """Let Python find the plugins that compile for described GPUs and TPUs, where `make test`
    installs them.
    """
    path = os.path.join(sys.prefix, "compilers")
    if path not in sys.path:
        sys.path.append(path)


find_compilers()
