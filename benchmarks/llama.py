"""A model of Llama 3 70B's shapes in plain jnp: attention with grouped heads, SwiGLU,
tensor-parallel specs.

Shapes: Llama team 2024, "The Llama 3 Herd of Models", table 3.  RoPE is left out: it changes
neither memory nor matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxpipe as jp

PyTree: TypeAlias = Any
TENSOR = "tensor"


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a microbatch."""

    width: int = 8192
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 28672
    vocab: int = 128256
    layers: int = 80
    rows: int = 1  # a microbatch
    time: int = 4096
    block: int = 0  # queries whose attention scores are there at a time; 0 for all of a row's

    @property
    def groups(self) -> int:
        """Query heads to each key-value head."""
        return self.heads // self.kv_heads


def layer_again(layer: Callable[..., Any], remat: Callable[..., bool] | bool) -> Callable[..., Any]:
    """The layer under `jax.checkpoint`, with this policy; True: it keeps its input alone."""
    return jax.checkpoint(layer, policy=None if remat is True else remat) if remat else layer


@dataclass(frozen=True)
class Model:
    """The functions of a pipeline; `remat_layer` puts `jax.checkpoint` around each layer,
    `sequence` splits x by time over the tensor axis.

    `sequence` is Megatron's sequence parallelism (Korthikanti et al. 2022, section 4.2.2): what
    lies between two layers is split too. Without `tensor` the model says nothing about its arrays,
    and runs where there is no tensor axis.
    """

    shape: Shape
    remat_layer: Callable[..., bool] | bool = False
    sequence: bool = False
    tensor: bool = True
    compute: Any = jnp.bfloat16

    def first(self, params: PyTree, microbatch: PyTree) -> Any:
        return self._split(params["table"][microbatch["tokens"]].astype(self.compute))

    def stage(self, params: PyTree, x: Any) -> Any:
        return jax.lax.scan(lambda x, p: (self.layer(p, x), None), x, params)[0]

    def layer(self, params: PyTree, x: Any) -> Any:
        return layer_again(self._layer, self.remat_layer)(params, x)

    def last(self, params: PyTree, x: Any, microbatch: PyTree) -> Any:
        logits = jnp.einsum("btd,dv->btv", _norm(params["norm"], x), params["head"].astype(x.dtype))
        logits = logits.astype(jnp.promote_types(x.dtype, jnp.float32))
        # The logit of the target by a masked sum: a gather would bring the split vocabulary
        # together on every device.
        target = jnp.arange(self.shape.vocab) == microbatch["targets"][..., None]
        return jnp.mean(
            jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(target, logits, 0), axis=-1)
        )

    def by_stages(self) -> jp.Model:
        """For a pipeline of stages of equal size."""
        return jp.Model(self.stage, first=self.first, last=self.last)

    def by_letters(self, letters: str) -> jp.Model:
        """For one whose layers have letters: E, t and L."""
        return jp.Model({"E": self.first, "t": self.layer, "L": self.last}, layers=letters)

    def _layer(self, params: PyTree, x: Any) -> Any:
        x = self._split(
            x + _attention(params, self._whole(_norm(params["norm1"], x)), self.shape.block)
        )
        return self._split(x + _swiglu(params, self._whole(_norm(params["norm2"], x))))

    def _split(self, x: Any) -> Any:
        """Say how x lies between layers: left open, the partitioner would split its width, as the
        embedding's.
        """
        return self._constrain(x, PartitionSpec(None, TENSOR if self.sequence else None, None))

    def _whole(self, x: Any) -> Any:
        """What the column-parallel matmuls read is whole on every device: otherwise the partitioner
        may gather their weights instead.
        """
        return self._constrain(x, PartitionSpec(None, None, None))

    def _constrain(self, x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, spec) if self.tensor else x


def _cast(params: PyTree, name: str, x: Any) -> Any:
    return params[name].astype(x.dtype)


def _norm(scale: Any, x: Any) -> Any:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)).astype(
        x.dtype
    ) * scale.astype(x.dtype)


def _attention(params: PyTree, x: Any, block: int) -> Any:
    """b rows, t and s time, k key-value heads, g query heads of each, h of a head."""
    query = jnp.einsum("btd,dkgh->bkgth", x, _cast(params, "query", x))
    key = jnp.einsum("bsd,dkh->bksh", x, _cast(params, "key", x))
    value = jnp.einsum("bsd,dkh->bksh", x, _cast(params, "value", x))
    time = jnp.arange(x.shape[1])
    if not block:
        return jnp.einsum(
            "bkgth,kghd->btd", _mixed(query, key, value, time), _cast(params, "out", x)
        )
    # Scores of some queries at a time, again in the backward (Rabe and Staats 2021): what a fused
    # kernel keeps, without its speed.
    cut = jnp.moveaxis(query.reshape(*query.shape[:3], -1, block, query.shape[4]), 3, 0)
    mixed = jax.lax.map(
        lambda part: jax.checkpoint(_mixed)(part[0], key, value, part[1]),
        (cut, time.reshape(-1, block)),
    )
    return jnp.einsum(
        "bkgth,kghd->btd", jnp.moveaxis(mixed, 0, 3).reshape(query.shape), _cast(params, "out", x)
    )


def _mixed(query: Any, key: Any, value: Any, at: Any) -> Any:
    """Values mixed for queries at these times."""
    scores = jnp.einsum("bkgth,bksh->bkgts", query, key) / math.sqrt(query.shape[-1])
    scores = scores.astype(jnp.promote_types(query.dtype, jnp.float32))
    weights = jax.nn.softmax(
        jnp.where(at[:, None] >= jnp.arange(key.shape[2]), scores, -1e30), axis=-1
    ).astype(query.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", weights, value)


def _swiglu(params: PyTree, x: Any) -> Any:
    return (jax.nn.silu(x @ _cast(params, "gate", x)) * (x @ _cast(params, "up", x))) @ _cast(
        params, "down", x
    )


def parameters(shape: Shape, stages: int, dtype: Any = jnp.bfloat16) -> dict[str, PyTree]:
    """Canonical parameters as shapes: leaves [stages, layers of a stage, ...]."""
    d, k, g, h, f = shape.width, shape.kv_heads, shape.groups, shape.head_dim, shape.hidden
    layer = {
        "norm1": (d,),
        "norm2": (d,),
        "query": (d, k, g, h),
        "key": (d, k, h),
        "value": (d, k, h),
        "out": (k, g, h, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }
    own = {
        name: jax.ShapeDtypeStruct((stages, shape.layers // stages, *dims), dtype)
        for name, dims in layer.items()
    }
    head = {
        "norm": jax.ShapeDtypeStruct((d,), dtype),
        "head": jax.ShapeDtypeStruct((d, shape.vocab), dtype),
    }
    return {
        "first": {"table": jax.ShapeDtypeStruct((shape.vocab, d), dtype)},
        "stages": own,
        "last": head,
    }


def specs() -> dict[str, PyTree]:
    """Heads, hidden units and the vocabulary split over the tensor axis (Shoeybi et al. 2019,
    section 3); dim 0 is the layer.
    """
    column, row = PartitionSpec(None, None, TENSOR), PartitionSpec(None, TENSOR)
    own = dict.fromkeys(("query", "key", "value", "gate", "up"), column)
    own |= dict.fromkeys(("out", "down"), row)
    return {
        "first": PartitionSpec(None, TENSOR),
        "stages": own,
        "last": {"head": PartitionSpec(None, TENSOR)},
    }


def layered(canonical: dict[str, PyTree]) -> dict[str, PyTree]:
    """Parameters of one stage as those of layers "t"; of shapes by `jax.eval_shape`."""
    return {**canonical, "stages": {"t": jax.tree.map(lambda leaf: leaf[0], canonical["stages"])}}


def layered_specs() -> dict[str, PyTree]:
    """The specs of these."""
    split = specs()
    own = {name: PartitionSpec(*spec[1:]) for name, spec in split["stages"].items()}
    return {**split, "stages": {"t": own}}


def batch(shape: Shape, microbatches: int, sharding: Any = None) -> dict[str, Any]:
    """Tokens and targets of a step, as shapes."""
    rows = jax.ShapeDtypeStruct(
        (shape.rows * microbatches, shape.time), jnp.int32, sharding=sharding
    )
    return {"tokens": rows, "targets": rows}
