"""bfloat16 compute with float32 parameters: each parameter is cast once a step, and gradients are
summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.extend import core
from jax.sharding import Mesh

import jaxpipe as jp
from tests.flat import flat_pipeline

# Sizes that occur nowhere else, so that a shape says which array it is.
WIDTH, HIDDEN, LAYERS, VOCAB, ROWS, MICROBATCHES = 6, 10, 3, 14, 2, 4


def layer(x: Any, p: Any) -> tuple[Any, None]:
    hidden = jax.nn.gelu(x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype))
    return x + hidden @ p["v"].astype(x.dtype), None


def stage(params: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, params)[0]


def stage_of_rematerialised_layers(params: Any, x: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(layer), x, params)[0]


def stage_that_casts_in_the_loop(params: Any, x: Any) -> Any:
    """The scale depends on x, so that the product must be cast for every microbatch."""
    scaled = {**params, "w": params["w"] * (1 + jnp.mean(x)).astype(jnp.float32)}
    return stage(scaled, x)


def first(params: Any, microbatch: Any) -> Any:
    return params["table"].astype(jnp.bfloat16)[microbatch["tokens"]]


def last(params: Any, x: Any, microbatch: Any) -> Any:
    logits = (x @ params["head"].astype(x.dtype)).astype(jnp.float32)
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits), microbatch["tokens"][..., None], axis=-1)
    )


def shapes(stages: int) -> Any:
    def f32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    own = {
        "w": f32(stages, LAYERS, WIDTH, HIDDEN),
        "b": f32(stages, LAYERS, HIDDEN),
        "v": f32(stages, LAYERS, HIDDEN, WIDTH),
    }
    return {
        "first": {"table": f32(VOCAB, WIDTH)},
        "stages": own,
        "last": {"head": f32(WIDTH, VOCAB)},
    }


def inner(eqn: Any) -> Iterator[core.Jaxpr]:
    """The jaxprs that an equation holds."""
    return core.jaxprs_in_params(eqn.params)


def is_tick_loop(eqn: Any) -> bool:
    """A loop over ticks holds transfers or predicated blocks; one over the layers of a stage holds
    neither.
    """
    names = {e.primitive.name for jaxpr in inner(eqn) for e, _ in equations(jaxpr)}
    return eqn.primitive.name == "while" or (
        eqn.primitive.name == "scan" and bool(names & {"ppermute", "while"})
    )


def equations(jaxpr: core.Jaxpr, ticks: bool = False) -> Iterator[tuple[Any, bool]]:
    """Every equation, and whether it runs in a loop over ticks."""
    for eqn in jaxpr.eqns:
        yield eqn, ticks
        below = list(inner(eqn))
        inside = ticks or (bool(below) and is_tick_loop(eqn))
        for jaxpr_below in below:
            yield from equations(jaxpr_below, inside)


def casts(
    schedule: jp.Schedule, function: Any, **options: Any
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of the parameters, of one layer, that a step casts to bfloat16: once, and in the loop
    over ticks.
    """
    mesh = Mesh(np.array(jax.devices()[: schedule.num_devices]), ("pipe",))
    pipe = flat_pipeline(function, schedule=schedule, mesh=mesh, first=first, last=last, **options)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS * MICROBATCHES, 5), jnp.int32)}
    jaxpr = jax.make_jaxpr(pipe.value_and_grad)(pipe.place(shapes(schedule.num_stages)), batch)
    known = {(WIDTH, HIDDEN), (HIDDEN, WIDTH), (HIDDEN,), (VOCAB, WIDTH), (WIDTH, VOCAB)}
    found: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    for eqn, looped in equations(jaxpr.jaxpr):
        narrows = (
            eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16
        )
        if (
            narrows
            and eqn.invars[0].aval.dtype == jnp.float32
            and eqn.invars[0].aval.shape in known
        ):
            found[looped].append(eqn.invars[0].aval.shape)
    return sorted(found[False]), sorted(found[True])


CASES = {
    "1f1b": ("1f1b", stage, None),
    "zbv": ("zbv", stage, None),
    "1f1b, remat": ("1f1b", stage, "full"),
    "1f1b, remat of each layer": ("1f1b", stage_of_rematerialised_layers, None),
    "dualpipe": ("dualpipe", stage, None),
    "interleaved_1f1b, remat of each layer": (
        "interleaved_1f1b",
        stage_of_rematerialised_layers,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_no_parameter_is_cast_in_the_loop_over_ticks(case: str) -> None:
    name, function, remat = CASES[case]
    _, looped = casts(
        jp.schedules.build(name, devices=2, microbatches=MICROBATCHES), function, remat=remat
    )
    assert looped == []


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_cast_once_a_step(case: str) -> None:
    name, function, remat = CASES[case]
    schedule = jp.schedules.build(name, devices=2, microbatches=MICROBATCHES)
    once, _ = casts(schedule, function, remat=remat)
    stages = schedule.num_chunks * [(WIDTH, HIDDEN), (HIDDEN, WIDTH), (HIDDEN,)]
    assert once == sorted([*stages, (VOCAB, WIDTH), (WIDTH, VOCAB)])


def test_a_cast_in_the_loop_would_be_found() -> None:
    _, looped = casts(
        jp.schedules.build("1f1b", devices=2, microbatches=MICROBATCHES),
        stage_that_casts_in_the_loop,
    )
    assert (WIDTH, HIDDEN) in looped


def gradient(dtype: Any, accumulate: Any) -> Any:
    """Of a parameter whose gradients in two microbatches are 256 and 1: bfloat16 has no 257 between
    256 and 258.
    """
    schedule = jp.schedules.build("1f1b", devices=1, microbatches=2)
    mesh = Mesh(np.array(jax.devices()[:1]), ("pipe",))
    pipe = jp.Pipeline(
        jp.Model(
            lambda p, x: p.astype(jnp.bfloat16) * x,
            last=lambda _, x, microbatch: jnp.sum(x.astype(jnp.float32)),
        ),
        schedule,
        mesh,
        memory=jp.Memory(accumulate=accumulate),
    )
    params = pipe.place({"stages": jnp.ones((1,), dtype), "last": {}})
    _, grads = pipe.value_and_grad(params, {"x": jnp.asarray([256, 1], jnp.bfloat16)})
    return grads["stages"][0]


@pytest.mark.parametrize(
    ("dtype", "accumulate", "wanted"),
    [
        (jnp.float32, jnp.float32, 257 / 2),
        (jnp.bfloat16, jnp.float32, 257 / 2),
        (jnp.bfloat16, None, 256 / 2),  # what summing in the parameters' own precision would give
    ],
)
def test_gradients_are_summed_in_float32(dtype: Any, accumulate: Any, wanted: float) -> None:
    found = gradient(dtype, accumulate)
    assert found.dtype == (accumulate or dtype)
    assert float(found[0]) == wanted  # exact: powers of two, and sums that float32 holds


@pytest.mark.parametrize("unlike", [False, True])
def test_the_optimizers_state_is_begun_as_a_step_leaves_it(unlike: bool) -> None:
    """Gradients of bfloat16 parameters are float32, and so are their moments: the step is compiled
    once, and a run may resume.
    """
    schedule = jp.schedules.build("gpipe", devices=2, microbatches=2)
    functions = [lambda p, x: x @ p, lambda p, x: x @ p["w"]]
    pipe = jp.Pipeline(
        jp.Model(
            functions if unlike else functions[0], last=lambda p, x, microbatch: jnp.mean(x**2)
        ),
        schedule,
        jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2]),
    )
    weight = jnp.ones((3, 3), jnp.bfloat16)
    params = pipe.place(
        {"stages": [weight, {"w": weight}] if unlike else jnp.stack([weight] * 2), "last": {}}
    )
    optimizer = optax.adam(0.1)
    state = pipe.init(optimizer, params)
    _, grads = pipe.value_and_grad(params, {"x": jnp.ones((2, 3), jnp.bfloat16)})
    _, after = jax.jit(optimizer.update)(grads, state, params)
    assert jax.tree.leaves(state[0].mu)[0].dtype == jnp.float32
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == jax.tree.map(
        lambda leaf: leaf.dtype, after
    )
    shapes = pipe.init(optimizer, jax.eval_shape(lambda: params))
    assert jax.tree.map(lambda leaf: leaf.dtype, shapes) == jax.tree.map(
        lambda leaf: leaf.dtype, state
    )


def test_an_optimizer_that_wants_the_loss_is_begun_as_it_says() -> None:
    pipe = jp.Pipeline(
        jp.Model(lambda p, x: x @ p, last=lambda p, x, microbatch: jnp.mean(x**2)),
        jp.schedules.build("gpipe", devices=1, microbatches=1),
        jax.make_mesh((1,), ("pipe",), devices=jax.devices()[:1]),
    )
    params = pipe.place({"stages": jnp.ones((1, 3, 3), jnp.bfloat16), "last": {}})
    optimizer = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())
    assert jax.tree.leaves(pipe.init(optimizer, params)[0][0].mu)[0].dtype == jnp.bfloat16
