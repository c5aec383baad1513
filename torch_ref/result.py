"""What a run of a table gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .models.base import Arrays

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Result:
    """What a table computed.

    Attributes:
        losses: [M], in microbatch order whatever order they ran in; each is a mean (or a sum, where
            the model returns `SumCount`), its stages' auxiliary losses included.
        loss: the whole batch's: the mean of `losses` weighted by rows, or the sum of sums divided
            once by the sum of counts.
        grads: of `loss`, by parameter name, in the shape of the weights; empty for a table without
            backwards.
        peak_activations: per device, the most (stage, microbatch) whose forward was kept at one
            time (not those of which only the input was kept, for an R).
        outputs: the last stage's output of every microbatch, in microbatch order.
        counts: [M], where the model returns `SumCount`; otherwise None.
        order: every cell in the order in which it ran, as text.
    """

    losses: Array
    loss: float
    grads: Arrays
    peak_activations: tuple[int, ...]
    outputs: tuple[Any, ...]
    counts: Array | None
    order: tuple[str, ...]


def to_numpy(tensor: Tensor) -> Array:
    """The tensor's values; bfloat16, which numpy has not, becomes float32."""
    tensor = tensor.detach()
    array: Array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy(force=True)
    return array.copy()
