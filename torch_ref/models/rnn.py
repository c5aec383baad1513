"""Stacked recurrent cells, each scanned over time: a minimal gated unit (Zhou et al. 2016) with a
residual.

Sizes: N rows in a microbatch, T steps of time, i = features_in, d = width, o = features_out, S
stages of one cell.

Batch
    x  float [N, T, i]
    y  float [N, T, o]

Parameters (kernel is [in, out])
    first/dense/kernel           [i, d]       first/dense/bias          [d]
    stages/gate/kernel           [S, d, d]    stages/gate/recurrent     [S, d, d]
    stages/gate/bias         [S, d] stages/candidate/kernel      [S, d, d]
    stages/candidate/recurrent [S, d, d]   stages/candidate/bias    [S, d] last/dense/kernel
    [d, o]       last/dense/bias           [o]

first:  x = x @ kernel + bias                                                              [N, T, d]
stage:  with s_0 = 0 [N, d], or the carry of the slice before, for t = 1 .. T
            f_t = sigmoid(x_t @ gate.kernel + s_{t-1} @ gate.recurrent + gate.bias)
            c_t = tanh(x_t @ candidate.kernel + (f_t s_{t-1}) @ candidate.recurrent +
            candidate.bias) s_t = (1 - f_t) s_{t-1} + f_t c_t
        output_t = x_t + s_t;  the carry is s_T
last:   p = x @ kernel + bias;  loss = mean over N, T and o of (p - y)^2;
        where `sum_count`: loss_sum = the sum of (p - y)^2, count = N T o
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Batch, Context, Params, StagedModel, SumCount, Value, dense


@dataclass(frozen=True)
class RNN(StagedModel):
    """The recurrent net of this file's formulas; the fields are its sizes and flags."""

    takes_slices: ClassVar[bool] = True
    num_stages: int
    width: int = 8
    features_in: int = 4
    features_out: int = 2
    sum_count: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        d, lead = self.width, (self.num_stages,)
        stages: dict[str, tuple[int, ...]] = {}
        for part in ("gate", "candidate"):
            stages |= {f"stages/{part}/{kind}": (*lead, d, d) for kind in ("kernel", "recurrent")}
            stages[f"stages/{part}/bias"] = (*lead, d)
        first = {"first/dense/kernel": (self.features_in, d), "first/dense/bias": (d,)}
        return (
            first
            | stages
            | {"last/dense/kernel": (d, self.features_out), "last/dense/bias": (self.features_out,)}
        )

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Tensor:
        """The input layer, [N, T, d]."""
        return dense(params, "first/dense", microbatch["x"])

    def stage(self, params: Params, x: Tensor, ctx: Context) -> Value:
        """One cell over all of time, [N, T, d] -> [N, T, d]; the weights are looked up once a step,
        so each step can be cut.
        """
        state = torch.zeros_like(x[:, 0]) if ctx.carry is None else ctx.carry
        states = []
        for step in x.unbind(1):
            gate = torch.sigmoid(_cell(params, "stages/gate", step, state))
            candidate = torch.tanh(_cell(params, "stages/candidate", step, gate * state))
            state = (1 - gate) * state + gate * candidate
            states.append(state)
        ctx.hand_on(state)
        return x + torch.stack(states, 1)

    def last(self, params: Params, x: Tensor, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """The output layer and the squared error."""
        error = (dense(params, "last/dense", x) - microbatch["y"]).square()
        if self.sum_count:
            return SumCount(error.sum(), torch.tensor(float(error.numel()), dtype=error.dtype))
        return error.mean()


def _cell(params: Params, name: str, step: Tensor, state: Tensor) -> Tensor:
    return (
        step @ params[f"{name}/kernel"]
        + state @ params[f"{name}/recurrent"]
        + params[f"{name}/bias"]
    )
