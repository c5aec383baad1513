"""Two executors of one program: the SPMD program and the eager interpreter give the same numbers as
each other and as plain JAX.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.flat import flat_pipeline
from tests.parity.tolerance import FLOAT64
from tests.tiers import by_actions, exhaustive

WIDTH, ROWS = 4, 2


def first(params, microbatch, *, shared):
    return microbatch["x"] @ params["e"] + shared["b"]


def stage(params, x, *, shared, ctx):
    return (
        x + jnp.tanh(x @ params["w"]) * (1 + 0.01 * ctx.stage + 0.02 * ctx.microbatch) + shared["b"]
    )


def last(params, x, microbatch, *, shared):
    error = (x @ params["h"] + jnp.sum(shared["b"]) - microbatch["y"]) ** 2
    return jnp.sum(error * microbatch["mask"][:, None]), jnp.sum(microbatch["mask"])


def pipelines(name, *, devices=4, microbatches=8, mesh=None, data_axes=()):
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches)
    mesh = mesh or jax.make_mesh((devices,), ("pipe",))
    common = {
        "schedule": schedule,
        "mesh": mesh,
        "first": first,
        "last": last,
        "loss": jp.Loss.SUM_OVER_COUNT,
        "data_axes": data_axes,
    }
    return [
        flat_pipeline(stage, **common, executor=executor) for executor in (None, EagerExecutor())
    ]


def case(schedule, shards=1):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = {
        "first": {"e": jax.random.normal(next(keys), (3, WIDTH))},
        "stages": {"w": jax.random.normal(next(keys), (schedule.num_stages, WIDTH, WIDTH))},
        "last": {"h": jax.random.normal(next(keys), (WIDTH, 2))},
        "shared": {"b": jax.random.normal(next(keys), (WIDTH,))},
    }
    rows = schedule.num_microbatches * ROWS * shards
    batch = {
        "x": jax.random.normal(next(keys), (rows, 3)),
        "y": jax.random.normal(next(keys), (rows, 2)),
        "mask": (jax.random.uniform(next(keys), (rows,)) > 0.3).astype(float),
    }
    return params, batch


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Sums of the same few hundred float64 products in another order: see
        # tests/parity/tolerance.py.  In NumPy: the two executors' arrays live on other devices,
        # which JAX's own arithmetic may refuse to mix.
        one, other = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(one - other)) <= FLOAT64 * (1 + np.max(np.abs(other)))


# tests/parity/test_grid.py runs the whole catalogue through every engine but this one.
QUICK = ("1f1b", "interleaved_1f1b", "zbv", "no_pipelining")
# Their kinds of actions are among those of the others: pairs, chunks, halves of backwards.
CONTAINED = ("1f1b_overlap", "dualpipev", "gpipe", "zb_h1")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else exhaustive(name) if name in CONTAINED else by_actions(name)
        for name in jp.schedules.names()
    ],
)
def test_the_interpreter_gives_the_numbers_of_the_compiled_program(name):
    devices = 1 if name == "no_pipelining" else 4
    compiled, eager = pipelines(name, devices=devices, microbatches=8)
    params, batch = case(compiled.schedule)
    placed = compiled.place(params)
    expected, found = compiled.value_and_grad(placed, batch), eager.value_and_grad(placed, batch)
    close(found, expected)
    close(eager.losses(placed, batch), compiled.losses(placed, batch))
    close(eager.evaluate(placed, batch), expected[0])


def test_over_data_shards():
    mesh = jax.make_mesh((2, 2), ("data", "pipe"))
    compiled, eager = pipelines("zb_h1", devices=2, microbatches=4, mesh=mesh, data_axes=("data",))
    params, batch = case(compiled.schedule, shards=2)
    placed = compiled.place(params)
    close(eager.value_and_grad(placed, batch), compiled.value_and_grad(placed, batch))


def test_in_a_context_of_explicit_axes():
    """A loss may be multiplied there, while it is differentiated too."""
    mesh = jax.make_mesh((2,), ("pipe",), axis_types=(jax.sharding.AxisType.Explicit,))
    both = pipelines("1f1b", devices=2, microbatches=4, mesh=mesh)
    params, batch = case(both[0].schedule)
    with jax.set_mesh(mesh):
        gradients = [
            jax.value_and_grad(lambda p, pipe=pipe: 3.0 * pipe.loss(p, batch))(pipe.place(params))
            for pipe in both
        ]
    close(*gradients)


def test_state_outputs_and_unlike_layers():
    def layer(params, x, *, state):
        return x + jnp.tanh(x @ params["w"]), state + jnp.sum(jax.lax.stop_gradient(x))

    schedule = jp.schedules.build("1f1b", devices=2, microbatches=4)
    mesh = jax.make_mesh((2,), ("pipe",))
    common = {"schedule": schedule, "mesh": mesh, "last": lambda p, x, mb: jnp.mean(x**2)}
    compiled, eager = (
        flat_pipeline([layer, layer], **common, executor=executor)
        for executor in (None, EagerExecutor())
    )
    key = jax.random.key(1)
    stages = [{"w": jax.random.normal(key, (WIDTH, WIDTH))} for _ in range(2)]
    placed, state = (
        compiled.place({"stages": stages, "last": {}}),
        compiled.place_state([jnp.zeros(()), jnp.ones(())]),
    )
    batch = {"x": jax.random.normal(key, (8, WIDTH))}
    close(
        eager.value_and_grad(placed, batch, state=state),
        compiled.value_and_grad(placed, batch, state=state),
    )
    close(eager.outputs(placed, batch, state=state), compiled.outputs(placed, batch, state=state))


@pytest.mark.parametrize("call", ["jit", "jax.jit", "lower", "report", "memory"])
def test_the_eager_executor_says_that_it_cannot_be_traced(call):
    _, pipe = pipelines("gpipe", devices=1, microbatches=2)
    canonical, batch = case(pipe.schedule)
    params = pipe.place(canonical)
    calls = {
        "jit": pipe.jit(pipe.value_and_grad),
        "jax.jit": jax.jit(pipe.evaluate),
        "lower": pipe.lower,
        "report": partial(jp.inspect.report, pipe),
        "memory": partial(jp.inspect.memory, pipe),
    }
    with pytest.raises(
        jp.PipelineError, match=r"cannot be traced: call the step outside of jax\.jit"
    ):
        calls[call](params, batch)


def test_a_tree_of_parameters_may_hold_none():
    def stage(params, x):
        return jnp.tanh(x @ params["w"] + params["z"])

    schedule = jp.schedules.build("zb_h1", devices=1, microbatches=2)
    params = {"stages": {"a": None, "w": jnp.eye(WIDTH)[None], "z": jnp.ones((1, WIDTH))}}
    params |= {"first": {}, "last": {"e": None, "h": jnp.ones((WIDTH, 2))}}
    batch = {"x": jnp.ones((4, WIDTH)), "y": jnp.zeros((4, 2)), "mask": jnp.ones(4)}

    def end(params, x, microbatch):
        return last(params, x, microbatch, shared={"b": jnp.zeros(())})[0]

    model, mesh = jp.Model(stage, last=end), jax.make_mesh((1,), ("pipe",))
    found = []
    for executor in (None, EagerExecutor()):
        pipe = jp.Pipeline(model, schedule, mesh, executor=executor)
        loss, grads = pipe.value_and_grad(pipe.place(params), batch)
        found.append((loss, pipe.canonical(grads)))
    close(*found)
