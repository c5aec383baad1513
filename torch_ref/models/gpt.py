"""A GPT: token and position embedding, pre-norm attention blocks, final layer norm, tied or untied
head.

Sizes: N rows in a microbatch, T tokens a row (T <= block), d = width, H = heads, h = d / H, V =
vocab, S stages of L layers, r = mlp_ratio.

Batch
    tokens   int [N, T]
    targets  int [N, T]
    weights  float [N, T], optional: how much each target counts (0 = padding)

Parameters (kernel is [in, out])
    first/wte                [V, d]            untied; where `tied`, it is shared/wte [V, d] instead
    first/wpe                [block, d]
    stages/ln1/scale         [S, L, d]         stages/ln1/bias         [S, L, d]
    stages/attn/qkv/kernel   [S, L, d, 3 d]    stages/attn/qkv/bias    [S, L, 3 d]
    stages/attn/out/kernel   [S, L, d, d]      stages/attn/out/bias    [S, L, d]
    stages/ln2/scale         [S, L, d]         stages/ln2/bias         [S, L, d]
    stages/mlp/up/kernel     [S, L, d, r d]    stages/mlp/up/bias      [S, L, r d]
    stages/mlp/down/kernel   [S, L, r d, d]    stages/mlp/down/bias    [S, L, d]
    last/ln/scale            [d]               last/ln/bias            [d]
    last/head/kernel         [d, V]            untied only; the head has no bias

first:   x = wte[tokens] + wpe[o:o + T], o = 0, or the position of a slice's first token   [N, T, d]
stage:   for each of its L layers, in order
             u = ln(x; ln1);  x = x + attention(u)
             u = ln(x; ln2);  x = x + (gelu(u @ up.kernel + up.bias) @ down.kernel + down.bias)
last:    logits = ln(x; last/ln) @ head.kernel        (tied: ln(x; last/ln) @ wte^T)      [N, T, V]
         nll = logsumexp(logits, -1) - logits[targets]                                    [N, T]
         loss = mean(nll) over N and T; with `weights`: sum(weights * nll) / sum(weights) of the
         microbatch; where `sum_count`: loss_sum = sum(weights * nll), count = sum(weights)
         (weights = 1 where there are none)

ln(x):   (x - mean) / sqrt(var + eps) * scale + bias; mean and the biased variance are over d; eps =
1e-5 attention(u): qkv = u @ qkv.kernel + qkv.bias; q, k, v are its three contiguous blocks of d;
each is split into H heads of h
         contiguous features; a = softmax over keys of (q . k / sqrt(h)), where a query sees no
         later key (-inf), and sees those of earlier slices too; heads (a @ v) are joined in order
         to [N, T, d];  result = joined @ out.kernel + out.bias
gelu:    `gelu_tanh`: 0.5 u (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))), which is jax.nn.gelu's
         default (approximate=True); otherwise 0.5 u (1 + erf(u / sqrt(2)))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..errors import TorchRefError
from .base import Batch, Context, Params, StagedModel, SumCount, Value


@dataclass(frozen=True)
class GPT(StagedModel):
    """The GPT of this file's formulas; the fields are its sizes and flags."""

    takes_slices: ClassVar[bool] = True
    num_stages: int
    layers_per_stage: int = 1
    vocab: int = 64
    block: int = 32
    width: int = 32
    heads: int = 4
    mlp_ratio: int = 4
    tied: bool = True
    gelu_tanh: bool = True
    eps: float = 1e-5
    sum_count: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise TorchRefError(
                f"width {self.width} is not a multiple of heads {self.heads}; give every head "
                "the same number of features"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        lead, d, wide = (
            (self.num_stages, self.layers_per_stage),
            self.width,
            self.mlp_ratio * self.width,
        )
        embedding = {
            "shared/wte" if self.tied else "first/wte": (self.vocab, d),
            "first/wpe": (self.block, d),
        }
        stages = {
            "ln1/scale": (d,),
            "ln1/bias": (d,),
            "attn/qkv/kernel": (d, 3 * d),
            "attn/qkv/bias": (3 * d,),
            "attn/out/kernel": (d, d),
            "attn/out/bias": (d,),
            "ln2/scale": (d,),
            "ln2/bias": (d,),
            "mlp/up/kernel": (d, wide),
            "mlp/up/bias": (wide,),
            "mlp/down/kernel": (wide, d),
            "mlp/down/bias": (d,),
        }
        last = {"last/ln/scale": (d,), "last/ln/bias": (d,)} | (
            {} if self.tied else {"last/head/kernel": (d, self.vocab)}
        )
        return embedding | {f"stages/{name}": lead + shape for name, shape in stages.items()} | last

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Tensor:
        """Token plus position embedding, [N, T, d]."""
        tokens = microbatch["tokens"].long()
        start = ctx.offset(tokens.shape[-1])
        end = start + tokens.shape[-1]
        if end > self.block:
            raise TorchRefError(
                f"rows of {end} tokens do not fit {self.block} positions; cut the "
                "rows or raise `block`"
            )
        table = params["shared/wte" if self.tied else "first/wte"]
        return nnf.embedding(tokens, table) + params["first/wpe"][start:end]

    def stage(self, params: Params, x: Tensor, ctx: Context) -> Value:
        """L pre-norm blocks, [N, T, d] -> [N, T, d]."""
        for layer in range(self.layers_per_stage):
            u = self._norm(params, "stages/ln1", layer, x)
            x = x + self._attention(params, layer, u, ctx)
            up = _dense(params, "stages/mlp/up", layer, self._norm(params, "stages/ln2", layer, x))
            up = nnf.gelu(up, approximate="tanh" if self.gelu_tanh else "none")
            x = x + _dense(params, "stages/mlp/down", layer, up)
        return x

    def last(self, params: Params, x: Tensor, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """Layer norm, head and cross entropy: a scalar, or a sum and a count."""
        x = nnf.layer_norm(
            x, (self.width,), params["last/ln/scale"], params["last/ln/bias"], self.eps
        )
        logits = x @ (params["shared/wte"].t() if self.tied else params["last/head/kernel"])
        return token_loss(logits, microbatch, sum_count=self.sum_count)

    def _norm(self, params: Params, name: str, layer: int, x: Tensor) -> Tensor:
        return nnf.layer_norm(
            x,
            (self.width,),
            params[f"{name}/scale"][layer],
            params[f"{name}/bias"][layer],
            self.eps,
        )

    def _attention(self, params: Params, layer: int, u: Tensor, ctx: Context) -> Tensor:
        rows, tokens, width = u.shape
        qkv = _dense(params, "stages/attn/qkv", layer, u)
        q, k, v = (
            t.view(rows, tokens, self.heads, -1).transpose(1, 2) for t in qkv.split(width, dim=-1)
        )
        k, v = (ctx.append(f"{layer}/{name}", t, dim=2) for name, t in (("k", k), ("v", v)))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        later = torch.ones(tokens, k.shape[2], dtype=torch.bool).triu(1 + ctx.offset(tokens))
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return _dense(
            params, "stages/attn/out", layer, mixed.transpose(1, 2).reshape(rows, tokens, width)
        )


def token_loss(logits: Tensor, microbatch: Batch, *, sum_count: bool) -> Tensor | SumCount:
    """Cross entropy of `targets` (weighted by `weights` where given): its mean, or its sum and
    count.
    """
    targets = microbatch["targets"].long()
    nll = logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]
    weights = (
        microbatch["weights"].to(nll.dtype) if "weights" in microbatch else torch.ones_like(nll)
    )
    if sum_count:
        return SumCount((weights * nll).sum(), weights.sum())
    return (weights * nll).sum() / weights.sum()


def _dense(params: Params, name: str, layer: int, x: Tensor) -> Tensor:
    return x @ params[f"{name}/kernel"][layer] + params[f"{name}/bias"][layer]
