"""What every baseline is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any
Step: TypeAlias = Callable[[PyTree, PyTree], tuple[Any, PyTree]]


@dataclass(frozen=True)
class Model:
    """A model in three functions, as `jaxpipe.Pipeline` takes them, cut into `stages` stages.

    Parameters are canonical: {"first", "stages" with leaves [S, ...] in model order, "last"}.
    """

    first: Callable[[PyTree, PyTree], Any]
    stage: Callable[[PyTree, Any], Any]
    last: Callable[[PyTree, Any, PyTree], Any]
    stages: int


def microbatches_of(batch: PyTree, count: int) -> PyTree:
    """Leaves [rows, ...] -> [M, rows / M, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)
