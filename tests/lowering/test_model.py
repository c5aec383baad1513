"""`Model.loss`, the plain function, against the pipeline of the same model."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64

M, ROWS, WIDTH, WORDS = 4, 2, 6, 8


def draw(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape) / 2)


def embed(params: Any, microbatch: Any) -> Any:
    return params[microbatch["tokens"]]


def layer(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params)


def noisy(params: Any, x: Any, *, ctx: Any) -> Any:
    return layer(params, x) * jax.random.bernoulli(ctx.rng, 0.8, x.shape)


def with_loss(params: Any, x: Any, *, shared: Any) -> Any:
    y = layer(params, x) * shared
    return y, 0.1 * jnp.mean(y**2)


def counting(params: Any, x: Any, *, state: Any) -> Any:
    mean = jax.lax.stop_gradient(x.mean())
    return layer(params, x) + state["mean"], {"mean": 0.5 * (state["mean"] + mean)}


def head(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((x @ params - microbatch["y"]) ** 2)


def counted(params: Any, x: Any, microbatch: Any) -> Any:
    error = (x @ params - microbatch["y"]) ** 2
    kept = microbatch["tokens"] > 2
    return (jnp.sum(error.sum(-1) * kept), jnp.sum(kept)), {"largest": jnp.max(error)}


STAGES = {"first": draw(WORDS, WIDTH), "stages": draw(4, WIDTH, WIDTH), "last": draw(WIDTH, 3)}
LAYERS = {**STAGES, "stages": {"t": draw(5, WIDTH, WIDTH)}}
BATCH = {
    "tokens": jnp.arange(M * ROWS) % WORDS,
    "targets": jnp.arange(M * ROWS) % 5,
    "y": draw(M * ROWS, 3),
}
KEY = jax.random.key(3)
ENDS = {"first": embed, "last": head}
# name -> model, canonical parameters, keywords of the loss
MODELS: dict[str, tuple[jp.Model, Any, dict[str, Any]]] = {
    "alike": (jp.Model(layer, **ENDS), STAGES, {}),
    "a list": (
        jp.Model([layer, noisy, layer, layer], **ENDS),
        {**STAGES, "stages": list(STAGES["stages"])},
        {"rng": KEY},
    ),
    "letters": (
        jp.Model({"E": embed, "t": noisy, "L": head}, layers="Et*5L"),
        LAYERS,
        {"rng": KEY},
    ),
    "losses of stages": (
        jp.Model(with_loss, stage_loss=True, **ENDS),
        {**STAGES, "shared": jnp.asarray(1.25)},
        {},
    ),
    "counts and metrics": (
        jp.Model(layer, first=embed, last=counted, loss=jp.Loss.SUM_OVER_COUNT, has_metrics=True),
        STAGES,
        {},
    ),
    "state": (jp.Model(counting, **ENDS), STAGES, {"state": {"mean": jnp.zeros(4)}}),
    "state of some stages": (
        jp.Model([layer, counting, layer, layer], **ENDS),
        {**STAGES, "stages": list(STAGES["stages"])},
        {"state": [{}, {"mean": jnp.zeros(())}, {}, {}]},
    ),
    "a spread vocabulary": (
        jp.Model(layer, first=jp.VocabEmbedding(), last=jp.VocabHead()),
        {**STAGES, "last": draw(5, WIDTH)},
        {},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_loss_is_that_of_the_pipeline(name: str) -> None:
    """Values, metrics, state and gradients, with the keys of the same microbatches."""
    model, params, keywords = MODELS[name]
    plain = jax.jit(
        jax.value_and_grad(
            lambda p: model.loss(p, BATCH, microbatches=M, **keywords),
            has_aux=model.has_metrics or "state" in keywords,
        )
    )
    wanted, wanted_grads = plain(params)
    chunks = 1 if model.layers else 2
    schedule = jp.schedules.build(
        "interleaved_1f1b" if chunks == 2 else "1f1b", devices=2, microbatches=M, chunks=chunks
    )
    pipe = jp.Pipeline(model, schedule, mesh_of(2))
    given = dict(keywords)
    if "state" in given:
        given["state"] = pipe.place_state(given["state"])
    found, grads = pipe.value_and_grad(pipe.place(params), BATCH, **given)
    grads = pipe.canonical(grads)
    if "state" in given:
        found = found[0], pipe.canonical_state(found[1])
    for mine, theirs in zip(
        jax.tree.leaves((found, grads)), jax.tree.leaves((wanted, wanted_grads)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=FLOAT64, atol=FLOAT64)


def test_a_whole_batch_is_one_microbatch() -> None:
    """A mean of equal microbatches is the mean of all rows."""
    model, params, _ = MODELS["alike"]
    whole = model.loss(params, BATCH)
    np.testing.assert_allclose(whole, model.loss(params, BATCH, microbatches=M), rtol=FLOAT64)


def test_rows_that_do_not_divide_are_refused() -> None:
    model, params, _ = MODELS["alike"]
    with pytest.raises(jp.PipelineError, match="do not divide into 3 microbatches"):
        model.loss(params, BATCH, microbatches=3)


def test_the_arguments_of_the_public_surface() -> None:
    """At most eight each, and what slices of sequences, rows of the batch and FP8 add."""
    added = {jp.Model: {"time", "carry", "whole", "replaced"}}
    for call in (jp.Model, jp.Pipeline, jp.Sharding, jp.Memory):
        assert len(set(inspect.signature(call).parameters) - added.get(call, set())) <= 8, call
    assert list(inspect.signature(jp.Pipeline).parameters)[:3] == ["model", "schedule", "mesh"]
    assert len(dir(jp)) == 42


def test_equal_models_make_pipelines_that_share_code() -> None:
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    for make in (
        lambda: jp.Model(layer, **ENDS),
        lambda: jp.Model([layer, noisy], **ENDS),
        lambda: jp.Model({"E": embed, "t": layer, "L": head}, layers="EttL"),
    ):
        specs = jp.Sharding(specs={"last": jax.sharding.PartitionSpec()})
        pipes = [jp.Pipeline(make(), schedule, mesh_of(2), sharding=specs) for _ in range(2)]
        assert pipes[0]._calls is pipes[1]._calls
        assert make() == make()
    other = jp.Pipeline(jp.Model(noisy, **ENDS), schedule, mesh_of(2))
    assert other._calls is not pipes[0]._calls


def test_arguments_of_other_kinds_are_listed() -> None:
    with pytest.raises(jp.PipelineError) as caught:
        jp.Pipeline(layer, "1f1b", "pipe", sharding="data", memory=None)
    for part in ("jaxpipe.Model", "schedules.build('1f1b'", "jax.make_mesh", "Sharding", "Memory"):
        assert part in str(caught.value)
    with pytest.raises(jp.PipelineError) as caught:
        jp.Model("stage", loss="mean", has_metrics=1, time=2, frozen=3, carry=4)
    for name in ("stages", "loss", "has_metrics", "time", "frozen", "carry"):
        assert f"{name} must be" in str(caught.value)
    with pytest.raises(jp.PipelineError) as caught:
        jp.Memory(remat="some", offload="all", accumulate="int8")
    for part in ("remat must be", "offload must be", "accumulate must be"):
        assert part in str(caught.value)
