"""Stages that return a loss of their own, or keep state from microbatch to microbatch, give the
numbers of one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.flat import flat_pipeline
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tolerance import relative
from tests.unlike.test_unlike import draw, over_microbatches

M, ROWS, WIDTH = 4, 2, 4


def rows(data=1):
    x, y = draw([(M * ROWS * data, WIDTH), (M * ROWS * data, WIDTH)], seed=7)
    return {"x": x, "y": y}


def last(params, x, microbatch):
    return jnp.mean(jnp.square(x - microbatch["y"]))


def build(name, devices=2, microbatches=M, **options):
    return jp.schedules.build(name, devices=devices, microbatches=microbatches, **options)


# Losses of stages


def balanced(params, x):
    """A stage with a penalty on its own activations, as a router has."""
    y = jnp.tanh(x @ params["w"])
    return y, jnp.mean(jnp.square(y @ params["v"]))


def with_penalties(params, microbatch, _):
    x, total = microbatch["x"], 0.0
    for s in range(len(params["stages"]["w"])):
        x, penalty = balanced(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), x)
        total += penalty
    return total + last({}, x, microbatch)


@pytest.mark.parametrize(
    "name",
    [
        "zbv",
        pytest.param("dualpipe", marks=pytest.mark.slow),
        pytest.param("1f1b", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_of_stages_are_added_to_that_of_their_microbatch(name):
    schedule = build(name)
    canonical = {
        "stages": draw(
            {"w": (schedule.num_stages, WIDTH, WIDTH), "v": (schedule.num_stages, WIDTH)}
        ),
        "last": {},
    }
    pipe = jp.Pipeline(jp.Model(balanced, last=last, stage_loss=True), schedule, mesh_of(2))
    params = pipe.place(canonical)
    loss, grads = pipe.value_and_grad(params, rows())
    wanted_loss, wanted = over_microbatches(with_penalties)(canonical, rows())
    assert abs(float(loss) - float(wanted_loss)) <= FLOAT64 * float(wanted_loss)
    assert relative(pipe.canonical(grads)["stages"], wanted["stages"]) <= FLOAT64
    assert abs(float(pipe.evaluate(params, rows())) - float(wanted_loss)) <= FLOAT64 * float(
        wanted_loss
    )
    each = [
        with_penalties(
            canonical, jax.tree.map(lambda a, m=m: a[m * ROWS : (m + 1) * ROWS], rows()), m
        )
        for m in range(M)
    ]
    assert relative(pipe.losses(params, rows()), jnp.stack(each)) <= FLOAT64


def test_losses_of_layers():
    layers = {"E": lambda p, mb: mb["x"], "t": balanced, "L": last}
    canonical = {
        "first": {},
        "stages": {"t": draw({"w": (3, WIDTH, WIDTH), "v": (3, WIDTH)})},
        "last": {},
    }
    pipe = jp.Pipeline(
        jp.Model(layers, layers="EtttL", stage_loss=True),
        build("1f1b"),
        mesh_of(2),
        layout="Ett|tL",
    )
    loss, grads = pipe.value_and_grad(pipe.place(canonical), rows())
    flat = {**canonical, "stages": canonical["stages"]["t"]}
    wanted_loss, wanted = over_microbatches(with_penalties)(flat, rows())
    assert abs(float(loss) - float(wanted_loss)) <= FLOAT64 * float(wanted_loss)
    assert relative(pipe.canonical(grads)["stages"]["t"], wanted["stages"]) <= FLOAT64


def layers_with(loss):
    """Two layers after each other that return this loss, and one with a loss of another dtype."""

    def plain(params, x):
        return jnp.tanh(x @ params), loss(x) if callable(loss) else loss

    def single(params, x):
        return jnp.sin(x @ params), jnp.mean(x).astype(jnp.float32)

    return {"t": plain, "u": single, "L": last}


def of_layers(loss):
    layers = layers_with(loss)
    pipe = jp.Pipeline(
        jp.Model(layers, layers="ttuttL", stage_loss=True),
        build("1f1b"),
        mesh_of(2),
        layout="ttu|ttL",
    )
    own = {letter: draw([(count, WIDTH, WIDTH)])[0] for letter, count in (("t", 4), ("u", 1))}
    return pipe, {"stages": own, "last": {}}, rows()


def test_a_layer_may_return_a_python_number_as_its_loss():
    def whole(params, microbatch, _):
        t, (u,) = params["stages"]["t"], params["stages"]["u"]
        x = jnp.tanh(jnp.tanh(microbatch["x"] @ t[0]) @ t[1])
        total = 4 * 0.1 + jnp.mean(x).astype(jnp.float32).astype(x.dtype)
        x = jnp.tanh(jnp.tanh(jnp.sin(x @ u) @ t[2]) @ t[3])
        return total + last({}, x, microbatch)

    pipe, canonical, batch = of_layers(0.1)
    loss, grads = pipe.value_and_grad(pipe.place(canonical), batch)
    wanted_loss, wanted = over_microbatches(whole)(canonical, batch)
    # One of the losses is of float32.
    assert abs(float(loss) - float(wanted_loss)) <= 1e-6 * float(wanted_loss)
    assert relative(pipe.canonical(grads)["stages"], wanted["stages"]) <= 1e-6


@pytest.mark.parametrize(
    "loss",
    [
        0.0,
        2,
        np.float32(1),
        np.zeros(()),
        None,
        lambda x: jnp.mean(x).astype(jnp.bfloat16),
        lambda x: jnp.float16(6e4),
    ],
    ids=["float", "int", "numpy scalar", "numpy array", "None", "bfloat16", "float16"],
)
def test_losses_of_layers_may_have_any_floating_form(loss):
    pipe, canonical, batch = of_layers(loss)
    losses = jax.eval_shape(pipe.losses, pipe.place(canonical), batch)
    assert losses.dtype in (jnp.float32, jnp.float64)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ((), "nothing"),
        (True, r"bool\[\]"),
        (lambda x: jnp.sum(x, -1), r"float64\[2\]"),
        ({}, "nothing"),
    ],
    ids=["tuple", "bool", "vector", "dict"],
)
def test_what_is_no_loss_of_a_layer_is_refused(loss, text):
    pipe, canonical, batch = of_layers(loss)
    with refused(r"`layers\['t'\]` must return a floating scalar as its loss; it returns " + text):
        jax.eval_shape(pipe.losses, pipe.place(canonical), batch)


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("loss", [0, 0.5, None])
def test_a_stage_may_return_a_python_number_as_its_loss(loss, remat):
    options = {"last": last, "stage_loss": True, "remat": remat}
    pipe = flat_pipeline(
        lambda p, x: (x @ p, loss), schedule=build("1f1b"), mesh=mesh_of(2), **options
    )
    params = pipe.place({"stages": draw([(2, WIDTH, WIDTH)])[0], "last": {}})
    assert jax.eval_shape(pipe.losses, params, rows()).shape == (M,)


def test_faults_of_losses():
    canonical = {"stages": draw({"w": (2, WIDTH, WIDTH), "v": (2, WIDTH)}), "last": {}}
    for stage, text in [
        (lambda p, x: x @ p["w"], r"`stage` must return \(x, loss\), since stage_loss=True"),
        (
            lambda p, x: (x @ p["w"], x),
            r"`stage` must return a floating scalar as its loss; it returns float64\[2, 4\]",
        ),
    ]:
        pipe = jp.Pipeline(jp.Model(stage, last=last, stage_loss=True), build("1f1b"), mesh_of(2))
        with refused(text):
            pipe.value_and_grad(pipe.place(canonical), rows())


# State


def normalised(params, x, *, state, training):
    """A dense layer with batch normalisation: batch statistics in training, running ones in
    evaluation.
    """
    h = x @ params["w"]
    mean = jnp.mean(h, axis=0) if training else state["mean"]
    new = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(h, axis=0), "seen": state["seen"] + 1}
    return jnp.tanh(h - mean), new


def start(stages):
    return {"mean": np.zeros((stages, WIDTH)), "seen": np.zeros(stages, np.int32)}


def one_by_one(params, state, batch, stage):
    """Losses and the state after every stage has seen every microbatch in order."""
    losses = []
    for m in range(M):
        x = batch["x"][m * ROWS : (m + 1) * ROWS]
        for s in range(len(params["stages"]["w"])):
            own = jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"])
            x, new = stage(own, x, state=jax.tree.map(lambda leaf, s=s: leaf[s], state))
            state = jax.tree.map(
                lambda leaf, value, s=s: jnp.asarray(leaf).at[s].set(value), state, new
            )
        losses.append(last({}, x, {"y": batch["y"][m * ROWS : (m + 1) * ROWS]}))
    return jnp.mean(jnp.stack(losses)), state


@pytest.mark.parametrize(
    "name",
    [
        "zb_h1",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("1f1b", "interleaved_1f1b")
        ),
    ],
)
def test_state_goes_from_microbatch_to_microbatch_and_from_step_to_step(name):
    schedule = build(name)
    canonical = {"stages": draw({"w": (schedule.num_stages, WIDTH, WIDTH)}), "last": {}}
    pipe = jp.Pipeline(jp.Model(normalised, last=last), schedule, mesh_of(2))
    params, state = pipe.place(canonical), pipe.place_state(start(schedule.num_stages))
    expected = start(schedule.num_stages)
    for _ in range(2):
        (loss, state), grads = pipe.value_and_grad(params, rows(), state=state)
        (wanted_loss, expected), wanted = jax.value_and_grad(
            lambda p, expected=expected: one_by_one(
                p, expected, rows(), partial(normalised, training=True)
            ),
            has_aux=True,
        )(canonical)
        assert abs(float(loss) - float(wanted_loss)) <= FLOAT64 * float(wanted_loss)
        assert relative(pipe.canonical(grads)["stages"], wanted["stages"]) <= FLOAT64
        assert relative(pipe.canonical_state(state), jax.tree.map(jnp.asarray, expected)) <= FLOAT64
    evaluated = pipe.evaluate(params, rows(), state=state)
    wanted_loss, _ = one_by_one(canonical, expected, rows(), partial(normalised, training=False))
    assert abs(float(evaluated) - float(wanted_loss)) <= FLOAT64 * float(wanted_loss)


def everything(params, x, *, state, training):
    """A loss, statistics and a counter of one stage."""
    x, new = normalised(params, x, state=state, training=training)
    return x, jnp.mean(jnp.square(x @ params["v"])), new


def with_metrics(params, x, microbatch):
    error = x - microbatch["y"]
    return jnp.mean(jnp.square(error)), {
        "worst": jnp.max(jnp.abs(error)),
        "above": jnp.sum(error > 0),
    }


def all_one_by_one(params, state, batch, training):
    """(the mean loss, (losses, metrics, state, what the last stage returns))."""
    losses, metrics, outputs = [], [], []
    for m in range(M):
        microbatch = jax.tree.map(lambda leaf, m=m: leaf[m * ROWS : (m + 1) * ROWS], batch)
        x, total = microbatch["x"], 0.0
        for s in range(2):
            own, kept = jax.tree.map(lambda leaf, s=s: leaf[s], (params["stages"], state))
            x, loss, new = everything(own, x, state=kept, training=training)
            state = jax.tree.map(
                lambda leaf, value, s=s: jnp.asarray(leaf).at[s].set(value), state, new
            )
            total += loss
        loss, found = with_metrics({}, x, microbatch)
        losses.append(total + loss)
        metrics.append(found)
        outputs.append(x)
    averages = jax.tree.map(lambda *parts: sum(parts) / M, *metrics)
    return jnp.mean(jnp.stack(losses)), (
        jnp.stack(losses),
        averages,
        state,
        jnp.concatenate(outputs),
    )


@pytest.mark.parametrize("executor", [None, EagerExecutor()], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_recomputation_adds_losses_and_state_once(name, executor):
    schedule = jp.add_recompute(build(name))
    pipe = jp.Pipeline(
        jp.Model(everything, last=with_metrics, has_metrics=True, stage_loss=True),
        schedule,
        mesh_of(2),
        executor=executor,
    )
    canonical = {"stages": draw({"w": (2, WIDTH, WIDTH), "v": (2, WIDTH)}), "last": {}}
    params, state, batch = pipe.place(canonical), pipe.place_state(start(2)), rows()
    found, grads = pipe.value_and_grad(params, batch, state=state)
    (loss, (losses, metrics, after, _)), wanted = jax.value_and_grad(all_one_by_one, has_aux=True)(
        canonical, start(2), batch, True
    )
    assert relative((*found[:2], pipe.canonical_state(found[2])), (loss, metrics, after)) <= FLOAT64
    assert relative(pipe.canonical(grads)["stages"], wanted["stages"]) <= FLOAT64
    aux = pipe.loss(params, batch, state=state)
    assert (
        relative((aux[0], aux[1][0], pipe.canonical_state(aux[1][1])), (loss, metrics, after))
        <= FLOAT64
    )
    # Forwards alone hand state on likewise.
    loss, (losses, metrics, after, outputs) = all_one_by_one(canonical, start(2), batch, False)
    assert relative(pipe.evaluate(params, batch, state=state), (loss, metrics)) <= FLOAT64
    assert relative(pipe.losses(params, batch, state=state), losses) <= FLOAT64
    rows_of_last, new = pipe.outputs(params, batch, state=state)
    assert relative((rows_of_last, pipe.canonical_state(new)), (outputs, after)) <= FLOAT64


def test_state_of_data_shards_is_averaged():
    canonical = {"stages": draw({"w": (2, WIDTH, WIDTH)}), "last": {}}
    pipe = jp.Pipeline(
        jp.Model(normalised, last=last),
        build("1f1b"),
        mesh_of(2, data=2),
        sharding=jp.Sharding(data=("data",)),
    )
    (_, state), _ = pipe.value_and_grad(
        pipe.place(canonical), rows(2), state=pipe.place_state(start(2))
    )
    training, halves = (
        partial(normalised, training=True),
        [jax.tree.map(lambda a, h=h: a[h * 8 : h * 8 + 8], rows(2)) for h in (0, 1)],
    )
    halves = [one_by_one(canonical, start(2), half, training)[1] for half in halves]
    found = pipe.canonical_state(state)
    assert relative(found["mean"], (halves[0]["mean"] + halves[1]["mean"]) / 2) <= FLOAT64
    assert found["seen"].tolist() == [M, M]


def test_faults_of_state():
    canonical = {"stages": draw({"w": (2, WIDTH, WIDTH)}), "last": {}}
    pipe = jp.Pipeline(jp.Model(normalised, last=last), build("1f1b"), mesh_of(2))
    params = pipe.place(canonical)
    with refused(r"takes `state`, but the step got none; give state=pipe.place_state"):
        pipe.value_and_grad(params, rows())
    with refused(r"its leading axis must be the number of stages, 2"):
        pipe.place_state(start(3))
    with refused(r"state are not placed.*`place_state`"):
        pipe.value_and_grad(params, rows(), state=start(2))
    stateless = jp.Pipeline(jp.Model(lambda p, x: x @ p["w"], last=last), build("1f1b"), mesh_of(2))
    for given in (pipe.place_state(start(2)), np.zeros(2)):
        with refused("no stage takes `state`"):
            stateless.value_and_grad(params, rows(), state=given)
    with refused("cannot be on two devices"):
        jp.Pipeline(jp.Model(normalised, last=last), build("dualpipe"), mesh_of(2))

    def scaled(params, x, *, state):
        return x @ params["w"] * (1 + state["mean"]), {**state, "mean": state["mean"] + 1}

    reads = jp.Pipeline(jp.Model(scaled, last=last), build("1f1b"), mesh_of(2))
    with refused("the gradient of `stage` depends on its state"):
        reads.value_and_grad(params, rows(), state=pipe.place_state(start(2)))
    grown = jp.Pipeline(
        jp.Model(lambda p, x, *, state: (x @ p["w"], {"mean": state["mean"]}), last=last),
        build("1f1b"),
        mesh_of(2),
    )
    with refused("return the same tree"):
        grown.value_and_grad(params, rows(), state=pipe.place_state(start(2)))
