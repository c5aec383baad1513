"""The bytes that a decoder's layers keep, by its sizes alone, against those of the traced model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.inspect import step_memory
from jaxpipe.jaxprs.equations import nbytes
from jaxpipe.lowering.target import FORMS, GPU_FORM, RunsOn
from jaxpipe.planner.layer_cost import Ends
from jaxpipe.planner.transformer import Transformer
from jaxpipe.table.effects import LastUse, Place
from tests.tiers import exhaustive, slow

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from llama_parts import model as llama
from llama_parts.sizes import PUBLISHED, Sizes
from moe_parts.model import MoE
from moe_parts.sizes import PUBLISHED as MIXTURE_SIZES

POLICIES = {
    llama.Remat.NONE: None,
    llama.Remat.DOTS: "dots_with_no_batch_dims_saveable",
    llama.Remat.LAYER: "nothing_saveable",
}
# A sixteenth of every width, so that shapes are small and their ratios those of the model.
SHARE, CONTEXT = 16, 512
LONG = 8192  # tokens of a row at the published sizes


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch):
    """Blocks of CPU devices have the form of those of GPUs."""
    for kind in RunsOn:
        monkeypatch.setitem(FORMS, kind, GPU_FORM)


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


class Gemma(llama.Llama):
    """Gemma 2: results of attention and MLP are normed too, and the gate is a GELU."""

    def _layers(self):
        scale = {"scale": (self.sizes.width,)}
        return super()._layers() | {"post1": scale, "post2": scale}

    def _layer(self, params, x, seen):
        u = self._whole(self._norm(params["norm1"], x))
        x = self._added(params["post1"], x, self._attend(params["attn"], u, seen))
        u = self._whole(self._norm(params["norm2"], x))
        return self._added(params["post2"], x, self._swiglu(params["mlp"], u))

    def _added(self, params, x, more):
        return x + self._between(self._norm(params, self._between(more)))

    def _swiglu(self, params, u):
        gate = jax.nn.gelu(self._dense(params["gate"], u))
        return self._dense(params["down"], gate * self._dense(params["up"], u))


class Gelu(llama.Llama):
    """An MLP of two matrices, as GPT has it."""

    def _layers(self):
        width, hidden = self.sizes.width, self.sizes.hidden
        mlp = llama.kernels(up=(width, hidden), down=(hidden, width))
        return super()._layers() | {"mlp": mlp}

    def _swiglu(self, params, u):
        return self._dense(params["down"], jax.nn.gelu(self._dense(params["up"], u)))


GEMMA2_9B = Sizes(42, 3584, 16, 8, 14_336, 256_000, head_size=256, tied=True)
DENSE = {name: (llama.Llama, PUBLISHED[name]) for name in ("llama3-8b", "llama3-70b")}
DENSE |= {"gelu": (Gelu, PUBLISHED["llama3-8b"]), "gemma2-9b": (Gemma, GEMMA2_9B)}
MIXTURES = ("qwen3-30b-a3b", "67b-a2b")


def made(name, remat, monkeypatch, *, layers, capacity=0.0, **settings):
    """A model, smaller, with a stand-in for its fused kernel."""
    stand_in = {llama.Attention.PLAIN: lambda q, k, v, segments: fused(q, k, v)}
    monkeypatch.setattr(llama, "ATTENTIONS", stand_in)
    own = smaller(name, layers)
    if name in MIXTURES:
        found = MoE(own, jnp.bfloat16, remat, capacity=capacity, **settings)
    else:
        found = DENSE[name][0](own, jnp.bfloat16, remat, **settings)
    return functions_of(found, "E" + "t" * layers + "L")


def functions_of(found, letters):
    """A model with its functions by letter."""
    if isinstance(found, MoE):
        return found, found.pipeline_model(letters)
    functions = {"E": found.first, "t": found.layer, "L": found.last}
    return found, jp.Model(functions, layers=letters, loss=jp.Loss.SUM_OVER_COUNT)


def smaller(name, layers):
    """A part of every width, and of the experts; the table is not tied, for it is not looked at."""
    own = MIXTURE_SIZES[name] if name in MIXTURES else DENSE[name][1]
    less = {"layers": layers, "width": own.width // SHARE, "hidden": own.hidden // SHARE}
    less |= {"head_size": own.head // SHARE, "vocab": 512, "tied": False}
    if name not in MIXTURES:
        return replace(own, **less)
    r = own.routing
    parts = {"hidden": r.hidden // SHARE, "shared": r.shared // SHARE, "experts": r.experts // 8}
    return replace(own, **less, routing=replace(r, **parts))


def rows(count):
    kinds = (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
    return {key: jax.ShapeDtypeStruct((count, CONTEXT), dtype) for key, dtype in kinds}


def described(own, name, *, capacity=0.0, **settings):
    """A model by its sizes."""
    more = {}
    if name in MIXTURES:
        r = own.routing
        more = {"experts": r.experts, "chosen": r.chosen, "ffn": r.hidden, "shared": r.shared}
        more |= {"capacity": capacity, "normed": own.normed}
    return Transformer(
        **{"ffn": own.hidden, **more},
        width=own.width,
        vocab=own.vocab,
        gated=name != "gelu",
        q_share=own.heads * own.head / own.width,
        kv_share=own.kv_heads * own.head / own.width,
        head=own.head,
        post_norms=name == "gemma2-9b",
        **settings,
    )


def estimated(name, **settings):
    """The same by sizes."""
    return described(smaller(name, 4), name, context=CONTEXT, **settings).costs()["t"]


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize(
    ("name", "capacity"), [*((n, 0) for n in (*DENSE, *MIXTURES)), ("qwen3-30b-a3b", 1.25)]
)
def test_a_layer_keeps_what_its_sizes_say(name, capacity, remat, monkeypatch):
    """Of two stages of three layers each, traced: nothing is compiled."""
    found, model = made(name, remat, monkeypatch, layers=6, capacity=capacity, tensor=None)
    schedule = jp.schedules.build("zb_h1", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    pipe = jp.Pipeline(model, schedule, mesh, layout="Ettt|tttL")
    (kind,) = pipe.trace(pipe.place(found.shapes()), rows(2)).code.kinds
    said = estimated(name, capacity=capacity).under(POLICIES[remat] or "")
    # Each layer's input besides; that of the first one is the stage's.  The others are made again
    # of the results that are normed, where these are kept.
    inputs = 0 if name == "gemma2-9b" and remat is not llama.Remat.LAYER else 2
    kept = sum(map(nbytes, (*kind.avals[Place.RESIDUAL_INPUT], *kind.avals[Place.RESIDUAL_WEIGHT])))
    assert 3 * said.residuals + inputs * said.boundary == pytest.approx(kept, rel=0.05)
    left = [*kind.avals[Place.STASH]]
    if kind.liveness.cotangent is LastUse.WEIGHT_GRAD:
        left += kind.avals[Place.COTANGENT]  # of the last layer, in its own slot until W
    assert 3 * said.stash == pytest.approx(sum(map(nbytes, left)), rel=0.02)
    held = sum(leaf.size for leaf in jax.tree.leaves(found.shapes()["stages"]))
    assert 6 * said.parameters / 2 == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("name", ["llama3-8b", *MIXTURES])
def test_a_layer_in_fp8_leaves_what_its_sizes_say(name, remat, monkeypatch):
    """Of two stages of three layers: histories are not counted, which are a few KiB at the
    published sizes.
    """
    monkeypatch.setattr(llama.fp8, "HISTORY", 1)
    own = {"capacity": 1.25} if name in MIXTURES else {}
    found, model = made(name, remat, monkeypatch, layers=6, fp8=True, **own)
    schedule = jp.schedules.build("zb_h1", devices=2, microbatches=2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    model = model if own else model.changed(replaced=llama.fp8.RULES)
    pipe = jp.Pipeline(model, schedule, mesh, layout="Ettt|tttL")
    (kind,) = pipe.trace(pipe.place(found.shapes()), rows(2)).code.kinds
    said = estimated(name, fp8=True, **own).under(POLICIES[remat] or "")
    kept = sum(map(nbytes, (*kind.avals[Place.RESIDUAL_INPUT], *kind.avals[Place.RESIDUAL_WEIGHT])))
    assert 3 * said.residuals + 2 * said.boundary == pytest.approx(kept, rel=0.05)
    left = sum(map(nbytes, kind.avals[Place.STASH]))
    assert 3 * said.stash == pytest.approx(left, rel=0.02)


def test_experts_that_take_all_tokens_are_not_in_fp8():
    with pytest.raises(jp.CostError, match="flax has no FP8; give a capacity"):
        estimated("qwen3-30b-a3b", fp8=True)


# Each compiles a layer.
SHARED = [
    (slow if remat is llama.Remat.NONE and sequence >= (name != "llama3-8b") else exhaustive)(
        name, remat, sequence
    )
    for name in ("llama3-8b", "gemma2-9b", "qwen3-30b-a3b")
    for remat in POLICIES
    for sequence in (False, True)
]


@pytest.mark.parametrize(("name", "remat", "sequence"), SHARED)
def test_devices_that_share_a_layer_keep_their_parts(name, remat, sequence, monkeypatch):
    """Where the partitioner splits it, which compiles the layer."""
    settings = {"tensor": "tensor", "sequence": sequence}
    found, model = made(name, remat, monkeypatch, layers=1, **settings)
    mesh = jax.make_mesh((1, 2), ("pipe", "tensor"), devices=jax.devices()[:2])
    measured = jp.measure(
        model,
        found.shapes(),
        rows(1),
        mesh=mesh,
        sharding=jp.Sharding(specs=found.specs()),
        peak=jp.measuring.Peak(flops=1e12, bandwidth=1e12),
    )["t"]
    said = estimated(name, tensor=2, sequence=sequence).under(POLICIES[remat] or "")
    assert said.boundary == measured.boundary
    assert said.residuals == pytest.approx(measured.residuals, rel=0.05)


# Each traces a pipeline; where devices share layers, the partitioner splits a stage.
STEPS = [
    (slow if (name, remat, tensor) == ("llama3-8b", llama.Remat.NONE, 1) else exhaustive)(
        name, remat, tensor
    )
    for name in ("llama3-8b", "llama3-70b", "gemma2-9b", "qwen3-30b-a3b")
    for remat in POLICIES
    for tensor in (1, 2)
]


@pytest.mark.parametrize(("name", "remat", "tensor"), STEPS)
def test_the_memory_of_a_step_is_that_of_the_traced_model(name, remat, tensor, monkeypatch):
    """At the published sizes, with Adam's state; the work space of blocks, which would have to be
    compiled, is left out of both.
    """
    monkeypatch.setattr(step_memory, "work_space", lambda step: {})
    monkeypatch.setattr(step_memory, "outer_blocks", lambda step: [])
    stand_in = {llama.Attention.PLAIN: lambda q, k, v, segments: fused(q, k, v)}
    monkeypatch.setattr(llama, "ATTENTIONS", stand_in)
    own = replace(MIXTURE_SIZES[name] if name in MIXTURES else DENSE[name][1], tied=False)
    axis = {} if tensor == 1 else {"tensor": "tensor", "sequence": True}
    more = {"capacity": 1.25} if name in MIXTURES else {}
    kind = MoE if name in MIXTURES else DENSE[name][0]
    letters = "E" + "t" * own.layers + "L"
    found, model = functions_of(kind(own, jnp.bfloat16, **axis, **more), letters)
    sizes = described(own, name, context=LONG, tensor=tensor, sequence=tensor > 1, **more)
    costs = {c: replace(cost, ends=Ends.ONE) for c, cost in sizes.costs().items()}
    pipe = 8 // tensor
    (plan,) = jp.plan(
        letters,
        costs,
        devices=pipe,
        microbatches=2 * pipe,
        schedules=("zb_h1",),
        chunks=(1,),
        remat=(POLICIES[remat],),
        mesh=RunsOn.ONE_CPU_PROCESS,
    )
    mesh = jax.make_mesh((pipe, tensor), ("pipe", "tensor"), devices=jax.devices()[:8])
    run = plan.pipeline(model, mesh, sharding=jp.Sharding(specs=found.specs() if axis else None))
    count = 2 * pipe
    kinds = (("tokens", jnp.int32), ("targets", jnp.int32), ("weights", jnp.float32))
    batch = {k: jax.ShapeDtypeStruct((count, LONG), dtype) for k, dtype in kinds}
    # `Transformer` counts the optimizer's float32 copy of parameters as its state.
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), found.shapes())
    traced = jp.inspect.memory(run, run.place(shapes), batch)
    said = plan.parts
    assert said.total - said.work == pytest.approx(traced["total"] + said.optimizer, rel=0.05)
