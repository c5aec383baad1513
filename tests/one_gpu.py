"""Run a program as on a machine with one GPU:  python tests/one_gpu.py PROGRAM.py [ARGUMENTS]

A second client of XLA with one device stands in for the GPU.  JAX prefers it to the CPU, and
`jax_num_cpu_devices` adds no device to it.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

os.environ.pop("JAX_PLATFORMS", None)

from jax._src import xla_bridge
from jaxlib import xla_client


def main(program: str, *arguments: str) -> None:
    """Run the program with these arguments."""
    client = xla_client.make_cpu_client(num_devices=1)
    xla_bridge.register_backend_factory("one_gpu", lambda: client, priority=1000)
    sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
