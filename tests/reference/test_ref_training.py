"""Optimizers against optax, training against a plain JAX loop, and the command on files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from test_ref_executor import ZERO_BUBBLE, mlp_batch

import torch_ref
from torch_ref import TableError, TorchRefError, optim
from torch_ref.__main__ import main
from torch_ref.files import load_arrays
from torch_ref.models import MLP

torch.set_num_threads(1)

MASK = ("*/bias",)


def mask_of(tree):
    return {name: not name.endswith("/bias") for name in tree}


def in_float64(schedule):
    """optax's schedule, computed in float64; from its int32 count alone it would be float32."""
    return lambda count: schedule(jnp.asarray(count, jnp.float64))


COSINE = optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 5, 30, 1e-3)

RATES = [1e-2 / (1 + step) for step in range(40)]

# Our optimizer, optax's.  The clip of 0.7 bites in most steps of the MLP below and spares some.
PAIRS = {
    "adamw": (
        optim.AdamW(optim.Warmup(1e-2, 10), b2=0.95, weight_decay=0.1, no_decay=MASK, clip=0.7),
        lambda: optax.chain(
            optax.clip_by_global_norm(0.7),
            optax.adamw(
                in_float64(optax.linear_schedule(0.0, 1e-2, 10)),
                b2=0.95,
                weight_decay=0.1,
                mask=mask_of,
            ),
        ),
    ),
    "adamw, cosine": (
        optim.AdamW(optim.WarmupCosine(1e-2, 5, 30, init=1e-4, end=1e-3), eps=1e-3),
        lambda: optax.adamw(in_float64(COSINE), eps=1e-3, weight_decay=0.0),
    ),
    "adamw, a list of rates": (
        optim.AdamW(RATES),
        lambda: optax.adamw(lambda count: jnp.asarray(RATES)[count], weight_decay=0.0),
    ),
    "momentum": (
        optim.SGD(0.05, momentum=0.9, weight_decay=0.01, no_decay=MASK, clip=0.7),
        lambda: optax.chain(
            optax.clip_by_global_norm(0.7),
            optax.add_decayed_weights(0.01, mask_of),
            optax.sgd(0.05, momentum=0.9),
        ),
    ),
    "nesterov": (
        optim.SGD(0.05, momentum=0.9, nesterov=True),
        lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    ),
}


def jax_loss(w, batch):
    x = jnp.tanh(batch["x"] @ w["first/dense/kernel"] + w["first/dense/bias"])
    for s in range(2):
        x = jnp.tanh(x @ w["stages/dense/kernel"][s] + w["stages/dense/bias"][s])
    return jnp.mean((x @ w["last/dense/kernel"] + w["last/dense/bias"] - batch["y"]) ** 2)


@pytest.mark.parametrize("name", PAIRS)
def test_forty_steps_as_optax_takes_them(name):
    ours, theirs = PAIRS[name][0], PAIRS[name][1]()
    model = MLP(num_stages=2)
    batches = [mlp_batch(6, seed=step) for step in range(40)]
    trained = torch_ref.train(ZERO_BUBBLE, model, batches, weights=model.init(), optimizer=ours)

    @jax.jit
    def step(w, state, batch):
        loss, grads = jax.value_and_grad(jax_loss)(w, batch)
        updates, state = theirs.update(grads, state, w)
        return optax.apply_updates(w, updates), state, loss, optax.tree.norm(grads)

    w = {k: jnp.asarray(v) for k, v in model.init().items()}
    state, losses, norms = theirs.init(w), [], []
    for batch in batches:
        w, state, loss, norm = step(w, state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    # float64 on both sides: 40 steps let rounding errors of 1e-16 grow by a few orders of
    # magnitude, Adam's small v more than others.
    np.testing.assert_allclose(trained.losses, losses, rtol=1e-11)
    np.testing.assert_allclose(trained.grad_norms, norms, rtol=1e-11)
    for key, value in w.items():
        np.testing.assert_allclose(trained.weights[key], value, rtol=1e-9, atol=1e-11)
    if ours.clip is not None:
        assert (trained.grad_norms > ours.clip).any()
        assert (trained.grad_norms < ours.clip).any()


def test_torchs_own_clipping_is_another_formula():
    """The reason why it is not used."""
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    leaf = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    leaf.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([leaf], 1.0)
    ours = optim.clip({"g": gradient}, 1.0)["g"]
    assert ours.tolist() == [3 / 5, 4 / 5]
    assert 1e-8 < (leaf.grad - ours).abs().max().item() < 1e-6


def test_weights_given_stay_as_they_are():
    model = MLP(num_stages=2)
    weights = model.init()
    kept = {name: value.copy() for name, value in weights.items()}
    torch_ref.train(ZERO_BUBBLE, model, [mlp_batch(3)], weights=weights, optimizer=optim.SGD(1.0))
    for name, value in kept.items():
        np.testing.assert_array_equal(weights[name], value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: optim.SGD(0.1, no_decay=("*/bais",)).build({"a/bias": torch.zeros(1)}),
            r"\['\*/bais'\] match no parameter",
        ),
        (lambda: optim.rate_of([0.1, 0.2], 2), "there are 2 rates, but step 2 needs one more"),
        (lambda: optim.WarmupCosine(1.0, 10, 10), r"decay_steps \(10\) counts the warm-up too"),
    ],
)
def test_optimizers_that_do_not_fit(call, says):
    with pytest.raises(TorchRefError, match=says):
        call()


def test_training_needs_backwards():
    model = MLP(num_stages=2)
    with pytest.raises(TableError, match="no backwards"):
        torch_ref.train(
            "0F0\n1F0\n", model, [mlp_batch(1)], weights=model.init(), optimizer=optim.SGD(0.1)
        )


@pytest.fixture
def files(tmp_path):
    model = MLP(num_stages=2)
    (tmp_path / "t.csv").write_text(ZERO_BUBBLE)
    (tmp_path / "c.json").write_text(json.dumps({"num_stages": 2}))
    np.savez(tmp_path / "w.npz", **model.init())
    np.savez(tmp_path / "b.npz", **mlp_batch(6))
    paths = {
        "table": "t.csv",
        "weights": "w.npz",
        "batch": "b.npz",
        "config": "c.json",
        "out": "out",
    }
    return tmp_path, [
        "--model",
        "mlp",
        *(x for key, name in paths.items() for x in (f"--{key}", str(tmp_path / name))),
    ]


def test_command_writes_gradients(files, capsys):
    folder, arguments = files
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    model = MLP(num_stages=2)
    result = torch_ref.run(ZERO_BUBBLE, model, mlp_batch(6), weights=model.init())
    assert printed == {
        "loss": result.loss,
        "losses": result.losses.tolist(),
        "counts": None,
        "peak_activations": [3, 2],
    }
    written = load_arrays(folder / "out")
    assert written.keys() == result.grads.keys()
    # The command runs in this process: the same kernels on the same numbers.
    for name, gradient in result.grads.items():
        np.testing.assert_array_equal(written[name], gradient)


def test_command_trains(files, capsys):
    folder, arguments = files
    batches = [mlp_batch(6, seed=step) for step in range(3)]
    np.savez(folder / "b.npz", **{key: np.stack([b[key] for b in batches]) for key in batches[0]})
    config = {
        "name": "adamw",
        "rate": {"peak": 1e-2, "steps": 2},
        "weight_decay": 0.1,
        "no_decay": ["*/bias"],
        "clip": 1.0,
    }
    (folder / "o.json").write_text(json.dumps(config))
    assert main([*arguments, "--optimizer", str(folder / "o.json")]) == 0
    model = MLP(num_stages=2)
    optimizer = optim.AdamW(optim.Warmup(1e-2, 2), weight_decay=0.1, no_decay=("*/bias",), clip=1.0)
    trained = torch_ref.train(
        ZERO_BUBBLE, model, batches, weights=model.init(), optimizer=optimizer
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["losses"] == trained.losses.tolist()
    assert printed["rates"] == [0.0, 5e-3, 1e-2]
    for name, value in load_arrays(folder / "out").items():
        np.testing.assert_array_equal(value, trained.weights[name])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "0F0\n", "the table has 1 stages, the model 2"),
        ("t.csv", "0F0,hello\n", "'hello' is not an action"),
        ("c.json", "{", "Expecting property name"),
        ("c.json", "[2]", "must hold a JSON object"),
    ],
)
def test_command_says_what_is_wrong(files, capsys, name, text, says):
    folder, arguments = files
    (folder / name).write_text(text)
    assert main(arguments) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"name": "lion", "rate": 1}, "must be adamw or sgd, not 'lion'"),
        ({"name": "sgd"}, "needs a rate"),
        ({"name": "sgd", "rate": 1, "beta": 2}, r"not known: \['beta'\]"),
        ({"name": "sgd", "rate": {"top": 2}}, "does not fit"),
    ],
)
def test_optimizer_files_that_do_not_fit(config, says):
    from torch_ref.__main__ import read_optimizer

    with pytest.raises(TorchRefError, match=says):
        read_optimizer(config)


def test_bad_usage_exits_with_two(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--model", "lstm"])
    assert caught.value.code == 2
