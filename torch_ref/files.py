"""Weights, batches and gradients as `.npz` files, named by path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import BatchError, TorchRefError
from .models.base import Arrays
from .result import Array


def load_arrays(path: str | Path) -> Arrays:
    """Read an `.npz` file; nothing in it is ever executed (no pickles)."""
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def save_arrays(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write an `.npz` file under exactly this name (numpy alone would add `.npz` to a name without
    it).
    """
    with Path(path).open("wb") as file:
        entries: dict[str, Any] = dict(arrays)
        np.savez(file, **entries)


def load_config(path: str | Path) -> dict[str, Any]:
    """Read a JSON object."""
    found = json.loads(Path(path).read_text())
    if not isinstance(found, dict):
        raise TorchRefError(f'{path} must hold a JSON object, {{"num_stages": 2}} for instance')
    return found


def batches(stacked: Mapping[str, Array]) -> Iterator[Arrays]:
    """Cut arrays [steps, rows, ...] into one batch a step."""
    steps = {name: len(value) if value.ndim else 0 for name, value in stacked.items()}
    if len(set(steps.values())) != 1:
        raise BatchError(
            f"the entries have different numbers of steps: {steps}; give all of them a leading "
            "axis of the same length"
        )
    for step in range(next(iter(steps.values()))):
        yield {name: value[step] for name, value in stacked.items()}
