"""Programs that run on a real GPU, and on CPU devices where there is none: `make test-gpu`."""

from __future__ import annotations

import os
from glob import glob
from typing import Any

from jaxpipe.cli.checks import shares_gpu

HAS_GPU = bool(glob("/dev/nvidia[0-9]*"))
# Without it a scatter's sums, as of an embedding's gradient, have no fixed order on a GPU.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
MARK = "gpu_real: "
# What every process writes of a case: (job, mode) -> lines of `MARK`, for the file of results.
RESULTS: dict[tuple[str, str], list[dict[str, Any]]] = {}


def environment(process: int, mode: str) -> dict[str, str]:
    """Of a process that shares the one GPU with the others of its job; of CPU devices otherwise.

    The flags with which the tests compile faster are for CPUs alone.
    """
    if mode == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    flags = DETERMINISTIC if mode == "deterministic" else ""
    return {
        **shares_gpu(process, flags),
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }
