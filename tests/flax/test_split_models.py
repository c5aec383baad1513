"""Whole flax models, split by `from_flax_model`, compute what they compute unsplit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jaxpipe as jp
from jaxpipe.flax import from_flax_model
from tests.axes.model import worst_error
from tests.flax.models import F64, VOCAB, WIDTH, cross_entropy, rows
from tests.refused import refused
from tests.tolerance import FLOAT64

LAYERS = 4


class Attention(nn.Module):
    """A block of a decoder whose mask and number come from the model."""

    layer_idx: int

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", None))
        h = nn.LayerNorm(param_dtype=F64)(x)
        x = x + nn.MultiHeadDotProductAttention(
            2, use_bias=False, param_dtype=F64, kernel_init=init
        )(h, mask=mask)
        h = nn.Dense(8, use_bias=False, param_dtype=F64, kernel_init=init)(x)
        return x + nn.Dense(WIDTH, use_bias=False, param_dtype=F64)(nn.gelu(h))


class Decoder(nn.Module):
    """As nanodo: blocks made in setup, the embedding tied to the head."""

    between: str = ""

    def setup(self) -> None:
        self.embed = nn.Embed(VOCAB, WIDTH, param_dtype=F64)
        self.position = nn.Embed(5, WIDTH, param_dtype=F64)
        kind = nn.remat(Attention) if self.between == "remat" else Attention
        self.blocks = [kind(i) for i in range(LAYERS)]
        self.norm = nn.LayerNorm(param_dtype=F64)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        mask, seen = nn.make_causal_mask(tokens), []
        for block in self.blocks:
            x = block(2 * x if self.between == "scale" else x, mask)
            seen.append(x)
        return self.embed.attend(self.norm(x + seen[0] if self.between == "skip" else x))


class NnxBlock(nnx.Module):
    def __init__(self, number: int, rngs: nnx.Rngs) -> None:
        self.layer_idx = number
        self.dense = nnx.Linear(WIDTH, WIDTH, param_dtype=F64, rngs=rngs)

    def __call__(self, x: Any, scale: float) -> Any:
        return x + jnp.tanh(self.dense(x)) * scale


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=F64, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(i, rngs) for i in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, param_dtype=F64, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.embed.attend(self.norm(x))


def loss(model: Any, microbatch: Any) -> Any:
    return cross_entropy(model(microbatch["tokens"]), microbatch)


def decoder(between: str = "") -> tuple[Any, Any]:
    net = Decoder(between)
    return net, jax.jit(net.init)(jax.random.key(0), rows()["tokens"])


def step(model: Any) -> tuple[Any, Any]:
    """The loss and the canonical gradients of a pipeline of two devices."""
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(model.model, schedule, jax.make_mesh((2,), ("pipe",)))
    found, grads = pipe.jit(pipe.value_and_grad)(pipe.place(model.params), rows(4))
    return found, pipe.canonical(grads)


def test_a_linen_transformer_is_split_at_its_blocks() -> None:
    net, variables = decoder()
    model = from_flax_model(net, variables=variables, loss=loss, batch=rows(2), num_stages=2)
    assert {key: sorted(tree) for key, tree in model.params.items() if key != "stages"} == {
        "first": ["position"],
        "last": ["norm"],
        "shared": ["embed"],
    }
    found, grads = step(model)
    values = nn.meta.unbox(variables)["params"]

    @jax.jit
    def whole(params: Any) -> Any:
        return cross_entropy(net.apply({"params": params}, rows(4)["tokens"]), rows(4))

    expected, plain = jax.value_and_grad(whole)(values)
    assert float(found) == pytest.approx(float(expected), rel=FLOAT64)
    assert worst_error(model.to_linen(grads)["params"], plain) < FLOAT64
    jax.tree.map(np.testing.assert_array_equal, model.to_linen(model.params)["params"], values)


def test_an_nnx_model_is_split_and_written_back() -> None:
    net = Net(nnx.Rngs(0))
    model = from_flax_model(net, "blocks/{}", loss=loss, batch=rows(2), num_stages=2)
    assert sorted(model.params["shared"]) == ["embed"]
    assert model.params["first"] == {}
    found, grads = step(model)
    expected, plain = nnx.value_and_grad(loss)(net, rows(4))
    assert float(found) == pytest.approx(float(expected), rel=FLOAT64)
    model.to_nnx(grads)  # as if they were parameters
    assert worst_error(nnx.to_pure_dict(nnx.state(net)), nnx.to_pure_dict(plain)) < FLOAT64
    assert np.any(nnx.to_pure_dict(plain)["embed"]["embedding"])


@pytest.mark.parametrize(
    ("between", "message"),
    [
        ("scale", "blocks_1 is not called with what blocks_0 returned"),
        ("skip", "what blocks_0 returns is also used after the blocks"),
        (
            "remat",
            r"inside of a transformation.*Attention\(...\) instead of nn.remat.*name=f'blocks_{i}'",
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused(between: str, message: str) -> None:
    net, variables = decoder(between)
    with refused(message):
        from_flax_model(net, variables=variables, loss=loss, batch=rows(2), num_stages=2)


def test_wrong_names_and_numbers_are_refused() -> None:
    net, variables = decoder()
    how: dict[str, Any] = {"variables": variables, "loss": loss, "batch": rows(2), "num_stages": 2}
    with refused(r"no submodule is called 'layers_0'; the names are \['blocks_0', 'blocks_1'"):
        from_flax_model(net, "layers_{}", **how)
    with refused(r"must have one \{\} for the number"):
        from_flax_model(net, "blocks", **how)
    with refused("no argument stage_loss; blocks that return"):
        from_flax_model(net, **how, stage_loss=True)
    with refused("layer_idx is 0 in one and 2 in the other"):
        from_flax_model(net, ignore=(), **how)
