"""The parts of the GPT example, each by itself: data, model, checkpoints, the comparison that
--verify makes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpipe as jp
from gpt import data, verify
from gpt.checkpoint import RunFolder
from gpt.model import GPT
from gpt.optimizer import adamw, decayed
from jaxpipe.checkpoint import Checkpoints
from tests.tiers import slow
from tests.tolerance import FLOAT64, relative
from torch_ref.models import GPT as TorchGPT

SIZES = {"layers": 4, "vocab": 32, "context": 8, "width": 16, "heads": 2}


def model_of(stages=4, **changes):
    return GPT(stages=stages, **{**SIZES, "dtype": jnp.float64, **changes})


def batch_of(rows=4, seed=0):
    tokens = np.random.default_rng(seed).integers(
        0, SIZES["vocab"], (rows, SIZES["context"] + 1), dtype=np.int32
    )
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def pipeline(model, name="1f1b", devices=4, microbatches=2):
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("pipe",))
    return jp.Pipeline(jp.Model(model.stage, first=model.first, last=model.last), schedule, mesh)


@pytest.fixture(scope="module")
def corpus():
    return data.standard_library(vocab=256)


class TestData:
    def test_decoding_undoes_encoding(self, corpus):
        text = "def f(self):\n        return [x for x in y]  # ~\t?\n"
        assert corpus.vocabulary.decode(corpus.vocabulary.encode(text)) == text

    def test_pieces_make_texts_shorter(self, corpus):
        # many texts, since the first ones differ between versions of Python
        text = corpus.vocabulary.decode(corpus.train[:500_000])
        assert len(text) > 1.3 * 500_000
        assert max(corpus.train) < 256

    def test_what_is_not_ascii_becomes_a_question_mark(self):
        assert data.ascii_only("naïve") == "na?ve"

    def test_batch_depends_on_seed_and_step_only(self, corpus):
        one = corpus.batch(7, size=3, context=5, seed=1)
        corpus.batch(8, size=3, context=5, seed=1)
        again = corpus.batch(7, size=3, context=5, seed=1)
        assert all(np.array_equal(one[k], again[k]) for k in one)
        assert not np.array_equal(
            one["tokens"], corpus.batch(8, size=3, context=5, seed=1)["tokens"]
        )
        assert not np.array_equal(
            one["tokens"], corpus.batch(7, size=3, context=5, seed=2)["tokens"]
        )

    def test_targets_are_the_next_tokens(self, corpus):
        batch = corpus.batch(0, size=3, context=5, seed=0)
        assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])

    def test_held_out_text_is_other_text(self, corpus):
        held_out = corpus.batch(0, size=1, context=60, seed=0, held_out=True)["tokens"][0]
        window = bytes(held_out.astype(np.uint16))
        assert window in corpus.valid.tobytes()
        assert window not in corpus.train.tobytes()

    def test_a_vocabulary_without_room_for_ascii_is_refused(self):
        with pytest.raises(SystemExit, match="--vocab 128 or more"):
            data.Vocabulary.of("text", size=100)


class TestModel:
    @pytest.mark.parametrize("tied", [True, slow(False)])
    def test_names_and_shapes_are_those_of_the_reference(self, tied):
        model = model_of(tied=tied)
        ours = {
            name: value.shape
            for name, value in verify.by_path(model.init(jax.random.key(0))).items()
        }
        reference = TorchGPT(
            num_stages=4, layers_per_stage=1, vocab=32, block=8, width=16, heads=2, tied=tied
        )
        assert ours == reference.shapes()

    @pytest.mark.parametrize("tied", [False, True])
    def test_the_parts_make_the_plain_loss(self, tied):
        model = model_of(tied=tied)
        params, batch = model.init(jax.random.key(0)), batch_of()
        x = model.first(params["first"], batch, shared=params.get("shared"))
        for s in range(4):
            x = model.stage(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), x)
        loss = model.last(params["last"], x, batch, shared=params.get("shared"))
        # The same operations, in four scans of one layer that are compiled apart from one of four.
        assert relative(loss, model.plain_loss(params, batch)) <= FLOAT64

    def test_no_token_sees_a_later_one(self):
        model = model_of()
        params, tokens = model.init(jax.random.key(0)), batch_of()["tokens"]
        changed = tokens.copy()
        changed[:, 5] = (changed[:, 5] + 1) % SIZES["vocab"]
        before, after = model.logits(params, tokens), model.logits(params, changed)
        # The same compiled code twice, and what is masked is added as an exact zero: the same bits.
        assert np.array_equal(before[:, :5], after[:, :5])
        assert not np.allclose(before[:, 5], after[:, 5])

    @pytest.mark.slow
    def test_generated_text_follows_the_logits_past_the_context(self):
        model = model_of()
        # far from uniform
        params = jax.tree.map(lambda leaf: 20 * leaf, model.init(jax.random.key(3)))
        prompt = np.array([1, 2, 3], np.int32)
        # At this temperature the likeliest token is always drawn, so a plain loop over growing
        # windows must agree.
        drawn = model.generate(
            params, jnp.asarray(prompt), length=12, key=jax.random.key(0), temperature=1e-9
        )
        text = list(prompt)
        for _ in range(12):
            logits = model.logits(params, np.array([text[-SIZES["context"] :]], np.int32))
            text.append(int(np.argmax(logits[0, -1])))
        assert list(map(int, drawn)) == text[3:]

    @pytest.mark.slow
    def test_bfloat16_compute_keeps_float32_parameters_and_loss(self):
        model = model_of(dtype=jnp.bfloat16)
        params = model.init(jax.random.key(0))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        assert model.plain_loss(params, batch_of()).dtype == jnp.float32


class TestOptimizer:
    def test_only_kernels_decay(self):
        params = model_of().init(jax.random.key(0))
        names = {name for name, yes in verify.by_path(decayed(params)).items() if yes}
        assert names == {name for name in verify.by_path(params) if name.endswith("kernel")}
        assert len(names) == 5

    def test_warm_up_is_linear_and_reaches_the_rate(self):
        optimizer = adamw(rate=0.1, warmup=4, decay=0.0, clip=1e9)
        params = {"kernel": jnp.zeros(1)}
        state, moved = optimizer.init(params), []
        for _ in range(6):
            updates, state = optimizer.update({"kernel": jnp.ones(1)}, state, params)
            moved.append(-float(updates["kernel"][0]))
        # With a constant gradient Adam moves by the rate itself, but for its eps of 1e-8.
        assert moved == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rel=1e-6)


class TestCheckpoints:
    @pytest.mark.slow
    def test_another_schedule_and_number_of_devices_reads_them(self, tmp_path):
        model = model_of(stages=4)
        wide = pipeline(model, "1f1b", devices=4)
        optimizer = adamw(rate=1e-2, warmup=1, decay=0.1, clip=1.0)
        state = self.trained(wide, optimizer, model)
        checkpoints = Checkpoints(tmp_path / "c", wide, layer_axis=True)
        checkpoints.save(3, state)
        checkpoints.close()

        narrow_model = dataclasses.replace(model, stages=2)
        narrow = pipeline(narrow_model, "gpipe", devices=2)
        like = {"params": narrow.place(narrow_model.init(jax.random.key(9)))}
        like["opt_state"] = narrow.init(optimizer, like["params"])
        step, found = Checkpoints(tmp_path / "c", narrow, layer_axis=True).restore(like)

        assert step == 3
        moments, saved = found["opt_state"][1][0], state["opt_state"][1][0]
        assert int(moments.count) == int(saved.count) == 1
        for ours, theirs in (
            (found["params"], state["params"]),
            (moments.mu, saved.mu),
            (moments.nu, saved.nu),
        ):
            stages = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), narrow.canonical(ours)["stages"]
            )
            expected = jax.tree.map(
                lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), wide.canonical(theirs)["stages"]
            )
            jax.tree.map(
                np.testing.assert_array_equal, jax.device_get(stages), jax.device_get(expected)
            )
            jax.tree.map(
                np.testing.assert_array_equal,
                jax.device_get(ours["first"]),
                jax.device_get(theirs["first"]),
            )
        assert any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(moments.mu)))

    def test_a_new_run_never_takes_an_old_folder(self, tmp_path):
        assert [RunFolder.create(tmp_path).path.name for _ in range(3)] == [
            "run-1",
            "run-2",
            "run-3",
        ]

    def test_losses_after_the_checkpoint_are_written_again(self, tmp_path):
        folder = RunFolder(tmp_path)
        assert folder.read_losses(0) == []
        for step, loss in enumerate([0.1 + 0.2, 1 / 3, 2.0], start=1):
            folder.append_loss(step, loss)
        assert folder.read_losses(2) == [0.1 + 0.2, 1 / 3]
        assert (tmp_path / "losses.csv").read_text().count("\n") == 3

    @staticmethod
    def trained(pipe, optimizer, model):
        params = pipe.place(model.init(jax.random.key(0)))
        opt_state = pipe.init(optimizer, params)
        _, grads = pipe.value_and_grad(params, batch_of())
        updates, opt_state = jax.jit(optimizer.update)(grads, opt_state, params)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}


GRADS = {"a": np.array([1.0, -4.0]), "b": np.array([1e-3])}


class TestDifference:
    def test_is_relative_to_the_largest_entry_of_the_array(self):
        other = {"a": np.array([1.0, -4.0 + 1e-6]), "b": np.array([1e-3 + 1e-8])}
        found = verify.difference((2.0, GRADS), (2.0 + 1e-9, other))
        assert found.gradient == pytest.approx(1e-6)
        assert (found.relative_gradient, found.where) == (pytest.approx(1e-8 / (1e-3 + 1e-8)), "b")
        assert found.relative_loss == pytest.approx(5e-10)

    def test_names_must_be_the_same(self):
        with pytest.raises(ValueError, match="'b'"):
            verify.difference((2.0, GRADS), (2.0, {"a": GRADS["a"]}))

    @pytest.mark.parametrize("gradient", [1e-3, float("nan")])
    def test_beyond_the_tolerance_is_a_failure(self, gradient, capsys):
        args = type("Args", (), {"dtype": "float64"})()
        good, bad = (
            verify.Difference(0, 1e-16, 0, 1e-15, "a"),
            verify.Difference(0, gradient, 0, gradient, "b"),
        )
        assert verify.report({"torch_ref": [good]}, args) == 0
        assert verify.report({"torch_ref": [good, bad]}, args) == 1
        assert "BEYOND" in capsys.readouterr().out
