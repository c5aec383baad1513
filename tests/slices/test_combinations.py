"""Slices of sequences together with everything else that a pipeline does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

import jaxpipe as jp
from jaxpipe.model.arguments import under_policies
from tests.slices.models import MODELS, TIME, TIMED, WIDTH, attention, data, embed, loss
from tests.slices.test_parity import BOUND, build, check, pipeline
from tests.tiers import exhaustive, slow
from tests.tolerance import relative

EXHAUSTIVE = pytest.mark.exhaustive
PARTS = {"q", "k", "v", "up"}
TENSOR = {
    "stages": {
        name: Spec(None, "more") if name in PARTS else Spec("more")
        for name in MODELS["attention"][1]
    }
}


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(jp.Sharding(data=("more",)), marks=EXHAUSTIVE, id="data"),
        pytest.param(jp.Sharding(data=("more",), fsdp="more"), marks=EXHAUSTIVE, id="fsdp"),
        pytest.param(jp.Sharding(specs=TENSOR), marks=pytest.mark.slow, id="tensor"),
    ],
)
def test_another_axis_of_the_mesh(sharding):
    model, params, batch = data("attention", 2, 4)
    mesh = jax.make_mesh((2, 2), ("pipe", "more"), devices=jax.devices()[:4])
    pipe = jp.Pipeline(model, build("1f1b", devices=2, slices=2), mesh, sharding=sharding)
    loss, grads = pipe.value_and_grad(pipe.place(params), batch)
    wanted = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=4))(params)
    assert relative((loss, pipe.canonical(grads)), wanted) < BOUND


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["state_space", "attention"])
@pytest.mark.parametrize("how", ["R", "remat", "offload", "overlap", "dualpipev"])
def test_other_memory_and_tables(name, how):
    table = {"overlap": "1f1b_overlap", "dualpipev": "dualpipev", "offload": "gpipe"}
    schedule = build(table.get(how, "zb_h1"), devices=2, slices=4)
    memory = {"remat": jp.Memory(remat="full"), "offload": jp.Memory(offload="residuals")}
    check(
        name,
        jp.add_recompute(schedule) if how == "R" else schedule,
        memory=memory.get(how, jp.Memory()),
    )


def test_layers_of_letters_cannot_carry():
    carrying = jp.Model({"t": lambda p, x, *, carry: (x, carry)}, layers="tt", time=TIMED)
    with pytest.raises(jp.PipelineError, match="take `carry`, which only whole stages can"):
        pipeline(carrying, build("1f1b", devices=2, slices=4))


@pytest.mark.slow
def test_layers_under_policies_append_apart():
    """Each layer is recomputed by itself, and appends rows to its own buffers."""
    _, own, batch = data("attention", 4, 2)
    model = jp.Model({"E": embed, "t": attention, "L": loss}, layers="EttttL", time=TIMED)
    params = {**own, "stages": {"t": own["stages"]}}
    kept = under_policies(model, {"t": "nothing_saveable"})
    pipe = pipeline(kept, build("1f1b", devices=2, slices=4), layout="Ett|ttL")
    found, grads = pipe.value_and_grad(pipe.place(params), batch)
    wanted = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=2))(params)
    assert relative((found, pipe.canonical(grads)), wanted) < BOUND


@pytest.mark.exhaustive
def test_layers_of_letters_append_apart_and_stages_are_unlike():
    rng = np.random.default_rng(2)
    _, own, batch = data("attention", 4, 2)
    functions = {
        "E": embed,
        "t": attention,
        "m": lambda p, x: {**x, "h": jnp.tanh(x["h"] @ p)},
        "L": loss,
    }
    model = jp.Model(functions, layers="Ettmtt L".replace(" ", ""), time=TIMED)
    params = {**own, "stages": {"t": own["stages"], "m": rng.standard_normal((1, WIDTH, WIDTH))}}
    pipe = pipeline(model, build("zb_h1", devices=2, slices=4), layout="Ett|mttL")
    found, grads = pipe.value_and_grad(pipe.place(params), batch)
    wanted = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=2))(params)
    assert relative((found, pipe.canonical(grads)), wanted) < BOUND


@pytest.mark.exhaustive
def test_a_sum_over_a_count_is_exact():
    def weighted(params, x, microbatch):
        weight = microbatch["weight"]
        errors = jnp.sum((x["h"] @ params - microbatch["y"]) ** 2, axis=-1)
        return jnp.sum(weight * errors), jnp.sum(weight)

    time = (*TIMED, "weight")
    model = jp.Model(attention, first=embed, last=weighted, time=time, loss=jp.Loss.SUM_OVER_COUNT)
    _, params, batch = data("attention", 2, 2)
    batch["weight"] = np.random.default_rng(1).random((4, TIME)) ** 4
    pipe = pipeline(model, build("1f1b", devices=2, slices=4))
    found, grads = pipe.value_and_grad(pipe.place(params), batch)
    wanted = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=2))(params)
    assert relative((found, pipe.canonical(grads)), wanted) < BOUND


def dropped(params, x, *, ctx):
    keys = ctx.position_keys(x.shape[1])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (x.shape[0], WIDTH)))(keys)
    return jnp.tanh(x @ params) * jnp.swapaxes(keep, 0, 1)


def test_slicing_does_not_change_what_is_dropped():
    rng, key = np.random.default_rng(0), jax.random.key(3)
    model = jp.Model(dropped, last=loss, time=("x", "y"))
    params = {"stages": rng.standard_normal((2, WIDTH, WIDTH)), "last": np.ones((WIDTH, 3))}
    _, _, batch = data("recurrent", 2, 2)
    wanted = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=2, rng=key))(params)
    pipe = pipeline(model, build("1f1b", devices=2, slices=4))
    found, grads = pipe.value_and_grad(pipe.place(params), batch, rng=key)
    assert relative((found, pipe.canonical(grads)), wanted) < BOUND
    other = pipe.value_and_grad(pipe.place(params), batch, rng=jax.random.key(4))[0]
    assert abs(float(other - found)) > 1e-3
    with pytest.raises(jp.PipelineError, match=r"position_keys needs the step's key"):
        pipe.value_and_grad(pipe.place(params), batch)


@pytest.mark.parametrize("deferred", [slow(False), exhaustive(True)])
def test_spread_ends(deferred):
    def stage(params, x, *, ctx):
        keys = ctx.append("keys", x @ params["k"])
        seen = (ctx.offset + jnp.arange(x.shape[1]))[:, None] >= jnp.arange(keys.shape[1])
        scores = jnp.where(seen, jnp.einsum("rtd,rsd->rts", x @ params["q"], keys), -1e30)
        return x + jnp.einsum("rts,rsd->rtd", jax.nn.softmax(scores), keys)

    rng, vocabulary = np.random.default_rng(0), 12
    model = jp.Model(
        stage, first=jp.VocabEmbedding(), last=jp.VocabHead(), time=("tokens", "targets")
    )
    table = rng.standard_normal((vocabulary, WIDTH))
    params = {
        "first": {"embedding": table},
        "last": {"kernel": table},
        "stages": {name: rng.standard_normal((2, WIDTH, WIDTH)) / 3 for name in "kq"},
    }
    batch = {name: rng.integers(0, vocabulary, (4, TIME)) for name in ("tokens", "targets")}
    table = build("1f1b", devices=2, slices=4)
    pipe = pipeline(model, jp.defer_last(jp.spread_last(table)) if deferred else table)
    for kind in "EGLH" if deferred else "EGL":
        assert f"0{kind}" in str(pipe.schedule)
    found, grads = pipe.value_and_grad(pipe.place(params), batch)
    wanted = jax.value_and_grad(lambda p: model.loss(p, batch, microbatches=2))(params)
    assert relative((found, pipe.canonical(grads)), wanted) < BOUND


@pytest.mark.slow
def test_evaluation_outputs_and_the_report():
    model, params, batch = data("attention", 2, 2)
    schedules = [build("1f1b", devices=2, slices=slices) for slices in (4, 1)]
    pipe, whole = (pipeline(model, schedule) for schedule in schedules)
    placed = pipe.place(params)
    assert relative(pipe.outputs(placed, batch), whole.outputs(placed, batch)) < BOUND
    assert relative(pipe.evaluate(placed, batch), whole.evaluate(placed, batch)) < BOUND
    assert relative(pipe.loss(placed, batch), whole.loss(placed, batch)) < BOUND
    assert pipe.losses(placed, batch).shape == (8,)
    half = jax.tree.map(lambda leaf: leaf[:2], batch)
    assert relative(pipe.evaluate(placed, half), whole.evaluate(placed, half)) < BOUND
    report = jp.inspect.report(pipe, placed, batch)
    assert (report["slots"].buffer, report["slots"].buffer_gradient) == (2, 1)


def test_find_nonfinite_runs_whole_sequences():
    model, params, batch = data("recurrent", 2, 2)
    pipe = pipeline(model, build("1f1b", devices=2, slices=4))
    placed = pipe.place(params)
    batch["x"][2, 5] = np.nan
    found = jp.debug.find_nonfinite(pipe, placed, batch)
    assert (found.function, found.stage, found.microbatch) == ("first", 0, 1)


def unmasked(params, x, *, ctx):
    """Attention without a causal mask in the second stage; in the first one it sees one position
    too many.
    """
    keys = ctx.append("keys", x @ params)
    values = ctx.append("values", x)
    at = ctx.offset + jnp.arange(x.shape[1]) + ctx.stage * 8 + (ctx.stage == 0) * wrong[0]
    seen = at[:, None] >= jnp.arange(keys.shape[1])
    scores = jnp.where(seen, jnp.einsum("rtd,rsd->rts", x, keys), -jnp.inf)
    return x + jnp.einsum("rts,rsd->rtd", jax.nn.softmax(scores), values)


wrong = [0]


@pytest.mark.parametrize("too_many", [0, 1])
def test_a_missing_causal_mask_is_found(too_many):
    wrong[0] = too_many
    model = jp.Model(unmasked, last=loss, time=("x", "y"))
    _, _, batch = data("recurrent", 2, 2)
    params = {"stages": np.ones((2, WIDTH, WIDTH)) / WIDTH, "last": np.ones((WIDTH, 3))}
    pipe = pipeline(model, build("1f1b", devices=2, slices=4))
    text = refusal(lambda: jp.debug.find_nonfinite(pipe, pipe.place(params), batch))
    assert f"stage {1 - too_many} reads appended rows of later slices" in text
    for name in ("keys", "values"):
        found = [k for k in range(4) if f"slice {k} reads later rows of '{name}'" in text]
        assert found == [0, 1, 2]
    # The last row of a slice alone sees a row of the next one.
    assert ("16 values" in text) == bool(too_many)
    assert ("32 values" in text) == (not too_many)
    assert "mask what comes after each position" in text


@pytest.mark.parametrize("name", ["attention", slow("state_space")])
def test_correct_masks_are_passed(name):
    model, params, batch = data(name, 2, 2)
    pipe = pipeline(model, build("1f1b", devices=2, slices=4))
    assert jp.debug.find_nonfinite(pipe, pipe.place(params), batch) is None


def refusal(call):
    with pytest.raises(jp.PipelineError) as caught:
        call()
    return str(caught.value)


def step(stage, *, slices=2, time=("x", "y"), batch=None, **options):
    model = jp.Model(stage, last=loss, time=time, **options)
    _, _, given = data("recurrent", 2, 2)
    params = {"stages": np.ones((2, WIDTH, WIDTH)), "last": np.ones((WIDTH, 3))}
    pipe = pipeline(model, build("1f1b", devices=2, slices=slices))
    return pipe.value_and_grad(pipe.place(params), given if batch is None else batch)


def plain(params, x):
    return x @ params


def test_bad_batches_are_refused_before_anything_is_traced():
    assert 'jaxpipe.Model(..., time=("tokens", "targets"))' in refusal(lambda: step(plain, time=()))
    text = refusal(lambda: step(plain, slices=3, time=("x", "z")))
    assert "batch['x'] has 8 positions of time, which do not divide into 3 equal slices" in text
    assert "use 9" in text
    assert "the batch has no 'z', which time= of the model names" in text
    _, _, batch = data("recurrent", 2, 2)
    flat = {"x": batch["x"], "y": batch["y"][:, 0, 0]}
    expected = (
        f"batch['y'] has shape {list(flat['y'].shape)}; a leaf in time= needs axis 1, of time"
    )
    assert expected in refusal(lambda: step(plain, batch=flat))
    short = {"x": batch["x"], "y": batch["y"][:, :4]}
    assert "lengths: batch['x'] has 8 positions of time, batch['y'] has 4 positions" in refusal(
        lambda: step(plain, batch=short)
    )


def test_bad_carries_and_rows_are_refused():
    def growing(params, x, *, carry):
        return x, jnp.concatenate([carry, carry], axis=1)

    begin = lambda _, x: x  # noqa: E731
    assert "takes carry of" in refusal(lambda: step(growing, carry=begin))
    assert "must return (x, carry), since it takes `carry`" in refusal(
        lambda: step(lambda p, x, *, carry: x, carry=begin)
    )
    assert "the shapes of the first one cannot be inferred" in refusal(
        lambda: step(lambda p, x, *, carry: (x, carry["h"]))
    )
    assert "carry must be a function" in refusal(lambda: jp.Model(plain, carry=3))

    def twice(params, x, *, ctx):
        return ctx.append("a", x)[:, :4] + ctx.append("a", x)[:, :4]

    assert "is called twice" in refusal(lambda: step(twice))
    assert "axis=5) has no such axis: the rows have shape" in refusal(
        lambda: step(lambda p, x, *, ctx: x + ctx.append("a", x, axis=5))
    )

    def circular(params, x, *, ctx):
        return x + ctx.append("b", ctx.append("a", x)[:, :4]).sum()

    assert float(step(circular)[0]) > 0
