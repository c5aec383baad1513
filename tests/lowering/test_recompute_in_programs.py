"""R in a table: the compiled program gives the numbers of plain JAX, and keeps fewer residuals."""

import jax
import jax.numpy as jnp
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from jaxpipe.lowering.plan import plan_of
from jaxpipe.program.verify import verify
from tests.flat import flat_pipeline
from tests.models import twin
from tests.parity.engines import case_data, jaxpipe_step, pipeline, truth, worst_error
from tests.parity.tolerance import FLOAT64

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe")


def some(schedule):
    """R for the odd microbatches only: others keep their residuals."""
    whole = jp.add_recompute(schedule)
    rows = [
        [
            c
            for c in row
            if not (isinstance(c, jp.Action) and c.kind is jp.Kind.R and c.microbatch % 2 == 0)
        ]
        for row in whole.rows
    ]
    return jp.check(whole.with_rows([tuple(row) for row in rows]))


@pytest.mark.parametrize("which", [jp.add_recompute, some], ids=["all", "some"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers(name, which):
    schedule = which(jp.schedules.build(name, devices=2, microbatches=4))
    model = twin("mlp", schedule.num_stages, width=2, features_in=2, features_out=1)
    verify(plan_of(schedule).program())
    assert (
        worst_error(
            jaxpipe_step(pipeline(schedule, model), *case_data(model, 4, 1)), truth(model, 4, 1)
        )
        <= FLOAT64
    )


def test_one_stage_recomputes_while_another_keeps_its_residuals():
    """In one tick all devices run forwards, some of which keep nothing."""
    schedule = jp.add_recompute(jp.schedules.build("1f1b", devices=2, microbatches=8), stages=[0])
    model = twin("mlp", schedule.num_stages, width=2, features_in=2, features_out=1)
    found = jaxpipe_step(pipeline(schedule, model), *case_data(model, 8, 1))
    assert worst_error(found, truth(model, 8, 1)) <= FLOAT64


def test_the_interpreter_recomputes_too():
    schedule = some(jp.schedules.build("zb_h1", devices=2, microbatches=4))
    mesh = jax.make_mesh((2,), ("pipe",))
    common = {"schedule": schedule, "mesh": mesh, "last": lambda p, x, mb: jnp.mean(x**2)}
    compiled, eager = (
        flat_pipeline(lambda p, x: jnp.tanh(x @ p), **common, executor=e)
        for e in (None, EagerExecutor())
    )
    key = jax.random.key(0)
    placed, batch = (
        compiled.place({"stages": jax.random.normal(key, (2, 3, 3)), "last": {}}),
        {"x": jax.random.normal(key, (8, 3))},
    )
    for one, other in zip(
        *(jax.tree.leaves(p.value_and_grad(placed, batch)) for p in (compiled, eager)), strict=True
    ):
        assert jnp.max(jnp.abs(one - other)) <= FLOAT64


def test_fewer_residuals_are_kept():
    """GPipe holds every microbatch's residuals at once; with R right before each backward, those of
    one.
    """
    plain = jp.schedules.build("gpipe", devices=4, microbatches=8)
    assert plan_of(plain).program().slots.residual_weight == 8
    slots = plan_of(jp.add_recompute(plain)).program().slots
    assert slots.residual_weight <= 2
    assert slots.x == 8


def test_a_program_has_the_room_that_its_table_was_made_for():
    plain = jp.schedules.build("1f1b", devices=4, microbatches=8)
    for room in (1, 2, 3):
        assert (
            plan_of(jp.add_recompute(plain, max_activations=room)).program().slots.residual_weight
            == room
        )


def test_the_work_of_the_forward_is_done_twice():
    """And no more: F keeps nothing and R sends nothing."""
    program = plan_of(
        jp.add_recompute(jp.schedules.build("1f1b", devices=2, microbatches=4))
    ).program()
    blocks = {
        str(use.block)
        for segment in program.segments
        for template in segment.templates
        for use in template.blocks
    }
    assert blocks == {"F.0-", "R.0", "B.0"}
