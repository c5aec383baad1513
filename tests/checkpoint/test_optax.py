"""optax on placed parameters does what it does on canonical ones, and its state has a natural
layout.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.checkpoint import PortableState
from jaxpipe.errors import CheckpointError
from tests.axes.model import worst_error
from tests.checkpoint import runs
from tests.checkpoint.placements import pipelines
from tests.parity.tolerance import FLOAT64
from tests.tolerance import same

STEPS = 5
NAMES = ("1f1b", "interleaved_1f1b", "zbv", "dualpipe", "uneven")


@cache
def pipe_of(name: str) -> jp.Pipeline:
    return pipelines()[name]


def part(params: Any) -> Any:
    """A rule for each parameter, by its path: placed and canonical paths end alike."""
    rules = {"table": "frozen", "head": "fast", "bias": "fast"}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: rules.get(jax.tree_util.keystr(path[-1:], simple=True), "slow"), params
    )


def rules() -> optax.GradientTransformation:
    each = {
        "slow": optax.adamw(0.01, weight_decay=0.1),
        "fast": optax.sgd(0.1, momentum=0.9),
        "frozen": optax.set_to_zero(),
    }
    return optax.multi_transform(each, part)


TRANSFORMATIONS = {
    # Random gradients of 404 entries: norms of 17 to 23, so 20 bites in some steps only.
    "clip": lambda: optax.chain(optax.clip_by_global_norm(20.0), optax.sgd(0.1)),
    "adamw-mask": runs.optimizer,
    "multi_transform": rules,
    "multi_steps": lambda: optax.MultiSteps(rules(), every_k_schedule=2),
    "ema": lambda: optax.chain(
        optax.ema(0.9),
        optax.masked(
            optax.trace(0.5), {"first": False, "stages": True, "last": False, "shared": False}
        ),
    ),
    "lbfgs": lambda: optax.chain(optax.scale_by_lbfgs(memory_size=2), optax.scale(-0.01)),
    "schedule": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=lambda count: 0.1 / (1 + count)
    ),
}


@cache
def starting(name: str) -> list[Any]:
    """Parameters, and two trees that gradients are mixed of; of the plain run where the name is
    empty.
    """
    trees = [runs.canonical(4)]
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        trees.append(jax.tree.map(lambda a, rng=rng: rng.standard_normal(a.shape), trees[0]))
    return [pipe_of(name).place(t) if name else jax.tree.map(jnp.asarray, t) for t in trees]


def updated(name: str, tx: optax.GradientTransformation) -> tuple[Any, Any, list[float]]:
    """Parameters, optimizer state and gradient norms after some steps with given gradients."""
    params, one, two = starting(name)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def update(params: Any, state: Any, weight: Any) -> Any:
        grads = jax.tree.map(lambda a, b: weight * a + (1 - weight) * b, one, two)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    norms = []
    for step in range(STEPS):
        params, state, norm = update(params, state, 1 - step / 4)
        norms.append(float(norm))
    return params, state, norms


@cache
def plain(kind: str) -> tuple[Any, Any, list[float]]:
    return updated("", TRANSFORMATIONS[kind]())


def close(found: Any, wanted: Any) -> None:
    """Equal structures and, but for rounding, numbers; zeros are equal."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    scaled = [(f, w) for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]
    for f, w in scaled:
        f, w = np.asarray(f), np.asarray(w)
        assert f.shape == w.shape
        assert f.dtype == w.dtype
        assert np.max(np.abs(f - w), initial=0) <= STEPS * FLOAT64 * np.max(np.abs(w), initial=0)


QUICK = {("uneven", "adamw-mask"), ("uneven", "multi_steps"), ("dualpipe", "clip"), ("zbv", "ema")}
CASES = [
    pytest.param(
        name,
        kind,
        id=f"{name}-{kind}",
        marks=() if (name, kind) in QUICK else pytest.mark.exhaustive,
    )
    for name, kind in itertools.product(NAMES, TRANSFORMATIONS)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_placed_parameters_take_the_same_steps_and_leave_the_same_state(
    name: str, kind: str
) -> None:
    pipe = pipe_of(name)
    params, state, norms = updated(name, TRANSFORMATIONS[kind]())
    wanted, wanted_state, wanted_norms = plain(kind)
    # Every parameter is counted once: devices without a stage have zeros, stages on two devices one
    # owner.
    assert worst_error(norms, wanted_norms) <= FLOAT64
    assert min(wanted_norms) < 20 < max(wanted_norms)
    natural = PortableState(pipe.partition).of({"params": params, "opt_state": state})
    like = PortableState(None).of({"params": wanted, "opt_state": wanted_state})
    close(natural, like)
    # There and back: numbers are moved, not computed.
    back = PortableState(pipe.partition).placed(natural, {"params": params, "opt_state": state})
    for ours, theirs in zip(
        jax.tree.leaves(back), jax.tree.leaves({"params": params, "opt_state": state}), strict=True
    ):
        assert np.array_equal(ours, theirs)


def test_devices_without_a_stage_keep_zeros() -> None:
    """Weight decay and moments leave what is no parameter at zero, so that no norm ever
    counts it.
    """
    params, state, _ = updated("uneven", optax.adamw(0.1, weight_decay=0.1))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(runs.canonical(4)["stages"]))
    for tree in (params, state[0].mu, state[0].nu):
        leaves = jax.tree.leaves(tree["stages"])
        # two chunks on each of three devices, for four stages
        assert sum(leaf.size for leaf in leaves) == 1.5 * parameters
        assert sum(np.count_nonzero(leaf) for leaf in leaves) == parameters


def test_factored_moments_have_a_natural_layout() -> None:
    """Adafactor keeps a mean over rows and one over columns: leaves with fewer axes than their
    parameter, and placeholders.
    """
    pipe, tx = pipe_of("uneven"), optax.scale_by_factored_rms(min_dim_size_to_factor=runs.WIDTH)
    params, state, _ = updated("uneven", tx)
    natural = PortableState(pipe.partition).of({"params": params, "opt_state": state})
    params, wanted, _ = updated("", tx)
    close(
        natural["opt_state"],
        PortableState(None).of({"params": params, "opt_state": wanted})["opt_state"],
    )
    assert natural["opt_state"].v_row["stages"]["w"].shape == (4, 2, runs.WIDTH)


def test_a_history_has_a_natural_layout() -> None:
    """Leaves with more axes than their parameter, as L-BFGS keeps them, and with layers merged."""
    pipe, params = pipe_of("zbv"), starting("zbv")[0]
    history = jax.tree.map(lambda a: jnp.stack([a, 2 * a, 3 * a]), params)
    natural = PortableState(pipe.partition, layer_axis=True)
    found = natural.of({"params": params, "history": history})
    assert found["history"]["stages"]["w"].shape == (3, runs.LAYERS, runs.WIDTH, runs.WIDTH)
    for i in range(3):
        # A product with a small integer is one operation, rounded in one way.
        wanted = (i + 1) * np.concatenate(runs.canonical(4)["stages"]["w"])
        assert np.array_equal(found["history"]["stages"]["w"][i], wanted)
    back = natural.placed(found, {"params": params, "history": history})["history"]
    assert same(back, history)
    assert jax.tree.leaves(back["stages"])[0].sharding.spec == PartitionSpec(None, "pipe")


def test_a_number_for_each_chunk_is_refused() -> None:
    """What belongs to a schedule's chunks has no place in the model's layout; it must not be lost
    without a word.
    """
    pipe, params = pipe_of("zbv"), starting("zbv")[0]
    norms = jax.tree.map(jnp.linalg.norm, params)
    with pytest.raises(
        CheckpointError, match=r"opt_state/norms holds one number for all stages of a chunk"
    ):
        PortableState(pipe.partition).of({"params": params, "opt_state": {"norms": norms}})


def test_faults_of_a_state_are_all_listed() -> None:
    pipe, params = pipe_of("zbv"), starting("zbv")[0]
    one, two = params["stages"]
    transposed = {**params, "stages": jax.tree.map(jnp.transpose, params["stages"])}
    other = {**params, "stages": params["stages"].like((one, {**two, "b": optax.MaskedNode()}))}
    with pytest.raises(CheckpointError) as caught:
        PortableState(pipe.partition).of({"params": params, "a": transposed, "c": other})
    assert len(caught.value.faults) == 5
    assert "c: chunks of stages have unlike structures" in str(caught.value)
    assert f"a/stages/0/w of shape ({runs.WIDTH}, {runs.WIDTH}, 2, 2) fits no axis" in str(
        caught.value
    )
    with pytest.raises(CheckpointError, match='under "params"'):
        PortableState(pipe.partition).of({"parameters": params})
