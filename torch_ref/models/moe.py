"""Token-wise mixture-of-experts blocks with an auxiliary loss that balances the experts.

Sizes: N rows in a microbatch, T tokens a row, d = width, E = experts, k = chosen, V = vocab, r =
mlp_ratio, S stages of one block.

Batch
    tokens   int [N, T]
    targets  int [N, T]
    weights  float [N, T], optional, as in the GPT

Parameters (kernel is [in, out])
    first/wte                    [V, d]
    stages/ln/scale              [S, d]             stages/ln/bias               [S, d]
    stages/router/kernel         [S, d, E]
    stages/experts/up/kernel     [S, E, d, r d]     stages/experts/up/bias       [S, E, r d]
    stages/experts/down/kernel   [S, E, r d, d]     stages/experts/down/bias     [S, E, d]
    last/ln/scale                [d]                last/ln/bias                 [d]
    last/head/kernel             [d, V]

first:  h = wte[tokens];  aux = 0
stage:  u = ln(h);  p = softmax(u @ router.kernel) over the E experts
        [N, T, E] chosen = the k largest of p for each token;  g = p where chosen, else 0;  g = g /
        sum of g over E expert_e(u) = gelu_tanh(u @ up.kernel[e] + up.bias[e]) @ down.kernel[e] +
        down.bias[e] h = h + sum over e of g_e expert_e(u) f_e = (number of tokens of the microbatch
        that chose e) / (k N T), a constant;  q_e = mean of p_e over N and T aux = aux + aux_weight
        * E * sum over e of f_e q_e            (Switch Transformer, Fedus et al. 2021, equation 4)
last:   logits = ln(h; last/ln) @ head.kernel;  loss = the GPT's token loss + aux;
        where `sum_count`: loss_sum = the GPT's sum + aux * count, so that aux is weighted by each
        microbatch's count

ln and gelu_tanh are the GPT's.  Between stages travels {"aux": scalar, "h": [N, T, d]}.  Where
`returned`, only h travels, each stage returns its own aux beside it (`WithAux`), and the executor
adds it to the microbatch's loss: the same numbers (not with `sum_count`, where a returned aux is
added to the sum as it is).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..errors import TorchRefError
from .base import Batch, Context, Params, StagedModel, SumCount, Value, WithAux
from .gpt import token_loss


@dataclass(frozen=True)
class MoE(StagedModel):
    """The mixture of experts of this file's formulas; the fields are its sizes and flags."""

    num_stages: int
    vocab: int = 64
    width: int = 16
    experts: int = 4
    chosen: int = 2
    mlp_ratio: int = 2
    aux_weight: float = 0.01
    eps: float = 1e-5
    returned: bool = False
    sum_count: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise TorchRefError(
                f"chosen {self.chosen} must be from 1 to the number of experts, {self.experts}"
            )
        if self.returned and self.sum_count:
            raise TorchRefError(
                "returned and sum_count do not go together; let the auxiliary loss travel with h"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        d, wide, experts = self.width, self.mlp_ratio * self.width, (self.num_stages, self.experts)
        return {
            "first/wte": (self.vocab, d),
            "stages/ln/scale": (self.num_stages, d),
            "stages/ln/bias": (self.num_stages, d),
            "stages/router/kernel": (self.num_stages, d, self.experts),
            "stages/experts/up/kernel": (*experts, d, wide),
            "stages/experts/up/bias": (*experts, wide),
            "stages/experts/down/kernel": (*experts, wide, d),
            "stages/experts/down/bias": (*experts, d),
            "last/ln/scale": (d,),
            "last/ln/bias": (d,),
            "last/head/kernel": (d, self.vocab),
        }

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Value:
        """Token embedding, and an auxiliary loss of zero."""
        table = params["first/wte"]
        h = nnf.embedding(microbatch["tokens"].long(), table)
        # The zero hangs on the graph, so that every stage sees an input of the same kind.
        return h if self.returned else {"aux": 0 * h.sum(), "h": h}

    def stage(self, params: Params, x: Value, ctx: Context) -> Value | WithAux:
        """One block."""
        h = x if self.returned else x["h"]
        u = nnf.layer_norm(
            h, (self.width,), params["stages/ln/scale"], params["stages/ln/bias"], self.eps
        )
        p = (u @ params["stages/router/kernel"]).softmax(-1)
        chosen = torch.zeros_like(p).scatter(-1, p.topk(self.chosen, dim=-1).indices, 1.0)
        g = p * chosen
        g = g / g.sum(-1, keepdim=True)
        up = (
            torch.einsum("ntd,edf->ntef", u, params["stages/experts/up/kernel"])
            + params["stages/experts/up/bias"]
        )
        down = torch.einsum(
            "ntef,efd->nted", nnf.gelu(up, approximate="tanh"), params["stages/experts/down/kernel"]
        )
        h = h + torch.einsum("nte,nted->ntd", g, down + params["stages/experts/down/bias"])
        load = chosen.mean((0, 1)) / self.chosen
        aux = self.aux_weight * self.experts * (load * p.mean((0, 1))).sum()
        return WithAux(h, aux) if self.returned else {"aux": x["aux"] + aux, "h": h}

    def last(self, params: Params, x: Value, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """Layer norm, head, cross entropy, and the auxiliary loss that came along."""
        h, aux = (x, 0.0) if self.returned else (x["h"], x["aux"])
        h = nnf.layer_norm(
            h, (self.width,), params["last/ln/scale"], params["last/ln/bias"], self.eps
        )
        loss = token_loss(h @ params["last/head/kernel"], microbatch, sum_count=self.sum_count)
        if isinstance(loss, SumCount):
            return SumCount(loss.loss_sum + aux * loss.count, loss.count)
        return loss + aux
