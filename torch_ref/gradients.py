"""Accumulates gradients over microbatches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .models.base import Arrays, owner
from .weights import Weights


class Gradients:
    """One array a weight, in float32 at least: sums of half-precision gradients lose digits with
    every microbatch.
    """

    def __init__(self, weights: Weights) -> None:
        self._sums = {
            name: torch.zeros(value.shape, dtype=torch.promote_types(value.dtype, torch.float32))
            for name, value in weights.whole.items()
        }

    def add(self, stage: int, named: Iterable[tuple[str, Tensor]]) -> None:
        """Add the gradients of a stage's uses of weights, in the order in which they come."""
        for name, gradient in named:
            target = self._sums[name][stage] if owner(name) == "stages" else self._sums[name]
            target += gradient

    def arrays(self, divisor: float) -> Arrays:
        """Every gradient, divided once."""
        return {
            name: (value / divisor if divisor != 1 else value).numpy().copy()
            for name, value in self._sums.items()
        }
