"""A Llama: token embedding, pre-norm layers with rotary grouped-query attention and a SwiGLU, final
norm and head, nothing with a bias.

Sizes: N rows in a microbatch, T tokens a row, d = width, H = heads, K = kv_heads, h = head
features, f = hidden, V = vocab, S stages of L layers.

Batch
    tokens     int [N, T]
    targets    int [N, T]
    weights    float [N, T], optional: how much each target counts (0 = padding)
    segments   int [N, T], optional: which document of the row a token belongs to; a row is one
    document where there are none positions  int [N, T], optional: the place of a token in its
    document; 0 ... T - 1 where there are none

Parameters (kernel is [in, out])
    first/table                  [V, d]          untied; where `tied`, it is shared/table [V, d]
    instead stages/norm1/scale           [S, L, d] stages/attn/q/kernel         [S, L, d, H h]
    stages/attn/k/kernel         [S, L, d, K h]  stages/attn/v/kernel         [S, L, d, K h]
    stages/attn/out/kernel       [S, L, H h, d] stages/norm2/scale           [S, L, d]
    stages/mlp/gate/kernel       [S, L, d, f]    stages/mlp/up/kernel         [S, L, d, f]
    stages/mlp/down/kernel       [S, L, f, d] last/norm/scale              [d] last/head/kernel
    [d, V]          untied only

first:   x = table[tokens]                                                                [N, T, d]
stage:   for each of its L layers, in order
             u = rms(x; norm1);  x = x + attention(u)
             u = rms(x; norm2);  x = x + (silu(u @ gate.kernel) * (u @ up.kernel)) @ down.kernel
last:    logits = rms(x; last/norm) @ head.kernel        (tied: rms(x; last/norm) @ table^T)    [N,
         T, V] the loss of them is GPT's: `token_loss`, with `weights` and `sum_count`

rms(x):  x / sqrt(mean(x^2) + eps) * scale, the mean over d
attention(u): q = u @ q.kernel in H heads of h contiguous features, k and v likewise in K heads;
         head n of the queries sees head floor(n K / H) of the keys and values; q and k turn; a =
         softmax over keys of (q . k / sqrt(h)), where a query sees no later key and none of another
         segment (-inf), and sees those of earlier slices too; heads (a @ v) are joined in order;
         result = joined @ out.kernel
turn:    features i and i + h / 2 of a head are a complex number z_i, and z_i <- z_i exp(1j p w_i)
         at position p, with w_i = theta^(-2 i / h), i = 0 ... h / 2 - 1, and where `rope_factor` is
         not 1 (Llama 3.1's stretch)
             n_i = rope_context w_i / (2 pi)
             w_i <- w_i / rope_factor                                            where n_i <
             rope_low w_i <- w_i                                                          where n_i
             > rope_high w_i <- (1 - m_i) w_i / rope_factor + m_i w_i,  m_i = (n_i - rope_low) /
             (rope_high - rope_low)      between them
silu(x): x * sigmoid(x)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..errors import TorchRefError
from .base import Batch, Context, Params, StagedModel, SumCount, Value
from .gpt import token_loss


@dataclass(frozen=True)
class Llama(StagedModel):
    """The Llama of this file's formulas; the fields are its sizes and flags.

    What a stage needs to know of its rows besides x travels with it: x is {"h", "positions",
    "segments"} between stages.
    """

    takes_slices: ClassVar[bool] = True
    num_stages: int
    layers_per_stage: int = 1
    vocab: int = 64
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head: int = 8
    hidden: int = 48
    theta: float = 10_000.0
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    tied: bool = False
    eps: float = 1e-5
    sum_count: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise TorchRefError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; give every "
                "key as many queries"
            )
        if self.head % 2:
            raise TorchRefError(f"head {self.head} is odd; features of a head turn in pairs")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        lead, d, queries, keys = (
            (self.num_stages, self.layers_per_stage),
            self.width,
            self.heads * self.head,
            self.kv_heads * self.head,
        )
        stages = {
            "norm1/scale": (d,),
            "attn/q/kernel": (d, queries),
            "attn/k/kernel": (d, keys),
            "attn/v/kernel": (d, keys),
            "attn/out/kernel": (queries, d),
            "norm2/scale": (d,),
            "mlp/gate/kernel": (d, self.hidden),
            "mlp/up/kernel": (d, self.hidden),
            "mlp/down/kernel": (self.hidden, d),
        }
        table = {"shared/table" if self.tied else "first/table": (self.vocab, d)}
        last = {"last/norm/scale": (d,)} | (
            {} if self.tied else {"last/head/kernel": (d, self.vocab)}
        )
        return table | {f"stages/{name}": lead + shape for name, shape in stages.items()} | last

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Value:
        """Token embedding, with the positions and segments of the rows."""
        tokens = microbatch["tokens"].long()
        h = nnf.embedding(tokens, params["shared/table" if self.tied else "first/table"])
        start, length = ctx.offset(tokens.shape[-1]), tokens.shape[-1]
        default = torch.arange(start, start + length).expand_as(tokens)
        positions = microbatch.get("positions", default)
        return {
            "h": h,
            "positions": positions,
            "segments": microbatch.get("segments", torch.zeros_like(tokens)),
        }

    def stage(self, params: Params, x: Value, ctx: Context) -> Value:
        """L layers."""
        h = x["h"]
        turn = self._turns(x["positions"].to(h.dtype))
        segments = x["segments"]
        start, known = ctx.offset(h.shape[1]), ctx.append("segments", segments)
        later = torch.ones(h.shape[1], known.shape[1], dtype=torch.bool).triu(1 + start)
        unseen = later | (segments[:, :, None] != known[:, None, :])
        for layer in range(self.layers_per_stage):
            own = {
                name: value[layer] for name, value in params.items() if name.startswith("stages/")
            }
            u = _rms(h, own["stages/norm1/scale"], self.eps)

            def append(name: str, rows: Tensor, layer: int = layer) -> Tensor:
                return ctx.append(f"{layer}/{name}", rows)

            h = h + self._attention(own, u, turn, unseen, append)
            u = _rms(h, own["stages/norm2/scale"], self.eps)
            gated = nnf.silu(u @ own["stages/mlp/gate/kernel"]) * (u @ own["stages/mlp/up/kernel"])
            h = h + gated @ own["stages/mlp/down/kernel"]
        return {**x, "h": h}

    def last(self, params: Params, x: Value, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """Norm, head and cross entropy."""
        u = _rms(x["h"], params["last/norm/scale"], self.eps)
        logits = u @ (params["shared/table"].t() if self.tied else params["last/head/kernel"])
        return token_loss(logits, microbatch, sum_count=self.sum_count)

    def _turns(self, positions: Tensor) -> Tensor:
        """exp(1j p w) for every token and pair of features, [N, T, 1, h / 2]."""
        pairs = torch.arange(self.head // 2, dtype=positions.dtype)
        w = self.theta ** (-2 * pairs / self.head)
        if self.rope_factor != 1:
            n = self.rope_context * w / (2 * math.pi)
            m = (n - self.rope_low) / (self.rope_high - self.rope_low)
            between = (1 - m) * w / self.rope_factor + m * w
            w = torch.where(
                n < self.rope_low, w / self.rope_factor, torch.where(n > self.rope_high, w, between)
            )
        angle = positions[:, :, None, None] * w
        return torch.polar(torch.ones_like(angle), angle)

    def _attention(
        self,
        params: Params,
        u: Tensor,
        turn: Tensor,
        unseen: Tensor,
        append: Callable[[str, Tensor], Tensor],
    ) -> Tensor:
        rows, tokens, _ = u.shape
        q, k, v = (
            (u @ params[f"stages/attn/{name}/kernel"]).view(rows, tokens, heads, self.head)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k, v = _turned(q, turn), append("k", _turned(k, turn)), append("v", v)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=2) for t in (k, v))
        scores = torch.einsum("nqhf,nkhf->nhqk", q, k) / math.sqrt(self.head)
        a = scores.masked_fill(unseen[:, None], -math.inf).softmax(-1)
        joined = torch.einsum("nhqk,nkhf->nqhf", a, v).reshape(rows, tokens, -1)
        return joined @ params["stages/attn/out/kernel"]


def _rms(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    real, imaginary = x.chunk(2, dim=-1)
    z = torch.complex(real, imaginary) * turn
    return torch.cat([z.real, z.imag], dim=-1)
