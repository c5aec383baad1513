"""The published sizes of mixtures of experts, and their names in the files of Hugging Face."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from llama_parts.sizes import Sizes


class Scores(StrEnum):
    """The scores of a router, and the rule that keeps the load of experts even."""

    # over all experts; an auxiliary loss of each row (Fedus et al. 2021, equation 4)
    SOFTMAX = "softmax"
    # of each expert by itself; a bias that moves with the load (Wang et al. 2024; DeepSeek-V3,
    # section 2.1.2), and the same auxiliary loss of the scores' shares, with a small weight
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Routing:
    """The experts of a layer, and how tokens choose them."""

    experts: int
    chosen: int  # experts of a token
    hidden: int  # features inside an expert
    shared: int = 0  # features inside the experts that every token has
    scores: Scores = Scores.SOFTMAX
    normalized: bool = True  # the gates of a token sum to `scale`
    scale: float = 1.0
    groups: int = 1  # of experts; a token chooses within `chosen_groups` of them
    chosen_groups: int = 1
    auxiliary: float = 0.001  # weight of the auxiliary loss


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks and features of a head."""

    queries: int  # rank
    keys: int  # rank of keys and values
    plain: int  # features of queries and keys without positions
    turned: int  # and with rotary positions; the keys' are the same for all heads
    value: int


@dataclass(frozen=True)
class Yarn:
    """The stretch of rotary positions to longer rows (YaRN, Peng et al. 2023, section 3), with the
    values of a config.json's `rope_scaling`.
    """

    factor: float
    context: int  # of the training before the stretch
    fast: float = 32.0  # features that turn more often than this within `context` are kept
    slow: float = 1.0  # those that turn less often are stretched
    magnitude: float = 0.0  # mscale
    magnitude_all: float = 0.0  # mscale_all_dim

    def stretched(self, turns: np.ndarray[Any, Any], theta: float) -> np.ndarray[Any, Any]:
        """The frequencies of a head's pairs of features, from those before the stretch."""

        def feature(rotations: float) -> float:
            waves = self.context / (2 * math.pi * rotations)
            return len(turns) * math.log(waves) / math.log(theta)

        low = max(math.floor(feature(self.fast)), 0)
        high = min(math.ceil(feature(self.slow)), 2 * len(turns) - 1)
        share = np.clip((np.arange(len(turns)) - low) / max(high - low, 1e-3), 0, 1)
        return turns * (1 - share + share / self.factor)

    @property
    def rotary(self) -> float:
        """The factor of features with rotary positions."""
        if self.magnitude and self.magnitude_all:
            return self._size(self.magnitude) / self._size(self.magnitude_all)
        return self._size(1.0)

    @property
    def scores(self) -> float:
        """The factor of attention's scores."""
        return self._size(self.magnitude_all) ** 2

    def _size(self, magnitude: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * magnitude * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Mixture(Sizes):
    """The sizes of a mixture of experts; `hidden` is of dense layers."""

    routing: Routing = Routing(8, 2, 32)
    dense: int = 0  # first layers without experts
    latent: Latent | None = None  # grouped-query attention where None
    normed: bool = False  # queries and keys of a head are normed (Qwen3)
    predict: int = 0  # layers that predict one more token (DeepSeek-V3, section 2.2)
    yarn: Yarn | None = None  # rows are longer than in the first part of the training

    @property
    def turned(self) -> int:
        """Features of a head with rotary positions."""
        return self.head if self.latent is None else self.latent.turned

    def frequencies(self) -> np.ndarray[Any, Any]:
        """The growth of an angle from one position to the next, [turned / 2], in radians."""
        turns = super().frequencies()
        return turns if self.yarn is None else self.yarn.stretched(turns, self.theta)

    def letters(self) -> str:
        """The layers in model order: E, dense ones d, ones with experts t, m, and L."""
        return f"E{'d' * self.dense}{'t' * (self.layers - self.dense)}{'m' * self.predict}L"

    def parameters(self) -> int:
        """The number of parameters, with those of `predict`."""
        return self._counted(self.routing.experts)

    def active(self) -> int:
        """The number of parameters that a token is multiplied with, the table too, without
        `predict`.
        """
        return replace(self, predict=0)._counted(self.routing.chosen)

    def flops(self, context: int) -> dict[str, float]:
        """FLOPs a token, forward and backward, of each letter, with the experts that a token
        chooses and without what remat computes again (see `Sizes.flops`).
        """
        features = 2 * self.head
        if self.latent is not None:
            features = self.latent.plain + self.latent.turned + self.latent.value
        attention = 6.0 * self._attention() + 6.0 * self.heads * features * context
        head = 6.0 * self.vocab * self.width
        layer = attention + 6.0 * self._experts(self.routing.chosen)
        return {
            "E": 0.0,
            "d": attention + 18.0 * self.width * self.hidden,
            "t": layer,
            "m": layer + 12.0 * self.width**2 + head,
            "L": head,
        }

    def config(self, dtype: str) -> dict[str, Any]:
        """The config.json that `from_config` reads."""
        return to_config(self, dtype)

    def _attention(self) -> int:
        """Weights in the kernels of an attention."""
        d, h, latent = self.width, self.heads, self.latent
        if latent is None:
            return 2 * d * self.head * (h + self.kv_heads)
        queries = latent.queries * (d + h * (latent.plain + latent.turned))
        keys = d * (latent.keys + latent.turned) + latent.keys * h * (latent.plain + latent.value)
        return queries + keys + h * latent.value * d

    def _experts(self, count: int) -> int:
        """Weights of a layer's router, of so many experts and of the shared ones."""
        r, d = self.routing, self.width
        return d * r.experts + 3 * d * (count * r.hidden + r.shared)

    def _counted(self, experts: int) -> int:
        norms = 2 * self.width + (2 * self.head if self.normed else 0)
        norms += 0 if self.latent is None else self.latent.queries + self.latent.keys
        dense = self._attention() + norms + 3 * self.width * self.hidden
        bias = self.routing.experts if self.routing.scores is Scores.SIGMOID else 0
        layer = self._attention() + norms + self._experts(experts) + bias
        predict = layer + 2 * self.width**2 + 3 * self.width
        ends = self.vocab * self.width * (1 if self.tied else 2) + self.width
        count = self.layers - self.dense
        return self.dense * dense + count * layer + self.predict * predict + ends


_QWEN3 = {
    "vocab": 151_936,
    "theta": 1_000_000.0,
    "eps": 1e-6,
    "head_size": 128,
    "kv_heads": 4,
    "context": 40_960,
    "normed": True,
}
_SIGMOID = {"scores": Scores.SIGMOID, "scale": 2.5, "auxiliary": 0.0001}

PUBLISHED = {
    # for trials and tests; not published
    "tiny": Mixture(
        4,
        64,
        4,
        2,
        160,
        256,
        normed=True,
        context=512,
        routing=Routing(8, 2, 64, auxiliary=0.01),
    ),
    "tiny-latent": Mixture(
        4,
        64,
        4,
        4,
        160,
        256,
        context=512,
        dense=1,
        predict=1,
        latent=Latent(24, 16, 16, 8, 16),
        routing=Routing(8, 2, 64, 64, groups=4, chosen_groups=2, **_SIGMOID),
    ),
    "qwen3-30b-a3b": Mixture(48, 2048, 32, hidden=6144, routing=Routing(128, 8, 768), **_QWEN3),
    "qwen3-235b-a22b": Mixture(
        94, 4096, 64, hidden=12_288, routing=Routing(128, 8, 1536), **_QWEN3
    ),
    # marin-community/marin 6367 and 7024: width, layers, experts and chosen ones are published;
    # features inside an expert follow from 67B parameters, of which 2B are active
    "67b-a2b": Mixture(
        26, 2560, 20, 5, 7680, 128_256, context=8192, routing=Routing(256, 4, 1280, 2560)
    ),
    "deepseek-v3": Mixture(
        61,
        7168,
        128,
        128,
        18_432,
        129_280,
        eps=1e-6,
        context=4096,
        dense=3,
        predict=1,
        latent=Latent(1536, 512, 128, 64, 128),
        routing=Routing(256, 8, 2048, 2048, groups=8, chosen_groups=4, **_SIGMOID),
    ),
}

# The names of the two families in transformers, and the supported values of a config.json.
_QWEN, _DEEPSEEK = "qwen3_moe", "deepseek_v3"
_FIXED = {"hidden_act": "silu", "attention_bias": False}
_FIXED_OF = {
    _QWEN: {"mlp_only_layers": [], "decoder_sparse_step": 1},
    _DEEPSEEK: {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
}


def to_config(sizes: Mixture, dtype: str) -> dict[str, Any]:
    """The config.json of a model, for `transformers`."""
    s, r = sizes, sizes.routing
    family = _QWEN if s.latent is None else _DEEPSEEK
    found = {
        "architectures": ["Qwen3MoeForCausalLM" if s.latent is None else "DeepseekV3ForCausalLM"],
        "model_type": family,
        "hidden_size": s.width,
        "intermediate_size": s.hidden,
        "moe_intermediate_size": r.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "num_experts_per_tok": r.chosen,
        "norm_topk_prob": r.normalized,
        "vocab_size": s.vocab,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "rope_scaling": None if s.yarn is None else _yarn_config(s.yarn),
        "max_position_embeddings": s.context,
        "tie_word_embeddings": s.tied,
        "torch_dtype": dtype,
        **_FIXED,
        **_FIXED_OF[family],
    }
    if s.latent is None:
        return found | {
            "head_dim": s.head,
            "num_experts": r.experts,
            "router_aux_loss_coef": r.auxiliary,
        }
    return found | {
        "q_lora_rank": s.latent.queries,
        "kv_lora_rank": s.latent.keys,
        "qk_nope_head_dim": s.latent.plain,
        "qk_rope_head_dim": s.latent.turned,
        "v_head_dim": s.latent.value,
        "rope_interleave": True,
        "n_routed_experts": r.experts,
        "n_shared_experts": r.shared // r.hidden,
        "n_group": r.groups,
        "topk_group": r.chosen_groups,
        "routed_scaling_factor": r.scale,
        "aux_loss_alpha": r.auxiliary,
        "first_k_dense_replace": s.dense,
        "num_nextn_predict_layers": s.predict,
    }


# Fields of `Yarn`, and their names in a config.json.
_YARN = {
    "factor": "factor",
    "context": "original_max_position_embeddings",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "magnitude": "mscale",
    "magnitude_all": "mscale_all_dim",
}


def _yarn_config(yarn: Yarn) -> dict[str, Any]:
    return {"type": "yarn", **{theirs: getattr(yarn, own) for own, theirs in _YARN.items()}}


def from_config(config: dict[str, Any]) -> Mixture:
    """The sizes in a config.json; SystemExit names unsupported values."""
    family = config.get("model_type")
    wanted = _FIXED | _FIXED_OF.get(str(family), {"model_type": f"{_QWEN} or {_DEEPSEEK}"})
    rope = config.get("rope_scaling") or {}
    faults = [
        f"{name} {config[name]!r} (this model has {has!r})"
        for name, has in wanted.items()
        if config.get(name, has) != has
    ]
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = {"type", "rope_type", *_YARN.values()} if kind == "yarn" else {*rope}
    faults += [f"{name} in rope_scaling" for name in rope if name not in known]
    faults += [
        f"no {name} in rope_scaling"
        for name in (_YARN["factor"], _YARN["context"])
        if kind == "yarn" and name not in rope
    ]
    if kind not in ("default", "yarn"):
        faults.append(f"rope_type {kind!r} (this model has 'default' and 'yarn')")
    if faults:
        raise SystemExit(
            f"config.json is not of a mixture that this example knows: {', '.join(faults)}"
        )
    c = config
    common = {
        "layers": c["num_hidden_layers"],
        "width": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c["num_key_value_heads"],
        "hidden": c["intermediate_size"],
        "vocab": c["vocab_size"],
        "theta": float(c["rope_theta"]),
        "eps": c["rms_norm_eps"],
        "tied": c["tie_word_embeddings"],
        "context": c["max_position_embeddings"],
        "yarn": None,
    }
    if kind == "yarn":
        given = {own: rope[theirs] for own, theirs in _YARN.items() if theirs in rope}
        common["yarn"] = Yarn(**given)
    chosen, hidden = c["num_experts_per_tok"], c["moe_intermediate_size"]
    if family == _QWEN:
        routing = Routing(
            c["num_experts"],
            chosen,
            hidden,
            normalized=c["norm_topk_prob"],
            auxiliary=c["router_aux_loss_coef"],
        )
        return Mixture(**common, routing=routing, normed=True, head_size=c["head_dim"])
    return Mixture(
        **common,
        routing=Routing(
            c["n_routed_experts"],
            chosen,
            hidden,
            c["n_shared_experts"] * hidden,
            Scores.SIGMOID,
            c["norm_topk_prob"],
            c["routed_scaling_factor"],
            c["n_group"],
            c["topk_group"],
            c.get("aux_loss_alpha", 0.0001),
        ),
        dense=c["first_k_dense_replace"],
        predict=c.get("num_nextn_predict_layers", 0),
        latent=Latent(
            c["q_lora_rank"],
            c["kv_lora_rank"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        ),
    )
