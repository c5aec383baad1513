"""Carries and appended rows that pass from call to call: chunks of a sequence, one call after the
other, give what the whole sequence gives.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from tests.slices.models import MODELS, TIME, TIMED, WIDTH, attention, data, embed
from tests.slices.test_combinations import TENSOR
from tests.slices.test_parity import BOUND, pipeline
from tests.tiers import slow
from tests.tolerance import relative


def forwards(name, *, devices, slices, sequences=2, **options):
    return jp.schedules.build(
        name,
        devices=devices,
        microbatches=sequences * slices,
        slices=slices,
        forward_only=True,
        **options,
    )


def part(batch, begin, end):
    return {name: leaf[:, begin:end] for name, leaf in batch.items()}


@partial(jax.jit, static_argnums=0)
def plain(name, params, batch):
    """What the last stage returns, by plain JAX on whole sequences."""
    model, _ = MODELS[name]
    x = batch["x"] if model.first is None else model.first(params["first"], batch)
    ctx = jp.Context(jnp.int32(0), jnp.int32(0), offset=0)
    for stage in range(len(params["stages"][next(iter(params["stages"]))])):
        own = jax.tree.map(lambda leaf, s=stage: leaf[s], params["stages"])
        if name == "attention":
            x = model.stages(own, x, ctx=ctx)
        else:
            x, _ = model.stages(own, x, carry=model.carry(own, x))
    return x


def join(parts):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)


def in_two_calls(pipe, params, batch):
    """What the last stage returns for half of a sequence, and then for the other half."""
    placed = pipe.place(params)
    cache = pipe.empty_cache(placed, part(batch, 0, 4), length=TIME)
    found = []
    for at in (0, 4):
        out, cache = pipe.outputs(placed, part(batch, at, at + 4), cache=cache, position=at)
        found.append(out)
    return join(found)


EXPLICIT = jax.sharding.AxisType.Explicit
CASES = [
    ("attention", "gpipe", 2, {}),
    ("recurrent", "interleaved_1f1b", 2, {}),
    slow("state_space", "gpipe", 4, {}),
    slow("attention", "zbv", 2, {}),
    slow("attention", "gpipe", 2, {"executor": EagerExecutor()}),
]


@pytest.mark.parametrize(("name", "schedule", "devices", "options"), CASES)
def test_calls_go_on_where_the_one_before_ended(name, schedule, devices, options):
    """Two slices of a prompt in one call, and two calls of two positions with another table."""
    tables = [forwards(schedule, devices=devices, slices=slices) for slices in (2, 1)]
    model, params, batch = data(name, tables[0].num_stages, 2)
    prompt, rest = (pipeline(model, table, **options) for table in tables)
    placed = prompt.place(params)
    cache = prompt.empty_cache(placed, part(batch, 0, 4), length=TIME)
    out, cache = prompt.outputs(placed, part(batch, 0, 4), cache=cache)
    found = [out]
    step = rest.outputs if options else jax.jit(rest.outputs)
    for at in (4, 6):
        out, cache = step(placed, part(batch, at, at + 2), cache=cache, position=at)
        found.append(out)
    assert relative(join(found), plain(name, params, batch)) < BOUND
    if not options:  # a position that is traced is refused too late for an error
        out, _ = step(placed, part(batch, 6, 8), cache=cache, position=7)
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(out) if leaf.dtype == float)


@pytest.mark.slow
def test_sequences_are_at_positions_of_their_own():
    """One sequence begins again while the other goes on."""
    model, params, batch = data("attention", 2, 2)
    pipe = pipeline(model, forwards("gpipe", devices=2, slices=1))
    placed = pipe.place(params)
    cache = pipe.empty_cache(placed, part(batch, 0, 4), length=TIME)
    _, cache = pipe.outputs(placed, part(batch, 0, 4), cache=cache)
    mixed = {k: np.concatenate([leaf[:2, :4], leaf[2:, 4:]]) for k, leaf in batch.items()}
    found, _ = pipe.outputs(placed, mixed, cache=cache, position=np.array([0, 4]))
    wanted = plain("attention", params, batch)
    wanted = jax.tree.map(lambda a: np.concatenate([a[:2, :4], a[2:, 4:]]), wanted)
    assert relative(found, wanted) < BOUND


@pytest.mark.slow
def test_a_cache_of_unlike_stages():
    rng = np.random.default_rng(2)
    _, own, batch = data("attention", 3, 2)
    layers = {"E": embed, "t": attention, "m": lambda p, x: {**x, "h": jnp.tanh(x["h"] @ p)}}
    model = jp.Model(layers, layers="Etmtt", time=TIMED)
    more = rng.standard_normal((1, WIDTH, WIDTH))
    params = {"first": own["first"], "stages": {"t": own["stages"], "m": more}}
    pipe = pipeline(model, forwards("gpipe", devices=2, slices=2), layout="Etm|tt")
    found = in_two_calls(pipe, params, batch)
    whole = pipeline(model, forwards("gpipe", devices=2, slices=1), layout="Etm|tt")
    assert relative(found, whole.outputs(whole.place(params), batch)) < BOUND


@pytest.mark.exhaustive
def test_a_cache_with_a_tensor_axis():
    model, params, batch = data("attention", 2, 2)
    mesh = jax.make_mesh((2, 2), ("pipe", "more"), devices=jax.devices()[:4])
    table = forwards("gpipe", devices=2, slices=2)
    pipe = jp.Pipeline(model, table, mesh, sharding=jp.Sharding(specs=TENSOR))
    found = in_two_calls(pipe, params, batch)
    assert relative(found, plain("attention", params, batch)) < BOUND


def test_a_cache_in_a_context_of_explicit_axes():
    """The shapes of the first cache are found there too, from placed arrays of explicit axes."""
    model, params, batch = data("attention", 2, 2)
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2], axis_types=(EXPLICIT,))
    pipe = jp.Pipeline(model, forwards("gpipe", devices=2, slices=2), mesh)
    with jax.set_mesh(mesh):
        found = in_two_calls(pipe, params, batch)
    assert relative(found, plain("attention", params, batch)) < BOUND


def refusal(call):
    with pytest.raises(jp.PipelineError) as caught:
        call()
    return str(caught.value)


def test_what_does_not_fit_a_cache_is_refused():
    model, params, batch = data("attention", 2, 2)
    pipe = pipeline(model, forwards("gpipe", devices=2, slices=2))
    placed = pipe.place(params)
    cache = pipe.empty_cache(placed, batch, length=TIME)
    assert jax.tree.leaves(cache)[0].shape[:2] == (2, 2)
    assert "parameters are not placed" in refusal(
        lambda: pipe.empty_cache(params, batch, length=TIME)
    )

    def call(pipe=pipe, batch=batch, **options):
        return refusal(lambda: pipe.outputs(placed, batch, **{"cache": cache, **options}))

    text = call(position=1)
    assert "8 rows at position 1 are beyond the buffers of the cache, which have room for 8" in text
    assert "make it with length=9" in text
    assert "rows at position -1 are beyond" in call(position=-1)
    assert "position is int64[3]; give a whole number, or 2 of them" in call(
        position=np.zeros(3, int)
    )
    assert "does not combine with state=; leave it out" in call(state=cache.stages)
    assert "position is float" in call(position=0.5)
    assert "cache= takes what `empty_cache` or `outputs` returned" in call(cache={})
    other = pipeline(model, forwards("gpipe", devices=2, slices=2, sequences=4))
    assert "the cache has 2 sequences, but the schedule has 4" in call(pipe=other)
    vee = pipeline(model, forwards("zbv", devices=2, slices=2))
    assert "caches are placed for stages by device" in call(pipe=vee)
    assert "do not divide into 2 equal slices" in call(batch=part(batch, 0, 3))
    assert "length must be a whole number of at least 1, not 0" in refusal(
        lambda: pipe.empty_cache(placed, batch, length=0)
    )
    timeless = pipeline(jp.Model(attention, first=embed), forwards("gpipe", devices=2, slices=1))
    assert "a cache has a time; name the leaves" in refusal(
        lambda: timeless.empty_cache(placed, batch, length=TIME)
    )

    def counting(params, x, *, state):
        return x, state

    counts = pipeline(jp.Model(counting, time=("x",)), forwards("gpipe", devices=2, slices=1))
    assert "does not combine with stages that take `state`" in refusal(
        lambda: counts.empty_cache(placed, batch, length=TIME)
    )
    mesh = jax.make_mesh((2, 2), ("pipe", "data"), devices=jax.devices()[:4])
    sharded = jp.Pipeline(model, pipe.schedule, mesh, sharding=jp.Sharding(data=("data",)))
    assert "a cache does not combine with the data axes data" in refusal(
        lambda: sharded.empty_cache(placed, batch, length=TIME)
    )


def test_rows_of_another_batch_are_refused():
    model, params, batch = data("attention", 2, 2)
    pipe = pipeline(model, forwards("gpipe", devices=2, slices=1))
    placed = pipe.place(params)
    cache = pipe.empty_cache(placed, batch, length=TIME)
    more = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), batch)
    text = refusal(lambda: pipe.outputs(placed, more, cache=cache))
    assert "ctx.append('keys', ...) of rows float64[4, 8, 2, 2] finds a buffer" in text
    assert "the buffer has room for 8 of them" in text
