"""A mixture of experts in plain JAX, as the layers of a pipeline.  It is a Llama with experts as
feed-forward parts, and with the attention and the routing of Qwen3 or DeepSeek-V3.

Letters of a layout: E embedding, d a dense layer, t a layer with experts, m the layer that predicts
one more token (DeepSeek-V3, section 2.2), L norm, head and loss.  Layers pass {"h": [N, T, d]} on,
and with a capacity also {"dropped": [N]}, the dropped choices of each row.

The loss is the cross entropy, the auxiliary losses of the layers, and `PREDICT` times that of m.
The bias that keeps the load of experts even has no gradient of the loss.  It is a leaf that is
replaced (`jaxpipe.Replaced`): in place of its gradient is the load of the experts in this step,
summed over microbatches and data shards.  `moe.balance` moves the bias by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxpipe as jp
from llama_parts import fp8
from llama_parts.model import (
    LAYER,
    Llama,
    Tensor,
    Tree,
    cross_entropy,
    kernels,
    stacked,
    swiglu,
    wide,
)

from .experts import Experts, route
from .sizes import Mixture, Scores

# Path of a parameter of a layer -> its name in the files of Hugging Face
_LAYER = LAYER | {
    "attn/q_low/kernel": "self_attn.q_a_proj",
    "attn/q_up/kernel": "self_attn.q_b_proj",
    "attn/kv_low/kernel": "self_attn.kv_a_proj_with_mqa",
    "attn/kv_norm/scale": "self_attn.kv_a_layernorm",
    "attn/kv_up/kernel": "self_attn.kv_b_proj",
    "attn/k_norm/scale": "self_attn.k_norm",
    "router/kernel": "mlp.gate",
    "experts/gate/kernel": "mlp.experts.{}.gate_proj",
    "experts/up/kernel": "mlp.experts.{}.up_proj",
    "experts/down/kernel": "mlp.experts.{}.down_proj",
    "shared/gate/kernel": "mlp.shared_experts.gate_proj",
    "shared/up/kernel": "mlp.shared_experts.up_proj",
    "shared/down/kernel": "mlp.shared_experts.down_proj",
    "norm_known/scale": "enorm",
    "norm_x/scale": "hnorm",
    "join/kernel": "eh_proj",
    "norm/scale": "shared_head.norm",
}
PREDICT = 0.3  # the weight of m's loss in the first part of the published training


@jax.custom_vjp
def _with_load(loss: jax.Array, bias: jax.Array, load: jax.Array) -> jax.Array:
    """The loss, with the load of experts in place of the gradient of their bias.

    The load is not multiplied by the cotangent of the loss, so that neither the count of a batch
    nor the scale of a loss changes it: sums of it are whole numbers, and equal loads are equal.
    """
    return loss


def _load_as_gradient(load: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return g, load, None


_with_load.defvjp(
    lambda loss, bias, load: (loss, load.astype(bias.dtype)),
    _load_as_gradient,
)


@dataclass(frozen=True)
class MoE(Llama):
    """A mixture of experts; the fields after Llama's say how its experts are computed (see
    `Experts`).
    """

    sizes: Mixture
    expert: str | None = None  # the data axis over which experts are split; None: all are here
    capacity: float = 0.0
    ragged: bool = False

    def pipeline_model(self, layers: str, *, spread_head: bool = False) -> jp.Model:
        """The functions by letter, of these layers (or of a layout)."""
        functions = {"E": self.first, "d": self.dense, "t": self.routed, "m": self.predict}
        last = self.last
        if spread_head:
            last = jp.spread(self.spread_last, dims={"norm": None, "head": {"kernel": 1}})
        return jp.Model(
            {k: f for k, f in (functions | {"L": last}).items() if k in layers},
            layers=layers,
            loss=jp.Loss.SUM_OVER_COUNT,
            stage_loss=True,
            has_metrics=bool(self.capacity),
            replaced=({"^shared/bias$": jp.Replaced.SUM} if self._is_balanced else {})
            | (fp8.RULES if self.fp8 else {}),
        )

    def shapes(self) -> Tree:
        """The canonical parameters as shapes: {"first", "stages": {letter: leaves [layers, ...]},
        "last", "shared"}.
        """
        s, r, (d, t, m) = self.sizes, self.sizes.routing, self.counts
        attention = {k: v for k, v in self._layers().items() if k != "mlp"}
        experts = swiglu(s.width, r.hidden)
        routed = attention | kernels(router=(s.width, r.experts))
        routed |= {"experts": self._scaled(stacked(experts, r.experts))}
        routed |= {"shared": self._scaled(swiglu(s.width, r.shared))} if r.shared else {}
        scale = {"scale": (s.width,)}
        predict = routed | {"norm_x": scale, "norm_known": scale, "norm": scale}
        predict |= kernels(join=(2 * s.width, s.width))
        layers = {"d": (self._layers(), d), "t": (routed, t), "m": (predict, m)}
        stages = {letter: stacked(own, count) for letter, (own, count) in layers.items() if count}
        ends = self._ends()
        if m:
            head = {"head": ends["last"].pop("head")} if "head" in ends["last"] else {}
            table = ends["first"] or ends["shared"]
            ends |= {"first": {}, "shared": table | head}
        if self._is_balanced:
            ends["shared"] = ends.get("shared", {}) | {"bias": (t + m, r.experts)}
        return self._filled(ends | {"stages": stages})

    def specs(self, *, spread_head: bool = False) -> Tree:
        """How parameters are split: experts over their axis, and as in Llama over the tensor axis.

        `spread_head`: the pipe axis cuts the vocabulary of the head, and the tensor axis its width.
        """
        axis = self.tensor
        columns, rows = {"kernel": PartitionSpec(None, axis)}, {"kernel": PartitionSpec(axis, None)}
        mlp = {"gate": columns, "up": columns, "down": rows} if axis else {}
        attn = {"q": columns, "k": columns, "v": columns, "out": rows} if axis else {}
        if axis and self.sizes.latent is not None:
            attn = {"q_up": columns, "kv_up": columns, "out": rows}
        features = PartitionSpec(self.expert, None, axis)
        own = {
            "gate": {"kernel": features},
            "up": {"kernel": features},
            "down": {"kernel": PartitionSpec(self.expert, axis, None)},
        }
        routed = {"attn": attn, "experts": own} | ({"shared": mlp} if self._shares else {})
        letters = {"d": {"attn": attn, "mlp": mlp}, "t": routed, "m": routed}
        _, _, predict = self.counts
        counts = dict(zip("dtm", self.counts, strict=True))
        stages = {"stages": {letter: letters[letter] for letter in "dtm" if counts[letter]}}
        if axis is None:
            return stages
        table, head = {"table": PartitionSpec(axis, None)}, {"head": columns}
        if predict or self.sizes.tied:
            return stages | {"shared": table | ({} if self.sizes.tied else head)}
        return stages | {"first": table, "last": {"head": rows} if spread_head else head}

    def tensors(self) -> dict[str, Tensor]:
        """How Hugging Face's files name the parameters, by canonical path."""
        s, found = self.sizes, self._end_tensors()
        names = _LAYER | {"attn/q_norm/scale": f"self_attn.{'q_a_layer' if s.latent else 'q_'}norm"}
        for letter, begin in zip("dtm", (0, s.dense, s.layers), strict=True):
            own = {f"stages/{letter}/{path}": name for path, name in names.items()}
            found |= {
                path: Tensor(f"model.layers.{{}}.{name}.weight", begin)
                for path, name in own.items()
            }
        bias = Tensor("model.layers.{}.mlp.gate.e_score_correction_bias", s.dense)
        head, table = Tensor("lm_head.weight"), Tensor("model.embed_tokens.weight")
        return found | {
            "shared/bias": bias,
            "shared/table": table,
            "shared/head/kernel": head,
        }

    def ignores(self, name: str) -> bool:
        """Whether a tensor of a file is unused here: the tensors of m repeat table and head."""
        repeated = (f"layers.{self.sizes.layers}.embed_tokens.weight", "shared_head.head.weight")
        return super().ignores(name) or name.endswith(repeated)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Layers of the letters d, t and m."""
        s = self.sizes
        return s.dense, s.layers - s.dense, s.predict

    # The functions of the pipeline

    def first(self, params: Tree, microbatch: Tree, *, shared: Tree = None) -> Tree:
        """Token embedding."""
        h = super().first(params, microbatch, shared=shared)
        dropped = {"dropped": jnp.zeros(len(h), jnp.int32)} if self.capacity else {}
        return {"h": h, **dropped}

    def dense(self, params: Tree, x: Tree, *, microbatch: Tree) -> tuple[Tree, jax.Array]:
        """A layer without experts: (x, no loss)."""
        h = self.layer(params, x["h"], microbatch=microbatch)
        return x | {"h": h}, jnp.zeros((), self.param_dtype)

    def routed(
        self, params: Tree, x: Tree, *, microbatch: Tree, ctx: jp.Context, shared: Tree = None
    ) -> tuple[Tree, jax.Array]:
        """A layer with experts: (x, its auxiliary loss, summed over rows by what their targets
        count).
        """
        h, dropped, loss = self._mixed(params, x["h"], microbatch, ctx, shared)
        return self._passed(x, h, dropped), loss

    def predict(
        self, params: Tree, x: Tree, *, microbatch: Tree, ctx: jp.Context, shared: Tree
    ) -> tuple[Tree, jax.Array]:
        """x unchanged, and the loss of the token after the next, from a layer with experts that
        sees the next token.
        """
        known = self._table({}, shared)[microbatch["targets"]]
        joined = jnp.concatenate(
            [self._norm(params["norm_known"], known), self._norm(params["norm_x"], x["h"])], axis=-1
        )
        h = self._between(self._dense(params["join"], joined))
        h, dropped, loss = self._mixed(params, h, microbatch, ctx, shared)
        u = self._whole(self._norm(params["norm"], h))
        after = self._after(microbatch)
        total, _ = self._summed(
            lambda parts: cross_entropy(self._head({}, shared), parts), u, after
        )
        return self._passed(x, x["h"], dropped), loss + PREDICT * total

    def last(self, params: Tree, x: Tree, microbatch: Tree, *, shared: Tree = None) -> Any:
        """Norm, head and loss of a microbatch, and the share of dropped choices as a metric."""
        found = super().last(params, x["h"], microbatch, shared=shared)
        return self._measured(found, x)

    def spread_last(
        self, params: Tree, x: Tree, microbatch: Tree, *, ctx: jp.Context, shared: Tree = None
    ) -> Any:
        """`last` on all devices of the pipeline at once."""
        found = super().spread_last(params, x["h"], microbatch, ctx=ctx, shared=shared)
        return self._measured(found, x)

    # Inside

    @property
    def _is_balanced(self) -> bool:
        return self.sizes.routing.scores is Scores.SIGMOID

    @property
    def _shares(self) -> bool:
        return self.sizes.routing.shared > 0

    def _measured(self, found: Any, x: Tree) -> Any:
        if not self.capacity:
            return found
        rows, tokens, _ = x["h"].shape
        _, routed, predict = self.counts
        choices = rows * tokens * self.sizes.routing.chosen * (routed + predict)
        return found, {"dropped": jnp.sum(x["dropped"]) / choices}

    def _passed(self, x: Tree, h: jax.Array, dropped: jax.Array) -> Tree:
        return {"h": h} | ({"dropped": x["dropped"] + dropped} if self.capacity else {})

    def _mixed(
        self, params: Tree, h: jax.Array, microbatch: Tree, ctx: jp.Context, shared: Tree
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(h, dropped choices, loss) of a layer with experts."""
        names = ("segments", "positions", "weights")
        seen = {name: microbatch[name] for name in names if name in microbatch}
        bias = None
        if self._is_balanced:
            bias = shared["bias"][ctx.layer - self.sizes.dense]
        return self.rematerialised(self._mix)(params, h, seen, bias)

    def _mix(
        self, params: Tree, h: jax.Array, seen: Tree, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        h = self._attended(params, h, seen)
        u = self._whole(self._norm(params["norm2"], h))
        to = route(self.sizes.routing, wide(u) @ wide(params["router"]["kernel"]), bias)
        weights = jnp.sum(seen["weights"], axis=1)
        loss = jnp.sum(to.auxiliary * weights, dtype=self.param_dtype)
        if bias is not None:
            loss = _with_load(loss, bias, to.load)
        experts = Experts(self.sizes.routing, self.expert, self.capacity, self.ragged)
        own = {
            name: each | {"kernel": each["kernel"].astype(self.dtype)}
            for name, each in params["experts"].items()
        }
        mixed, dropped = experts(own, u, to)
        if self._shares:
            mixed += self._swiglu(params["shared"], u)
        return h + self._between(mixed), dropped, loss

    def _after(self, microbatch: Tree) -> Tree:
        """The targets of m: the successors of the targets, if they are of the same document."""
        targets, weights = microbatch["targets"], microbatch["weights"]
        counted = weights[:, :-1] * weights[:, 1:]
        return {
            "targets": jnp.roll(targets, -1, axis=1),
            "weights": jnp.pad(counted, ((0, 0), (0, 1))),
        }

    def _table(self, params: Tree, shared: Tree) -> jax.Array:
        return super()._table(shared if self.sizes.predict else params, shared)

    def _head(self, params: Tree, shared: Tree) -> jax.Array:
        return super()._head(shared if self.sizes.predict else params, shared)

    def _layers(self) -> Tree:
        s, latent = self.sizes, self.sizes.latent
        found = super()._layers()
        if s.normed:
            found["attn"] |= {"q_norm": {"scale": (s.head,)}, "k_norm": {"scale": (s.head,)}}
        if latent is not None:
            products = kernels(
                q_low=(s.width, latent.queries),
                q_up=(latent.queries, s.heads * (latent.plain + latent.turned)),
                kv_low=(s.width, latent.keys + latent.turned),
                kv_up=(latent.keys, s.heads * (latent.plain + latent.value)),
                out=(s.heads * latent.value, s.width),
            )
            found["attn"] = self._scaled(products) | {
                "q_norm": {"scale": (latent.queries,)},
                "kv_norm": {"scale": (latent.keys,)},
            }
        return found

    def _projected(
        self, params: Tree, u: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values; of latent attention without the low ranks, as in training."""
        latent, yarn = self.sizes.latent, self.sizes.yarn
        if latent is None:
            q, k, v = super()._projected(params, u, positions)
            return (q if yarn is None else q * yarn.scores), k, v
        heads = (*u.shape[:2], self.sizes.heads, -1)
        low = self._norm(params["q_norm"], self._dense(params["q_low"], u))
        plain, turned = jnp.split(
            self._dense(params["q_up"], low).reshape(heads), [latent.plain], axis=-1
        )
        q = jnp.concatenate([plain, self._rotate(_paired(turned), positions)], axis=-1)
        q = q if yarn is None else q * yarn.scores
        low, turned = jnp.split(self._dense(params["kv_low"], u), [latent.keys], axis=-1)
        both = self._dense(params["kv_up"], self._norm(params["kv_norm"], low)).reshape(heads)
        plain, v = jnp.split(both, [latent.plain], axis=-1)
        turned = self._rotate(_paired(turned[:, :, None]), positions)
        turned = jnp.broadcast_to(turned, (*plain.shape[:3], latent.turned))
        return q, jnp.concatenate([plain, turned], axis=-1), v

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        found = super()._rotate(x, positions)
        return found if self.sizes.yarn is None else found * self.sizes.yarn.rotary


def _paired(x: jax.Array) -> jax.Array:
    """Reorder features 2 i and 2 i + 1, a rotary pair in DeepSeek's files, to i and i + h / 2."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
