"""Bad input to `Pipeline` gets an error that names the fault and says what to write instead."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of

P, M, WIDTH = 2, 3, 4


def stage(params, x):
    return jnp.tanh(x @ params["w"])


def last(params, x, microbatch):
    return jnp.mean(jnp.square(x - microbatch["y"]))


def schedule(name="1f1b", **changes):
    return jp.schedules.build(name, **{"devices": P, "microbatches": M, **changes})


def pipe_of(stage=stage, **options):
    return flat_pipeline(
        stage, **{"schedule": schedule(), "mesh": mesh_of(P), "last": last, **options}
    )


def params_of(stages=P):
    return {"stages": {"w": np.ones((stages, WIDTH, WIDTH))}, "last": {}}


def batch_of(rows=M * 2):
    return {"x": np.ones((rows, WIDTH)), "y": np.ones((rows, WIDTH))}


def step(pipe, params=None, batch=None, **how):
    return pipe.value_and_grad(
        pipe.place(params_of()) if params is None else params,
        batch_of() if batch is None else batch,
        **how,
    )


def raises(*parts):
    """A PipelineError whose text holds all of these, in any order."""
    return pytest.raises(
        jp.PipelineError,
        match="".join(f"(?=.*{re.escape(part)})" for part in parts).join(["(?s)", ""]),
    )


# The mesh


def test_wrong_mesh_axis():
    with raises(
        "the mesh has no pipe axis 'pipes'", "{'pipe': 2}", "write Sharding(pipe=) one of them"
    ):
        pipe_of(axis="pipes")


def test_wrong_number_of_devices():
    with raises(
        "'1f1b' is for 2 devices but mesh axis 'pipe' has 4",
        "devices=4",
        "a mesh with 2 along 'pipe'",
    ):
        pipe_of(mesh=mesh_of(4))


def test_every_fault_of_the_mesh_is_listed():
    with raises(
        "mesh axis 'pipe' has 4", "no data axis 'date'", "'pipe' is the pipe axis"
    ) as caught:
        pipe_of(mesh=mesh_of(4), data_axes=("date", "pipe"))
    assert len(caught.value.faults) == 3
    assert isinstance(caught.value, ValueError)


def test_a_mesh_axis_name_instead_of_a_mesh():
    with raises("mesh", "jax.make_mesh"):
        pipe_of(mesh="pipe")


def test_arguments_of_another_kind_are_listed():
    table = jp.schedules.build("1f1b", devices=1, microbatches=2)
    with raises(
        "layout must be a text or a jaxpipe.layouts.Layout or None, not 3",
        "memory must be a jaxpipe.Memory, not 'full'",
        "executor must be a",
    ) as caught:
        jp.Pipeline(jp.Model(stage), table, mesh_of(1), layout=3, memory="full", executor="eager")
    assert len(caught.value.faults) == 3


# The schedule


def test_a_name_instead_of_a_schedule():
    with raises("'1f1b'", "jaxpipe.schedules.build('1f1b'"):
        pipe_of(schedule="1f1b")


def test_a_broken_table_is_refused_with_its_grid():
    broken = jp.Schedule.from_csv("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(
        jp.ScheduleError, match=r"(?s)1B0 comes before 1F0.*swap them.*device 1"
    ) as caught:
        pipe_of(schedule=broken)
    assert caught.value.violations


# The batch


def test_batch_that_does_not_divide():
    with raises(
        "batch['x'] has 7 rows", "batch['y'] has 7 rows", "3 microbatches", "use 6 rows"
    ) as caught:
        step(pipe_of(), batch=batch_of(7))
    assert len(caught.value.faults) == 2


def test_batch_that_does_not_divide_over_data_shards():
    pipe = pipe_of(mesh=mesh_of(P, data=2), data_axes=("data",))
    with raises("has 9 rows", "3 microbatches x 2 data shards", "use 12 rows"):
        step(pipe, batch=batch_of(9))


def test_batch_leaves_of_different_lengths():
    with raises("batch['x'] has 6 rows", "batch['y'] has 12"):
        step(pipe_of(), batch={"x": np.ones((6, WIDTH)), "y": np.ones((12, WIDTH))})


def test_a_batch_without_leaves_or_with_scalars():
    with raises("no leaves", "leading axis of rows"):
        step(pipe_of(), batch={})
    with raises("batch['step']", "leading axis of rows"):
        step(pipe_of(), batch={**batch_of(), "step": 3})


def test_without_first_the_batch_needs_x():
    with raises('"x"', "first="):
        step(pipe_of(), batch={"y": np.ones((6, WIDTH))})


# Parameters


def test_parameters_placed_for_another_schedule():
    four = pipe_of(schedule=schedule(devices=4), mesh=mesh_of(4)).place(params_of(4))
    with raises(
        "placed for stages by device {0: 0; 1: 1; 2: 2; 3: 3}",
        "this schedule has stages by device {0: 0; 1: 1}",
        "bring them over",
    ):
        step(pipe_of(), four)
    chunks = pipe_of(schedule=schedule("interleaved_1f1b", chunks=2)).place(params_of(4))
    with raises("placed for stages by device {0: 0, 2; 1: 1, 3}"):
        step(pipe_of(), chunks)


def test_parameters_that_were_not_placed():
    with raises("parameters are not placed (their stages are a dict); give what `place` returned"):
        step(pipe_of(), params_of())


def test_missing_unknown_and_misshapen_parameters_are_all_listed():
    pipe = pipe_of(first=lambda params, microbatch: microbatch["x"])
    wrong = {
        "stage": {},
        "stages": {"w": np.ones((3, 2)), "n": np.arange(2)},
        "shared": {"k": np.float64(1.0)},
    }
    with raises(
        "unknown keys ['stage']",
        "the keys are first, stages, last and shared",
        'no "first"',
        'no "last"',
        "({} if none)",
        "stages['w'] has shape (3, 2)",
        "the number of stages, 2",
    ) as caught:
        pipe.place(wrong)
    assert len(caught.value.faults) == 4


def test_a_parameter_that_is_trained_is_floating():
    stages = {"w": np.ones((2, 3)), "n": np.arange(2)}
    with raises("n' is int64", "put other arrays in the batch, or name", "frozen="):
        pipe_of(first=lambda params, microbatch: microbatch["x"]).place(
            {"stages": stages, "first": {}, "last": {}}
        )


def test_missing_stages_and_no_dict_at_all():
    with raises('no "stages"', "leading axis of S stages"):
        pipe_of().place({"last": {}})
    with raises("must be a dict", "first, stages, last"):
        pipe_of().place([np.ones((2, 3))])


# The functions


def test_no_last():
    pipe = pipe_of(last=None)
    with raises("needs a loss", "last=function(last_params, x, microbatch) -> scalar"):
        step(pipe, pipe.place(params_of()))


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (lambda x: x, "float64[2, 4]"),
        (lambda x: jnp.mean(x, axis=0), "float64[4]"),
        (lambda x: jnp.sum(x > 0), "int64[]"),
    ],
)
def test_a_loss_that_is_no_scalar(result, shown):
    with raises("`last` must return a floating scalar as its loss", shown, "take its mean"):
        step(pipe_of(last=lambda params, x, microbatch: result(x)))


def test_a_loss_of_the_wrong_form():
    pair = lambda params, x, microbatch: (jnp.mean(x), jnp.ones(()))  # noqa: E731
    with raises("(loss, metrics)", "has_metrics=True"):
        step(pipe_of(has_metrics=True))
    with raises("(sum, count)", "Loss.SUM_OVER_COUNT"):
        step(pipe_of(loss=jp.Loss.SUM_OVER_COUNT))
    with raises("it returns 0 float64[], 1 float64[]", "has_metrics=True", "Loss.SUM_OVER_COUNT"):
        step(pipe_of(last=pair))


def test_a_loss_named_by_a_string():
    with raises("'sum_over_count'", "Loss.SUM_OVER_COUNT"):
        pipe_of(loss="sum_over_count")


def test_stage_output_that_does_not_fit():
    with raises(
        "takes x as float64[2, 4] but returns float64[2, 1]", "return the same shape and dtype"
    ):
        step(pipe_of(lambda params, x: x[:, :1]))
    with raises("takes x as float64[2, 4] but returns float32[2, 4]", "cast in `first`"):
        step(pipe_of(lambda params, x: x.astype(jnp.float32)))
    with raises("a stage's output is the next stage's input", "return the same tree"):
        step(pipe_of(lambda params, x: (x, x)))


def test_every_leaf_that_does_not_fit_is_named():
    first = lambda params, microbatch: {"a": microbatch["x"], "b": microbatch["y"]}  # noqa: E731
    pipe = pipe_of(lambda params, x: {"a": x["a"][:, :1], "b": x["b"] > 0}, first=first)
    with raises(
        "['a'] as float64[2, 4] but returns float64[2, 1]",
        "['b'] as float64[2, 4] but returns bool[2, 4]",
    ):
        step(pipe, pipe.place({**params_of(), "first": {}}))


def test_functions_that_are_none():
    with raises("stages must be a stage function", "not 'stage'"):
        pipe_of("stage")
    with raises("first must be a function", "jaxpipe.spread", "not {}"):
        pipe_of(first={})


def test_randomness_without_a_key():
    def dropped(params, x, *, ctx):
        return x * jax.random.bernoulli(ctx.rng, 0.5, x.shape)

    with raises("ctx.rng", "rng=jax.random.key"):
        step(pipe_of(dropped))


def test_an_unknown_remat():
    with raises("'all'", '"full"', "jax.checkpoint policy"):
        pipe_of(remat="all")
