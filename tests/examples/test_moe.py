"""examples/moe.py on data 2 x pipe 2 x expert 2, in float64, against plain JAX and against
torch_ref; its exchanges, its files, and what it refuses.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

import moe
import torch_ref
from jaxpipe.distributed import make_mesh
from llama_parts import initial, model as llama_model, weights
from llama_parts.packing import Corpus, packed
from moe_parts.experts import Experts, Routed, route
from moe_parts.model import PREDICT, MoE
from moe_parts.sizes import PUBLISHED, Routing, Scores, Yarn, from_config
from tests.environment import python, quick
from tests.examples.test_llama import QUICKLY, by_path
from tests.tiers import exhaustive, slow
from tests.tolerance import FLOAT64, relative
from torch_ref.models import Mixture as TorchMixture

EIGHT = "--pipe 2 --data 2 --expert 2 --dtype float64 --microbatches 2 --rows 8 --context 16"
CASES = {
    "1f1b": "--model tiny",
    "1f1b_overlap": "--model tiny --schedule 1f1b_overlap --capacity 1 --fsdp",
    "interleaved": "--model tiny --schedule interleaved_1f1b --chunks 2 --remat exchanged "
    "--fsdp --fsdp-axis expert --capacity 2",
    "dualpipev": "--model tiny-latent --schedule dualpipev --capacity 1.25 --remat layer",
    "zbv": "--model tiny-latent --schedule zbv --fsdp --fsdp-axis expert --loss-tokens 8",
    "dualpipe": "--model tiny --schedule dualpipe --capacity 1 --remat stage",
    "tensor": "--model tiny-latent --schedule zb_h1 --data 1 --tensor 2 --capacity 1.25",
    "spread head": "--model tiny --schedule 1f1b --spread-head",
}
# Each of these schedules with a capacity, and dropless.
BOTH_WAYS = ("1f1b", "1f1b_overlap", "interleaved", "dualpipev", "zbv", "dualpipe")
CASES |= {
    f"{name}, the other way": f"{flags} --capacity {0 if 'capacity' in flags else 1.25}"
    for name, flags in CASES.items()
    if name in BOTH_WAYS
}
CASES["fp8"] = "--model tiny --schedule zb_h1 --capacity 1.25 --fp8"
CASES["W in an F"] = "--model tiny --schedule zb_h1 --microbatches 8 --rows 32 --capacity 1.25"


# Those that are not run by hand alone.
TIERED = ("1f1b_overlap", "1f1b", "dualpipev", "fp8")


def on_eight(pipe=2, data=2, expert=2, tensor=1):
    """A mesh of eight virtual devices."""
    shape = {"pipe": pipe, "data": data, "expert": expert, "tensor": tensor}
    return make_mesh(shape, devices=jax.devices()[:8])


@pytest.fixture(scope="module")
def made():
    """What `case` makes, kept for all tests: a pipeline, its parameters, a batch of packed rows,
    what one compiled step gives for it, and the step.
    """
    found = {}

    def make(name):
        if name in found:
            return found[name]
        args = moe.parser().parse_args([*EIGHT.split(), *CASES[name].split()])
        model, pipe = moe.build(args, on_eight(args.pipe, args.data, args.expert, args.tensor))
        params = initial.placed(model, pipe, jax.random.key(0))
        if model.sizes.routing.scores is Scores.SIGMOID:  # a bias that decides something
            bias = params["shared"]["bias"]
            moved = 0.02 * jax.random.normal(jax.random.key(1), bias.shape, bias.dtype)
            params["shared"]["bias"] = jax.device_put(moved, bias.sharding)
        if model.fp8:
            params = pipe.place(with_gradient_scales(pipe.canonical(params)))
        batch = Corpus.standard_library().batch(
            0, rows=args.rows, mine=np.arange(args.rows), length=16, seed=0
        )
        batch["tokens"][::2, 3::7] = 0  # more documents, not as many in each row
        batch = packed(np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1), end=0)
        step = pipe.jit(pipe.value_and_grad, compiler_options=QUICKLY)
        found[name] = model, pipe, params, batch, *step(params, batch), step
        return found[name]

    return make


def with_gradient_scales(canonical):
    """Parameters whose scales keep gradients of about 2^-8 in FP8; without a history they are 1."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 2.0**-8 * (path[-1].key == "gradient_history"), canonical
    )


def reference(model: MoE) -> TorchMixture:
    s, r = model.sizes, model.sizes.routing
    dense, routed, predict = model.counts
    return TorchMixture(
        num_stages=1,
        dense=dense,
        routed=routed,
        predict=predict,
        vocab=s.vocab,
        width=s.width,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head=s.head,
        hidden=s.hidden,
        eps=s.eps,
        normed=s.normed,
        latent=None if s.latent is None else dataclasses.astuple(s.latent),
        experts=r.experts,
        chosen=r.chosen,
        expert_hidden=r.hidden,
        shared_hidden=r.shared,
        sigmoid=r.scores is Scores.SIGMOID,
        scale=r.scale,
        groups=r.groups,
        groups_chosen=r.chosen_groups,
        auxiliary=r.auxiliary,
        capacity=model.capacity,
        predict_weight=PREDICT,
    )


@pytest.mark.parametrize(
    "name",
    [
        "1f1b_overlap",  # with a capacity
        "1f1b",  # dropless
        *(slow("dualpipev"), slow("fp8")),
        *(exhaustive(name) for name in CASES if name not in TIERED),
    ],
)
def test_loss_and_gradients_are_those_of_plain_jax_and_of_torch(made, name):
    model, pipe, params, batch, loss, grads, _ = made(name)
    canonical, mine = jax.device_get(pipe.canonical(params)), by_path(pipe.canonical(grads))
    given = {key: canonical[key] for key in model.shapes()}
    alone = dataclasses.replace(model, tensor=None, expert=None)
    plain = alone.pipeline_model(model.sizes.letters())
    wanted, wanted_grads = jax.jit(
        jax.value_and_grad(lambda p: plain.loss(p, batch), has_aux=bool(model.capacity)),
        compiler_options=QUICKLY,
    )(given)
    if model.capacity:
        (loss, metrics), (wanted, wanted_metrics) = loss, wanted
        assert relative(metrics, wanted_metrics) <= FLOAT64
        assert 0 < metrics["dropped"] < 0.5
    assert relative(loss, wanted) <= FLOAT64
    theirs = by_path(wanted_grads)
    assert mine.keys() == theirs.keys()
    assert relative(mine, theirs) <= FLOAT64

    if model.fp8:
        return  # torch's has none
    their_loss, their_grads = of_torch(model, given, batch)
    assert relative(float(loss), their_loss) <= FLOAT64
    assert relative(mine, their_grads) <= FLOAT64


def of_torch(model, given, batch):
    """Loss and gradients by path, of canonical parameters."""
    lead = {path: value[None] for path, value in by_path(given).items() if "stages/" in path}
    result = torch_ref.run(
        "0F0,0B0\n",
        reference(model),
        {k: v.astype(float) if k == "weights" else v for k, v in batch.items()},
        weights=by_path(given) | lead,
    )
    grads = {n: v[0] if n.startswith("stages/") else v for n, v in result.grads.items()}
    if "shared/bias" in grads:  # the load, which it divides by the sum of weights, as gradients
        grads["shared/bias"] = grads["shared/bias"] * batch["weights"].sum()
    return float(result.loss), grads


def test_where_all_scores_are_equal_both_choose_the_first_experts_and_drop_the_same(made):
    """Every token chooses experts 0 and 1.  Of a row each takes capacity k T / E of T tokens."""
    model, pipe, params, batch, *_, step = made("1f1b_overlap")
    canonical = jax.device_get(pipe.canonical(params))
    given = {key: canonical[key] for key in model.shapes()}
    given["stages"]["t"]["router"]["kernel"] = np.zeros((4, 64, 8))
    (loss, metrics), grads = step(pipe.place(given), batch)
    assert (model.capacity, model.sizes.routing.chosen, model.sizes.routing.experts) == (1, 2, 8)
    assert float(metrics["dropped"]) == 1 - 4 / 16  # the share of choices
    wanted, wanted_grads = of_torch(model, given, batch)
    assert relative(float(loss), wanted) <= FLOAT64
    mine = by_path(pipe.canonical(grads))
    assert relative(mine, wanted_grads) <= FLOAT64
    used = np.any(mine["stages/t/experts/up/kernel"], axis=(2, 3))
    assert used.tolist() == 4 * [2 * [True] + 6 * [False]]


@pytest.mark.slow
def test_the_bias_of_a_pipeline_moves_the_load_towards_balance(made):
    """By the example's rate, on one batch and with all other parameters as they are.

    A layer that routes otherwise changes the load of the layers after it, so the load of a layer is
    even for good only once those before it are at rest.
    """
    *_, params, batch, _, _, step = made("dualpipev")
    worst = []
    bias, sharding = jnp.zeros_like(params["shared"]["bias"]), params["shared"]["bias"].sharding
    for _ in range(50):
        shared = params["shared"] | {"bias": jax.device_put(bias, sharding)}
        _, grads = step(params | {"shared": shared}, batch)
        load = jax.device_get(grads["shared"]["bias"])
        worst.append(np.max(np.max(load, axis=1) / np.mean(load, axis=1)))
        bias += moe.balance(0.001, load)
    # times the mean load of the layer, in the worst of four layers
    assert worst[0] > 1.8
    assert max(worst[-10:]) < 1.2


def test_experts_and_their_moments_are_split_and_the_bias_moves_by_the_load(made):
    _, pipe, params, _, _, grads, _ = made("1f1b_overlap")
    args = moe.parser().parse_args([*EIGHT.split(), *CASES["1f1b_overlap"].split()])
    state = pipe.init(moe.optimizer_of(args), params)
    split = [
        leaf
        for leaf in jax.tree.leaves((params["stages"], grads["stages"], state))
        if leaf.ndim == 5  # device, layer, expert, in, out
    ]
    assert len(split) == 3 * 4  # gate, up and down, of parameters, gradients and two moments
    for leaf in split:
        assert leaf.sharding.spec[2] == "expert"
        # half of the devices, half of the experts, and over the replicas (fsdp)
        assert leaf.addressable_shards[0].data.size * 8 == leaf.size
    load = jnp.array([[3.0, 1.0, 2.0]])
    assert moe.balance(0.5, load).tolist() == [[-0.5, 0.5, 0.0]]


class TestRouting:
    def test_of_equal_scores_the_lower_number_is_chosen(self):
        logits = jnp.zeros((1, 2, 8)).at[0, 1, 5].set(1.0)
        found = route(Routing(8, 3, 4), logits, None)
        assert found.experts.tolist() == [[[0, 1, 2], [5, 0, 1]]]
        np.testing.assert_allclose(found.gates[0, 0], 1 / 3, rtol=1e-12)
        np.testing.assert_array_equal(found.load, [2, 2, 1, 0, 0, 1, 0, 0])

    def test_the_bias_counts_in_the_choice_alone(self):
        routing = Routing(4, 1, 4, scores=Scores.SIGMOID, normalized=False)
        logits = jnp.array([[[1.0, 0.0, 0.0, 0.0]]])
        found = route(routing, logits, jnp.array([0.0, 0.0, 0.0, 9.0]))
        assert found.experts.tolist() == [[[3]]]
        assert float(found.gates[0, 0, 0]) == pytest.approx(0.5)

    def test_a_token_stays_within_its_groups(self):
        routing = Routing(8, 2, 4, scores=Scores.SIGMOID, groups=4, chosen_groups=1)
        # the best expert is in group 0, but group 2 has the best two
        logits = jnp.array([[[5.0, -9, -9, -9, 4, 4, -9, -9]]])
        assert route(routing, logits, jnp.zeros(8)).experts.tolist() == [[[4, 5]]]


def exchange(axis, *, capacity=0.0, ragged=False):
    """Loss and gradients of experts on the devices of an axis, or on one."""
    rng = np.random.default_rng(0)
    routing = Routing(8, 3, 5)
    u = rng.standard_normal((4, 6, 7))
    logits = rng.standard_normal((4, 6, 8)) + 2 * rng.standard_normal(8)  # uneven loads
    kernels = {
        name: {"kernel": rng.standard_normal(shape)}
        for name, shape in {"gate": (8, 7, 5), "up": (8, 7, 5), "down": (8, 5, 7)}.items()
    }

    def loss(kernels, u, logits):
        to: Routed = route(routing, logits, None)
        found, dropped = Experts(routing, axis, capacity, ragged)(kernels, u, to)
        return jnp.sum(jnp.sin(found)), dropped

    step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    if axis is None:
        return jax.jit(step)(kernels, u, logits)

    def summed(*given):
        (value, dropped), grads = step(*given)
        return (jax.lax.psum(value, axis), dropped), grads

    split = PartitionSpec(axis)
    return jax.jit(
        jax.shard_map(
            summed,
            mesh=make_mesh({axis: 4}, devices=jax.devices()[:4]),
            in_specs=split,
            out_specs=((PartitionSpec(), split), split),
            check_vma=False,
        )
    )(kernels, u, logits)


@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_experts_on_four_devices_are_those_of_one(capacity):
    (loss, dropped), grads = exchange("expert", capacity=capacity)
    (wanted, wanted_dropped), wanted_grads = exchange(None, capacity=capacity)
    assert relative(float(loss), float(wanted)) <= FLOAT64
    assert relative(jax.device_get(grads), jax.device_get(wanted_grads)) <= FLOAT64
    assert dropped.tolist() == wanted_dropped.tolist()
    assert (sum(dropped.tolist()) > 0) is (capacity > 0)


def test_without_a_capacity_nothing_is_dropped():
    alone, roomy = exchange(None), exchange(None, capacity=8.0)
    assert relative(jax.device_get(alone), jax.device_get(roomy)) <= FLOAT64


def test_a_ragged_all_to_all_is_asked_for_where_there_is_one(monkeypatch):
    """XLA:CPU has none; in its place is what it is defined as, for four devices."""

    def meant(operand, output, begins, sizes, lands, got, *, axis_name):
        every = [jax.lax.all_gather(a, axis_name) for a in (operand, begins, sizes, lands)]
        me = jax.lax.axis_index(axis_name)
        for source in range(4):
            rows, begin, size, land = (a[source] for a in every)
            at = jnp.arange(len(output)) - land[me]
            taken = rows[jnp.clip(begin[me] + at, 0, len(rows) - 1)]
            output = jnp.where(((at >= 0) & (at < size[me]))[:, None], taken, output)
        return output

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", meant)
    found, wanted = exchange("expert", ragged=True), exchange(None)
    assert relative(jax.device_get(found), jax.device_get(wanted)) <= FLOAT64


def test_attention_by_blocks_of_queries_is_the_plain_one(monkeypatch):
    monkeypatch.setattr(llama_model, "BLOCK", 4)
    rng = np.random.default_rng(0)
    shapes = ((2, 12, 4, 6), (2, 12, 2, 6), (2, 12, 2, 5))  # values have other features
    given = tuple(rng.standard_normal(shape) for shape in shapes)
    segments = np.cumsum(rng.random((2, 12)) < 0.2, axis=1)

    def step(attention):
        call = llama_model.ATTENTIONS[attention]
        return jax.jit(jax.value_and_grad(lambda qkv: jnp.sum(jnp.sin(call(*qkv, segments)))))(
            given
        )

    plain, blocks = step("plain"), step("blocks")
    assert relative(jax.device_get(blocks), jax.device_get(plain)) <= FLOAT64


class TestSafetensors:
    @pytest.mark.parametrize("name", ["1f1b_overlap", slow("dualpipev")])
    def test_what_is_written_is_read_back(self, made, tmp_path, name):
        model, pipe, params, *_ = made(name)
        weights.save(tmp_path, pipe, model, params, dtype=jnp.float64, file_bytes=1e6)
        # Data only moves: the same bits.
        again = weights.load(tmp_path, pipe, model)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(params))
        assert jax.tree.map(lambda leaf: leaf.sharding, again) == jax.tree.map(
            lambda leaf: leaf.sharding, params
        )
        stored = {
            name: value
            for path in tmp_path.glob("*.safetensors")
            for name, value in load_file(path).items()
        }
        assert sum(value.size for value in stored.values()) == model.sizes.parameters()
        canonical = jax.device_get(pipe.canonical(params))
        first = model.sizes.dense
        np.testing.assert_array_equal(
            stored[f"model.layers.{first + 1}.mlp.experts.5.up_proj.weight"],
            canonical["stages"]["t"]["experts"]["up"]["kernel"][1, 5].T,
        )
        assert f"model.layers.{first}.mlp.gate.weight" in stored
        if model.sizes.latent is not None:
            np.testing.assert_array_equal(
                stored["model.layers.2.mlp.gate.e_score_correction_bias"],
                canonical["shared"]["bias"][1],
            )
            assert "model.layers.4.eh_proj.weight" in stored
            assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in stored
        config = json.loads((tmp_path / "config.json").read_text())
        assert from_config(config).parameters() == model.sizes.parameters()

    def test_a_config_of_another_model_is_refused(self):
        config = PUBLISHED["deepseek-v3"].config("bfloat16")
        for rope, fault in (
            ({"rope_type": "linear", "factor": 2.0}, "rope_type 'linear'"),
            ({"type": "yarn", "factor": 2.0}, "no original_max_position_embeddings"),
            ({"type": "yarn", "attention_factor": 2.0}, "attention_factor in rope_scaling"),
        ):
            with pytest.raises(SystemExit, match=fault):
                from_config(config | {"rope_scaling": rope})
        with pytest.raises(SystemExit, match="model_type 'llama'"):
            from_config({"model_type": "llama"})

    def test_stretched_positions(self):
        """DeepSeek-V3 as published is for 163,840 tokens; it was trained first without a stretch.

        The numbers are of transformers 4.57 for its config.json, in float32.
        """
        plain = PUBLISHED["deepseek-v3"]
        rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
        rope |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        sizes = from_config(plain.config("bfloat16") | {"rope_scaling": rope})
        assert sizes == dataclasses.replace(plain, yarn=Yarn(40, 4096, 32, 1, 1.0, 1.0))
        assert from_config(sizes.config("bfloat16")) == sizes
        found = sizes.frequencies()[[0, 9, 10, 11, 15, 20, 22, 23, 31]]
        wanted = [1.0, 0.07498942, 0.05623413, 0.03900693, 0.008334509, 0.0007905694]
        wanted += [0.00017782794, 3.3338034e-05, 3.3338035e-06]
        assert found == pytest.approx(wanted, rel=1e-6)
        assert (sizes.yarn.rotary, sizes.yarn.scores) == pytest.approx((1.0, 1.3688879**2))
        # without magnitudes rotary features grow, on both sides
        assert Yarn(4.0, 128).rotary == pytest.approx(1.1386294)

    def test_stretched_positions_reach_the_attention(self):
        """Scores and rotary features by the formulas, with the published order of features."""
        yarn = Yarn(8.0, 64, 16.0, 1.0, 0.7, 1.0)
        sizes = dataclasses.replace(PUBLISHED["tiny-latent"], yarn=yarn)
        model, latent = MoE(sizes, jnp.float64), sizes.latent
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda leaf: rng.standard_normal(leaf.shape[1:]), model.shapes()["stages"]["t"]["attn"]
        )
        u = jnp.asarray(rng.standard_normal((1, 5, sizes.width)))
        plain = MoE(PUBLISHED["tiny-latent"], jnp.float64)
        at = jnp.arange(5)[None]
        (q, k, v), (old_q, old_k, old_v) = (m._projected(params, u, at) for m in (model, plain))
        np.testing.assert_array_equal(v, old_v)
        # without a position, features only grow
        turned = jnp.concatenate([jnp.ones(latent.plain), jnp.full(latent.turned, yarn.rotary)])
        np.testing.assert_allclose(k[:, 0], (old_k * turned)[:, 0], rtol=1e-12)
        np.testing.assert_allclose(q[:, 0], (old_q * turned)[:, 0] * yarn.scores, rtol=1e-12)
        # and turn with it
        halves = [jnp.split(a[..., latent.plain :], 2, axis=-1) for a in (k, old_k * turned)]
        angles = [jnp.arctan2(b, a)[0, 1, 0] for a, b in halves]
        stretch = sizes.frequencies() - PUBLISHED["tiny-latent"].frequencies()
        np.testing.assert_allclose(angles[0] - angles[1], stretch, atol=1e-12)


class TestSizes:
    # As the files on Hugging Face count them; DeepSeek-V3 with its layer for one more token, of
    # which table and head are the main model's, and 67B-A2B by its name.
    @pytest.mark.parametrize(
        ("name", "count", "active"),
        [
            ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
            ("qwen3-235b-a22b", 235_093_634_560, 22e9),
            ("deepseek-v3", 671_026_419_200, 37e9),
            ("67b-a2b", 67_042_152_960, 2.6e9),
        ],
    )
    def test_published_models_have_the_published_number_of_parameters(self, name, count, active):
        sizes = dataclasses.replace(PUBLISHED[name], predict=0)
        shapes = jax.tree.leaves(MoE(sizes).shapes())
        bias = (sizes.layers - sizes.dense) * sizes.routing.experts
        assert sizes.parameters() == sum(int(np.prod(leaf.shape)) for leaf in shapes)
        assert sizes.parameters() - (bias if sizes.latent else 0) in (count, count - bias)
        assert sizes.active() == pytest.approx(active, rel=0.03)

    def test_flops_are_those_of_a_published_run(self):
        sizes = PUBLISHED["67b-a2b"]
        flops = sum(sizes.flops(8192)[letter] for letter in sizes.letters())
        # marin-community/marin 7024: tokens/s and MFU on 64 H100s
        assert flops * 603_326.77 / 64 / 989e12 == pytest.approx(0.1945529, rel=0.005)

    @pytest.mark.parametrize("name", ["qwen3-235b-a22b", "deepseek-v3"])
    def test_a_config_tells_the_sizes(self, name):
        assert (
            from_config(json.loads(json.dumps(PUBLISHED[name].config("bfloat16"))))
            == PUBLISHED[name]
        )


def run(flags, *more):
    return python(moe.__file__, *flags.split(), *more, timeout=600, env=quick())


@pytest.mark.exhaustive
def test_a_run_beside_plain_jax_is_resumed_on_other_axes(tmp_path):
    small = "--microbatches 2 --rows 8 --context 32 --warmup 2 --rate 3e-3 --save-every 4 --steps 8"
    whole = run(f"{small} --peak 1e-3", "--out", tmp_path / "whole", "--export", tmp_path / "hf")
    losses = re.findall(r"loss (\S+)   plain (\S+) .*", whole.stdout)
    assert len(losses) == 8
    curve = [float(mine) for mine, _ in losses]
    # float32, eight steps of Adam on gradients summed in another order
    assert curve == pytest.approx([float(plain) for _, plain in losses], rel=1e-3)
    assert curve[-1] < curve[0] - 0.05
    assert re.search(r"MFU \d+\.\d%", whole.stdout)

    (tmp_path / "part").mkdir()
    (tmp_path / "whole" / "4").rename(tmp_path / "part" / "4")
    for number, flags in enumerate(
        ("--pipe 2 --expert 4 --data 1", "--pipe 4 --expert 1 --data 2 --schedule zb_h1")
    ):
        out = tmp_path / f"again {number}"
        out.mkdir()
        subprocess.run(["cp", "-r", tmp_path / "part" / "4", out / "4"], check=True)
        resumed = run(f"{small} {flags}", "--out", out)
        assert "resuming after step 4" in resumed.stdout
        again = list(map(float, re.findall(r"loss (\S+)", resumed.stdout)))
        assert again == pytest.approx(curve[4:], rel=1e-3)
