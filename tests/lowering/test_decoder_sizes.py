"""The bytes that a decoder's layers keep, by its sizes alone, against those of the traced model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.jaxprs.sizes import nbytes
from jaxpipe.planner.transformer import Transformer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from llama_parts import model as llama
from llama_parts.sizes import PUBLISHED

POLICIES = {
    llama.Remat.NONE: None,
    llama.Remat.DOTS: "dots_with_no_batch_dims_saveable",
    llama.Remat.LAYER: "nothing_saveable",
}
# A sixteenth of every width, so that shapes are small and their ratios those of the model.
SHARE, CONTEXT = 16, 512


@jax.custom_vjp
def fused(q, k, v):
    """Products alone, as of a fused kernel: of its parts, only arguments and results are kept."""
    return forward(q, k, v)[0]


def forward(q, k, v):
    wide = [jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v)]
    weights = jnp.einsum("nqhf,nshf->nhqs", q, wide[0])
    rows = jnp.einsum("nhqs,nshf->nhq", weights, wide[0]).astype(jnp.float32)
    out = jnp.einsum("nhqs,nshf->nqhf", weights, wide[1])
    return out, (q, k, v, out, rows)


def backward(kept, cotangent):
    q, k, v, out, rows = kept
    rest = jnp.einsum("nqhf,nqhf,nhq->nqhf", out, cotangent, rows.astype(out.dtype))
    wide = [jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v)]
    return (
        jnp.einsum("nqhf,nshf,nshf->nqhf", rest, *wide),
        jnp.einsum("nqhf,nqhf,nskf->nskf", rest, q, v),
        jnp.einsum("nqhf,nqhf,nskf->nskf", rest, q, k),
    )


fused.defvjp(forward, backward)


def made(name, remat, monkeypatch, *, layers, **settings):
    """The model of an example, smaller, with a stand-in for its fused kernel."""
    monkeypatch.setitem(
        llama.ATTENTIONS, llama.Attention.PLAIN, lambda q, k, v, segments: fused(q, k, v)
    )
    own = PUBLISHED[name]
    sizes = replace(
        own,
        layers=layers,
        width=own.width // SHARE,
        hidden=own.hidden // SHARE,
        vocab=512,
        head_size=own.head // SHARE,
    )
    found = llama.Llama(sizes, jnp.bfloat16, remat, **settings)
    model = jp.Model(
        {"E": found.first, "t": found.layer, "L": found.last},
        layers="E" + "t" * layers + "L",
        loss=jp.Loss.SUM_OVER_COUNT,
    )
    return found, model


def rows(count):
    kinds = (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
    return {key: jax.ShapeDtypeStruct((count, CONTEXT), dtype) for key, dtype in kinds}


def estimated(name, *, tensor=1, sequence=False):
    """The same by sizes."""
    own = PUBLISHED[name]
    width = own.width / SHARE
    return Transformer(
        width=width,
        vocab=512,
        context=CONTEXT,
        ffn=own.hidden / SHARE,
        gated=True,
        kv_share=own.kv_heads * own.head / own.width,
        head=own.head / SHARE,
        tensor=tensor,
        sequence=sequence,
    ).costs()["t"]


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_a_layer_keeps_what_its_sizes_say(name, remat, monkeypatch):
    """Of two stages of two layers each, traced: nothing is compiled."""
    found, model = made(name, remat, monkeypatch, layers=4, tensor=None)
    schedule = jp.schedules.build("zb_h1", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(model, schedule, mesh, layout="Ett|ttL")
    (kind,) = pipe.trace(pipe.place(found.shapes()), rows(2)).code.kinds
    said = estimated(name).under(POLICIES[remat] or "")
    # A scan over layers keeps each layer's input besides.
    kept = sum(map(nbytes, (*kind.residual_input, *kind.residual_weight)))
    assert 2 * (said.residuals + said.boundary) == pytest.approx(kept, rel=0.05)
    assert 2 * said.stash == pytest.approx(sum(map(nbytes, kind.stash)), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_devices_that_share_a_layer_keep_their_parts(sequence, monkeypatch):
    """Where the partitioner splits it, which compiles the layer."""
    settings = {"tensor": "tensor", "sequence": sequence}
    found, model = made("llama3-8b", llama.Remat.NONE, monkeypatch, layers=1, **settings)
    mesh = jax.make_mesh((1, 2), ("pipe", "tensor"), devices=jax.devices()[:2])
    measured = jp.measure(
        model,
        found.shapes(),
        rows(1),
        mesh=mesh,
        sharding=jp.Sharding(specs=found.specs()),
        peak=jp.measuring.Peak(flops=1e12, bandwidth=1e12),
    )["t"]
    said = estimated("llama3-8b", tensor=2, sequence=sequence)
    assert said.boundary == measured.boundary
    assert said.residuals == pytest.approx(measured.residuals, rel=0.05)
