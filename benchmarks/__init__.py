"""Benchmarks: each is one command that prints one table, `python -m benchmarks.NAME [-o FILE]`;
results are in `results/`.
"""

import os
import sys

# `make test` installs the plugins that compile for described GPUs and TPUs there.
sys.path.append(os.path.join(sys.prefix, "compilers"))
