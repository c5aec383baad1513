"""H: the gradient of the parameters of a spread `last` by each device alone, some time after its L,
in every executor.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe import Loss, PipelineError, Schedule
from jaxpipe.eager import EagerExecutor
from tests.lowering.test_spread_last import (
    LIMIT,
    ROWS,
    TOKENS,
    WIDTH,
    by_columns,
    canonical,
    rows,
    stage,
    table_agrees,
)
from tests.parity.engines import mesh_of
from tests.tiers import slow
from tests.tolerance import relative


def late(table: Schedule) -> Schedule:
    """Every H at the end of its row, in the order of its L."""
    found = []
    for device, row in enumerate(table.rows):
        after = [
            jp.Action(device, jp.Kind.H, cell.microbatch)
            for cell in row
            if isinstance(cell, jp.Action) and cell.kind is jp.Kind.L
        ]
        found.append([*row, *after])
    return jp.check(table.with_rows(found))


def deferred(name: str, devices: int, microbatches: int, most: int) -> Schedule:
    """A table with whole backwards and H: `most` left to do by a device, all of them where it
    is 0.
    """
    plain = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    table = jp.spread_last(plain, split=False)
    made = jp.defer_last(table, max_deferred=most) if most else late(table)
    assert jp.Kind.H in made.encoded.kinds
    return made


@pytest.mark.parametrize(
    ("name", "devices", "most", "tied"),
    [
        ("1f1b", 2, 1, False),
        slow("1f1b", 4, 1, True),
        slow("zb_h1", 4, 0, True),
        slow("interleaved_1f1b", 2, 2, False),
        slow("dualpipe", 2, 0, True),
        slow("gpipe", 1, 0, False),
    ],
)
def test_a_step_agrees_with_plain_jax(name, devices, most, tied):
    pipe, params, _ = table_agrees(deferred(name, devices, 4, most), tied=tied)
    assert pipe.outputs(params, rows(ROWS * 4, 11)).shape == (ROWS * 4, TOKENS, WIDTH)


@pytest.mark.slow
def test_a_sum_over_tokens_with_data_shards_and_fsdp():
    table_agrees(
        deferred("1f1b", 2, 4, 1),
        vocabulary=12,
        data=2,
        data_axes=("data",),
        fsdp="data",
        loss=Loss.SUM_OVER_COUNT,
    )


@pytest.mark.parametrize("most", [1, 0])
def test_the_eager_executor_does_each_share_by_itself(most):
    table_agrees(deferred("gpipe", 2, 3, most), tied=bool(most), executor=EagerExecutor())


def whole_model(own: Any) -> dict[str, Any]:
    return {**canonical(2, 1), "last": own}


def a_step(table: Schedule, last: Any, own: Any) -> Any:
    pipe = jp.Pipeline(jp.Model(stage, last=last), table, mesh_of(2))
    loss, grads = pipe.value_and_grad(pipe.place(whole_model(own)), rows(6, 2))
    return float(loss), pipe.canonical(grads)


@pytest.mark.slow
def test_a_function_of_ones_own_with_collectives_and_a_parameter_that_is_whole():
    rng = np.random.default_rng(0)
    own = {"w": rng.standard_normal((WIDTH, 5)), "scale": rng.standard_normal(WIDTH)}
    spread = jp.spread(by_columns, dims={"w": 1, "scale": None})
    table = deferred("gpipe", 2, 3, 0)
    (loss, found), (wanted_loss, wanted) = (
        a_step(each, spread, own) for each in (table, jp.transforms.remove_spread(table))
    )
    assert abs(loss - wanted_loss) <= LIMIT * abs(wanted_loss)
    assert relative(found, wanted) <= LIMIT


def test_a_gradient_that_needs_the_others_cannot_wait():
    def last(params, x, microbatch, *, ctx):
        return jnp.sum(x) + jnp.sum(params["a"] @ jax.lax.psum(params["b"], ctx.axis))

    own = {"a": np.ones((2, 3, 3)), "b": np.ones((2, 3, 3))}
    with pytest.raises(
        PipelineError,
        match=r"communication over the pipe axis 'pipe'.*without H: jaxpipe.spread_last",
    ):
        a_step(deferred("gpipe", 2, 3, 0), jp.spread(last), own)


def test_what_waits_is_the_gradient_of_the_logits_and_the_hidden_state():
    """Not the logits and not the parameters: the smallest from which one matmul makes
    the gradient.
    """
    table = late(jp.spread_last(jp.schedules.build("gpipe", devices=2, microbatches=3)))
    pipe = jp.Pipeline(jp.Model(stage, last=jp.VocabHead()), table, mesh_of(2))
    params = pipe.place(canonical(2, 10))
    report = jp.inspect.report(pipe, params, rows(6, 10))
    assert report["slots"].share == 3
    assert report["slot_bytes"]["share"] == 8 * ROWS * TOKENS * (WIDTH + 10 // 2)
