"""Llama in plain JAX, cut into the functions that a pipeline wants: `first` (embedding), `layer`,
`last` (norm, head and loss).

Pre-norm layers with RMSNorm, rotary positions, grouped-query attention and a SwiGLU (Touvron et al.
2023; Grattafiori et al. 2024). The formulas and parameter names are those of
torch_ref/models/llama.py; rotation and kernels fit the files that Hugging Face publishes.
Parameters have float32 (the master weights of the optimizer); the compute casts them to `dtype`,
once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxpipe as jp

from . import fp8
from .sizes import Sizes

Tree = Any  # a pytree of arrays
BLOCK = 512  # queries at a time

# Path of a parameter of a layer -> its name in the files of Hugging Face
LAYER = {
    "norm1/scale": "input_layernorm",
    "norm2/scale": "post_attention_layernorm",
    "attn/q/kernel": "self_attn.q_proj",
    "attn/k/kernel": "self_attn.k_proj",
    "attn/v/kernel": "self_attn.v_proj",
    "attn/out/kernel": "self_attn.o_proj",
    "mlp/gate/kernel": "mlp.gate_proj",
    "mlp/up/kernel": "mlp.up_proj",
    "mlp/down/kernel": "mlp.down_proj",
}


class Tensor(NamedTuple):
    """The tensors of a canonical parameter in the files of Hugging Face; kernels are stored as
    [out, in].
    """

    pattern: str  # with {} for the layer's number, and for the expert's
    begin: int = 0  # the number of the first layer

    @property
    def stacked(self) -> int:
        """Leading axes of the parameter that its tensors do not have: layers, experts."""
        return self.pattern.count("{}")

    def name(self, numbers: Sequence[int]) -> str:
        """The tensor of a layer, and of an expert."""
        return self.pattern.format(*(n + self.begin * (i == 0) for i, n in enumerate(numbers)))


class Remat(StrEnum):
    """What the backward of a layer computes again instead of keeping it."""

    NONE = "none"  # nothing but elementwise arithmetic
    DOTS = "dots"  # all but the results of products with weights
    LAYER = "layer"  # the whole layer, from its input
    # the same, but not what experts receive and return, so that nothing is sent again
    EXCHANGED = "exchanged"
    # the whole stage, from its input: the least memory between forward and backward
    STAGE = "stage"


class Attention(StrEnum):
    """How attention is computed."""

    PLAIN = "plain"  # products and a softmax, [N, heads, T, T]: any device, short contexts
    # the same for some queries at a time, and again in the backward (Rabe and Staats 2021): any
    # device, long contexts
    BLOCKS = "blocks"
    # JAX's call of cuDNN's fused kernel, on NVIDIA GPUs in bfloat16; no test runs it, for want of a
    # GPU
    CUDNN = "cudnn"


POLICIES = {
    Remat.DOTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    Remat.LAYER: jax.checkpoint_policies.nothing_saveable,
    Remat.EXCHANGED: jax.checkpoint_policies.save_only_these_names("exchanged"),
}


@dataclass(frozen=True)
class Llama:
    """Sizes and how to compute; `first`, `layer` and `last` are what `jaxpipe.Pipeline` takes as
    layers E, t and L.

    A microbatch holds "tokens", "targets" and "weights" (how much each target counts), [N, T], and
    where its rows are packed of several documents also "segments" (the document of a token) and
    "positions" (its place in the document).
    """

    sizes: Sizes
    dtype: Any = jnp.bfloat16  # of the compute
    remat: Remat = Remat.NONE
    attention: Attention = Attention.PLAIN
    loss_tokens: int = 0  # logits of so many tokens of a row at a time; 0 for all at once
    # the mesh axis over which layers are split; None outside of a pipeline
    tensor: str | None = None
    # what lies between layers is split over that axis too, by time (Korthikanti et al. 2022,
    # section 4.2.2)
    sequence: bool = False
    fp8: bool = False  # the layers' products with kernels

    @property
    def param_dtype(self) -> Any:
        """float32, or what the compute has if that is wider."""
        return jnp.promote_types(self.dtype, jnp.float32)

    def shapes(self) -> Tree:
        """The canonical parameters as shapes: {"first", "stages": {"t": leaves [layers, ...]},
        "last"}; a tied table is in "shared".
        """
        return self._filled(
            self._ends() | {"stages": {"t": stacked(self._layers(), self.sizes.layers)}}
        )

    def _layers(self) -> Tree:
        """The shapes of a layer."""
        s = self.sizes
        attention = kernels(
            q=(s.width, s.heads * s.head),
            k=(s.width, s.kv_heads * s.head),
            v=(s.width, s.kv_heads * s.head),
            out=(s.heads * s.head, s.width),
        )
        products = {"attn": attention, "mlp": swiglu(s.width, s.hidden)}
        products = {part: self._scaled(own) for part, own in products.items()}
        return {**products, "norm1": {"scale": (s.width,)}, "norm2": {"scale": (s.width,)}}

    def _scaled(self, kernels: Tree) -> Tree:
        """The shapes of kernels, with those of scales for FP8."""
        return fp8.with_scales(kernels) if self.fp8 else kernels

    def _ends(self) -> Tree:
        """The shapes of what is not a layer."""
        s = self.sizes
        table, last = {"table": (s.vocab, s.width)}, {"norm": {"scale": (s.width,)}}
        if s.tied:
            return {"first": {}, "last": last, "shared": table}
        return {"first": table, "last": last | kernels(head=(s.width, s.vocab))}

    def _filled(self, shapes: Tree) -> Tree:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a, self.param_dtype),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    def tensors(self) -> dict[str, Tensor]:
        """How Hugging Face's files name the parameters, by canonical path."""
        layers = {
            f"stages/t/{path}": Tensor(f"model.layers.{{}}.{name}.weight")
            for path, name in LAYER.items()
        }
        return layers | self._end_tensors()

    def _end_tensors(self) -> dict[str, Tensor]:
        table, head = Tensor("model.embed_tokens.weight"), Tensor("lm_head.weight")
        ends = {"last/norm/scale": Tensor("model.norm.weight")}
        if self.sizes.tied:
            return ends | {"shared/table": table}
        return ends | {"first/table": table, "last/head/kernel": head}

    def ignores(self, name: str) -> bool:
        """Whether a tensor may be in a file that this model does without: some repeat the table."""
        return name.endswith("rotary_emb.inv_freq") or (
            self.sizes.tied and name == "lm_head.weight"
        )

    def specs(self) -> Tree:
        """How tensor parallelism splits heads, hidden features and the vocabulary (Shoeybi et al.
        2019), without the layers' axis.
        """
        axis = self.tensor
        columns, rows = {"kernel": PartitionSpec(None, axis)}, {"kernel": PartitionSpec(axis, None)}
        layer = {
            "attn": {"q": columns, "k": columns, "v": columns, "out": rows},
            "mlp": {"gate": columns, "up": columns, "down": rows},
        }
        table = {"table": PartitionSpec(axis, None)}
        if self.sizes.tied:
            return {"shared": table, "stages": {"t": layer}}
        return {"first": table, "stages": {"t": layer}, "last": {"head": columns}}

    def spread_specs(self) -> Tree:
        """The same where the pipe axis cuts the vocabulary of head or tied table: the tensor axis
        has the width, and sums logits.
        """
        if self.sizes.tied:
            return self.specs() | {"shared": {"table": PartitionSpec(None, self.tensor)}}
        return self.specs() | {"last": {"head": {"kernel": PartitionSpec(self.tensor, None)}}}

    # What the pipeline calls

    def first(self, params: Tree, microbatch: Tree, *, shared: Tree = None) -> jax.Array:
        """Token embedding, [N, T, d]."""
        return self._between(self._table(params, shared)[microbatch["tokens"]])

    def layer(self, params: Tree, x: jax.Array, *, microbatch: Tree) -> jax.Array:
        """One layer, [N, T, d] -> [N, T, d]."""
        seen = {name: microbatch[name] for name in ("segments", "positions") if name in microbatch}
        return self.rematerialised(self._layer)(params, x, seen)

    def rematerialised(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a layer, with what its backward computes again."""
        policy = POLICIES.get(self.remat)
        return function if policy is None else jax.checkpoint(function, policy=policy)

    def last(
        self, params: Tree, x: jax.Array, microbatch: Tree, *, shared: Tree = None
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted cross entropy of a microbatch, in nats: its sum, and the sum of
        the weights.
        """
        u = self._whole(self._norm(params["norm"], x))
        return self._summed(partial(cross_entropy, self._head(params, shared)), u, microbatch)

    def spread_first(
        self, params: Tree, microbatch: Tree, *, ctx: jp.Context, shared: Tree
    ) -> jax.Array:
        """`first` of a tied model on all devices of the pipeline at once, each with some rows of
        the table (`jaxpipe.spread`).
        """
        return self._between(
            jp.VocabEmbedding()({}, microbatch, ctx=ctx, shared=self._table(params, shared))
        )

    def spread_last(
        self, params: Tree, x: jax.Array, microbatch: Tree, *, ctx: jp.Context, shared: Tree = None
    ) -> tuple[jax.Array, jax.Array]:
        """`last` in the same way: each device has some columns of the head, or some rows of the
        tied table.
        """
        size = ctx.shared_sizes["table"] if self.sizes.tied else ctx.sizes["head"]["kernel"]
        table = (
            self._table(params, shared)
            if self.sizes.tied
            else params["head"]["kernel"].astype(self.dtype).T
        )

        def cross_entropy(parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            u, targets, weights = parts
            losses, _ = jp.VocabHead().token_losses(
                table, u, {"targets": targets}, ctx=ctx._replace(sizes=size)
            )
            return jnp.sum(weights * losses)

        return self._summed(cross_entropy, self._whole(self._norm(params["norm"], x)), microbatch)

    def _summed(
        self, cross_entropy: Callable[..., jax.Array], u: jax.Array, microbatch: Tree
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of all tokens, of all at once or of some at a time."""
        parts = (u, microbatch["targets"], microbatch["weights"])
        length = u.shape[1]
        if not self.loss_tokens or self.loss_tokens >= length:
            return cross_entropy(parts), jnp.sum(microbatch["weights"], dtype=self.param_dtype)
        if length % self.loss_tokens:
            raise ValueError(
                f"rows of {length} tokens do not divide into pieces of {self.loss_tokens}; let "
                f"loss_tokens divide {length}"
            )
        # One piece of logits at a time, and again in the backward: [N, T, V] in float32 is more
        # than a stage's parameters.
        cut = jax.tree.map(
            lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, self.loss_tokens, *a.shape[2:]), 1, 0),
            parts,
        )
        piece = jax.checkpoint(cross_entropy)
        total = jax.lax.scan(
            lambda total, part: (total + piece(part), None), jnp.zeros((), self.param_dtype), cut
        )[0]
        return total, jnp.sum(microbatch["weights"], dtype=self.param_dtype)

    # Without a pipeline

    def logits(self, canonical: Tree, batch: Tree) -> jax.Array:
        """The whole model, [N, T] tokens -> [N, T, V]."""
        x, shared = self.hidden(canonical, batch), canonical.get("shared")
        last = canonical["last"]
        return wide(self._norm(last["norm"], x) @ self._head(last, shared))

    def hidden(self, canonical: Tree, batch: Tree) -> jax.Array:
        """What the last layer returns, [N, T, d]."""
        x = self.first(canonical["first"], batch, shared=canonical.get("shared"))
        return jax.lax.scan(
            lambda x, row: (self.layer(row, x, microbatch=batch), None), x, canonical["stages"]["t"]
        )[0]

    def loss(self, canonical: Tree, batch: Tree) -> jax.Array:
        """The loss of a whole batch at once, in nats a token."""
        total, count = self.last(
            canonical["last"], self.hidden(canonical, batch), batch, shared=canonical.get("shared")
        )
        return total / count

    # Inside

    def _table(self, params: Tree, shared: Tree) -> jax.Array:
        return (shared if self.sizes.tied else params)["table"].astype(self.dtype)

    def _head(self, params: Tree, shared: Tree) -> jax.Array:
        """The kernel of the head, [d, V]."""
        if self.sizes.tied:
            return self._table(params, shared).T
        return params["head"]["kernel"].astype(self.dtype)

    def _layer(self, params: Tree, x: jax.Array, seen: Tree) -> jax.Array:
        x = self._attended(params, x, seen)
        u = self._whole(self._norm(params["norm2"], x))
        return x + self._between(self._swiglu(params["mlp"], u))

    def _attended(self, params: Tree, x: jax.Array, seen: Tree) -> jax.Array:
        return x + self._between(
            self._attend(params["attn"], self._whole(self._norm(params["norm1"], x)), seen)
        )

    def _swiglu(self, params: Tree, u: jax.Array) -> jax.Array:
        gated = jax.nn.silu(self._dense(params["gate"], u)) * self._dense(params["up"], u)
        return self._dense(params["down"], gated)

    def _attend(self, params: Tree, u: jax.Array, seen: Tree) -> jax.Array:
        rows, tokens, _ = u.shape
        positions = seen.get("positions", jnp.broadcast_to(jnp.arange(tokens), (rows, tokens)))
        q, k, v = self._projected(params, u, positions)
        attend = ATTENTIONS[self.attention]
        return self._dense(
            params["out"], attend(q, k, v, seen.get("segments")).reshape(rows, tokens, -1)
        )

    def _projected(
        self, params: Tree, u: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Grouped-query attention (Ainslie et al. 2023): `heads / kv_heads` queries share a key and
        a value.
        """
        q, k, v = (
            self._dense(params[name], u).reshape(*u.shape[:2], -1, self.sizes.head)
            for name in ("q", "k", "v")
        )
        if "q_norm" in params:
            q, k = self._norm(params["q_norm"], q), self._norm(params["k_norm"], k)
        return self._rotate(q, positions), self._rotate(k, positions), v

    def _between(self, x: jax.Array) -> jax.Array:
        """Say how x lies between layers: left open, the partitioner might split its width."""
        return self._lies(x, PartitionSpec(None, self.tensor if self.sequence else None, None))

    def _whole(self, x: jax.Array) -> jax.Array:
        """What is multiplied with split kernels is whole on every device: else the partitioner
        might gather the kernels.
        """
        return self._lies(x, PartitionSpec(None, None, None))

    def _lies(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return x if self.tensor is None else jax.lax.with_sharding_constraint(x, spec)

    def _dense(self, params: Tree, x: jax.Array) -> jax.Array:
        kernel = params["kernel"].astype(self.dtype)
        return fp8.matmul(x, kernel, params["fp8"]) if "fp8" in params else x @ kernel

    def _norm(self, params: Tree, x: jax.Array) -> jax.Array:
        u = wide(x)
        size = jnp.mean(u * u, axis=-1, keepdims=True) + self.sizes.eps
        return (u * jax.lax.rsqrt(size) * params["scale"]).astype(self.dtype)

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotary positions (Su et al. 2021) of [N, T, heads, h]: feature i turns with feature i + h
        / 2, as in Hugging Face's files.
        """
        angle = (
            wide(positions.astype(jnp.float32)).astype(self.param_dtype)[..., None, None]
            * self.sizes.frequencies()
        )
        a, b = jnp.split(wide(x), 2, axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def kernels(**shapes: tuple[int, ...]) -> Tree:
    """A kernel of each name."""
    return {name: {"kernel": shape} for name, shape in shapes.items()}


def swiglu(width: int, hidden: int) -> Tree:
    """The kernels of a SwiGLU."""
    return kernels(gate=(width, hidden), up=(width, hidden), down=(hidden, width))


def stacked(layer: Tree, count: int) -> Tree:
    """The shapes of so many equal layers."""
    return jax.tree.map(
        lambda shape: (count, *shape), layer, is_leaf=lambda node: isinstance(node, tuple)
    )


def wide(x: jax.Array) -> jax.Array:
    """In float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _visible(tokens: int, segments: jax.Array | None) -> jax.Array:
    """Which keys a query sees, [N or 1, 1, T, T]: none that come later, and none of another
    document.
    """
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
    return (
        causal
        if segments is None
        else causal & (segments[:, None, :, None] == segments[:, None, None, :])
    )


def _plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    return _attention_of(q, k, v, _visible(q.shape[1], segments))


def _blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    rows, tokens, heads, _ = q.shape
    if tokens % BLOCK or tokens <= BLOCK:
        return _plain_attention(q, k, v, segments)
    segments = jnp.zeros((rows, tokens), jnp.int32) if segments is None else segments

    @jax.checkpoint
    def block(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, own, at = part
        earlier = at[:, None] >= jnp.arange(tokens)
        seen = earlier & (own[:, None, :, None] == segments[:, None, None, :])
        return _attention_of(queries, k, v, seen)

    def cut(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(rows, -1, BLOCK, *a.shape[2:]), 1, 0)

    found = jax.lax.map(block, (cut(q), cut(segments), jnp.arange(tokens).reshape(-1, BLOCK)))
    return jnp.moveaxis(found, 0, 1).reshape(rows, tokens, heads, v.shape[-1])


def _attention_of(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    rows, tokens, heads, size = q.shape
    grouped = q.reshape(rows, tokens, k.shape[2], -1, size)
    scores = jnp.einsum(
        "nqkgf,nskf->nkgqs", grouped, k, preferred_element_type=wide(q).dtype
    ) / np.sqrt(size).astype(wide(q).dtype)
    seen = visible[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("nkgqs,nskf->nqkgf", weights, v).reshape(rows, tokens, heads, v.shape[-1])


def _fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    if segments is None:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return jax.nn.dot_product_attention(
        q, k, v, mask=_visible(q.shape[1], segments), implementation="cudnn"
    )


ATTENTIONS = {
    Attention.PLAIN: _plain_attention,
    Attention.BLOCKS: _blocked_attention,
    Attention.CUDNN: _fused_attention,
}


def cross_entropy(kernel: jax.Array, parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """The weighted sum over some tokens; what is compared with the target, not looked up, stays
    split over a tensor axis.
    """
    u, targets, weights = parts
    logits = wide(u @ kernel)
    found = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0).sum(axis=-1)
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - found))
