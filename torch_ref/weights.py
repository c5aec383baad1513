"""Weights as tensors: what every stage sees, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .models.base import owner


@dataclass(frozen=True)
class Weights:
    """The whole arrays by name; `stages/...` with their leading axis of S."""

    whole: dict[str, Tensor]
    num_stages: int

    @classmethod
    def of(
        cls,
        weights: Mapping[str, np.ndarray[Any, Any]],
        num_stages: int,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy numpy arrays, cast to `dtype` where it is given."""
        return cls(
            {name: torch.tensor(value, dtype=dtype) for name, value in weights.items()}, num_stages
        )

    @property
    def outer(self) -> dict[str, Tensor]:
        """What `first` sees."""
        return {
            name: value for name, value in self.whole.items() if owner(name) in ("first", "shared")
        }

    def of_stage(self, stage: int) -> dict[str, Tensor]:
        """What a stage sees: its slice of `stages/...`, `shared/...`, and on the last stage
        `last/...`.
        """
        seen = {"stages", "shared"} | ({"last"} if stage == self.num_stages - 1 else set())
        owners = {name: owner(name) for name in self.whole}
        return {
            name: value[stage] if owners[name] == "stages" else value
            for name, value in self.whole.items()
            if owners[name] in seen
        }
