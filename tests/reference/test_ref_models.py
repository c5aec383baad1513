"""Every model through tables with a cut backward, against plain autograd; and models against
formulas written out again.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from test_ref_executor import BIDIRECTIONAL, RECOMPUTED, TOLERANCE, ZERO_BUBBLE, agrees, gpt_batch

import torch_ref
from torch_ref import TorchRefError
from torch_ref.models import GPT, MLP, RNN, Context, ConvNet, Llama, MoE, build, names

torch.set_num_threads(1)


def conv_batch(rows, *, seed=0):
    rng = np.random.default_rng(seed)
    return {"images": rng.standard_normal((rows, 5, 4, 3)), "labels": rng.integers(0, 10, rows)}


def rnn_batch(rows, *, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 6, 4)), "y": rng.standard_normal((rows, 6, 2))}


def packed_batch(rows, *, seed=0):
    """Rows of two documents, the second from token 2 or 3 on."""
    second = np.arange(6) >= 2 + np.arange(rows)[:, None] % 2
    places = np.arange(6) - np.where(second, second.argmax(1)[:, None], 0)
    return gpt_batch(rows, seed=seed, weighted=True) | {
        "segments": 1 + second.astype(int),
        "positions": places,
    }


CASES = {
    "conv": (ConvNet, conv_batch),
    "llama": (
        lambda **how: Llama(
            vocab=11, layers_per_stage=2, rope_factor=8.0, rope_context=16, tied=True, **how
        ),
        packed_batch,
    ),
    "moe": (lambda **how: MoE(vocab=11, **how), gpt_batch),
    "moe returning its auxiliary loss": (
        lambda **how: MoE(vocab=11, returned="sum_count" not in how, **how),
        gpt_batch,
    ),
    "rnn": (RNN, rnn_batch),
}


@pytest.mark.parametrize(
    "table",
    [ZERO_BUBBLE, BIDIRECTIONAL, RECOMPUTED],
    ids=["zero bubble", "bidirectional", "recomputed"],
)
@pytest.mark.parametrize("name", CASES)
def test_models_agree_with_plain_autograd(name, table):
    make, batch = CASES[name]
    agrees(table, make(num_stages=2), batch(6), microbatches=3)
    agrees(table, make(num_stages=2, sum_count=True), batch(6), microbatches=3)


def test_auxiliary_loss_counts_and_travels_either_way():
    batch = gpt_batch(6)
    weights = MoE(num_stages=2, vocab=11).init()
    carried, returned, without = (
        torch_ref.run(ZERO_BUBBLE, MoE(num_stages=2, vocab=11, **how), batch, weights=weights)
        for how in ({}, {"returned": True}, {"aux_weight": 0.0})
    )
    np.testing.assert_allclose(carried.losses, returned.losses, rtol=TOLERANCE)
    for name, gradient in carried.grads.items():
        np.testing.assert_allclose(returned.grads[name], gradient, rtol=1e-9, atol=1e-14)
    # Each of 2 stages adds weight * E * sum(f q), which is between 0 and weight * E, and about
    # `weight` where balanced.
    assert (carried.losses - without.losses > 2 * 0.01 * 0.5).all()
    assert (
        np.abs(carried.grads["stages/router/kernel"] - without.grads["stages/router/kernel"]).max()
        > 1e-5
    )


def layer_norm(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def cross_entropy(logits, targets):
    return (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    ).mean()


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_formulas_in_numpy(tied):
    """The docstring's formulas, written out a second time."""
    model = GPT(num_stages=2, layers_per_stage=2, vocab=11, block=8, width=8, heads=2, tied=tied)
    w, batch = model.init(5), gpt_batch(2)
    wte = w["shared/wte"] if tied else w["first/wte"]
    x = wte[batch["tokens"]] + w["first/wpe"][:6]
    for s in range(2):
        for i in range(2):
            p = {
                name.removeprefix("stages/"): value[s, i]
                for name, value in w.items()
                if name.startswith("stages/")
            }
            u = (
                layer_norm(x, p["ln1/scale"], p["ln1/bias"]) @ p["attn/qkv/kernel"]
                + p["attn/qkv/bias"]
            )
            joined = np.zeros((2, 6, 8))
            for head in range(2):
                q, k, v = (
                    u[..., 8 * block + 4 * head : 8 * block + 4 * head + 4] for block in range(3)
                )
                for t in range(6):
                    scores = np.einsum("nf,nkf->nk", q[:, t], k[:, : t + 1]) / 2.0
                    a = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
                    joined[:, t, 4 * head : 4 * head + 4] = np.einsum(
                        "nk,nkf->nf", a, v[:, : t + 1]
                    )
            x = x + joined @ p["attn/out/kernel"] + p["attn/out/bias"]
            u = layer_norm(x, p["ln2/scale"], p["ln2/bias"]) @ p["mlp/up/kernel"] + p["mlp/up/bias"]
            u = 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
            x = x + u @ p["mlp/down/kernel"] + p["mlp/down/bias"]
    logits = layer_norm(x, w["last/ln/scale"], w["last/ln/bias"]) @ (
        wte.T if tied else w["last/head/kernel"]
    )
    result = torch_ref.run("0F0\n1F0\n", model, batch, weights=w)
    np.testing.assert_allclose(result.loss, cross_entropy(logits, batch["targets"]), rtol=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_formulas_in_numpy(tied):
    """The docstring's formulas, a token, a head and a pair of features at a time; each document by
    itself.
    """
    how = {"rope_factor": 8.0, "rope_context": 16}
    model, batch = (
        Llama(num_stages=2, layers_per_stage=2, vocab=11, hidden=12, tied=tied, **how),
        packed_batch(2),
    )
    w = model.init(5)
    table = w["shared/table"] if tied else w["first/table"]

    def rms(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def turned(u, heads):
        found = np.empty((len(u), heads, 8))
        for place, head, i in itertools.product(range(len(u)), range(heads), range(4)):
            speed = 10_000.0 ** (-2 * i / 8)
            turns = 16 * speed / (2 * math.pi)
            mixed = min(max((turns - 1) / 3, 0), 1)
            angle = place * ((1 - mixed) * speed / 8 + mixed * speed)
            a, b = u[place, 8 * head + i], u[place, 8 * head + i + 4]
            found[place, head, i] = a * math.cos(angle) - b * math.sin(angle)
            found[place, head, i + 4] = b * math.cos(angle) + a * math.sin(angle)
        return found

    def document(x):
        for s, i in itertools.product(range(2), range(2)):
            p = {
                name.removeprefix("stages/"): value[s, i]
                for name, value in w.items()
                if name.startswith("stages/")
            }
            u, joined = rms(x, p["norm1/scale"]), np.zeros((len(x), 4, 8))
            q, k, v = (
                turned(u @ p["attn/q/kernel"], 4),
                turned(u @ p["attn/k/kernel"], 2),
                (u @ p["attn/v/kernel"]).reshape(-1, 2, 8),
            )
            for t, head in itertools.product(range(len(x)), range(4)):
                a = np.exp(k[: t + 1, head // 2] @ q[t, head] / math.sqrt(8))
                joined[t, head] = a / a.sum() @ v[: t + 1, head // 2]
            x = x + joined.reshape(len(x), -1) @ p["attn/out/kernel"]
            u = rms(x, p["norm2/scale"])
            gate = u @ p["mlp/gate/kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (u @ p["mlp/up/kernel"])) @ p["mlp/down/kernel"]
        return rms(x, w["last/norm/scale"]) @ (table.T if tied else w["last/head/kernel"])

    x = table[batch["tokens"]]
    logits = np.stack(
        [
            np.concatenate([document(x[n, batch["segments"][n] == d]) for d in (1, 2)])
            for n in range(2)
        ]
    )
    nll = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    )
    result = torch_ref.run("0F0\n1F0\n", model, batch, weights=w)
    np.testing.assert_allclose(
        result.loss, (batch["weights"] * nll).sum() / batch["weights"].sum(), rtol=TOLERANCE
    )


def test_conv_formulas_in_numpy():
    model, batch = ConvNet(num_stages=1), conv_batch(2)
    w = model.init(5)

    def conv(x, name, s=()):
        kernel, padded = w[f"{name}/kernel"][s], np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        height, width = x.shape[1:3]
        parts = [
            padded[:, a : a + height, b : b + width] @ kernel[a, b]
            for a in range(3)
            for b in range(3)
        ]
        return sum(parts) + w[f"{name}/bias"][s]

    def gn(x, name):
        grouped = x.reshape(2, 5, 4, 2, 4)
        mean, var = grouped.mean((1, 2, 4), keepdims=True), grouped.var((1, 2, 4), keepdims=True)
        normed = ((grouped - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
        return normed * w[f"{name}/scale"][0] + w[f"{name}/bias"][0]

    def silu(x):
        return x / (1 + np.exp(-x))

    x = conv(batch["images"], "first/conv")
    u = conv(silu(gn(x, "stages/gn1")), "stages/conv1", 0)
    x = x + conv(silu(gn(u, "stages/gn2")), "stages/conv2", 0)
    logits = x.mean((1, 2)) @ w["last/head/kernel"] + w["last/head/bias"]
    result = torch_ref.run("0F0\n", model, batch, weights=w)
    np.testing.assert_allclose(result.loss, cross_entropy(logits, batch["labels"]), rtol=TOLERANCE)


def test_moe_formulas_in_numpy():
    """One token at a time, and only the experts it chose."""
    model, batch = MoE(num_stages=1, vocab=11), gpt_batch(2)
    w = model.init(5)
    s = {
        name.removeprefix("stages/"): value[0]
        for name, value in w.items()
        if name.startswith("stages/")
    }
    h = w["first/wte"][batch["tokens"]].reshape(12, 16)
    out, load, mean_p = h.copy(), np.zeros(4), np.zeros(4)
    for t, u in enumerate(layer_norm(h, s["ln/scale"], s["ln/bias"])):
        p = np.exp(u @ s["router/kernel"])
        p /= p.sum()
        best = np.argsort(p)[-2:]
        mean_p += p / 12
        for e in best:
            load[e] += 1 / 24
            v = u @ s["experts/up/kernel"][e] + s["experts/up/bias"][e]
            v = 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
            out[t] += (
                p[e] / p[best].sum() * (v @ s["experts/down/kernel"][e] + s["experts/down/bias"][e])
            )
    logits = layer_norm(out, w["last/ln/scale"], w["last/ln/bias"]) @ w["last/head/kernel"]
    loss = cross_entropy(logits, batch["targets"].reshape(12)) + 0.01 * 4 * (load * mean_p).sum()
    np.testing.assert_allclose(
        torch_ref.run("0F0\n", model, batch, weights=w).loss, loss, rtol=TOLERANCE
    )


def test_rnn_formulas_in_numpy():
    model, batch = RNN(num_stages=1), rnn_batch(2)
    w = model.init(5)
    gate, cand = (
        {kind: w[f"stages/{part}/{kind}"][0] for kind in ("kernel", "recurrent", "bias")}
        for part in ("gate", "candidate")
    )
    x = batch["x"] @ w["first/dense/kernel"] + w["first/dense/bias"]
    s, outputs = np.zeros((2, 8)), []
    for t in range(6):
        f = 1 / (1 + np.exp(-(x[:, t] @ gate["kernel"] + s @ gate["recurrent"] + gate["bias"])))
        c = np.tanh(x[:, t] @ cand["kernel"] + (f * s) @ cand["recurrent"] + cand["bias"])
        s = (1 - f) * s + f * c
        outputs.append(x[:, t] + s)
    p = np.stack(outputs, 1) @ w["last/dense/kernel"] + w["last/dense/bias"]
    np.testing.assert_allclose(
        torch_ref.run("0F0\n", model, batch, weights=w).loss,
        ((p - batch["y"]) ** 2).mean(),
        rtol=TOLERANCE,
    )


@pytest.mark.parametrize("name", names())
def test_build_by_name(name):
    model = build(name, {"num_stages": 3})
    assert model.num_stages == 3
    model.check(model.init())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: build("lstm", {}),
            "there is no model 'lstm'; write one of conv, gpt, llama, mlp, moe, rnn",
        ),
        (
            lambda: build("mlp", {"num_stages": 1, "depth": 3}),
            "mlp has no depth; its fields are num_stages, width",
        ),
        (lambda: build("mlp", {}), "mlp needs num_stages"),
        (lambda: GPT(num_stages=1, width=10, heads=4), "width 10 is not a multiple of heads 4"),
        (lambda: Llama(num_stages=1, kv_heads=3), "heads 4 is not a multiple of kv_heads 3"),
        (lambda: Llama(num_stages=1, head=7), "head 7 is odd"),
        (lambda: ConvNet(num_stages=1, channels=9), "channels 9 is not a multiple of groups 2"),
        (lambda: MoE(num_stages=1, chosen=5), "chosen 5 must be from 1 to"),
        (lambda: MLP(num_stages=1, with_first=False, features_in=3), "features_in"),
        (
            lambda: GPT(num_stages=1, block=4).first(
                GPT(num_stages=1).init(), {"tokens": torch.zeros(1, 5)}, Context(0, 0)
            ),
            "rows of 5 tokens",
        ),
    ],
)
def test_sizes_that_do_not_fit(call, says):
    with pytest.raises(TorchRefError, match=says):
        call()
