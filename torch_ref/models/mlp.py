"""A multi-layer perceptron with tanh and a squared error.

Sizes: N rows in a microbatch, i = features_in, d = width, o = features_out, S stages of one layer.

Batch
    x  float [N, i]
    y  float [N, o]

Parameters (kernel is [in, out])
    first/dense/kernel   [i, d]       first/dense/bias   [d]        (not where `with_first` is
    false; then i = d) stages/dense/kernel  [S, d, d]    stages/dense/bias  [S, d] last/dense/kernel
    [d, o]       last/dense/bias    [o]

first:  h = tanh(x @ kernel + bias)      (without first: h = x)
stage:  h = tanh(h @ kernel + bias)
last:   p = h @ kernel + bias;  loss = mean over N and o of (p - y)^2;
        where `sum_count`: loss_sum = the sum of (p - y)^2, count = N o
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import TorchRefError
from .base import Batch, Context, Params, StagedModel, SumCount, Value, dense


@dataclass(frozen=True)
class MLP(StagedModel):
    """The MLP of this file's formulas; the fields are its sizes and flags."""

    num_stages: int
    width: int = 8
    features_in: int = 8
    features_out: int = 4
    with_first: bool = True
    sum_count: bool = False

    def __post_init__(self) -> None:
        if not self.with_first and self.features_in != self.width:
            raise TorchRefError(
                f"without `first`, features_in ({self.features_in}) must be width ({self.width})"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        d = self.width
        first = (
            {"first/dense/kernel": (self.features_in, d), "first/dense/bias": (d,)}
            if self.with_first
            else {}
        )
        stages = {
            "stages/dense/kernel": (self.num_stages, d, d),
            "stages/dense/bias": (self.num_stages, d),
        }
        return (
            first
            | stages
            | {"last/dense/kernel": (d, self.features_out), "last/dense/bias": (self.features_out,)}
        )

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Tensor:
        """The input layer."""
        return (
            torch.tanh(dense(params, "first/dense", microbatch["x"]))
            if self.with_first
            else microbatch["x"]
        )

    def stage(self, params: Params, x: Tensor, ctx: Context) -> Value:
        """One layer."""
        return torch.tanh(dense(params, "stages/dense", x))

    def last(self, params: Params, x: Tensor, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """The output layer and the squared error."""
        error = (dense(params, "last/dense", x) - microbatch["y"]).square()
        if self.sum_count:
            return SumCount(error.sum(), torch.tensor(float(error.numel()), dtype=error.dtype))
        return error.mean()
