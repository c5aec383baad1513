"""What users may write and what they get: losses, metrics, shared parameters, randomness, trees of
activations, data shards.
"""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
import torch_ref
from tests.keys import STAGE, key_of
from tests.models import to_flat, to_tree, twin
from tests.oracle import oracle_value_and_grad
from tests.parity.engines import Outcome, case_data, mesh_of, pipeline, truth, worst_error
from tests.tiers import slow
from tests.tolerance import FLOAT64, relative

ROWS = 2
WIDTH = 3


def build(name, *, devices=2, microbatches=3, **options):
    return jp.schedules.build(name, devices=devices, microbatches=microbatches, **options)


def plain_last(params, x, microbatch):
    return jnp.mean(jnp.square(x @ params["w"] - microbatch["y"]))


def plain_stage(params, x):
    return jnp.tanh(x @ params["w"])


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def stacked(stages, *, seed=0):
    """Canonical parameters of a model with one matrix a stage and a head."""
    stage, last = draw((stages, WIDTH, WIDTH), (WIDTH, 2), seed=seed)
    return {"stages": {"w": stage}, "last": {"w": last}}


def rows_of(microbatches, *, seed=1):
    x, y = draw((ROWS * microbatches, WIDTH), (ROWS * microbatches, 2), seed=seed)
    return {"x": x, "y": y}


def outcome(pipe, canonical, batch, **how):
    """A training step as an `Outcome`, with every part of the model that has parameters."""
    loss, grads = pipe.value_and_grad(pipe.place(canonical), batch, **how)
    loss = loss[0] if isinstance(loss, tuple) else loss
    return Outcome(
        float(loss),
        {k: v for k, v in to_flat(pipe.canonical(grads)).items() if k in to_flat(canonical)},
    )


def wanted(
    canonical,
    batch,
    microbatches,
    *,
    first=lambda p, mb: mb["x"],
    stage=plain_stage,
    last=plain_last,
):
    """The oracle's `Outcome`."""
    full = {"first": {}, **canonical}
    loss, grads = oracle_value_and_grad(
        full, batch, first=first, stage=stage, last=last, microbatches=microbatches
    )
    return Outcome(
        float(loss), {k: v for k, v in to_flat(grads).items() if k in to_flat(canonical)}
    )


# Losses


def test_evaluation_is_the_training_loss_on_every_device_and_leaves_no_trace():
    schedule = build("zb_h1", microbatches=4)
    model = twin("mlp", 2)
    pipe = pipeline(schedule, model)
    weights, batch = case_data(model, 4, ROWS)
    params = pipe.place(to_tree(weights))
    before, _ = pipe.value_and_grad(params, batch)
    evaluated = pipe.evaluate(params, batch)
    after, _ = pipe.value_and_grad(params, batch)
    assert abs(float(evaluated) - float(before)) <= FLOAT64 * float(before)
    # One compiled program run twice; and every device gets one sum of the same numbers, of which
    # all but one are zero.
    assert float(before) == float(after)
    assert {float(np.asarray(shard.data)) for shard in evaluated.addressable_shards} == {
        float(evaluated)
    }
    assert len(evaluated.addressable_shards) == 2


def test_a_forward_only_table_evaluates_and_does_not_train():
    model = twin("mlp", 2)
    weights, batch = case_data(model, 3, ROWS)
    pipe = pipeline(build("1f1b", forward_only=True), model)
    params = pipe.place(to_tree(weights))
    wanted = truth(model, 3, ROWS).loss
    assert abs(float(pipe.evaluate(params, batch)) - wanted) <= FLOAT64 * wanted
    with pytest.raises(jp.PipelineError, match="forwards only"):
        pipe.value_and_grad(params, batch)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "dualpipe"])
def test_losses_come_in_microbatch_order(name):
    schedule = build(name, microbatches=4)
    model = twin("mlp", schedule.num_stages)
    weights, batch = case_data(model, 4, ROWS)
    pipe = pipeline(schedule, model)
    found = np.asarray(pipe.losses(pipe.place(to_tree(weights)), batch))
    in_torch = torch_ref.run(schedule.to_csv(), model.reference, batch, weights=weights).losses
    np.testing.assert_allclose(found, in_torch, rtol=FLOAT64)
    assert len(set(found)) == 4, "equal losses would not show their order"


@pytest.mark.parametrize("data", [slow(1), 2])
def test_sum_over_count_divides_once_over_the_whole_batch(data):
    schedule = build("1f1b")
    model = twin("gpt", 2, sum_count=True, layers_per_stage=1)
    weights, batch = case_data(model, 3 * data, ROWS)
    mesh = mesh_of(2, data=data)
    pipe = pipeline(schedule, model, loss=jp.Loss.SUM_OVER_COUNT, mesh=mesh, data_axes=("data",))
    found = outcome(pipe, to_tree(weights), batch)
    in_torch = torch_ref.run(
        build("1f1b", microbatches=3 * data).to_csv(), model.reference, batch, weights=weights
    )
    counts = batch["weights"].reshape(3 * data, -1).sum(1)
    assert len(set(counts)) > 1, "equal counts would make this the mean over microbatches"
    assert worst_error(found, Outcome(in_torch.loss, in_torch.grads)) <= FLOAT64
    assert (
        abs(float(pipe.evaluate(pipe.place(to_tree(weights)), batch)) - in_torch.loss)
        <= FLOAT64 * in_torch.loss
    )


def test_a_padded_last_microbatch_is_right_by_weights():
    model = twin("gpt", 2, sum_count=True, layers_per_stage=1)
    weights, short = case_data(model, 5, 1)
    padded = {k: np.concatenate([v, np.zeros_like(v[:1])]) for k, v in short.items()}
    pipe = pipeline(build("1f1b"), model, loss=jp.Loss.SUM_OVER_COUNT)
    found = outcome(pipe, to_tree(weights), padded)
    in_torch = torch_ref.run(
        build("1f1b").to_csv(), model.reference, short, weights=weights, rows=[2, 2, 1]
    )
    assert worst_error(found, Outcome(in_torch.loss, in_torch.grads)) <= FLOAT64


@pytest.mark.parametrize("data", [1, 2])
def test_metrics_are_averaged_over_microbatches_and_data_shards(data):
    def last(params, x, microbatch):
        error = x @ params["w"] - microbatch["y"]
        return jnp.mean(error**2), {
            "worst": jnp.max(jnp.abs(error)),
            "wide": jnp.mean(error, axis=0),
            "right": jnp.sum(error < 0),
        }

    canonical, batch, count = stacked(2), rows_of(3 * data), 3 * data
    mesh = mesh_of(2, data=data)
    pipe = jp.Pipeline(
        jp.Model(plain_stage, last=last, has_metrics=True),
        build("1f1b"),
        mesh,
        sharding=jp.Sharding(data=("data",)),
    )
    params = pipe.place(canonical)
    (loss, metrics), _ = pipe.value_and_grad(params, batch)
    evaluated_loss, evaluated = pipe.evaluate(params, batch)
    x = batch["x"]
    for s in range(2):
        x = np.tanh(x @ canonical["stages"]["w"][s])
    error = (x @ canonical["last"]["w"] - batch["y"]).reshape(count, ROWS, 2)
    right = {
        "worst": np.abs(error).max((1, 2)).mean(),
        "wide": error.mean((0, 1)),
        "right": (error < 0).sum((1, 2)).mean(),
    }
    for found in (metrics, evaluated):
        assert found.keys() == right.keys()
        for key, value in right.items():
            np.testing.assert_allclose(found[key], value, rtol=FLOAT64)
    np.testing.assert_allclose([loss, evaluated_loss], (error**2).mean(), rtol=FLOAT64)


# Parameters


def test_shared_parameters_get_the_sum_over_first_stages_and_last():
    def first(params, microbatch, *, shared):
        return microbatch["x"] @ shared["w"] + params["b"]

    def stage(params, x, *, shared):
        return jnp.tanh(x @ shared["w"] + params["b"])

    def last(params, x, microbatch, *, shared):
        return jnp.mean(jnp.square(x @ shared["w"] @ params["w"] - microbatch["y"]))

    w, b, bias, head = draw((WIDTH, WIDTH), (4, WIDTH), (WIDTH,), (WIDTH, 2))
    canonical = {"first": {"b": bias}, "stages": {"b": b}, "last": {"w": head}, "shared": {"w": w}}
    batch = rows_of(3)
    right = wanted(canonical, batch, 3, first=first, stage=stage, last=last)
    for name in ("interleaved_1f1b", "interleaved_zb"):
        pipe = jp.Pipeline(
            jp.Model(stage, first=first, last=last), build(name, chunks=2), mesh_of(2)
        )
        assert worst_error(outcome(pipe, canonical, batch), right) <= FLOAT64


def test_parameters_that_nothing_uses_get_zero_gradients():
    def first(params, microbatch):
        return microbatch["x"]

    def stage(params, x):
        return jnp.tanh(x @ params["w"])

    idle = {
        "stages": {"idle": np.ones((2, 3))},
        "last": {"idle": np.ones(2)},
        "first": {"idle": np.ones(1)},
        "shared": {"idle": np.ones(4)},
    }
    canonical = stacked(2)
    full = {key: {**canonical.get(key, {}), **idle[key]} for key in idle}
    batch = rows_of(3)
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=plain_last), build("zb_h1"), mesh_of(2))
    found = outcome(pipe, full, batch)
    for key in idle:
        assert not found.grads[f"{key}/idle"].any()
    assert worst_error(found, wanted(full, batch, 3, first=first)) <= FLOAT64


def test_half_precision_parameters_accumulate_in_float32_unless_told_otherwise():
    model = twin("mlp", 2)
    weights, batch = case_data(model, 3, ROWS, dtype=jnp.bfloat16)
    for option, dtype in (
        (jnp.float32, jnp.float32),
        (None, jnp.bfloat16),
        (jnp.float64, jnp.float64),
    ):
        pipe = pipeline(build("1f1b"), model, accumulate_dtype=option)
        _, grads = pipe.value_and_grad(pipe.place(to_tree(weights)), batch)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(dtype)}


@pytest.mark.parametrize("remat", ["full", jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_remat_changes_memory_and_not_numbers(name, remat):
    model = twin("mlp", 2)
    weights, batch = case_data(model, 3, ROWS)
    pipe = pipeline(build(name), model, remat=remat)
    assert worst_error(outcome(pipe, to_tree(weights), batch), truth(model, 3, ROWS)) <= FLOAT64


# What a function is given


def dropout_stage(params, x, *, ctx):
    keep = jax.random.bernoulli(ctx.rng, 0.6, x.shape)
    return jnp.where(keep, jnp.tanh(x @ params["w"]) / 0.6, 0.0) + 0.1 * ctx.stage


def dropout_outcome(canonical, batch, microbatches, key):
    """The same model in a plain loop: a key for each stage and microbatch, and nothing else,
    decides.
    """

    def loss_of(params):
        total = 0.0
        for m in range(microbatches):
            rows = {k: v[m * ROWS : (m + 1) * ROWS] for k, v in batch.items()}
            x = rows["x"]
            for s in range(params["stages"]["w"].shape[0]):
                context = jp.Context(s, m, key_of(key, STAGE, m, s))
                x = dropout_stage({"w": params["stages"]["w"][s]}, x, ctx=context)
            total += plain_last(params["last"], x, rows)
        return total / microbatches

    loss, grads = jax.value_and_grad(loss_of)(canonical)
    return Outcome(float(loss), to_flat(grads))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h2"])
def test_randomness_depends_on_stage_and_microbatch_and_not_on_the_schedule(name):
    canonical, batch, key = stacked(2), rows_of(3), jax.random.key(7)
    pipe = jp.Pipeline(jp.Model(dropout_stage, last=plain_last), build(name), mesh_of(2))
    found = outcome(pipe, canonical, batch, rng=key)
    assert worst_error(found, dropout_outcome(canonical, batch, 3, key)) <= FLOAT64
    other = outcome(pipe, canonical, batch, rng=jax.random.key(8))
    assert other.loss != found.loss
    assert float(pipe.evaluate(pipe.place(canonical), batch, rng=key)) == pytest.approx(
        found.loss, rel=FLOAT64
    )


def test_randomness_is_the_same_with_chunks_and_in_a_vee():
    canonical, batch, key = stacked(4), rows_of(4), jax.random.key(7)
    right = dropout_outcome(canonical, batch, 4, key)
    for name in ("interleaved_1f1b", "zbv"):
        pipe = jp.Pipeline(
            jp.Model(dropout_stage, last=plain_last), build(name, microbatches=4), mesh_of(2)
        )
        assert worst_error(outcome(pipe, canonical, batch, rng=key), right) <= FLOAT64


def test_data_shards_draw_different_random_numbers():
    def last(params, x, microbatch, *, ctx):
        return jnp.mean(x * 0.0), jax.random.uniform(ctx.rng) * microbatch["side"][0]

    batch = {"x": np.ones((8, WIDTH)), "side": np.repeat([1.0, -1.0], 4)}
    pipe = jp.Pipeline(
        jp.Model(plain_stage, last=last, has_metrics=True),
        build("1f1b", microbatches=2),
        mesh_of(2, data=2),
        sharding=jp.Sharding(data=("data",)),
    )
    (_, difference), _ = pipe.value_and_grad(
        pipe.place({**stacked(2), "last": {}}), batch, rng=jax.random.key(0)
    )
    assert abs(float(difference)) > 1e-3, (
        "both shards drew the same numbers: their rows would share one dropout mask"
    )


def test_a_stage_and_its_ends_may_take_the_microbatch_and_the_context():
    def first(params, microbatch, *, ctx):
        return microbatch["x"] + ctx.microbatch

    def stage(params, x, *, microbatch, ctx):
        return (
            jnp.tanh(x @ params["w"]) * microbatch["mask"][:, None]
            + 0.01 * ctx.stage * microbatch["count"][:, None]
        )

    def last(params, x, microbatch, *, ctx):
        return (1 + ctx.microbatch) * plain_last(params, x, microbatch)

    canonical = {"first": {}, **stacked(4)}
    rng = np.random.default_rng(3)
    batch = {**rows_of(3), "mask": rng.random(3 * ROWS), "count": rng.integers(0, 5, 3 * ROWS)}

    def loss_of(params):
        total = 0.0
        for m in range(3):
            rows = {k: v[m * ROWS : (m + 1) * ROWS] for k, v in batch.items()}
            x = first({}, rows, ctx=jp.Context(0, m))
            for s in range(4):
                x = stage({"w": params["stages"]["w"][s]}, x, microbatch=rows, ctx=jp.Context(s, m))
            total += last(params["last"], x, rows, ctx=jp.Context(3, m))
        return total / 3

    loss, grads = jax.value_and_grad(loss_of)(canonical)
    right = Outcome(float(loss), to_flat(grads))
    for name in ("interleaved_1f1b", "interleaved_zb"):
        pipe = jp.Pipeline(
            jp.Model(stage, first=first, last=last), build(name, chunks=2), mesh_of(2)
        )
        assert worst_error(outcome(pipe, canonical, batch), right) <= FLOAT64


# What travels between stages


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_activations_may_be_trees_with_integers_masks_and_keys(name):
    def first(params, microbatch):
        ids = microbatch["ids"]
        return {
            "h": (microbatch["x"], microbatch["x"][:, :1]),
            "ids": ids,
            "even": ids % 2 == 0,
            "key": jax.random.key(3),
            "aux": 0.0,
        }

    def stage(params, x):
        wide, thin = x["h"]
        key, mine = jax.random.split(x["key"])
        wide = (
            jnp.tanh(wide @ params["w"])
            + thin * x["ids"][:, None]
            + 0.1 * jax.random.normal(mine, wide.shape)
        )
        thin = jnp.where(x["even"][:, None], thin * 0.5, wide[:, :1])
        return {
            "h": (wide, thin),
            "ids": (x["ids"] + 1) % 3,
            "even": ~x["even"],
            "key": key,
            "aux": x["aux"] + jnp.mean(wide**2),
        }

    def last(params, x, microbatch):
        return plain_last(params, x["h"][0], microbatch) + jnp.mean(x["h"][1]) + 0.1 * x["aux"]

    canonical = {"first": {}, **stacked(2)}
    batch = {**rows_of(3), "ids": np.arange(3 * ROWS) % 3}
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last), build(name), mesh_of(2))
    right = wanted(canonical, batch, 3, first=first, stage=stage, last=last)
    assert worst_error(outcome(pipe, canonical, batch), right) <= FLOAT64


def test_a_stage_may_do_nothing_or_hold_constants():
    table = jnp.asarray(draw((WIDTH, WIDTH))[0])

    def stage(params, x):
        # A matrix that the function closes over, and a loop over time with one more constant
        # inside.
        mixed, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ table), None), x, None, length=2)
        return x + mixed * params["w"][0]

    canonical, batch = stacked(2), rows_of(3)
    pipe = jp.Pipeline(jp.Model(stage, last=plain_last), build("zb_h1"), mesh_of(2))
    assert (
        worst_error(outcome(pipe, canonical, batch), wanted(canonical, batch, 3, stage=stage))
        <= FLOAT64
    )

    def nothing(params, x):
        return x

    pipe = jp.Pipeline(jp.Model(nothing, last=plain_last), build("zb_h1"), mesh_of(2))
    assert (
        worst_error(outcome(pipe, canonical, batch), wanted(canonical, batch, 3, stage=nothing))
        <= FLOAT64
    )


def test_stages_without_parameters():
    canonical, batch = {"stages": {}, "last": stacked(2)["last"]}, rows_of(3)
    pipe = jp.Pipeline(
        jp.Model(lambda params, x: jnp.tanh(x), last=plain_last), build("zb_h1"), mesh_of(2)
    )
    loss, grads = pipe.value_and_grad(pipe.place(canonical), batch)
    x = np.tanh(np.tanh(batch["x"]))
    error = x @ canonical["last"]["w"] - batch["y"]
    assert float(loss) == pytest.approx((error**2).mean(), rel=FLOAT64)
    assert relative(np.asarray(grads["last"]["w"]), x.T @ (2 * error / error.size)) <= FLOAT64


def test_rules_of_their_own_for_the_gradient_are_obeyed():
    @jax.custom_vjp
    def clipped(x):
        return jnp.sin(x)

    # On purpose not the derivative of sin, so that using the true one would show.
    clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.clip(x, -0.3, 0.3),))

    def stage(params, x):
        return clipped(jax.jit(lambda a, b: a @ b)(x, params["w"]))

    canonical, batch = stacked(2), rows_of(3)
    for name in ("1f1b", "zb_h1"):
        pipe = jp.Pipeline(jp.Model(stage, last=plain_last), build(name), mesh_of(2))
        assert (
            worst_error(outcome(pipe, canonical, batch), wanted(canonical, batch, 3, stage=stage))
            <= FLOAT64
        )


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_callback_in_a_stage_runs_once_a_microbatch(name):
    seen = []

    def stage(params, x, *, ctx):
        jax.debug.callback(lambda s, m: seen.append((int(s), int(m))), ctx.stage, ctx.microbatch)
        return plain_stage(params, x)

    pipe = jp.Pipeline(jp.Model(stage, last=plain_last), build(name), mesh_of(2))
    jax.block_until_ready(pipe.value_and_grad(pipe.place(stacked(2)), rows_of(3)))
    jax.effects_barrier()
    assert sorted(seen) == [(s, m) for s in range(2) for m in range(3)]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_stages_may_be_unlike_by_a_switch_on_the_stage(name):
    kinds = [lambda p, h: jnp.tanh(h @ p["w"]), lambda p, h: 2 * h @ p["w"]]

    def stage(params, x, *, ctx):
        return jax.lax.switch(ctx.stage, kinds, params, x)

    canonical, batch = stacked(2), rows_of(3)

    def loss_of(params):
        x = kinds[1](
            {"w": params["stages"]["w"][1]}, kinds[0]({"w": params["stages"]["w"][0]}, batch["x"])
        )
        return plain_last(params["last"], x, batch)

    loss, grads = jax.value_and_grad(loss_of)(canonical)
    pipe = jp.Pipeline(jp.Model(stage, last=plain_last), build(name), mesh_of(2))
    assert (
        worst_error(outcome(pipe, canonical, batch), Outcome(float(loss), to_flat(grads)))
        <= FLOAT64
    )


# Meshes


def test_two_data_axes():
    canonical, batch = stacked(2), rows_of(12)
    mesh = mesh_of(2, data=2, replica=2)
    pipe = jp.Pipeline(
        jp.Model(plain_stage, last=plain_last),
        build("1f1b"),
        mesh,
        sharding=jp.Sharding(data=("data", "replica")),
    )
    assert worst_error(outcome(pipe, canonical, batch), wanted(canonical, batch, 12)) <= FLOAT64


def test_axes_that_are_not_named_are_left_to_the_partitioner():
    from jax.sharding import NamedSharding, PartitionSpec

    canonical, batch = stacked(2), rows_of(3)
    mesh = mesh_of(2, model=3)
    pipe = jp.Pipeline(
        jp.Model(plain_stage, last=plain_last),
        build("zb_h1"),
        mesh,
        sharding=jp.Sharding(replicated=("model",)),
    )
    params = pipe.place(canonical)
    split = NamedSharding(mesh, PartitionSpec("pipe", None, "model"))
    params["stages"] = jax.tree.map(lambda leaf: jax.device_put(leaf, split), params["stages"])
    loss, grads = pipe.value_and_grad(params, batch)
    found = Outcome(
        float(loss),
        {k: v for k, v in to_flat(pipe.canonical(grads)).items() if k in to_flat(canonical)},
    )
    assert worst_error(found, wanted(canonical, batch, 3)) <= FLOAT64


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_where_a_transfer_blocks_it_is_issued_after_all_blocks_of_its_tick(name):
    """On a CPU device F's output must not be awaited between F and I of one tick: neighbours would
    do theirs one after the other.
    """
    pipe = jp.Pipeline(
        jp.Model(plain_stage, last=plain_last), build(name, microbatches=4), mesh_of(2)
    )
    makers = senders(jax.make_jaxpr(pipe.value_and_grad)(pipe.place(stacked(2)), rows_of(4)).jaxpr)
    assert makers
    # Under a predicate of its own, which asks after all blocks, a permute sends what the loop was
    # given.
    for maker in makers:
        assert maker in ("jit", "pjit", "select_n", "given to while", "given to cond"), (
            f"something is sent as soon as {maker} has made it"
        )


def senders(jaxpr, inside=None):
    """What makes the operand of each permute."""
    made = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            found.append(made.get(eqn.invars[0], f"given to {inside}"))
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found += senders(getattr(inner, "jaxpr", inner), eqn.primitive.name)
    return found
