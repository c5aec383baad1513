"""A convolutional net with group norm and residual blocks.

Sizes: N rows in a microbatch, H x W pixels, i = channels_in, c = channels, G = groups, k = classes,
S stages of one block. Images keep the channels last, as in flax.

Batch
    images  float [N, H, W, i]
    labels  int [N]

Parameters (a convolution's kernel is [height, width, in, out])
    first/conv/kernel     [3, 3, i, c]       first/conv/bias     [c]
    stages/gn1/scale      [S, c]             stages/gn1/bias     [S, c]
    stages/conv1/kernel   [S, 3, 3, c, c]    stages/conv1/bias   [S, c]
    stages/gn2/scale      [S, c]             stages/gn2/bias     [S, c]
    stages/conv2/kernel   [S, 3, 3, c, c]    stages/conv2/bias   [S, c]
    last/head/kernel      [c, k]             last/head/bias      [k]

first:  x = conv(images; first/conv)                                                   [N, H, W, c]
stage:  u = conv(silu(gn(x; gn1)); conv1);  x = x + conv(silu(gn(u; gn2)); conv2)
last:   logits = mean of x over H and W @ head.kernel + head.bias                      [N, k]
        loss = mean over N of (logsumexp(logits) - logits[labels]);
        where `sum_count`: loss_sum = the sum over N, count = N

conv(x):  cross-correlation with stride 1, one pixel of zeros on each side ("SAME"), plus the bias
of each channel gn(x):    channels in G groups of c / G contiguous ones; per row and group, over
pixels and the group's channels:
          (x - mean) / sqrt(var + eps), biased variance, eps = 1e-5; then per channel * scale + bias
silu(x):  x * sigmoid(x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..errors import TorchRefError
from .base import Batch, Context, Params, StagedModel, SumCount, Value, dense


@dataclass(frozen=True)
class ConvNet(StagedModel):
    """The convolutional net of this file's formulas; the fields are its sizes and flags."""

    num_stages: int
    channels: int = 8
    channels_in: int = 3
    groups: int = 2
    classes: int = 10
    eps: float = 1e-5
    sum_count: bool = False

    def __post_init__(self) -> None:
        if self.channels % self.groups:
            raise TorchRefError(
                f"channels {self.channels} is not a multiple of groups {self.groups}; give every "
                "group the same number"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        c, lead = self.channels, (self.num_stages,)
        stages: dict[str, tuple[int, ...]] = {}
        for half in (1, 2):
            stages |= {f"stages/gn{half}/scale": (*lead, c), f"stages/gn{half}/bias": (*lead, c)}
            stages |= {
                f"stages/conv{half}/kernel": (*lead, 3, 3, c, c),
                f"stages/conv{half}/bias": (*lead, c),
            }
        first = {"first/conv/kernel": (3, 3, self.channels_in, c), "first/conv/bias": (c,)}
        return (
            first
            | stages
            | {"last/head/kernel": (c, self.classes), "last/head/bias": (self.classes,)}
        )

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Tensor:
        """The first convolution, [N, H, W, c]."""
        return _conv(params, "first/conv", microbatch["images"])

    def stage(self, params: Params, x: Tensor, ctx: Context) -> Value:
        """One residual block, [N, H, W, c] -> [N, H, W, c]."""
        u = _conv(params, "stages/conv1", nnf.silu(self._norm(params, "stages/gn1", x)))
        return x + _conv(params, "stages/conv2", nnf.silu(self._norm(params, "stages/gn2", u)))

    def last(self, params: Params, x: Tensor, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """Mean over pixels, head and cross entropy."""
        logits = dense(params, "last/head", x.mean((1, 2)))
        nll = logits.logsumexp(-1) - logits.gather(-1, microbatch["labels"].long()[:, None])[:, 0]
        return (
            SumCount(nll.sum(), torch.tensor(float(len(nll)), dtype=nll.dtype))
            if self.sum_count
            else nll.mean()
        )

    def _norm(self, params: Params, name: str, x: Tensor) -> Tensor:
        # contiguous(): on a CPU, torch 2.13's group norm crashes in a backward for scale and bias
        # alone (a W) of a channels-last input.
        rows = x.permute(0, 3, 1, 2).contiguous()
        normed = nnf.group_norm(
            rows, self.groups, params[f"{name}/scale"], params[f"{name}/bias"], self.eps
        )
        return normed.permute(0, 2, 3, 1)


def _conv(params: Params, name: str, x: Tensor) -> Tensor:
    """A 3 x 3 convolution with the channels last."""
    kernel = params[f"{name}/kernel"].permute(3, 2, 0, 1)
    return nnf.conv2d(x.permute(0, 3, 1, 2), kernel, params[f"{name}/bias"], padding=1).permute(
        0, 2, 3, 1
    )
