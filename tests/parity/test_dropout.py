"""Dropout depends on the step's key, the function and the microbatch: every schedule of as many
stages gives the oracle's numbers.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from tests.keys import FIRST, LAST, STAGE, key_of
from tests.parity import small
from tests.parity.engines import mesh_of, worst_error
from tests.parity.small import ROWS, batch, build, gradients_of, step, weights
from tests.parity.tolerance import FLOAT64
from tests.tiers import exhaustive, slow
from tests.tolerance import step_error

MICROBATCHES, KEEP = 4, 0.7
# One of each sort; the others differ from these in their order of actions alone, and take part with
# -m exhaustive.
DEFAULT = ("1f1b", "interleaved_1f1b", "zb_h2", "zbv", "dualpipe")
QUICK = ("1f1b", "dualpipe")
NAMES = [
    name if name in QUICK else slow(name) if name in DEFAULT else exhaustive(name)
    for name in jp.schedules.names()
]


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0.0)


def first(params, microbatch, *, ctx):
    return dropped(ctx.rng, microbatch["x"])


def stage(params, x, *, ctx):
    return dropped(ctx.rng, small.stage(params, x))


def last(params, x, microbatch, *, ctx):
    return small.last(params, dropped(ctx.rng, x), microbatch)


@lru_cache
def right(stages, seed):
    """A plain loop over microbatches and stages, with the keys that the documentation of `Context`
    promises.
    """
    rows, key = batch(MICROBATCHES * ROWS), jax.random.key(seed)

    def context(s, m, function=STAGE):
        return jp.Context(s, m, key_of(key, function, m, s if function == STAGE else 0))

    def loss(params):
        total = 0.0
        for m in range(MICROBATCHES):
            mine = jax.tree.map(lambda leaf, m=m: leaf[m * ROWS : (m + 1) * ROWS], rows)
            x = first({}, mine, ctx=context(0, m, FIRST))
            for s in range(stages):
                x = stage({"w": params["stages"]["w"][s]}, x, ctx=context(s, m))
            total += last(params["last"], x, mine, ctx=context(stages - 1, m, LAST))
        return total / MICROBATCHES

    return gradients_of(loss, weights(stages))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_draws_the_oracles_numbers(name):
    pipe = build(name, microbatches=MICROBATCHES, first=first, stage=stage, last=last)
    stages, rows = pipe.schedule.num_stages, batch(MICROBATCHES * ROWS)
    assert stages in (2, 4), "so that many schedules share one oracle"
    for seed in (3, 4):
        found = step(pipe, weights(stages), rows, rng=jax.random.key(seed))
        assert worst_error(found, right(stages, seed)) <= FLOAT64
    assert right(stages, 3).loss != right(stages, 4).loss


def test_remat_draws_the_same_numbers_in_the_backward():
    pipe = build(
        "zb_h1", microbatches=MICROBATCHES, first=first, stage=stage, last=last, remat="full"
    )
    found = step(pipe, weights(2), batch(MICROBATCHES * ROWS), rng=jax.random.key(3))
    assert worst_error(found, right(2, 3)) <= FLOAT64


def test_microbatches_and_stages_draw_different_masks():
    """Equal rows in every microbatch: without randomness all losses would be equal."""
    rows = jax.tree.map(lambda leaf: np.tile(leaf, (MICROBATCHES, 1)), batch(ROWS))
    pipe = build("1f1b", microbatches=MICROBATCHES, first=first, stage=stage, last=last)
    losses = np.asarray(pipe.losses(pipe.place(weights(2)), rows, rng=jax.random.key(3)))
    assert len(set(losses)) == MICROBATCHES
    plain = build("1f1b", microbatches=MICROBATCHES)
    assert len(set(np.asarray(plain.losses(plain.place(weights(2)), rows)))) == 1


@pytest.mark.parametrize(
    ("name", "layout", "remat"),
    [
        ("1f1b", "E|tttL", None),
        slow("zb_h1", "Ett|tL", "full"),
        slow("zbv", "Et|t||tL", None),
        slow("R", "Et|ttL", None),
    ],
)
def test_layers_draw_the_same_numbers_on_any_number_of_stages(name, layout, remat):
    """As the model alone draws them, in `first`, in layers and in `last`."""
    model = jp.Model({"E": first, "t": stage, "L": last}, layers="EtttL")
    canonical, rows = weights(3), batch(MICROBATCHES * ROWS)
    canonical["stages"] = {"t": canonical["stages"]}
    table = "1f1b" if name == "R" else name
    schedule = jp.schedules.build(table, devices=2, microbatches=MICROBATCHES)
    schedule = jp.add_recompute(schedule) if name == "R" else schedule
    memory = jp.Memory(remat=remat)
    pipe = jp.Pipeline(model, schedule, mesh_of(2), layout=layout, memory=memory)
    key = jax.random.key(3)

    def loss(params):
        return model.loss(params, rows, microbatches=MICROBATCHES, rng=key)

    wanted = jax.jit(jax.value_and_grad(loss))(canonical)
    assert step_error(pipe, canonical, rows, wanted, rng=key) <= FLOAT64


def test_a_count_that_is_drawn_is_that_of_the_loss():
    """Counts are summed before the first forward, so each is drawn twice, with one key."""

    def counted(params, x, microbatch, *, ctx):
        kept = jax.random.uniform(ctx.rng, (ROWS,))
        errors = jnp.sum((x @ params["w"] - microbatch["y"]) ** 2, axis=-1)
        return jnp.sum(errors * kept), jnp.sum(kept)

    model = jp.Model(small.stage, last=counted, loss=jp.Loss.SUM_OVER_COUNT)
    canonical, rows, key = weights(2), batch(MICROBATCHES * ROWS), jax.random.key(3)
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=MICROBATCHES)

    def loss(params):
        return model.loss(params, rows, microbatches=MICROBATCHES, rng=key)

    wanted = jax.jit(jax.value_and_grad(loss))(canonical)
    pipe = jp.Pipeline(model, schedule, mesh_of(2))
    assert step_error(pipe, canonical, rows, wanted, rng=key) <= FLOAT64
