"""The loss contract: what a step's loss is made of, and that evaluating leaves no trace.  More of
it in tests/lowering/test_contract.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from tests.parity.engines import worst_error
from tests.parity.small import ROWS, batch, build, gradients_of, last, oracle, stage, step, weights
from tests.parity.tolerance import FLOAT64

# One table of each sort: whole backwards, split ones on two chunks, both directions.
THREE = ("1f1b", "zbv", "dualpipe")


def stages_of(pipe):
    return pipe.schedule.num_stages


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("data", [1, 2])
def test_the_loss_is_the_mean_of_the_losses_of_microbatches(data):
    pipe, rows = build("zbv", data=data), batch(4 * ROWS * data)
    params = pipe.place(weights(stages_of(pipe)))
    loss, _ = pipe.value_and_grad(params, rows)
    losses = np.asarray(pipe.losses(params, rows))
    # Each data shard cuts its own rows into M microbatches; the m-th loss is the mean of theirs.
    shards = [
        jax.tree.map(lambda leaf, k=k: leaf.reshape(data, -1, *leaf.shape[1:])[k], rows)
        for k in range(data)
    ]
    single = build("zbv")
    wanted = np.mean(
        [np.asarray(single.losses(params_of(single), shard)) for shard in shards], axis=0
    )
    np.testing.assert_allclose(losses, wanted, rtol=FLOAT64)
    np.testing.assert_allclose(loss, losses.mean(), rtol=FLOAT64)
    assert len(set(losses)) == 4, "equal losses would not show their order"


def params_of(pipe):
    return pipe.place(weights(stages_of(pipe)))


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_scaling_the_loss_by_a_power_of_two_changes_no_bit(name):
    scale = 2.0**12
    pipe = build(
        name,
        last=lambda params, x, microbatch: microbatch["scale"][0] * last(params, x, microbatch),
    )
    canonical, rows = weights(stages_of(pipe)), batch(4 * ROWS)
    # The scale is data, so that one compiled program gives both.
    right, found = (
        step(pipe, canonical, {**rows, "scale": np.full(4 * ROWS, by)}) for by in (1.0, scale)
    )
    # Multiplying by a power of two is exact where nothing overflows or becomes subnormal, so it
    # passes through every sum and product.
    assert found.loss == scale * right.loss
    for key, grad in right.grads.items():
        np.testing.assert_array_equal(found.grads[key] / scale, grad, err_msg=key)


@pytest.mark.parametrize(("name", "data"), [("zbv", 1), ("1f1b", 2)])
def test_evaluating_between_steps_leaves_no_trace(name, data):
    pipe = build(name, data=data)
    batches = [batch(4 * ROWS * data, seed=seed) for seed in range(4)]

    def train(evaluate):
        params, seen = params_of(pipe), []
        for rows in batches:
            if evaluate:
                before = bits(params)
                evaluated = pipe.evaluate(params, rows)
                pipe.losses(params, batches[0])
                assert bits(params) == before
            loss, grads = pipe.value_and_grad(params, rows)
            if evaluate:
                np.testing.assert_allclose(evaluated, loss, rtol=FLOAT64)
                copies = {
                    np.asarray(shard.data).tobytes() for shard in evaluated.addressable_shards
                }
                assert (len(copies), len(evaluated.addressable_shards)) == (1, 2 * data)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            seen.append(float(loss))
        return seen, bits(params)

    # The same compiled step, on the same numbers: the same bits.
    assert train(evaluate=True) == train(evaluate=False)


@pytest.mark.parametrize("data", [1, 2])
def test_padding_rows_of_weight_zero_do_not_count(data):
    def weighted(params, x, microbatch):
        error = jnp.mean(jnp.square(x @ params["w"] - microbatch["y"]), axis=1)
        return jnp.sum(microbatch["weight"] * error), jnp.sum(microbatch["weight"])

    pipe = build("zbv", data=data, last=weighted, loss=jp.Loss.SUM_OVER_COUNT)
    # Three rows short of full microbatches: the last microbatch (of the last shard) has one row of
    # its own, the one before two.
    real, full = 4 * 3 * data - 3, 4 * 3 * data
    rows = batch(real)
    rng = np.random.default_rng(5)
    padded = {
        key: np.concatenate([value, rng.standard_normal((full - real, value.shape[1]))])
        for key, value in rows.items()
    }
    padded["weight"] = (np.arange(full) < real).astype(float)
    canonical = weights(stages_of(pipe))
    # One microbatch of all real rows, and no padding: the mean over them.
    assert worst_error(step(pipe, canonical, padded), oracle(canonical, rows, 1)) <= FLOAT64


@pytest.mark.parametrize("name", THREE)
def test_auxiliary_losses_of_middle_stages_travel_with_the_activations(name):
    def with_aux(params, x):
        y = stage(params, x["h"])
        return {"h": y, "aux": x["aux"] + jnp.mean(y**4) + 0.01 * jnp.sum(params["w"] ** 2)}

    def first(params, microbatch):
        return {"h": microbatch["x"], "aux": jnp.zeros(())}

    def last_with_aux(params, x, microbatch):
        return last(params, x["h"], microbatch) + 0.3 * x["aux"]

    functions = {"first": first, "stage": with_aux, "last": last_with_aux}
    pipe, rows = build(name, **functions), batch(4 * ROWS)
    canonical = weights(stages_of(pipe))
    right = oracle(canonical, rows, 4, **functions)
    assert worst_error(step(pipe, canonical, rows), right) <= FLOAT64
    assert worst_error(oracle(canonical, rows, 4), right) > 1e-3, (
        "the auxiliary loss must matter, in every gradient"
    )


def test_the_mean_over_microbatches_is_not_the_mean_over_counts():
    """MEAN weighs microbatches alike and SUM_OVER_COUNT rows, so that with uneven counts they
    differ, each as the oracle has it.
    """

    def error(params, x, microbatch):
        return microbatch["weight"] * jnp.mean(
            jnp.square(x @ params["w"] - microbatch["y"]), axis=1
        )

    def mean(params, x, microbatch):
        return jnp.sum(error(params, x, microbatch)) / jnp.sum(microbatch["weight"])

    def both(params, x, microbatch):
        return jnp.sum(error(params, x, microbatch)), jnp.sum(microbatch["weight"])

    rows = {**batch(4 * ROWS), "weight": np.arange(1.0, 4 * ROWS + 1) ** 2}
    canonical = weights(2)

    def over_all(params):
        h = jnp.asarray(rows["x"])
        for s in range(2):
            h = stage({"w": params["stages"]["w"][s]}, h)
        total, count = both(params["last"], h, rows)
        return total / count

    by_microbatch, by_row = oracle(canonical, rows, 4, last=mean), gradients_of(over_all, canonical)
    assert worst_error(step(build("1f1b", last=mean), canonical, rows), by_microbatch) <= FLOAT64
    assert (
        worst_error(
            step(build("1f1b", last=both, loss=jp.Loss.SUM_OVER_COUNT), canonical, rows), by_row
        )
        <= FLOAT64
    )
    assert worst_error(by_microbatch, by_row) > 1e-3
