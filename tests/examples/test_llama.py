"""examples/llama.py on data 2 x pipe 2 x tensor 2, in float64, against plain JAX and against
torch_ref; its files and its rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import llama
import torch_ref
from jaxpipe.distributed import make_mesh
from llama_parts import initial, weights
from llama_parts.model import Llama
from llama_parts.packing import Corpus, packed
from llama_parts.placed import joined
from llama_parts.sizes import PUBLISHED, Scaling, from_config, to_config
from tests.environment import python, quick
from tests.tiers import exhaustive, slow
from tests.tolerance import FLOAT64, relative
from torch_ref.models import Llama as TorchLlama

SCRIPT = Path(llama.__file__)
EIGHT = "--pipe 2 --data 2 --tensor 2 --dtype float64 --microbatches 2 --rows 8 --context 32"
# Compiling without LLVM's optimisations takes half as long.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CASES = {
    "plain": "--fsdp",
    "uneven": "--layout Ettt|tL --loss-tokens 16",
    "interleaved": "--schedule interleaved_1f1b --chunks 2 --remat layer --sequence",
    "zero bubble": "--schedule zbv --remat dots --layout Et|t|t|tL",
    "stage": "--schedule zb_h1 --remat stage --fsdp",
    "spread head": "--spread-head --loss-tokens 16 --fsdp",
}


def by_path(tree):
    return {
        joined(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    }


@pytest.fixture(scope="module")
def made():
    """What `case` makes, kept for all tests: a pipeline, its parameters and what one compiled step
    gives for a batch of packed rows.
    """
    found = {}

    def make(name, *, tied=False):
        if (name, tied) in found:
            return found[name, tied]
        args = llama.parser().parse_args([*EIGHT.split(), *CASES[name].split()])
        mesh = make_mesh({"pipe": 2, "data": 2, "tensor": 2}, devices=jax.devices()[:8])
        before = PUBLISHED["tiny"]
        # no even number: the pipeline's two devices hold 129 rows each
        vocab = 257 if tied and "spread" in name else before.vocab
        PUBLISHED["tiny"] = dataclasses.replace(before, tied=tied, vocab=vocab)
        try:
            model, pipe = llama.build(args, mesh)
        finally:
            PUBLISHED["tiny"] = before
        params = initial.placed(model, pipe, jax.random.key(0))
        batch = Corpus.standard_library().batch(0, rows=8, mine=np.arange(8), length=32, seed=0)
        batch["tokens"][::2, 7::11] = 0  # more documents, not as many in each row
        batch = packed(np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1), end=0)
        loss, grads = pipe.jit(pipe.value_and_grad, compiler_options=QUICKLY)(params, batch)
        found[name, tied] = model, pipe, params, batch, loss, grads
        return found[name, tied]

    return make


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        slow("plain", False),
        exhaustive("uneven", True),
        slow("interleaved", False),
        slow("zero bubble", True),
        slow("stage", False),
        exhaustive("spread head", False),
        slow("spread head", True),
    ],
)
def test_loss_and_gradients_are_those_of_plain_jax_and_of_torch(made, name, tied):
    model, pipe, params, batch, loss, grads = made(name, tied=tied)
    canonical, mine = jax.device_get(pipe.canonical(params)), by_path(pipe.canonical(grads))
    assert batch["segments"].max() > 1
    # what the microbatches and the replicas count differs
    assert len(set(batch["weights"].sum(axis=1))) > 1

    given = {key: canonical[key] for key in model.shapes()}
    plain, plain_grads = jax.jit(
        jax.value_and_grad(dataclasses.replace(model, tensor=None).loss), compiler_options=QUICKLY
    )(given, batch)
    assert relative(loss, plain) <= FLOAT64
    theirs = by_path(plain_grads)
    assert mine.keys() == theirs.keys()
    assert relative(mine, theirs) <= FLOAT64

    s, scaling = model.sizes, model.sizes.scaling
    reference = TorchLlama(
        num_stages=1,
        layers_per_stage=s.layers,
        vocab=s.vocab,
        width=s.width,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head=s.head,
        hidden=s.hidden,
        rope_factor=scaling.factor,
        rope_context=scaling.context,
        tied=tied,
    )
    named = {name.replace("stages/t", "stages"): value for name, value in by_path(given).items()}
    named = {
        name: value[None] if name.startswith("stages/") else value for name, value in named.items()
    }
    result = torch_ref.run(
        "0F0,0B0\n",
        reference,
        {k: v.astype(float) if k == "weights" else v for k, v in batch.items()},
        weights=named,
    )
    grads = {
        name: value[0] if name.startswith("stages/") else value
        for name, value in result.grads.items()
    }
    assert relative(float(loss), float(result.loss)) <= FLOAT64
    assert (
        relative({name.replace("stages/t", "stages"): value for name, value in mine.items()}, grads)
        <= FLOAT64
    )


def test_parameters_are_made_where_they_belong(made):
    model, pipe, params, *_ = made("plain")
    wanted = initial.canonical(model, jax.random.key(0))
    found = {
        key: value for key, value in jax.device_get(pipe.canonical(params)).items() if key in wanted
    }
    assert relative(found, jax.device_get(wanted)) <= FLOAT64  # the same keys, compiled apart
    # the optimizer knows scales, which do not decay, by their path
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        assert ("scale" in name) is (leaf.ndim == (3 if "stages" in name else 1))
    for chunk in params["stages"]:
        for leaf in jax.tree.leaves(chunk):
            # scales over the pipeline alone, kernels over the tensor axis too
            parts = 2 if leaf.ndim < 4 else 4
            # and all over the replicas (fsdp)
            assert leaf.addressable_shards[0].data.size * parts * 2 == leaf.size
    assert params["last"]["head"]["kernel"].sharding.spec[1] == "tensor"


class TestSafetensors:
    def test_what_is_written_is_read_back(self, made, tmp_path):
        model, pipe, params, *_ = made("plain")
        weights.save(tmp_path, pipe, model, params, dtype=jnp.float64, file_bytes=200_000)
        files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert len(files) > 3
        assert set(index["weight_map"].values()) == set(files)
        assert index["metadata"]["total_size"] == 8 * model.sizes.parameters()
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
        assert len(stored) == 4 * 9 + 3
        canonical = jax.device_get(pipe.canonical(params))
        layers = canonical["stages"]["t"]
        np.testing.assert_array_equal(
            stored["model.layers.2.self_attn.k_proj.weight"], layers["attn"]["k"]["kernel"][2].T
        )
        np.testing.assert_array_equal(
            stored["model.layers.3.mlp.down_proj.weight"], layers["mlp"]["down"]["kernel"][3].T
        )
        np.testing.assert_array_equal(
            stored["model.layers.0.post_attention_layernorm.weight"], layers["norm2"]["scale"][0]
        )
        np.testing.assert_array_equal(
            stored["model.embed_tokens.weight"], canonical["first"]["table"]
        )
        np.testing.assert_array_equal(
            stored["lm_head.weight"], canonical["last"]["head"]["kernel"].T
        )
        found = from_config(weights.config_of(tmp_path))
        assert found == dataclasses.replace(model.sizes, head_size=16)

        stored["model.layers.4.mlp.up_proj.weight"] = stored.pop(
            "model.layers.3.mlp.up_proj.weight"
        )
        stored["lm_head.weight"] = stored["lm_head.weight"].T
        for path in tmp_path.glob("*.safetensors"):
            path.unlink()
        save_file(
            {name: np.ascontiguousarray(value) for name, value in stored.items()},
            tmp_path / "model.safetensors",
        )
        with pytest.raises(SystemExit) as refused:
            weights.load(tmp_path, pipe, model)
        for fault in (
            "layers.3.mlp.up_proj.weight is missing",
            "layers.4.mlp.up_proj.weight is not a",
            "[64, 256]; this model wants [256, 64]",
        ):
            assert fault in str(refused.value)

    @pytest.mark.slow
    def test_a_table_with_zeros_at_its_end_is_written_without_them_and_read_back(
        self, made, tmp_path
    ):
        model, pipe, params, *_ = made("spread head", tied=True)
        weights.save(tmp_path, pipe, model, params, dtype=jnp.float64)
        stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
        assert stored["model.embed_tokens.weight"].shape == (257, 64)
        assert "lm_head.weight" not in stored
        again = weights.load(tmp_path, pipe, model)
        assert [leaf.shape for leaf in jax.tree.leaves(again["shared"])] == [(258, 64)]
        # data only moves: the same bits
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(params))

    def test_bfloat16_files_hold_the_rounded_weights(self, made, tmp_path):
        model, pipe, params, *_ = made("plain")
        weights.save(tmp_path, pipe, model, params)
        rounded = jax.tree.map(
            lambda leaf: np.asarray(leaf).astype(jnp.bfloat16).astype(leaf.dtype),
            jax.device_get(params),
        )
        assert [path.name for path in tmp_path.glob("*.safetensors")] == [
            "model-00001-of-00001.safetensors"
        ]
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.device_get(weights.load(tmp_path, pipe, model)),
            rounded,
        )

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_a_config_tells_the_sizes(self, name):
        sizes = PUBLISHED[name]
        assert from_config(
            json.loads(json.dumps(to_config(sizes, "bfloat16")))
        ) == dataclasses.replace(sizes, head_size=sizes.head)

    def test_a_config_of_another_model_is_refused(self):
        config = to_config(PUBLISHED["tiny"], "bfloat16") | {
            "model_type": "qwen2",
            "rope_scaling": {"rope_type": "yarn"},
        }
        with pytest.raises(SystemExit, match=r"model_type 'qwen2' .*rope_type 'yarn'"):
            from_config(config)


class TestPacking:
    def test_documents_of_a_row_do_not_see_each_other(self):
        model = Llama(PUBLISHED["tiny"], jnp.float64)
        params = initial.canonical(model, jax.random.key(1))
        documents = [[5, 9, 9, 0], [0], [7, 3, 2, 8, 1, 0], [4, 6, 1]]
        joined_up, ends = (
            [token for document in documents for token in document],
            np.cumsum([len(d) for d in documents]),
        )
        # no token sees what comes later
        alone = [document + [3] * (len(joined_up) - len(document)) for document in documents]
        batch = packed(np.array([[*row, 11] for row in (joined_up, joined_up, *alone)]), end=0)
        # as if each row were one document
        batch["segments"][1:], batch["positions"][1:] = 0, np.arange(len(joined_up))
        together, mixed, *alone = jax.jit(model.logits, compiler_options=QUICKLY)(params, batch)
        apart = np.concatenate(
            [rows[: len(document)] for rows, document in zip(alone, documents, strict=True)]
        )
        # Masked keys weigh exactly zero, so that only the order of sums differs.
        assert relative(np.asarray(together), apart) <= FLOAT64
        assert relative(np.asarray(mixed)[: ends[0]], apart[: ends[0]]) <= FLOAT64
        assert relative(np.asarray(mixed)[ends[0] :], apart[ends[0] :]) > 1e-3

    def test_segments_positions_and_weights(self):
        row = packed(np.array([[0, 3, 4, 0, 5, 0, 0, 6]]), end=0)
        found = {name: value[0].tolist() for name, value in row.items()}
        assert found == {
            "tokens": [0, 3, 4, 0, 5, 0, 0],
            "targets": [3, 4, 0, 5, 0, 0, 6],
            "weights": [0, 1, 1, 0, 1, 0, 0],
            "segments": [0, 1, 1, 1, 2, 2, 3],
            "positions": [0, 0, 1, 2, 0, 1, 0],
        }

    def test_a_row_depends_on_its_number_alone(self):
        corpus = Corpus.standard_library()
        whole = corpus.batch(3, rows=6, mine=np.arange(6), length=16, seed=1)
        part = corpus.batch(3, rows=6, mine=np.array([1, 4]), length=16, seed=1)
        assert all(np.array_equal(part[name], whole[name][[1, 4]]) for name in whole)
        other = corpus.batch(4, rows=6, mine=np.arange(6), length=16, seed=1)
        assert not np.array_equal(other["tokens"], whole["tokens"])

    def test_tokens_that_do_not_fit_are_refused(self, tmp_path):
        np.save(tmp_path / "large.npy", np.array([1, 300]))
        np.save(tmp_path / "square.npy", np.zeros((2, 2)))
        with pytest.raises(SystemExit, match="tokens up to 300, but the model's vocabulary is 256"):
            Corpus.read(tmp_path / "large.npy", end=0, vocab=256)
        with pytest.raises(SystemExit, match=r"float64\[2, 2\]"):
            Corpus.read(tmp_path / "square.npy", end=0, vocab=256)


class TestSizes:
    # As the files on Hugging Face count them.
    @pytest.mark.parametrize(
        ("name", "count"),
        [
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama2-70b", 68_976_648_192),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3.1-8b", 8_030_261_248),
            ("llama3.1-405b", 405_853_388_800),
            ("llama3.2-1b", 1_235_814_400),
            ("llama3.2-3b", 3_212_749_824),
        ],
    )
    def test_published_models_have_the_published_number_of_parameters(self, name, count):
        model = Llama(PUBLISHED[name])
        assert (
            PUBLISHED[name].parameters()
            == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes()))
            == count
        )

    def test_flops_are_six_a_weight_and_attention(self):
        sizes = PUBLISHED["llama3-8b"]
        flops = sizes.flops(8192)
        total = 32 * flops["t"] + flops["L"]
        # without the table and the scales
        kernels = sizes.parameters() - sizes.vocab * sizes.width - 65 * sizes.width
        assert total == 6 * kernels + 12 * 32 * 4096 * 8192

    def test_stretched_positions(self):
        sizes = dataclasses.replace(
            PUBLISHED["tiny"], head_size=16, scaling=Scaling(8.0, 1.0, 4.0, 64)
        )
        for i, found in enumerate(sizes.frequencies()):
            turns = 10_000.0 ** (-i / 8)
            wave = 2 * math.pi / turns
            smooth = (64 / wave - 1) / 3
            wanted = (
                turns
                if wave < 16
                else turns / 8
                if wave > 64
                else (1 - smooth) * turns / 8 + smooth * turns
            )
            assert found == pytest.approx(wanted, rel=1e-14)
        # all three cases
        assert (
            len(set(sizes.frequencies() / dataclasses.replace(sizes, scaling=None).frequencies()))
            > 2
        )


def run(flags, *more, status=0):
    return python(SCRIPT, *flags.split(), *more, timeout=600, env=quick(), status=status)


@pytest.mark.slow
def test_a_run_is_resumed_by_another_schedule_and_exported(tmp_path):
    small = (
        "--pipe 2 --data 2 --tensor 2 --microbatches 2 --rows 8 --context 32 --warmup 2 "
        "--rate 3e-3 --dtype float32 --save-every 4"
    )
    losses = re.compile(r"loss (\S+)")
    whole = run(
        f"{small} --steps 8 --peak 1e-3", "--out", tmp_path / "whole", "--export", tmp_path / "hf"
    )
    assert re.search(r"tokens/s   \S+ TFLOP/s a device   MFU \d+\.\d%", whole.stdout)
    curve = list(map(float, losses.findall(whole.stdout)))
    assert curve[-1] < curve[0] - 0.05

    (tmp_path / "part").mkdir()
    (tmp_path / "whole" / "4").rename(tmp_path / "part" / "4")
    resumed = run(
        f"{small} --steps 8 --schedule interleaved_1f1b --chunks 2 --fsdp",
        "--out",
        tmp_path / "part",
    )
    assert "resuming after step 4" in resumed.stdout
    # float32, four steps of Adam on gradients summed in another order.
    assert list(map(float, losses.findall(resumed.stdout))) == pytest.approx(curve[4:], rel=1e-4)

    again = ("--out", tmp_path / "loaded", "--load", tmp_path / "hf")
    refused = run(f"{small} --steps 1 --tied", *again, status=2)
    assert "unrecognized arguments: --tied" in refused.stderr
    loaded = run(f"{small} --steps 1", *again)
    # trained weights, rounded to bfloat16
    assert float(losses.findall(loaded.stdout)[0]) < curve[0] - 0.05


@pytest.mark.slow
def test_a_run_in_fp8_is_near_one_without_and_is_exported_without_its_scales(tmp_path):
    """On tensor and data axes, with fsdp.  A first step differs by roundings alone: of a layer's
    results, of three bits, next to a residual stream of 24.
    """
    small = (
        "--pipe 2 --data 2 --tensor 2 --microbatches 2 --rows 8 --context 32 --warmup 2 "
        "--rate 3e-3 --dtype float32 --fsdp"
    )
    losses = re.compile(r"loss (\S+)")
    own = ("--out", tmp_path / "fp8", "--export", tmp_path / "hf")
    curves = [
        list(map(float, losses.findall(run(f"{small} --steps 4 {flag}", *where).stdout)))
        for flag, where in (("--fp8", own), ("", ("--out", tmp_path / "plain")))
    ]
    assert curves[0] == pytest.approx(curves[1], rel=2**-4)
    assert curves[0] != curves[1]
    again = [
        run(f"{small} --steps 1 {flag}", "--load", tmp_path / "hf", "--out", tmp_path / name)
        for name, flag in (("a", "--fp8"), ("b", ""))
    ]
    first = [float(losses.findall(each.stdout)[0]) for each in again]
    assert first[0] == pytest.approx(first[1], rel=2**-4)
    assert max(first) < curves[0][0]


@pytest.mark.slow
def test_flags_that_do_not_fit_are_told_what_to_write(tmp_path):
    for flags, says in (
        ("--schedule 1f1bb", "1f1b"),
        ("--layout Ett|tL --pipe 2", "layers"),
        ("--rows 6", "use 8 rows"),
        ("--tensor 3", "does not divide over 'tensor'"),
    ):
        done = run(f"{flags} --steps 1", "--out", tmp_path, status=None)
        assert done.returncode != 0, flags
        assert "Traceback" not in done.stderr, done.stderr
        assert says in done.stderr, done.stderr
