"""A GPT in flax, cut into the three functions a pipeline wants: first (embedding), stage (some
blocks), last (head and loss).

Pre-norm blocks, causal attention, tanh gelu; the formulas and parameter names are those of
torch_ref/models/gpt.py, so that the torch reference runs on the same weights.  Parameters of the
stages are stacked: [S, layers per stage, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxpipe as jp

Tree = Any  # a pytree of arrays
EPS = 1e-5  # of every layer norm


class Attention(nn.Module):
    """Causal self-attention of [N, T, d]; q, k and v are the three contiguous thirds of one
    projection.
    """

    heads: int
    dtype: Any
    num_layers: int

    @nn.compact
    def __call__(self, u: jax.Array) -> jax.Array:
        rows, tokens, width = u.shape
        qkv = dense(3 * width, self.dtype, name="qkv")(u)
        q, k, v = (t.reshape(rows, tokens, self.heads, -1) for t in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("nqhf,nkhf->nhqk", q, k) / (width // self.heads) ** 0.5
        visible = jnp.tril(jnp.ones((tokens, tokens), bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("nhqk,nkhf->nqhf", weights, v).reshape(rows, tokens, width)
        return dense(width, self.dtype, scale=(2 * self.num_layers) ** -0.5, name="out")(mixed)


class MLP(nn.Module):
    """Two dense layers with a gelu between them."""

    ratio: int
    dtype: Any
    num_layers: int

    @nn.compact
    def __call__(self, u: jax.Array) -> jax.Array:
        up = jax.nn.gelu(
            dense(self.ratio * u.shape[-1], self.dtype, name="up")(u), approximate=True
        )
        return dense(u.shape[-1], self.dtype, scale=(2 * self.num_layers) ** -0.5, name="down")(up)


class Block(nn.Module):
    """One transformer layer, [N, T, d] -> [N, T, d]."""

    heads: int
    ratio: int
    dtype: Any
    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention(self.heads, self.dtype, self.num_layers, name="attn")(
            norm(self.dtype, name="ln1")(x)
        )
        return x + MLP(self.ratio, self.dtype, self.num_layers, name="mlp")(
            norm(self.dtype, name="ln2")(x)
        )


def dense(features: int, dtype: Any, *, name: str, scale: float = 1.0) -> nn.Dense:
    """A dense layer; `scale` shrinks the layers that write to the residual stream (GPT-2's
    initialisation).
    """
    return nn.Dense(
        features,
        dtype=dtype,
        param_dtype=wide(dtype),
        kernel_init=nn.initializers.normal(0.02 * scale),
        name=name,
    )


def norm(dtype: Any, *, name: str | None = None) -> nn.LayerNorm:
    """A layer norm with the two-pass variance, which loses no digits where the mean is large."""
    return nn.LayerNorm(
        EPS, dtype=dtype, param_dtype=wide(dtype), use_fast_variance=False, name=name
    )


def wide(dtype: Any) -> Any:
    """The type of parameters and losses: float32 under bfloat16 compute, else the compute type
    itself.
    """
    return jnp.promote_types(dtype, jnp.float32)


@dataclass(frozen=True)
class GPT:
    """Sizes, and the functions that a pipeline calls.  `tied`: the head is the token embedding, one
    shared parameter.
    """

    stages: int
    layers: int  # of the whole model, a multiple of `stages`
    vocab: int
    context: int
    width: int
    heads: int
    tied: bool = False
    mlp_ratio: int = 4
    dtype: Any = jnp.float32  # of the compute

    @property
    def block(self) -> Block:
        return Block(self.heads, self.mlp_ratio, self.dtype, self.layers)

    def init(self, key: jax.Array) -> Tree:
        """Draw the canonical parameters: {"first", "stages", "last"}, and "shared" where the
        embedding is tied.
        """
        keys, param = jax.random.split(key, 3 + self.layers), wide(self.dtype)
        x = jnp.zeros((1, self.context, self.width), self.dtype)
        blocks = jax.vmap(lambda k: self.block.init(k, x)["params"])(keys[3:])
        wte = 0.02 * jax.random.normal(keys[0], (self.vocab, self.width), param)
        wpe = 0.02 * jax.random.normal(keys[1], (self.context, self.width), param)
        canonical = {
            "first": {"wpe": wpe},
            "stages": jax.tree.map(
                lambda leaf: leaf.reshape(self.stages, -1, *leaf.shape[1:]), blocks
            ),
            "last": {"ln": norm(self.dtype).init(key, x)["params"]},
        }
        if self.tied:
            return canonical | {"shared": {"wte": wte}}
        canonical["first"]["wte"] = wte
        canonical["last"]["head"] = {
            "kernel": 0.02 * jax.random.normal(keys[2], (self.width, self.vocab), param)
        }
        return canonical

    def first(self, params: Tree, microbatch: Tree, *, shared: Tree = None) -> jax.Array:
        """Token plus position embedding, [N, T, d]."""
        tokens = microbatch["tokens"]
        table = shared["wte"] if self.tied else params["wte"]
        return (table[tokens] + params["wpe"][: tokens.shape[-1]]).astype(self.dtype)

    def stage(self, params: Tree, x: jax.Array) -> jax.Array:
        """One stage's layers, in order."""
        return jax.lax.scan(
            lambda x, layer: (self.block.apply({"params": layer}, x), None), x, params
        )[0]

    def last(
        self, params: Tree, x: jax.Array, microbatch: Tree, *, shared: Tree = None
    ) -> jax.Array:
        """Mean cross entropy of a microbatch, in nats a token."""
        logits = self.head(params, x, shared)
        return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["targets"]).mean()

    def spread_first(
        self, params: Tree, microbatch: Tree, *, ctx: jp.Context, shared: Tree
    ) -> jax.Array:
        """`first` of a tied model on all devices of the pipeline at once, each with some rows of
        the table (`jaxpipe.spread`).
        """
        found = jp.VocabEmbedding()({}, microbatch, ctx=ctx, shared=shared["wte"])
        return (found + params["wpe"][: found.shape[-2]]).astype(self.dtype)

    def spread_last(
        self, params: Tree, x: jax.Array, microbatch: Tree, *, ctx: jp.Context, shared: Tree = None
    ) -> jax.Array:
        """`last` in the same way: each device has some columns of the head, or some rows of the
        tied table.
        """
        hidden = norm(self.dtype).apply({"params": params["ln"]}, x)
        if self.tied:
            return jp.VocabHead()(
                {}, hidden, microbatch, ctx=ctx, shared=shared["wte"].astype(self.dtype)
            )
        columns = params["head"]["kernel"].astype(self.dtype)
        return jp.VocabHead()(
            columns.T, hidden, microbatch, ctx=ctx._replace(sizes=ctx.sizes["head"]["kernel"])
        )

    def head(self, params: Tree, x: jax.Array, shared: Tree) -> jax.Array:
        """Final layer norm and logits, [N, T, V]."""
        kernel = shared["wte"].T if self.tied else params["head"]["kernel"]
        logits = norm(self.dtype).apply({"params": params["ln"]}, x) @ kernel.astype(self.dtype)
        return logits.astype(wide(self.dtype))

    def logits(self, canonical: Tree, tokens: jax.Array) -> jax.Array:
        """The whole model without a pipeline: [N, T] tokens -> [N, T, V]."""
        shared = canonical.get("shared")
        layers = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), canonical["stages"])
        x = self.stage(layers, self.first(canonical["first"], {"tokens": tokens}, shared=shared))
        return self.head(canonical["last"], x, shared)

    def plain_loss(self, canonical: Tree, batch: Tree) -> jax.Array:
        """The loss of a whole batch without a pipeline and without microbatches."""
        losses = optax.softmax_cross_entropy_with_integer_labels(
            self.logits(canonical, batch["tokens"]), batch["targets"]
        )
        return losses.mean()

    def generate(
        self,
        canonical: Tree,
        prompt: jax.Array,
        *,
        length: int,
        key: jax.Array,
        temperature: float = 0.8,
    ) -> jax.Array:
        """Sample `length` tokens after `prompt` [T0], seeing the newest `context` tokens at each
        step.
        """
        start = prompt[-self.context :]
        window = jnp.zeros(self.context, jnp.int32).at[: start.size].set(start)

        def grow(
            carry: tuple[jax.Array, jax.Array], key: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            window, size = carry
            logits = self.logits(canonical, window[None])[0, size - 1]
            token = jax.random.categorical(key, logits / temperature).astype(jnp.int32)
            full = jnp.roll(window, -1).at[-1].set(token)
            window = jnp.where(
                size == self.context,
                full,
                window.at[jnp.minimum(size, self.context - 1)].set(token),
            )
            return (window, jnp.minimum(size + 1, self.context)), token

        return jax.lax.scan(grow, (window, jnp.asarray(start.size)), jax.random.split(key, length))[
            1
        ]
