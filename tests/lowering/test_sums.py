"""What a step adds over microbatches and data shards has room for the total, whatever its dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of
from tests.tiers import needs_half

M, DATA = 4, 2
ROWS = M * DATA
# A microbatch may count more than this in float32, which then rounds; adding rounds once a number.
# Both are relative to what is rounded: 2 ** -24, as for the sum of losses that it divides.
ROUNDING = (ROWS + 1) * 2.0**-24


def pipelines(last, stage=lambda p, x: x * p, **options):
    """A step in float32 on two data shards: compiled, and eager."""
    common = {
        "schedule": jp.schedules.build("1f1b", devices=2, microbatches=M),
        "mesh": mesh_of(2, data=DATA),
    }
    common |= {"data_axes": ("data",), "last": last, **options}
    for executor in (None, EagerExecutor()):
        pipe = flat_pipeline(stage, **common, executor=executor)
        yield pipe, pipe.place({"stages": jnp.ones(2, jnp.float32), "last": {}})


@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.uint32, pytest.param(jnp.float16, marks=needs_half)]
)
@pytest.mark.parametrize("x64", [False, True])
def test_counts(dtype, x64):
    each = 60_000 if dtype == jnp.float16 else 2**30 + 2**7 + 1

    def last(params, x, microbatch):
        return jnp.sum(x) * float(each), microbatch["count"][0]

    with jax.enable_x64(x64):
        batch = {"x": jnp.ones((ROWS, 1), jnp.float32), "count": jnp.full(ROWS, each, dtype)}
        for pipe, params in pipelines(last, loss=jp.Loss.SUM_OVER_COUNT):
            loss, grads = pipe.value_and_grad(params, batch)
            assert loss == pytest.approx(1, rel=ROUNDING)
            assert np.ravel(grads["stages"][0]) == pytest.approx([1, 1], rel=2 * ROUNDING)
            assert pipe.evaluate(params, batch) == pytest.approx(1, rel=ROUNDING)


METRICS = {
    "half": jnp.float16(60_000),
    # rounds to 256 or 258: 8 of them are counted apart from each other
    "bfloat": jnp.bfloat16(257),
    "whole": jnp.int32(2**30),
    "small": jnp.int8(100),
    "flag": jnp.bool_(True),
    "double": np.float64(1 / 3),
    "plain": 0.25,
    "complex": jnp.complex64(3 + 4j),
}


@needs_half
@pytest.mark.parametrize("x64", [False, True])
def test_metrics(x64):
    with jax.enable_x64(x64):
        batch = {"x": jnp.ones((ROWS, 1), jnp.float32)}
        for pipe, params in pipelines(lambda p, x, mb: (jnp.mean(x), METRICS), has_metrics=True):
            for found in (
                pipe.value_and_grad(params, batch)[0][1],
                pipe.evaluate(params, batch)[1],
            ):
                for name, value in METRICS.items():
                    wanted = complex(value) if name == "complex" else float(value)
                    assert complex(found[name]) == pytest.approx(wanted, rel=ROUNDING), name
                    assert jnp.issubdtype(found[name].dtype, jnp.inexact)
                    assert found[name].dtype.itemsize >= 4
                assert found["double"].dtype == (jnp.float64 if x64 else jnp.float32)


@needs_half
def test_losses_and_state_of_stages():
    """A loss in half precision that is large on every stage, and a state that is large on every
    shard.
    """

    def stage(params, x, *, state):
        return x, jnp.float16(60_000) + 0 * params.astype(jnp.float16), state

    with jax.enable_x64(False):
        batch = {"x": jnp.zeros((ROWS, 1), jnp.float32)}
        for pipe, params in pipelines(lambda p, x, mb: jnp.mean(x), stage=stage, stage_loss=True):
            state = pipe.place_state(jnp.full(2, 60_000, jnp.float16))
            (loss, new), _ = pipe.value_and_grad(params, batch, state=state)
            assert float(loss) == 120_000
            assert new[0].dtype == jnp.float16
            assert np.ravel(new[0]).tolist() == [60_000, 60_000]
