"""What users get wrong, and what must go right where JAX alone would fail: each function below is
one case.

A case returns what comes out, or raises.  It is written as a user would write it.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe import checkpoint
from jaxpipe.cli.main import main
from tests.flat import flat_pipeline


def cli(*words):
    """The exit status of the command, and what it prints on standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(list(words))
        except SystemExit as stop:
            status = stop.code
    return f"exit status {status}: {errors.getvalue()}"


def stage(params, x):
    return jnp.tanh(x @ params["w"])


def last(params, x, microbatch):
    return jnp.mean((x - microbatch["y"]) ** 2)


def schedule(name="1f1b", *, devices=2, microbatches=2, chunks=1):
    return jp.schedules.build(name, devices=devices, microbatches=microbatches, chunks=chunks)


def mesh(**axes):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count])


def pipeline(stage=stage, **options):
    return flat_pipeline(
        stage, **{"schedule": schedule(), "mesh": mesh(pipe=2), "last": last, **options}
    )


def ones(*shape):
    return np.ones(shape, np.float32)


PARAMS = {"stages": {"w": ones(2, 4, 4) / 4}, "last": {}}
BATCH = {"x": ones(4, 4), "y": ones(4, 4)}


def step(pipe, params=PARAMS, batch=BATCH, **how):
    return pipe.value_and_grad(pipe.place(params), batch, **how)


HELPERS = (stage, last, schedule, mesh, pipeline, ones, step)


class InFunctions:
    """Around a step: in the functions"""

    def a_collective_over_the_pipe_axis():
        return step(pipeline(lambda p, x: jax.lax.psum(stage(p, x), "pipe")))[0]

    def a_collective_over_the_pipe_axis_in_last():
        return step(
            pipeline(last=lambda p, x, microbatch: jax.lax.pmean(last(p, x, microbatch), "pipe"))
        )[0]

    def a_sharding_constraint_that_names_the_pipe_axis():
        step(
            pipeline(
                lambda p, x: jax.lax.with_sharding_constraint(stage(p, x), PartitionSpec("pipe"))
            )
        )

    def an_error_inside_a_function():
        step(pipeline(lambda p, x: stage(p, x).reshape(7, 7)))

    def ctx_by_position():
        return step(pipeline(lambda p, x, ctx: stage(p, x) + 0 * ctx.stage))[0]

    def a_function_of_another_signature():
        step(pipeline(lambda p, x, mask: stage(p, x)))

    def a_stage_that_returns_another_shape():
        step(pipeline(lambda p, x: x[:, :1]))

    def a_loss_that_is_no_scalar():
        step(pipeline(last=lambda p, x, microbatch: x))

    def dropout_without_a_key():
        step(pipeline(lambda p, x, ctx: x * jax.random.bernoulli(ctx.rng, 0.5, x.shape)))

    def a_number_for_a_key():
        step(pipeline(), rng=3)

    def evaluate_without_last():
        pipe = pipeline(last=None)
        pipe.evaluate(pipe.place({"stages": PARAMS["stages"]}), BATCH)

    def losses_without_last():
        pipe = pipeline(last=None)
        pipe.losses(pipe.place({"stages": PARAMS["stages"]}), BATCH)

    def evaluate_is_differentiated():
        pipe = pipeline()
        jax.grad(lambda params: pipe.evaluate(params, BATCH))(pipe.place(PARAMS))

    def counts_that_are_vectors():
        counted = pipeline(
            last=lambda p, x, microbatch: (jnp.sum(x), ones(3)), loss=jp.Loss.SUM_OVER_COUNT
        )
        return step(counted)[0]

    def counts_with_a_gradient():
        counted = pipeline(
            last=lambda p, x, microbatch: (jnp.sum(x), jnp.sum(x**2)), loss=jp.Loss.SUM_OVER_COUNT
        )
        return step(counted)[0]


class WhatGoesIn:
    """Around a step: parameters, batches, meshes"""

    def parameters_that_are_placed_twice():
        pipe = pipeline()
        pipe.place(pipe.place(PARAMS))

    def parameters_that_are_not_placed():
        pipeline().value_and_grad(PARAMS, BATCH)

    def placed_parameters_as_numpy_arrays():
        pipe = pipeline()
        return pipe.value_and_grad(jax.device_get(pipe.place(PARAMS)), BATCH)[0]

    def parameters_that_were_placed_for_another_schedule_of_the_same_shapes():
        one = pipeline(schedule=schedule("interleaved_1f1b", chunks=2))
        other = pipeline(schedule=schedule("zbv", chunks=2))
        placed = one.place({"stages": {"w": ones(4, 4, 4)}, "last": {}})
        return other.value_and_grad(placed, BATCH)[0]

    def parameters_of_another_layout():
        layers = {"t": stage, "L": last}
        pipe = jp.Pipeline(jp.Model(layers, layers="ttL"), schedule(), mesh(pipe=2), layout="t|tL")
        pipe.place({"stages": [{"w": ones(4, 4)}, {"w": ones(4, 4)}], "last": {}})

    def too_few_layers():
        layers = {"t": stage, "L": last}
        pipe = jp.Pipeline(
            jp.Model(layers, layers="tttL"), schedule(), mesh(pipe=2), layout="t|ttL"
        )
        pipe.place({"stages": {"t": {"w": ones(2, 4, 4)}}, "last": {}})

    def torch_tensors_as_parameters():
        import torch

        pipeline().place({"stages": {"w": torch.ones(2, 4, 4)}, "last": {}})

    def torch_tensors_as_a_batch():
        import torch

        step(pipeline(), batch={"x": torch.ones(4, 4), "y": ones(4, 4)})

    def lists_as_a_batch():
        step(pipeline(), batch={"x": [[1.0] * 4] * 4, "y": ones(4, 4)})

    def a_value_that_all_rows_share():
        step(pipeline(), batch={**BATCH, "step": 3})

    def a_scale_that_is_a_vector():
        step(pipeline(), scale=ones(2))

    def a_batch_that_does_not_divide():
        step(pipeline(), batch={"x": ones(5, 4), "y": ones(5, 4)})

    def an_axis_along_which_all_would_do_the_same():
        return step(pipeline(mesh=mesh(pipe=2, data=2)))[0]

    def an_optimizer_of_parameters_that_are_all_frozen():
        pipe = pipeline(frozen=["stages/w"])
        return pipe.init(optax.adam(1e-3), pipe.place(PARAMS))[0].mu["stages"][0]

    def a_rule_over_all_parameters_under_per_layer():
        pipe = pipeline(lambda p, x: stage(p, x) * p["scale"])
        params = pipe.place({"stages": {**PARAMS["stages"], "scale": ones(2, 4)}, "last": {}})
        optimizer = jp.per_layer(pipe, optax.clip_by_global_norm(1.0))
        optimizer.update(params, optimizer.init(params), params)


class Numbers:
    """Numbers that must come out: the plain model's"""

    def a_scan_over_no_layers():
        pipe = pipeline(
            lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]
        )
        return step(pipe, {"stages": {"w": ones(2, 0, 4, 4)}, "last": {}})[0]

    def a_stage_loss_that_is_a_constant():
        return step(pipeline(lambda p, x: (stage(p, x), 0.0), stage_loss=True))[0]

    def a_batch_in_which_nothing_is_counted():
        pipe = pipeline(
            last=lambda p, x, microbatch: (0 * jnp.sum(x), 0.0), loss=jp.Loss.SUM_OVER_COUNT
        )
        loss, grads = step(pipe)
        return loss, jnp.sum(grads["stages"][0]["w"])

    def sums_and_counts_beyond_float16():
        half = jnp.float16(40000)
        pipe = pipeline(
            last=lambda p, x, microbatch: (half + 0 * x[0, 0].astype(jnp.float16), half),
            loss=jp.Loss.SUM_OVER_COUNT,
        )
        return step(pipe)[0]

    def no_promotion_of_dtypes():
        with jax.numpy_dtype_promotion("strict"):
            return step(pipeline())[0]

    def parameters_of_8_bits():
        small = {"stages": {"w": jnp.asarray(PARAMS["stages"]["w"], jnp.float8_e4m3fn)}, "last": {}}
        return step(pipeline(lambda p, x: jnp.tanh(x @ p["w"].astype(x.dtype))), small)[0]

    def the_norm_of_gradients_outside_of_jit():
        return optax.global_norm(step(pipeline())[1])

    def gradients_by_jax_grad_beside_a_penalty():
        pipe = pipeline()
        params = pipe.place(PARAMS)
        loss, grads = jax.value_and_grad(
            lambda params: pipe.loss(params, BATCH) + 1e-3 * optax.tree.norm(params)
        )(params)
        return loss, optax.global_norm(grads)

    def an_evaluation_batch_of_another_size():
        pipe = pipeline()
        return pipe.evaluate(pipe.place(PARAMS), {"x": ones(3, 4), "y": ones(3, 4)})

    def steps_compiled_in_a_loop():
        pipe, optimizer = pipeline(), optax.adam(1e-3)

        @jax.jit
        def train(params, state):
            grads = pipe.value_and_grad(params, BATCH)[1]
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = pipe.place(PARAMS)
        state = pipe.init(optimizer, params)
        for _ in range(3):
            params, state = train(params, state)
        return train._cache_size()


class Checkpoints:
    """Checkpoints"""

    def a_newest_checkpoint_that_is_damaged():
        pipe = pipeline()
        state = {"params": pipe.place(PARAMS)}
        with tempfile.TemporaryDirectory() as folder:
            with checkpoint.Checkpoints(folder, pipe) as checkpoints:
                checkpoints.save(1, state)
                checkpoints.save(2, state)
            for file in (Path(folder) / "2").rglob("*"):
                if file.is_file():
                    file.write_bytes(b"")
            with checkpoint.Checkpoints(folder, pipe) as checkpoints:
                return checkpoints.restore(state)[0]

    def another_number_of_stages_without_layer_axis():
        def layers(p, x):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]

        two = pipeline(layers)
        four = pipeline(layers, schedule=schedule(devices=4), mesh=mesh(pipe=4))
        with tempfile.TemporaryDirectory() as folder:
            with checkpoint.Checkpoints(folder, two) as checkpoints:
                checkpoints.save(
                    1, {"params": two.place({"stages": {"w": ones(2, 2, 4, 4)}, "last": {}})}
                )
            with checkpoint.Checkpoints(folder, four) as checkpoints:
                checkpoints.restore(
                    {"params": four.place({"stages": {"w": ones(4, 1, 4, 4)}, "last": {}})}
                )

    def a_folder_without_a_checkpoint():
        pipe = pipeline()
        with (
            tempfile.TemporaryDirectory() as folder,
            checkpoint.Checkpoints(folder, pipe) as checkpoints,
        ):
            checkpoints.restore({"params": pipe.place(PARAMS)})


class Flax:
    """flax"""

    def a_module_of_nnx_for_first():
        from flax import nnx

        from jaxpipe.flax import from_nnx

        blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)]
        from_nnx(
            blocks,
            num_stages=2,
            first=nnx.Linear(4, 4, rngs=nnx.Rngs(9)),
            last=lambda module, x, microbatch: 0.0,
        )

    def a_module_of_linen_for_last():
        from flax import linen as nn

        from jaxpipe.flax import from_linen

        block = nn.Dense(4)
        variables = [block.init(jax.random.key(i), ones(1, 4)) for i in range(2)]
        from_linen(block, variables, num_stages=2, last=nn.Dense(4))

    def a_whole_model_for_its_blocks():
        from flax import nnx

        from jaxpipe.flax import from_nnx

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.embed = nnx.Embed(10, 4, rngs=rngs)
                self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

        from_nnx(Model(nnx.Rngs(0)), num_stages=2)

    def blocks_that_do_not_divide():
        from flax import nnx

        from jaxpipe.flax import from_nnx

        from_nnx([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(3)], num_stages=2)

    def metadata_of_nnx():
        from flax import nnx

        from jaxpipe.flax import from_nnx

        split = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "tensor"))
        with nnx.use_eager_sharding(False):
            blocks = [nnx.Linear(4, 4, kernel_init=split, rngs=nnx.Rngs(i)) for i in range(2)]
        return from_nnx(blocks, num_stages=2).specs


class Text:
    """Tables, layouts and costs as text and numbers"""

    def numbers_of_5000_digits():
        jp.Schedule.from_csv("0F" + "9" * 5000)

    def numbers_over_2_to_63():
        jp.check(jp.Schedule.from_csv(f"0F0,0F{2**64}"))

    def a_lone_carriage_return():
        jp.check(jp.Schedule.from_csv("0F0\r0B0"))

    def a_cell_of_200_kB():
        jp.Schedule.from_csv("0F0," + "x" * 200_000)

    def brackets_in_json():
        jp.Schedule.from_json("[" * 100_000)

    def brackets_in_a_layout():
        jp.parse_layout("(" * 100_000, devices=2)

    def full_width_digits():
        jp.Schedule.from_csv("\uff10F\uff10")

    def no_microbatches_but_transfers():
        table = json.loads(schedule().to_json())
        jp.check(
            jp.Schedule.from_json(
                json.dumps(table | {"num_microbatches": 0, "rows": [["0SEND_F0"], ["1RECV_F0"]]})
            )
        )

    def a_layout_of_gigabytes():
        jp.parse_layout("t*999999" * 2000, devices=2)

    def very_many_faults_in_a_layout():
        jp.parse_layout("t?|" * 3000, devices=2)

    def an_overlap_of_400_digits():
        jp.Costs(overlap=10**400)

    def a_cost_that_is_a_letter():
        jp.layouts.split_layers(["a"], stages=1)


class CommandLine:
    """The command line"""

    def very_many_microbatches():
        return cli("show", "gpipe", "--devices", "2", "-M", "99999999999")

    def an_option_that_show_does_not_take():
        return cli(
            "show", "1f1b", "--devices", "2", "--microbatches", "2", "--option", "forward_only=true"
        )

    def an_option_twice():
        return cli("show", "1f1b", "--devices", "2", "--microbatches", "2", "--option", "devices=3")

    def costs_that_are_no_numbers():
        return cli("simulate", "1f1b", "--devices", "2", "--microbatches", "2", "--costs", "1,x")


SECTIONS = (InFunctions, WhatGoesIn, Numbers, Checkpoints, Flax, Text, CommandLine)
