"""What docs/torch_peer.md says of jaxpipe beside a fault of torch's runtime, where no other test
shows it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from tests.parity.engines import mesh_of, worst_error
from tests.parity.small import ROWS, batch, build, last, oracle, stage, step, weights
from tests.parity.tolerance import FLOAT64

# Forwards in another order than microbatches, and backwards in a third one.
MIXED = "0F2,0F0,0F1,0B1,0B2,0B0\n1F2,1F0,1B0,1F1,1B1,1B2\n"


def test_a_table_whose_forwards_run_in_another_order_runs_and_the_batch_may_be_any_tree():
    def first(params, microbatch):
        return microbatch["input"]["x"][0]

    def last_of_tree(params, x, microbatch):
        return last(params, x, {"y": microbatch["target"][0]})

    schedule = jp.Schedule.from_csv(MIXED)
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last_of_tree), schedule, mesh_of(2))
    plain = batch(3 * ROWS)
    tree = {"input": {"x": (plain["x"],)}, "target": [plain["y"]]}
    canonical = weights(2)
    assert worst_error(step(pipe, canonical, tree), oracle(canonical, plain, 3)) <= FLOAT64
    alone = [
        oracle(
            canonical, jax.tree.map(lambda leaf, m=m: leaf[m * ROWS : (m + 1) * ROWS], plain), 1
        ).loss
        for m in range(3)
    ]
    np.testing.assert_allclose(pipe.losses(pipe.place(canonical), tree), alone, rtol=FLOAT64)


def test_two_steps_added_are_twice_one():
    pipe, rows, canonical = build("1f1b", microbatches=3), batch(3 * ROWS), weights(2)
    params = pipe.place(canonical)
    once, twice = pipe.value_and_grad(params, rows)[1], pipe.value_and_grad(params, rows)[1]
    assert worst_error(step(pipe, canonical, rows), oracle(canonical, rows, 3)) <= FLOAT64
    # One compiled program run twice gives the same bits, and doubling is exact.
    for one, other in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        np.testing.assert_array_equal(one + other, 2 * one)


def test_an_evaluation_keeps_nothing_for_a_backward():
    """GPipe's step holds every microbatch till its backward; its evaluation holds no more for more
    microbatches.
    """
    wide, rows = 32, 16

    def temp_bytes(microbatches, method):
        pipe = build("gpipe", microbatches=microbatches)
        canonical = {
            "first": {},
            "stages": {"w": jnp.zeros((2, wide, wide))},
            "last": {"w": jnp.zeros((wide, 2))},
        }
        given = {
            "x": jnp.zeros((rows * microbatches, wide)),
            "y": jnp.zeros((rows * microbatches, 2)),
        }
        compiled = jax.jit(getattr(pipe, method)).lower(pipe.place(canonical), given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    activation = rows * wide * 8
    # Two microbatches have fewer arrays at a time: their table has no steady state.
    assert temp_bytes(16, "evaluate") - temp_bytes(4, "evaluate") < activation
    assert temp_bytes(16, "value_and_grad") - temp_bytes(4, "value_and_grad") > 12 * activation


def test_letters_behind_an_action_are_refused_at_their_character():
    with pytest.raises(
        jp.ScheduleError, match=r"line 1, column 1: '0F0xyz' .*'xyz' follows at character 4"
    ):
        jp.Schedule.from_csv("0F0xyz,0B0\n")
