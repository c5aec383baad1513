"""optax on placed parameters takes the steps that it takes without a pipeline: norms, moments and
decay meet every parameter once.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest

from tests.axes.model import (
    SCHEDULES,
    SPECS,
    batch,
    build,
    canonical,
    first,
    last,
    like_truth,
    pipeline,
    stage,
    worst_error,
)
from tests.oracle import oracle_value_and_grad
from tests.parity.tolerance import FLOAT64
from tests.tiers import slow

M, STEPS = 4, 5
# Each step goes on from the last one's rounding errors, and Adam divides by the root of a small
# number: 1e-12 a step, added up.
TOLERANCE = STEPS * FLOAT64
EVERYTHING = {"data_axes": ("data",), "fsdp": "data", "shard_outer": True, "specs": SPECS}


def decayed(params: Any) -> Any:
    """Weight decay for matrices only, as is usual: by name, since placed leaves have one
    more axis.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) not in ("b", "gain", "odd"),
        params,
    )


# By stages: the clip must bite in some of the steps only, so that a norm that counts a copy twice
# shows.
NORM = {2: 10.0, 4: 31.0}


def optimizer(stages: int) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(NORM[stages]), optax.adamw(0.05, weight_decay=0.1, mask=decayed)
    )


def plain_run(stages: int) -> tuple[list[float], Any, list[float]]:
    """Losses, parameters and gradient norms of the run on one device."""
    step = jax.jit(
        lambda p, b: oracle_value_and_grad(
            p, b, first=first, stage=stage, last=last, microbatches=1
        )
    )
    return _run(step, jax.tree.map(jax.numpy.asarray, canonical(stages)), stages)


def _run(step: Any, params: Any, stages: int) -> tuple[list[float], Any, list[float]]:
    tx = optimizer(stages)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    losses, norms = [], []
    for seed in range(STEPS):
        loss, grads = step(params, batch(M, seed=seed))
        losses.append(float(loss))
        norms.append(float(optax.tree.norm(grads)))
        params, state = update(params, state, grads)
    return losses, params, norms


@pytest.mark.parametrize("name", ["1f1b", *(slow(name) for name in SCHEDULES if name != "1f1b")])
def test_adamw_with_a_global_clip_takes_the_same_steps(name: str) -> None:
    schedule = build(name, M)
    pipe = pipeline(schedule, **EVERYTHING)
    losses, params, norms = _run(
        pipe.value_and_grad, pipe.place(canonical(schedule.num_stages)), schedule.num_stages
    )
    wanted_losses, wanted, wanted_norms = plain_run(schedule.num_stages)
    assert min(wanted_norms) < NORM[schedule.num_stages] < max(wanted_norms), (
        "the clip must bite in some steps only"
    )
    assert worst_error(norms, wanted_norms) <= TOLERANCE
    assert worst_error(losses, wanted_losses) <= TOLERANCE
    assert worst_error(like_truth(pipe.canonical(params)), wanted) <= TOLERANCE
    assert wanted_losses[-1] < wanted_losses[0]


def test_optimizer_state_is_split_like_the_parameters() -> None:
    pipe = pipeline(build("1f1b"), **EVERYTHING)
    params = pipe.place(canonical(2))
    moments = jax.jit(optax.scale_by_adam().init)(params)
    steps = jax.jit(lambda p, s, g: optax.scale_by_adam().update(g, s, p))
    _, grads = pipe.value_and_grad(params, batch(4))
    _, moments = steps(params, moments, grads)
    for tree in (moments.mu, moments.nu):
        for leaf, param in zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
            assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dualpipe"])
def test_one_jitted_training_step_equals_the_steps_in_parts(name: str) -> None:
    schedule = build(name, M)
    pipe, tx = pipeline(schedule, **EVERYTHING), optimizer(schedule.num_stages)

    @jax.jit
    def train(params: Any, state: Any, rows: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = pipe.place(canonical(schedule.num_stages))
    state = jax.jit(tx.init)(params)
    losses = []
    for seed in range(STEPS):
        params, state, loss = train(params, state, batch(M, seed=seed))
        losses.append(float(loss))
    wanted_losses, wanted, _ = plain_run(schedule.num_stages)
    assert worst_error(losses, wanted_losses) <= TOLERANCE
    assert worst_error(like_truth(pipe.canonical(params)), wanted) <= TOLERANCE
