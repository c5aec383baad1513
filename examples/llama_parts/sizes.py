"""The published sizes of Llama, and their names in the files of Hugging Face."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpipe.planner.published import decoders


@dataclass(frozen=True)
class Scaling:
    """How Llama 3.1 and later stretch rotary positions (Grattafiori et al. 2024; `rope_scaling` of
    type llama3).
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192  # of the training before the stretch


@dataclass(frozen=True)
class Sizes:
    """All that makes one Llama differ from another."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    theta: float = 10_000.0
    eps: float = 1e-5
    scaling: Scaling | None = None
    tied: bool = False  # the head is the token embedding
    head_size: int | None = None  # features of a head; width / heads where None
    context: int = 4096  # longest row that it was trained for

    @property
    def head(self) -> int:
        """Features of a head."""
        return self.head_size or self.width // self.heads

    @property
    def turned(self) -> int:
        """Features of a head with rotary positions."""
        return self.head

    def letters(self) -> str:
        """The layers in model order: E, one t for each, and L."""
        return f"E{'t' * self.layers}L"

    def active(self) -> int:
        """How many parameters a token is multiplied with, the table too."""
        return self.parameters()

    def parameters(self) -> int:
        """How many parameters there are."""
        ends = self.vocab * self.width * (1 if self.tied else 2) + self.width
        return self.layers * (self._kernels() + 2 * self.width) + ends

    def flops(self, context: int) -> dict[str, float]:
        """FLOPs a token, forward and backward, of each letter of a layout, without what remat
        computes again.

        Six for each weight that it is multiplied with, and 12 T for each feature of the queries, as
        if each token saw the whole row (Chowdhery et al. 2022, appendix B).
        """
        attention = 12.0 * self.heads * self.head * context
        return {
            "E": 0.0,
            "t": 6.0 * self._kernels() + attention,
            "L": 6.0 * self.vocab * self.width,
        }

    def frequencies(self) -> np.ndarray[Any, Any]:
        """What an angle grows by from one position to the next, [turned / 2], in radians."""
        turns = self.theta ** -(np.arange(0, self.turned, 2) / self.turned)
        if self.scaling is None:
            return turns
        s = self.scaling
        waves = s.context * turns / (2 * math.pi)  # how often it turns within the old context
        kept = np.clip((waves - s.low) / (s.high - s.low), 0, 1)
        return turns * (kept + (1 - kept) / s.factor)

    def config(self, dtype: str) -> dict[str, Any]:
        """The config.json that `from_config` reads."""
        return to_config(self, dtype)

    def _kernels(self) -> int:
        """Weights in the kernels of a layer."""
        return self.width * (
            2 * self.heads * self.head + 2 * self.kv_heads * self.head + 3 * self.hidden
        )


_V3 = {"theta": 500_000.0, "context": 8192}
_V31 = {**_V3, "scaling": Scaling(), "context": 131_072}
# What the releases have besides.
_RELEASES: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3": _V3,
    "llama3.1": _V31,
    "llama3.2": {**_V31, "scaling": Scaling(factor=32.0), "tied": True},
}
# "tiny" is for trials and tests, and not published.
PUBLISHED = {"tiny": Sizes(4, 64, 4, 2, 160, 256, scaling=Scaling(context=64), context=512)}
PUBLISHED |= {
    name: Sizes(**own, **_RELEASES[name.partition("-")[0]]) for name, own in decoders().items()
}


def to_config(sizes: Sizes, dtype: str) -> dict[str, Any]:
    """The config.json of a model, as `transformers.LlamaForCausalLM` reads it."""
    s, scaling = sizes, sizes.scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.width,
        "intermediate_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head,
        "vocab_size": s.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.context,
        },
        "max_position_embeddings": s.context,
        "tie_word_embeddings": s.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def from_config(config: dict[str, Any]) -> Sizes:
    """The sizes that a config.json tells; SystemExit names what this model does not have."""
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    faults = [
        f"{name} {config[name]!r} (this model has {has!r})"
        for name, has in (
            ("model_type", "llama"),
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
        )
        if config.get(name, has) != has
    ]
    faults += (
        []
        if kind in ("default", "llama3")
        else [f"rope_type {kind!r} (this model has 'default' and 'llama3')"]
    )
    if faults:
        raise SystemExit(
            f"config.json is not of a Llama that this example knows: {', '.join(faults)}"
        )
    scaling = None
    if kind == "llama3":
        scaling = Scaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    return Sizes(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        hidden=config["intermediate_size"],
        vocab=config["vocab_size"],
        theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        eps=config["rms_norm_eps"],
        scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
        head_size=config.get("head_dim"),
        context=config.get("max_position_embeddings", 4096),
    )
