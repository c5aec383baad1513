"""Leaves that are replaced: each has its next value in place of a gradient, combined over
microbatches and data shards by its rule, by numpy here and in `Model.loss`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe import Replaced
from jaxpipe.eager import EagerExecutor
from tests.axes.test_errors import raises
from tests.flat import flat_pipeline
from tests.forms import gpu_form
from tests.parity.engines import mesh_of
from tests.tiers import by_actions, slow
from tests.tolerance import FLOAT64, same

WIDTH, M, ROWS = 4, 4, 2
RULES = {
    "most$": Replaced.MAX,
    "total$": Replaced.SUM,
    "mean$": Replaced.MEAN,
    "newest$": Replaced.LAST,
    "mixed$": (Replaced.LAST, Replaced.MEAN),
}


@jax.custom_vjp
def _seen(x: Any, leaf: Any, value: Any) -> Any:
    """x, whose custom derivative gives the leaf a value of the forward as its gradient."""
    return x


_seen.defvjp(lambda x, leaf, value: (x, value), lambda value, g: (g, value, None))


@jax.custom_vjp
def _seen_back(x: Any, leaf: Any) -> Any:
    """x; the leaf gets a value of the cotangent, negative, so that it is below an empty sum."""
    return x


_seen_back.defvjp(
    lambda x, leaf: (x, leaf), lambda leaf, g: (g, jnp.full_like(leaf, -jnp.max(jnp.abs(g))))
)


def first(params: Any, microbatch: Any) -> Any:
    x = microbatch["x"] @ params["w"]
    return _seen(x, params["mean"], jnp.sum(x))


def stage(params: Any, x: Any) -> Any:
    y = jnp.tanh(x @ params["w"])
    y = _seen_back(y, params["most"])
    for number, name in enumerate(("total", "mean", "newest", "mixed"), 1):
        if name in params:
            y = _seen(y, params[name], jnp.sum(y**number))
    return y


def last(params: Any, x: Any, microbatch: Any) -> Any:
    x = _seen_back(x @ params["w"], params["most"])
    return jnp.mean((x - microbatch["y"]) ** 2)


def weights(stages: int) -> Any:
    rng = np.random.default_rng(0)
    names = ("total", "mean", "newest", "mixed")
    return {
        "first": {"w": rng.standard_normal((WIDTH, WIDTH)), "mean": np.zeros(())},
        "stages": {
            "w": rng.standard_normal((stages, WIDTH, WIDTH)),
            "most": np.zeros((stages, 3)),
            **{name: np.zeros(stages) for name in names},
        },
        "last": {"w": rng.standard_normal((WIDTH, WIDTH)), "most": np.zeros(1)},
    }


def batch(rows: int) -> Any:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal((rows, WIDTH)) for name in "xy"}


def by_hand(given: Any, rows: Any, shards: int = 1, factor: float = 1.0) -> Any:
    """The sum of gradients, and next values, from `jax.grad` of each microbatch of each shard."""

    def loss(params: Any, own: Any) -> Any:
        x = first(params["first"], own)
        for s in range(len(given["stages"]["w"])):
            x = stage(jax.tree.map(lambda leaf, s=s: leaf[s], params["stages"]), x)
        return factor * last(params["last"], x, own) / (M * shards)

    cut = jax.tree.map(lambda leaf: leaf.reshape(shards, M, -1, WIDTH), rows)
    gradient = jax.jit(jax.grad(loss))
    every = [
        [gradient(given, jax.tree.map(lambda leaf, d=d, m=m: leaf[d, m], cut)) for m in range(M)]
        for d in range(shards)
    ]
    combine = {
        Replaced.MAX: np.max,
        Replaced.SUM: np.sum,
        Replaced.MEAN: np.mean,
        Replaced.LAST: lambda leaf, axis: leaf[-1],
    }

    def one(path: Any, *leaves: Any) -> Any:
        values = np.stack(leaves).reshape(shards, M, *np.shape(leaves[0]))
        rule = RULES.get(f"{path[-1].key}$", Replaced.SUM)
        over_microbatches, over_shards = rule if isinstance(rule, tuple) else (rule, rule)
        found = combine[over_microbatches](np.swapaxes(values, 0, 1), axis=0)
        return combine[over_shards](found, axis=0)

    flat = [leaf for shard in every for leaf in shard]
    return jax.tree_util.tree_map_with_path(one, *flat)


def pipe_of(name: str, **how: Any) -> jp.Pipeline:
    chunks = {"zbv": 2, "v_half": 2, "v_min": 2, "dualpipev": 2}.get(name, 1)
    chunks = 2 if "interleaved" in name or name == "looped_bfs" else chunks
    schedule = jp.schedules.build(name, devices=2, microbatches=M, chunks=chunks)
    model = {"stage": stage, "first": first, "last": last, "replaced": RULES}
    return flat_pipeline(**{"mesh": mesh_of(2), **model, **how}, schedule=schedule)


def close(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=FLOAT64 * max(1e-3, np.abs(b).max()))


NAMES = (
    *("1f1b", "zb_h1", "dualpipe", "zbv"),
    *map(slow, ("gpipe", "interleaved_1f1b", "dualpipev", "1f1b_overlap", "interleaved_zb")),
    *map(by_actions, ("looped_bfs", "zb_1p", "zb_h2", "v_half", "v_min")),
)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_combined_in_the_order_of_the_batch(name: str) -> None:
    pipe = pipe_of(name)
    given, rows = weights(pipe.schedule.num_stages), batch(M * ROWS)
    _, grads = pipe.value_and_grad(pipe.place(given), rows)
    close(pipe.canonical(grads), by_hand(given, rows))


def test_layers_of_their_own_arrays_have_them_in_stacks() -> None:
    """Stages are scans over three layers, unrolled as GPUs run them."""

    def layers(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, own: (stage(own, x), None), x, params)[0]

    pipe = pipe_of("zb_h1", stage=layers, executor=gpu_form())
    given, rows = weights(6), batch(M * ROWS)
    deep = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), given["stages"])
    _, grads = pipe.value_and_grad(pipe.place({**given, "stages": deep}), rows)
    found = pipe.canonical(grads)
    flat = jax.tree.map(lambda leaf: leaf.reshape(6, *leaf.shape[2:]), found["stages"])
    close({**found, "stages": flat}, by_hand(given, rows))


@pytest.mark.parametrize("executor", [None, EagerExecutor()], ids=["spmd", "eager"])
@pytest.mark.parametrize("fsdp", [None, "data"])
def test_values_are_combined_over_data_shards(executor: Any, fsdp: str | None) -> None:
    how = {"mesh": mesh_of(2, data=3), "data_axes": "data", "fsdp": fsdp}
    pipe = pipe_of("zb_h1", **how, executor=executor)
    given, rows = weights(2), batch(3 * M * ROWS)
    _, grads = pipe.value_and_grad(pipe.place(given), rows)
    close(pipe.canonical(grads), by_hand(given, rows, shards=3))


def test_the_plain_loss_has_the_same_gradient() -> None:
    given, rows = weights(2), batch(M * ROWS)
    model = pipe_of("1f1b").model
    found = jax.grad(lambda params: 3 * model.loss(params, rows, microbatches=M))(
        jax.tree.map(jnp.asarray, given)
    )
    wanted = by_hand(given, rows, factor=3)
    found.pop("shared", None)
    close(found, wanted)


def test_neither_a_scale_nor_a_factor_outside_changes_what_a_forward_gave() -> None:
    pipe, given, rows = pipe_of("1f1b"), weights(2), batch(M * ROWS)
    params = pipe.place(given)
    _, scaled = pipe.value_and_grad(params, rows, scale=8.0)
    close(pipe.canonical(scaled), by_hand(given, rows, factor=8))
    outside = pipe.canonical(jax.grad(lambda own: 8 * pipe.loss(own, rows))(params))
    wanted, plain = by_hand(given, rows), ["total", "mean", "newest", "mixed", "most"]
    close(
        {name: outside["stages"][name] for name in plain},
        {name: wanted["stages"][name] for name in plain},
    )
    np.testing.assert_allclose(outside["last"]["w"], 8 * wanted["last"]["w"], rtol=FLOAT64)


@pytest.mark.parametrize("executor", [None, EagerExecutor()], ids=["spmd", "eager"])
def test_a_count_that_is_known_late_is_no_factor_of_them(executor: Any) -> None:
    """The count depends on x, so that gradients are divided by it after the backwards."""

    def counted(params: Any, x: Any, microbatch: Any) -> Any:
        x = _seen(x @ params["w"], params["total"], jnp.sum(x))
        return jnp.sum(x**2), jnp.sum(jax.lax.stop_gradient(x) > 0)

    pipe = flat_pipeline(
        lambda params, x: _seen(x * params["w"], params["most"], jnp.max(x)),
        last=counted,
        loss=jp.Loss.SUM_OVER_COUNT,
        replaced={"most$": Replaced.MAX, "total$": Replaced.SUM},
        schedule=jp.schedules.build("1f1b", devices=2, microbatches=M),
        mesh=mesh_of(2),
        executor=executor,
    )
    rows = {"x": np.random.default_rng(2).standard_normal((M * ROWS, WIDTH))}
    own = {"w": np.ones((WIDTH, WIDTH)), "total": np.zeros(())}
    given = {"stages": {"w": np.full(2, 2.0), "most": np.zeros(2)}, "last": own}
    found = pipe.canonical(pipe.value_and_grad(pipe.place(given), rows)[1])
    greatest = rows["x"].max()
    assert found["stages"]["most"].tolist() == [greatest, 2 * greatest]
    np.testing.assert_allclose(found["last"]["total"], 4 * rows["x"].sum(), rtol=1e-10)
    plain = jax.grad(lambda p: pipe.model.loss(p, rows, microbatches=M))(
        jax.tree.map(jnp.asarray, given)
    )
    close({key: found[key] for key in ("stages", "last")}, {k: plain[k] for k in given})


@pytest.mark.parametrize("executor", [None, gpu_form()], ids=["loops", "unrolled"])
def test_stages_of_unlike_layers_have_them_in_arrays_of_their_own(executor: Any) -> None:
    """Device 0 has two layers and device 1 one, so trained leaves share buffers."""
    calls = {"t": stage, "E": first, "L": last}
    how = {"layers": calls, "layout": "Ett|tL", "first": None, "last": None}
    pipe = pipe_of("1f1b", **how, executor=executor)
    given = weights(3)
    letters = {"stages": {"t": given["stages"]}, "first": given["first"], "last": given["last"]}
    params, rows = pipe.place(letters), batch(M * ROWS)
    _, grads = pipe.value_and_grad(params, rows)
    found = pipe.canonical(grads)
    close({**found, "stages": found["stages"]["t"]}, by_hand(given, rows))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))


def test_shared_leaves_are_summed_over_their_uses_too() -> None:
    def counting(params: Any, x: Any, *, shared: Any) -> Any:
        return _seen(jnp.tanh(x * params["w"]), shared["total"], jnp.sum(x))

    model = jp.Model(
        counting, last=lambda p, x, microbatch: jnp.mean(x**2), replaced={"total": Replaced.SUM}
    )
    schedule = jp.schedules.build("zb_h1", devices=2, microbatches=M)
    pipe = jp.Pipeline(model, schedule, mesh_of(2))
    given = {"stages": {"w": np.full(2, 0.5)}, "shared": {"total": np.zeros(())}, "last": {}}
    rows = {"x": np.random.default_rng(3).standard_normal((M * ROWS, WIDTH))}
    _, grads = pipe.value_and_grad(pipe.place(given), rows)
    wanted = rows["x"].sum() + np.tanh(rows["x"] / 2).sum()
    np.testing.assert_allclose(grads["shared"]["total"], wanted, rtol=1e-10)


def test_an_optimizer_is_not_for_them_and_a_step_puts_the_new_values_in() -> None:
    pipe, given, rows = pipe_of("1f1b", frozen=["last/w"]), weights(2), batch(M * ROWS)
    optimizer = optax.MultiSteps(optax.adam(0.1), 2)
    params = pipe.place(given)
    state = pipe.init(optimizer, params)
    assert len(jax.tree.leaves(state.acc_grads)) == 2  # of `first` and of the stages

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        _, grads = pipe.value_and_grad(params, rows)
        trained = pipe.trained(params)
        updates, state = optimizer.update(pipe.trained(grads, like=params), state, trained)
        return pipe.with_trained(params, optax.apply_updates(trained, updates), grads=grads), state

    wanted = by_hand(given, rows)
    after, state = step(params, state)
    assert same(pipe.canonical(after)["stages"]["w"], given["stages"]["w"])  # half of two steps
    for name in ("most", "total", "mean", "newest", "mixed"):
        close(pipe.canonical(after)["stages"][name], wanted["stages"][name])
    again, state = step(after, state)
    assert step._cache_size() == 1
    assert not same(pipe.canonical(again)["stages"]["w"], given["stages"]["w"])
    assert same(pipe.canonical(again)["last"]["w"], given["last"]["w"])
    pipe.evaluate(again, rows)
    kept = pipe.with_trained(again, pipe.trained(again))
    assert same(kept, again)


def test_what_cannot_be_replaced_is_refused_before_anything_runs() -> None:
    with raises("not {'most': None}", "Replaced.MAX", "LAST, MAX, MEAN, SUM"):
        jp.Model(stage, replaced={"most": None})
    with raises("replaced must be a dict with a rule for each"):
        jp.Model(stage, replaced=["most"])
    with raises("replaced: '(' is no regular expression"):
        jp.Model(stage, replaced={"(": Replaced.MAX})
    odd = {**RULES, "mos": Replaced.SUM, "n/where": Replaced.MAX, "stages/w": Replaced.MAX}
    pipe = pipe_of("1f1b", replaced=odd, frozen=["stages/w"])
    given = weights(2)
    given["stages"]["total"] = np.zeros(2, np.int32)
    with raises(
        "replaced: 'n/where' is found in the path of no parameter",
        "stages/w is in replaced=, but in frozen= too",
        "stages/most is in replaced=, but found by several expressions with unlike rules",
        "stages/total is in replaced=, but is int32",
    ):
        pipe.place(given)
    with raises("stages/total is in replaced=, but is int32", "'n/where'"):
        pipe.model.loss(given, batch(M), microbatches=M)
    model = jp.Model(stage, last=last, replaced={"shared/s": Replaced.MAX})
    shared = {"stages": {"w": np.ones((2, 4, 4)), "most": np.ones(2)}, "shared": {"s": np.ones(2)}}
    one = jp.Pipeline(model, pipe.schedule, mesh_of(2))
    with raises("shared/s is in replaced=, but it is shared"):
        one.place({**shared, "last": {}})


def test_a_function_on_all_devices_has_none() -> None:
    spread = pipe_of("1f1b", last=jp.spread(last), replaced={"last/most": Replaced.MAX})
    with raises("last/most is in replaced=, but its function is spread over all devices"):
        spread.place(weights(2))
