"""No gradient goes through the state of a stage: what would lose one is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tolerance import relative
from tests.unlike.test_returned import ROWS, WIDTH, M, build, last, one_by_one, rows
from tests.unlike.test_unlike import draw

STATE = {
    "mean": np.zeros((2, WIDTH)),
    "keys": np.zeros((2, M, WIDTH)),
    "scale": np.ones((2, WIDTH)),
    "seen": np.zeros(2, np.int32),
}


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))


def running(params, x, *, state):
    """Running statistics in what the stage returns, made by a function with a backward of
    its own.
    """
    h = doubled(x @ params["w"])
    return jnp.tanh(h - state["mean"]), {
        **state,
        "mean": 0.9 * state["mean"] + 0.1 * jnp.mean(h, axis=0),
    }


def attending(params, x, *, state):
    """Writes a key and attends to those of the microbatches before."""
    keys = lax.dynamic_update_slice(
        state["keys"], jnp.mean(x @ params["w"], axis=0)[None], (state["seen"], np.int32(0))
    )
    return x + jax.nn.softmax(x @ keys.T) @ keys, {**state, "keys": keys, "seen": state["seen"] + 1}


def penalised(params, x, *, state):
    y = jnp.tanh(x @ params["w"])
    return y, jnp.mean((state["mean"] + y) ** 2), {**state, "mean": jnp.mean(y, axis=0)}


def two_later(params, x, *, state):
    """One leaf of the state becomes another, and that is read: the gradient is of two microbatches
    ago.
    """
    return jnp.tanh(x @ params["w"] + state["scale"]), {
        **state,
        "scale": state["mean"],
        "mean": jnp.mean(x, axis=0),
    }


def by_layers(params, x, *, state):
    """A loop over layers, as flax models have it."""
    x, mean = lax.scan(
        lambda x, m: (jnp.tanh(x @ params["w"] + m), m + jnp.mean(x)), x, state["mean"]
    )
    return x, {**state, "mean": mean}


def cut(stage):
    """The stage with no gradient to the state that it is given."""

    def other(params, x, *, state):
        return stage(params, x, state=lax.stop_gradient(state))

    return other


def normalised(params, x, *, state):
    """Statistics of its own rows: the running ones are for evaluation."""
    h = x @ params["w"]
    mean = jnp.mean(h, axis=0)
    return jnp.tanh(h - mean), {**state, "mean": 0.9 * state["mean"] + 0.1 * mean}


def apart(params, x, *, state):
    """What is read has no gradient to parameters, and what has one is not read; numbers that are
    whole have none.
    """
    h = jnp.tanh(x @ params["w"] + state["scale"] + state["seen"])
    count = jnp.sum(h > 0).astype(jnp.int32)
    return h, {
        **state,
        "mean": state["scale"] + jnp.mean(h, axis=0),
        "scale": state["scale"] * 0.5,
        "seen": count,
    }


def counted(params, x, *, state):
    """The backward reads what the forward made of the state."""
    return jnp.tanh(x @ params["w"] + state["seen"]), {**state, "seen": state["seen"] + 1}


def on_the_side(params, x, *, state):
    """Layers in a loop whose state is read by the state alone."""
    x, mean = lax.scan(
        lambda x, m: (jnp.tanh(x @ params["w"]), 0.9 * m + jnp.mean(x)), x, state["mean"]
    )
    return x, {**state, "mean": mean}


def pipeline(stage, schedule=None, **options):
    pipe = flat_pipeline(
        stage,
        schedule=schedule or build("1f1b"),
        mesh=mesh_of(2),
        last=last,
        stage_loss=stage is penalised,
        **options,
    )
    return (
        pipe,
        pipe.place({"stages": draw({"w": (2, WIDTH, WIDTH)}), "last": {}}),
        pipe.place_state(STATE),
    )


LOSES = {
    "running": "mean",
    "attending": "keys",
    "penalised": "mean",
    "two_later": "mean",
    "by_layers": "mean",
}


@pytest.mark.parametrize("executor", [None, EagerExecutor()], ids=["compiled", "eager"])
@pytest.mark.parametrize("stage", [running, attending, penalised, two_later, by_layers])
def test_a_stage_that_would_lose_a_gradient_is_refused(stage, executor):
    pipe, params, state = pipeline(stage, executor=executor)
    text = (
        rf"`stage` would lose a gradient: it makes state\['{LOSES[stage.__name__]}'\] of .* "
        r"state = jax.lax.stop_gradient\(state\)"
    )
    for call in (pipe.value_and_grad, pipe.loss):
        with refused(text):
            call(params, rows(), state=state)


def test_it_is_refused_under_remat_too():
    pipe, params, state = pipeline(running, remat="full")
    with refused("`stage` would lose a gradient"):
        pipe.value_and_grad(params, rows(), state=state)


def test_forwards_alone_lose_nothing():
    pipe, params, state = pipeline(attending)
    assert jax.eval_shape(partial(pipe.evaluate, state=state), params, rows()).shape == ()
    assert jax.eval_shape(partial(pipe.outputs, state=state), params, rows())[0].shape == (
        M * ROWS,
        WIDTH,
    )


def test_frozen_parameters_have_no_gradient_to_lose():
    def shifted(params, x, *, state):
        return jnp.tanh(x @ params["w"] + state["mean"]), {
            **state,
            "mean": params["b"] * state["mean"],
        }

    pipe = jp.Pipeline(jp.Model(shifted, last=last, frozen=["/b$"]), build("1f1b"), mesh_of(2))
    params = pipe.place({"stages": draw({"w": (2, WIDTH, WIDTH), "b": (2, WIDTH)}), "last": {}})
    jax.eval_shape(partial(pipe.value_and_grad, state=pipe.place_state(STATE)), params, rows())


@pytest.mark.parametrize(
    "stage", [cut(running), cut(two_later), normalised, apart, counted, on_the_side]
)
def test_others_have_the_gradients_of_one_device(stage):
    pipe, params, state = pipeline(stage)
    (loss, new), grads = pipe.value_and_grad(params, rows(), state=state)

    def plain(canonical):
        return one_by_one(canonical, STATE, rows(), stage)

    (wanted, after), gradients = jax.value_and_grad(plain, has_aux=True)(
        {"stages": draw({"w": (2, WIDTH, WIDTH)})}
    )
    assert abs(float(loss) - float(wanted)) <= FLOAT64 * float(wanted)
    assert relative(pipe.canonical_state(new), after) <= FLOAT64
    assert relative(pipe.canonical(grads)["stages"], gradients["stages"]) <= FLOAT64


def test_what_is_recomputed_must_not_depend_on_state():
    pipe, params, state = pipeline(counted, jp.add_recompute(build("1f1b")))
    with refused(r"R in the table recomputes .* `stage` needs.*remove_recompute"):
        pipe.value_and_grad(params, rows(), state=state)
    pipe, params, state = pipeline(counted, remat="full")
    with refused(r"the gradient of `stage` depends on its state.*\(With remat="):
        pipe.value_and_grad(params, rows(), state=state)
