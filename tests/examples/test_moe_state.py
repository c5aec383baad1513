"""The state of examples/moe.py: the bias that moves towards an even load, and checkpoints that
another number of experts' devices, of stages and of replicas reads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import moe
from jaxpipe.checkpoint import Checkpoints
from llama_parts import initial
from moe_parts.experts import route
from moe_parts.sizes import Routing, Scores
from tests.examples.test_moe import EIGHT, on_eight
from tests.tiers import exhaustive, slow


def test_a_bias_makes_an_uneven_load_even():
    """All tokens like the same four of 16 experts; without a bias these get nearly all."""
    routing = Routing(16, 4, 8, scores=Scores.SIGMOID)
    logits = jax.random.normal(jax.random.key(0), (4, 256, 16)) + 3.0 * (jnp.arange(16) < 4)

    def step(bias, _):
        load = route(routing, logits, bias[0]).load[None]
        return bias + moe.balance(0.001, load), jnp.max(load) / jnp.mean(load)

    _, worst = jax.lax.scan(step, jnp.zeros((1, 16)), length=800)
    assert worst[0] > 3.5  # 4 is all of them
    assert np.all(np.asarray(worst[-100:]) < 1.2)


def test_the_optimizer_has_no_state_for_the_bias():
    args = moe.parser().parse_args([*EIGHT.split(), "--model", "tiny-latent"])
    model, pipe = moe.build(args, on_eight())
    params = pipe.place(model.shapes())
    own = [
        {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (params, pipe.trained(params), pipe.init(moe.optimizer_of(args), params))
    ]
    assert own[0] - own[1] == {"['shared']['bias']"}
    assert not any("bias" in path for path in own[2])


LAYOUTS = {
    "first": "--schedule 1f1b_overlap --fsdp",
    "wider": "--pipe 2 --expert 4 --data 1 --schedule dualpipev --capacity 1.25",
    "deeper": "--pipe 4 --expert 2 --data 1 --schedule zb_h1 --fsdp --fsdp-axis expert",
    "no axis of experts": "--pipe 4 --expert 1 --data 2 --schedule 1f1b",
}


def built(flags):
    """The pipeline of these flags, and the state after an update by random gradients."""
    args = moe.parser().parse_args([*EIGHT.split(), "--model", "tiny-latent", *flags.split()])
    model, pipe = moe.build(args, on_eight(args.pipe, args.data, args.expert))
    rule, params = moe.optimizer_of(args), initial.placed(model, pipe, jax.random.key(0))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), model.shapes())
    placed, own = pipe.place(grads), pipe.trained(params)
    trained = pipe.trained(placed, like=params)
    moves, opt_state = pipe.jit(rule.update)(trained, pipe.init(rule, params), own)
    after = pipe.with_trained(params, optax.apply_updates(own, moves), grads=placed)
    return pipe, {"params": after, "opt_state": opt_state}


@pytest.mark.parametrize(
    "name", [slow("wider"), exhaustive("deeper"), exhaustive("no axis of experts")]
)
def test_a_checkpoint_is_read_on_other_axes(tmp_path, name):
    """Parameters, both moments and the bias, there and back: the same bits."""
    (pipe, state), (other, like) = built(LAYOUTS["first"]), built(LAYOUTS[name])
    with Checkpoints(tmp_path / "first", pipe) as checkpoints:
        checkpoints.save(1, state)
    with Checkpoints(tmp_path / "first", other) as checkpoints:
        _, moved = checkpoints.restore(jax.tree.map(jnp.zeros_like, like))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(other.canonical(moved["params"])),
        jax.device_get(pipe.canonical(state["params"])),
    )
    for found, wanted in zip(jax.tree.leaves(moved), jax.tree.leaves(like), strict=True):
        assert found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
    split = [leaf for leaf in jax.tree.leaves(moved) if "expert" in str(leaf.sharding.spec)]
    # gate, up and down of the layers with experts, and two moments of each
    assert len(split) >= (9 if "--expert 1" not in LAYOUTS[name] else 0)
    with Checkpoints(tmp_path / "second", other) as checkpoints:
        checkpoints.save(1, moved)
    with Checkpoints(tmp_path / "second", pipe) as checkpoints:
        _, again = checkpoints.restore(jax.tree.map(jnp.zeros_like, state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
