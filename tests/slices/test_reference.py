"""torch_ref and jaxpipe run the same tables of slices, and agree."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxpipe as jp
import torch_ref
from tests.models.gpt import token_loss
from tests.models.rnn import cell, rnn
from tests.parity.engines import Outcome, jaxpipe_step, mesh_of, worst_error
from tests.slices.models import rotated
from tests.slices.test_parity import build
from tests.tiers import slow
from tests.tolerance import FLOAT64
from torch_ref.__main__ import main
from torch_ref.files import load_arrays, save_arrays
from torch_ref.models import GPT, MLP, RNN, Llama

torch.set_num_threads(1)
LENGTH, HEAD = 8, 4
SIZES = {"width": 8, "heads": 4, "kv_heads": 2, "head": HEAD, "hidden": 6, "vocab": 11}


def recurrent(params, x, *, carry):
    """`tests.models.rnn` with a carry."""

    def step(state, now):
        gate = jax.nn.sigmoid(cell(params["gate"], now, state))
        candidate = jnp.tanh(cell(params["candidate"], now, gate * state))
        state = (1 - gate) * state + gate * candidate
        return state, state

    carry, states = jax.lax.scan(step, carry, jnp.swapaxes(x, 0, 1))
    return x + jnp.swapaxes(states, 0, 1), carry


def rms(params, x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * params["scale"]


def llama(params, x, *, ctx):
    """The layer of `torch_ref.models.llama`, with theta = 100."""
    params, h, segments = jax.tree.map(lambda leaf: leaf[0], params), x["h"], x["segments"]
    at = ctx.offset + jnp.arange(h.shape[1])
    u = rms(params["norm1"], h)

    def heads(name):
        return (u @ params["attn"][name]["kernel"]).reshape(*h.shape[:2], -1, HEAD)

    query = rotated(heads("q"), at).reshape(*h.shape[:2], SIZES["kv_heads"], -1, HEAD)
    keys, values = ctx.append("k", rotated(heads("k"), at)), ctx.append("v", heads("v"))
    seen = (at[:, None] >= jnp.arange(keys.shape[1])) & (
        segments[:, :, None] == ctx.append("segments", segments)[:, None]
    )
    scores = jnp.einsum("rtgqs,rugs->rgqtu", query, keys) / HEAD**0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf))
    mixed = jnp.einsum("rgqtu,rugs->rtgqs", weights, values).reshape(*h.shape[:2], -1)
    h = h + mixed @ params["attn"]["out"]["kernel"]
    u, mlp = rms(params["norm2"], h), params["mlp"]
    gated = jax.nn.silu(u @ mlp["gate"]["kernel"]) * (u @ mlp["up"]["kernel"])
    return {**x, "h": h + gated @ mlp["down"]["kernel"]}


def embed(params, microbatch):
    return {"h": params["table"][microbatch["tokens"]], "segments": microbatch["segments"]}


def head(params, x, microbatch):
    logits = rms(params["norm"], x["h"]) @ params["head"]["kernel"]
    return token_loss(logits, microbatch, sum_count=False)


def case(name, schedule, *, rows=2):
    """The torch model, its batch, the axis of time, and the pipeline."""
    rng, count = np.random.default_rng(0), rows * schedule.num_microbatches // schedule.slices
    if name == "rnn":
        twin = rnn(schedule.num_stages)
        reference, first, stage, last = twin.reference, twin.first, recurrent, twin.last
        batch = {"x": rng.standard_normal((count, LENGTH, 3))}
        batch["y"] = rng.standard_normal((count, LENGTH, reference.features_out))
        carry = {"carry": lambda params, x: jnp.zeros_like(x[:, 0])}
    else:
        reference = Llama(schedule.num_stages, theta=100.0, **SIZES)
        first, stage, last, carry = embed, llama, head, {}
        batch = {key: rng.integers(0, 11, (count, LENGTH)) for key in ("tokens", "targets")}
        batch["segments"] = np.sort(rng.integers(0, 3, (count, LENGTH)), axis=1)
    model = jp.Model(stage, first=first, last=last, time=tuple(batch), **carry)
    return reference, batch, jp.Pipeline(model, schedule, mesh_of(schedule.num_devices))


def reference_step(schedule, model, batch, weights, **how):
    found = torch_ref.run(
        schedule.to_csv(), model, batch, weights=weights, time=tuple(batch), **how
    )
    return found, Outcome(found.loss, found.grads, found.losses)


CASES = [
    ("rnn", "zb_h1", 2, 4),
    ("llama", "1f1b", 2, 4),
    slow("rnn", "1f1b", 2, 4),
    *(
        slow(model, name, devices, slices)
        for model in ("rnn", "llama")
        for name, devices, slices in (("interleaved_1f1b", 2, 2), ("zb_h1", 2, 8))
    ),
]


@pytest.mark.parametrize(("model", "name", "devices", "slices"), CASES)
def test_jaxpipe_and_torch_agree_on_tables_of_slices(model, name, devices, slices):
    schedule = build(name, devices=devices, slices=slices)
    reference, batch, pipe = case(model, schedule)
    weights = reference.init()
    result, found = reference_step(schedule, reference, batch, weights, slices=slices)
    assert worst_error(jaxpipe_step(pipe, weights, batch), found) < FLOAT64
    assert result.peak_activations == jp.simulate(schedule).peak_activations


NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "interleaved_zb")


def small(name, stages):
    """A torch model and a batch of two sequences."""
    rng = np.random.default_rng(1)
    if name == "rnn":
        batch = {key: rng.standard_normal((2, LENGTH, n)) for key, n in (("x", 4), ("y", 2))}
        return RNN(stages, sum_count=True), batch
    batch = {key: rng.integers(0, 11, (2, LENGTH)) for key in ("tokens", "targets")}
    batch["weights"] = rng.random((2, LENGTH))
    if name == "gpt":
        sizes = {"vocab": 11, "block": LENGTH, "width": 8, "heads": 2}
        return GPT(stages, layers_per_stage=2, sum_count=True, **sizes), batch
    return Llama(stages, layers_per_stage=2, sum_count=True, **SIZES), batch


@pytest.mark.parametrize("slices", [slow(2), 4, slow(8)])
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", ["rnn", "gpt", "llama"])
def test_slices_in_torch_are_whole_sequences(name, schedule, slices):
    """With recomputation, with ends that are spread, and a table of forwards too."""
    table = build(schedule, devices=2, slices=slices)
    model, batch = small(name, table.num_stages)
    weights = model.init()

    whole = jp.schedules.build(schedule, devices=2, microbatches=2).to_csv()
    found = torch_ref.run(whole, model, batch, weights=weights)
    wanted = Outcome(found.loss, found.grads)
    spread = jp.spread_first(jp.defer_last(jp.spread_last(table)))
    for each in (table, jp.add_recompute(table), spread):
        _, sliced = reference_step(each, model, batch, weights, slices=slices)
        assert worst_error(sliced, wanted) < FLOAT64
    shape = {"devices": 2, "microbatches": 2 * slices, "slices": slices}
    forward = jp.schedules.build(schedule, forward_only=True, **shape)
    alone, _ = reference_step(forward, model, batch, weights, slices=slices)
    assert abs(alone.loss / found.loss - 1) < FLOAT64


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("0F1,0F0,0B1,0B0\n", "0F1 needs 0F0, which comes later"),
        ("0F0,0F1,0B0,0B1\n", "0B0 needs 0B1, which comes later"),
        ("0F0,0F1,0I0,0I1,0W0,0W1\n", "0I0 needs 0I1, which comes later"),
    ],
)
def test_slices_in_another_order_are_refused(table, says):
    model, batch = RNN(1), {"x": np.zeros((1, 4, 4)), "y": np.zeros((1, 4, 2))}
    with pytest.raises(torch_ref.TableError, match=says):
        torch_ref.run(table, model, batch, weights=model.init(), slices=2, time=("x", "y"))


def test_what_does_not_fit_is_refused():
    table, model = "0F0,0F1,0B1,0B0\n", RNN(1)
    batch = {"x": np.zeros((1, 5, 4)), "y": np.zeros((1, 4, 2))}

    def run(model, batch, **how):
        torch_ref.run(table, model, batch, weights=model.init(), **how)

    with pytest.raises(torch_ref.TableError, match="2 microbatches are no whole sequences of 3"):
        run(model, batch, slices=3)
    with pytest.raises(torch_ref.BatchError, match="name the arrays that are cut along axis 1"):
        run(model, batch, slices=2)
    with pytest.raises(torch_ref.BatchError) as caught:
        run(model, batch, slices=2, time=("x", "z"))
    assert "the batch has no 'z'" in str(caught.value)
    assert "x of shape (1, 5, 4) has no axis 1 that 2 divides" in str(caught.value)
    rows = {"x": np.zeros((2, 8)), "y": np.zeros((2, 4))}
    with pytest.raises(torch_ref.TorchRefError, match="MLP passes nothing from slice to slice"):
        run(MLP(1), rows, slices=2, time=("x", "y"))


def test_the_command_runs_and_trains_slices(tmp_path, capsys):
    model, batch = small("llama", 1)
    weights, table = model.init(), "0F0,0F1,0B1,0B0,0F2,0F3,0B3,0B2\n"
    config = {"num_stages": 1, "layers_per_stage": 2, "sum_count": True, **SIZES}
    (tmp_path / "table.csv").write_text(table)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "sgd.json").write_text(json.dumps({"name": "sgd", "rate": 0.1}))
    save_arrays(tmp_path / "weights.npz", weights)
    wanted = torch_ref.run("0F0,0B0,0F1,0B1\n", model, batch, weights=weights)
    for more in ({}, {"--optimizer": "sgd.json"}):
        given = {name: value[None] for name, value in batch.items()} if more else batch
        save_arrays(tmp_path / "batch.npz", given)
        files = {"table": "table.csv", "config": "config.json", "weights": "weights.npz"}
        files |= {"batch": "batch.npz", "out": "out.npz"}
        command = [f for k, v in files.items() for f in (f"--{k}", str(tmp_path / v))]
        command += [f for k, v in more.items() for f in (k, str(tmp_path / v))]
        assert main([*command, "--model", "llama", "--slices", "2", "--time", *batch]) == 0
        found, said = load_arrays(tmp_path / "out.npz"), json.loads(capsys.readouterr().out)
        if more:
            found = {name: (weights[name] - value) / 0.1 for name, value in found.items()}
        loss = said["losses"][0] if more else said["loss"]
        bound = 20 * FLOAT64 if more else FLOAT64
        assert worst_error(Outcome(loss, found), Outcome(wanted.loss, wanted.grads)) < bound


class Odd(RNN):
    """Appends rows of the name that `names` gives for each slice."""

    def stage(self, params, x, ctx):
        for name in names[ctx.passing.number]:
            ctx.append(name, x)
        return super().stage(params, x, ctx)


names: list[str] = []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["aa", "a"], "appended twice"),
        (["a", "b"], "slice 1 appends rows 'b', but slice 0 did not"),
    ],
)
def test_rows_that_do_not_fit_are_refused(given, says):
    names[:] = given
    model, batch = Odd(1), {"x": np.zeros((1, 4, 4)), "y": np.zeros((1, 4, 2))}
    with pytest.raises(torch_ref.TorchRefError, match=says):
        torch_ref.run(
            "0F0,0F1,0B1,0B0\n", model, batch, weights=model.init(), slices=2, time=("x", "y")
        )
