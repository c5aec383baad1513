"""A language model with experts of published kinds: the layers of `Llama`, of which the later ones
have experts, with grouped-query or latent attention, and a layer that predicts one more token.

Sizes: those of `Llama`, and E = experts, k = chosen, f = expert_hidden, s = shared_hidden, D dense
layers, R layers with experts, and m = 1 where one more token is predicted, else 0.  One stage has
all layers: leaves are [1, layers, ...].

Batch: as `Llama`'s, with weights w [N, T].

Parameters (kernel is [in, out]), of each of the letters d (D layers), t (R layers), m (m layers)
    stages/X/norm1/scale, stages/X/norm2/scale     [d]
    stages/X/attn/q, k, v, out/kernel              as Llama's;  `normed`: q_norm, k_norm/scale [h]
    latent:  attn/q_low/kernel [d, a]    attn/q_norm/scale [a]    attn/q_up/kernel [a, H (p + r)]
             attn/kv_low/kernel [d, b + r]    attn/kv_norm/scale [b]
             attn/kv_up/kernel [b, H (p + v)]    attn/out/kernel [H v, d]
    d:       mlp/gate, up/kernel [d, hidden]    mlp/down/kernel [hidden, d]
    t, m:    router/kernel [d, E]    experts/gate, up/kernel [E, d, f]
             experts/down/kernel [E, f, d]
             where s > 0  shared/gate, up/kernel [d, s]    shared/down/kernel [s, d]
    m:       norm_known, norm_x, norm/scale [d]    join/kernel [2 d, d]
shared/bias [R + m, E]     where `sigmoid`
first/table, last/norm/scale, last/head/kernel as Llama's; where m: shared/table, shared/head/kernel

latent attention of u:  q = rms(u @ q_low; q_norm) @ q_up in H heads of p + r features, of which the
         last r turn, as pairs (2 i, 2 i + 1); c = u @ kv_low; the last r features of c turn and are
         the same for all heads; rms(the first b; kv_norm) @ kv_up gives each head p features of its
         key and v of its value.  The scores are divided by sqrt(p + r).
experts of u:  p = softmax(u @ router), or sigmoid of it; c = p (+ bias); with groups > 1, the
         groups_chosen groups with the largest sum of their two largest c count alone; chosen: the
         k largest c, of equal ones the one with the lower number; g = p of the chosen (normalized:
         over their sum), times `scale`;  result = sum of g_e expert_e(u) + shared(u)
         capacity > 0: of a row, an expert takes the first min(T, ceil(capacity k T / E)) tokens
         that chose it, in their order, and nothing comes of the others
         aux of a row = auxiliary E / (k T) sum over e of (its tokens that chose e) mean over T of
         q_e, with q = p, sigmoid: p / sum of p
loss:    the sum of w nll + sum over layers and rows of (aux of the row) (sum of w of the row)
         + predict_weight (m's sum), over the sum of w
m:       z = [rms(table[targets]; norm_known), rms(x; norm_x)] @ join, a layer with experts, norm
         and the head; position i predicts targets[i + 1] with weight w_i w_{i+1}
bias:    has no gradient of the loss; in its place, the tokens of each expert over the sum of w
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from ..errors import TorchRefError
from .base import Batch, Context, Params, StagedModel, SumCount, Value
from .gpt import token_loss


@dataclass(frozen=True)
class Mixture(StagedModel):
    """The mixture of this file's formulas; the fields are its sizes and flags."""

    num_stages: int
    dense: int = 0
    routed: int = 2
    predict: int = 0
    vocab: int = 64
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head: int = 8
    hidden: int = 48
    theta: float = 10_000.0
    eps: float = 1e-5
    normed: bool = False
    latent: tuple[int, int, int, int, int] | None = None  # a, b, p, r, v
    experts: int = 4
    chosen: int = 2
    expert_hidden: int = 16
    shared_hidden: int = 0
    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    auxiliary: float = 0.001
    capacity: float = 0.0
    predict_weight: float = 0.3
    sum_count: bool = True

    def __post_init__(self) -> None:
        if self.num_stages != 1:
            raise TorchRefError(f"one stage has all layers; num_stages is {self.num_stages}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        d, vocab = self.width, self.vocab
        common: dict[str, tuple[int, ...]] = {"norm1/scale": (d,), "norm2/scale": (d,)}
        common |= {f"attn/{name}": shape for name, shape in self._attention_shapes().items()}
        mlp = _swiglu_shapes("mlp", d, self.hidden)
        routed = common | {"router/kernel": (d, self.experts)}
        experts = _swiglu_shapes("experts", d, self.expert_hidden)
        routed |= {name: (self.experts, *shape) for name, shape in experts.items()}
        if self.shared_hidden:
            routed |= _swiglu_shapes("shared", d, self.shared_hidden)
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(_PREDICT_NORMS, (d,))
        predict = routed | norms | {"join/kernel": (2 * d, d)}
        found: dict[str, tuple[int, ...]] = {"last/norm/scale": (d,)}
        for letter, count, own in (
            ("d", self.dense, common | mlp),
            ("t", self.routed, routed),
            ("m", self.predict, predict),
        ):
            found |= {f"stages/{letter}/{n}": (1, count, *s) for n, s in own.items() if count}
        ends: dict[str, tuple[int, ...]] = {"table": (vocab, d), "head/kernel": (d, vocab)}
        places = ("shared", "shared") if self.predict else ("first", "last")
        found |= {f"{at}/{n}": s for at, (n, s) in zip(places, ends.items(), strict=True)}
        if self.sigmoid:
            found["shared/bias"] = (self.routed + self.predict, self.experts)
        return found

    def first(self, params: Params, microbatch: Batch, ctx: Context) -> Value:
        """Token embedding, with what layers need to know of the rows."""
        tokens = microbatch["tokens"].long()
        table = params["shared/table" if self.predict else "first/table"]
        return {
            "h": nnf.embedding(tokens, table),
            "aux": 0 * table.sum(),
            "positions": microbatch.get(
                "positions", torch.arange(tokens.shape[-1]).expand_as(tokens)
            ),
            "segments": microbatch.get("segments", torch.zeros_like(tokens)),
            "weights": microbatch["weights"],
            "targets": microbatch["targets"].long(),
        }

    def stage(self, params: Params, x: Value, ctx: Context) -> Value:
        """All layers."""
        h, aux = x["h"], x["aux"]
        for layer in range(self.dense):
            own = _layer(params, "d", layer)
            h = self._attended(own, h, x)
            u = _rms(h, own["norm2/scale"], self.eps)
            h = h + _swiglu(own, "mlp", u)
        for layer in range(self.routed):
            h, more = self._mixed(params, _layer(params, "t", layer), h, x, layer)
            aux = aux + more
        if self.predict:
            own = _layer(params, "m", 0)
            known = nnf.embedding(x["targets"], params["shared/table"])
            known = _rms(known, own["norm_known/scale"], self.eps)
            joined = torch.cat([known, _rms(h, own["norm_x/scale"], self.eps)], dim=-1)
            z, more = self._mixed(params, own, joined @ own["join/kernel"], x, self.routed)
            logits = _rms(z, own["norm/scale"], self.eps) @ params["shared/head/kernel"]
            nll = nnf.cross_entropy(
                logits[:, :-1].transpose(1, 2), x["targets"][:, 1:], reduction="none"
            )
            weights = x["weights"][:, :-1] * x["weights"][:, 1:]
            aux = aux + more + self.predict_weight * (weights * nll).sum()
        return {**x, "h": h, "aux": aux}

    def last(self, params: Params, x: Value, microbatch: Batch, ctx: Context) -> Tensor | SumCount:
        """Norm, head, cross entropy, and what the layers added."""
        u = _rms(x["h"], params["last/norm/scale"], self.eps)
        head = params["shared/head/kernel" if self.predict else "last/head/kernel"]
        loss = token_loss(u @ head, microbatch, sum_count=True)
        assert isinstance(loss, SumCount)
        return SumCount(loss.loss_sum + x["aux"], loss.count)

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        d, heads = self.width, self.heads
        if self.latent is not None:
            a, b, p, r, v = self.latent
            return {
                "q_low/kernel": (d, a),
                "q_norm/scale": (a,),
                "q_up/kernel": (a, heads * (p + r)),
                "kv_low/kernel": (d, b + r),
                "kv_norm/scale": (b,),
                "kv_up/kernel": (b, heads * (p + v)),
                "out/kernel": (heads * v, d),
            }
        keys = self.kv_heads * self.head
        found: dict[str, tuple[int, ...]] = {
            "q/kernel": (d, heads * self.head),
            "k/kernel": (d, keys),
            "v/kernel": (d, keys),
            "out/kernel": (heads * self.head, d),
        }
        norms = {"q_norm/scale": (self.head,), "k_norm/scale": (self.head,)}
        return found | (norms if self.normed else {})

    def _attended(self, own: Params, h: Tensor, x: Value) -> Tensor:
        """h and the attention of its norm."""
        u = _rms(h, own["norm1/scale"], self.eps)
        rows, tokens, _ = u.shape

        def heads(name: str, source: Tensor, count: int) -> Tensor:
            return (source @ own[f"attn/{name}/kernel"]).view(rows, tokens, count, -1)

        if self.latent is None:
            q = heads("q", u, self.heads)
            k, v = heads("k", u, self.kv_heads), heads("v", u, self.kv_heads)
            if self.normed:
                q = _rms(q, own["attn/q_norm/scale"], self.eps)
                k = _rms(k, own["attn/k_norm/scale"], self.eps)
            q, k = self._turned(q, x, pairs=False), self._turned(k, x, pairs=False)
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=2) for t in (k, v))
        else:
            _, b, p, r, _ = self.latent
            low = _rms(u @ own["attn/q_low/kernel"], own["attn/q_norm/scale"], self.eps)
            plain, turned = heads("q_up", low, self.heads).split([p, r], dim=-1)
            q = torch.cat([plain, self._turned(turned, x, pairs=True)], dim=-1)
            low, turned = (u @ own["attn/kv_low/kernel"]).split([b, r], dim=-1)
            low = _rms(low, own["attn/kv_norm/scale"], self.eps)
            both = heads("kv_up", low, self.heads)
            turned = self._turned(turned[:, :, None], x, pairs=True)
            k = torch.cat([both[..., :p], turned.expand(-1, -1, self.heads, -1)], dim=-1)
            v = both[..., p:]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        segments = x["segments"]
        unseen = later | (segments[:, :, None] != segments[:, None, :])
        scores = torch.einsum("nqhf,nkhf->nhqk", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(unseen[:, None], -math.inf).softmax(-1)
        mixed = torch.einsum("nhqk,nkhf->nqhf", weights, v).reshape(rows, tokens, -1)
        return h + mixed @ own["attn/out/kernel"]

    def _turned(self, x: Tensor, known: Value, *, pairs: bool) -> Tensor:
        """Rotary positions; `pairs`: features 2 i and 2 i + 1 turn together."""
        half = x.shape[-1] // 2
        w = self.theta ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = known["positions"].to(x.dtype)[:, :, None, None] * w
        turn = torch.polar(torch.ones_like(angle), angle)
        real, imaginary = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)
        z = torch.complex(real.contiguous(), imaginary.contiguous()) * turn
        return torch.cat([z.real, z.imag], dim=-1)

    def _mixed(
        self, params: Params, own: Params, h: Tensor, x: Value, number: int
    ) -> tuple[Tensor, Tensor]:
        """A layer with experts, and what it adds to the sum of the loss."""
        h = self._attended(own, h, x)
        u = _rms(h, own["norm2/scale"], self.eps)
        logits = u @ own["router/kernel"]
        p = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        c = p + params["shared/bias"][number] if self.sigmoid else p
        chosen = self._chosen(c.detach())  # [N, T, k]
        g = p.gather(-1, chosen)
        if self.normalized:
            g = g / g.sum(-1, keepdim=True)
        picked = nnf.one_hot(chosen, self.experts)  # [N, T, k, E]
        q = p / p.sum(-1, keepdim=True) if self.sigmoid else p
        counts = picked.sum((1, 2)).to(p.dtype)
        tokens = u.shape[1]
        aux = self.auxiliary * self.experts / (self.chosen * tokens) * (counts * q.mean(1)).sum(-1)
        loss = (aux * x["weights"].sum(1)).sum()
        if self.sigmoid:
            bias = params["shared/bias"][number]
            loss = loss + ((bias - bias.detach()) * counts.sum(0)).sum()
        kept = picked
        if self.capacity:
            room = min(tokens, math.ceil(self.capacity * self.chosen * tokens / self.experts))
            flat = picked.flatten(1, 2)  # [N, T k, E], in the order of tokens
            kept = (flat * (flat.cumsum(1) <= room)).view_as(picked)
        gates = (g[..., None] * self.scale * kept).sum(2)  # [N, T, E]
        mixed = torch.zeros_like(u)
        for e in range(self.experts):
            expert = {n: t[e] for n, t in own.items() if n.startswith("experts/")}
            mixed = mixed + gates[..., e, None] * _swiglu(expert, "experts", u)
        if self.shared_hidden:
            mixed = mixed + _swiglu(own, "shared", u)
        return h + mixed, loss

    def _chosen(self, c: Tensor) -> Tensor:
        """The experts of each token, of equal ones those with the lower numbers."""
        if self.groups > 1:
            grouped = c.unflatten(-1, (self.groups, -1))
            best = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
            groups = best.sort(dim=-1, descending=True, stable=True).indices[
                ..., : self.groups_chosen
            ]
            inside = torch.zeros_like(best, dtype=torch.bool).scatter(-1, groups, True)
            c = grouped.masked_fill(~inside[..., None], -math.inf).flatten(-2)
        return c.sort(dim=-1, descending=True, stable=True).indices[..., : self.chosen]


_PREDICT_NORMS = ("norm_known/scale", "norm_x/scale", "norm/scale")


def _swiglu_shapes(name: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}/gate/kernel": (width, hidden),
        f"{name}/up/kernel": (width, hidden),
        f"{name}/down/kernel": (hidden, width),
    }


def _layer(params: Params, letter: str, layer: int) -> dict[str, Any]:
    prefix = f"stages/{letter}/"
    return {n.removeprefix(prefix): t[layer] for n, t in params.items() if n.startswith(prefix)}


def _swiglu(own: Params, name: str, u: Tensor) -> Tensor:
    gated = nnf.silu(u @ own[f"{name}/gate/kernel"]) * (u @ own[f"{name}/up/kernel"])
    return gated @ own[f"{name}/down/kernel"]


def _rms(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * scale
