"""flax models in a pipeline: the numbers that the same functions give one after the other, whatever
the schedule.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jaxpipe as jp
from jaxpipe.flax import End, from_nnx
from tests.axes.model import worst_error
from tests.flax.models import Net, rows
from tests.flax.test_linen import LinenNet, initialised, taken_apart as linen_apart
from tests.flax.test_nnx import taken_apart
from tests.flax.walk import through
from tests.keys import STAGE, key_of
from tests.parity.tolerance import FLOAT64
from tests.refused import refused
from tests.tolerance import same

M, ROWS = 2, 3


def pipeline(model: Any, name: str) -> jp.Pipeline:
    schedule = jp.schedules.build(name, devices=2, microbatches=M)
    return pipeline_of(model, schedule)


def pipeline_of(model: Any, schedule: jp.Schedule) -> jp.Pipeline:
    return jp.Pipeline(model.model, schedule, Mesh(np.array(jax.devices()[:2]), ("pipe",)))


def one_by_one(model: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    """The mean loss of microbatches, each of which finds the state that the one before left; and
    the last one's.
    """
    cut = jax.tree.map(lambda leaf: leaf.reshape(M, -1, *leaf.shape[1:]), batch)
    state, losses = model.state, []
    for m in range(M):
        loss, state = through(
            model, params, jax.tree.map(lambda leaf, m=m: leaf[m], cut), state=state
        )
        losses.append(loss)
    return jnp.mean(jnp.stack(losses)), state


def models(num_stages: int) -> dict[str, Any]:
    net = LinenNet(norm=True)
    return {
        "nnx": lambda: taken_apart(Net(norm=True), num_stages),
        "linen": lambda: linen_apart(net, initialised(net), num_stages),
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("nnx", "1f1b", marks=pytest.mark.slow),
        pytest.param("linen", "zb_h1", marks=pytest.mark.exhaustive),
    ],
)
def test_batch_statistics_are_carried_from_microbatch_to_microbatch(kind: str, name: str) -> None:
    model = models(2)[kind]()
    pipe, batch = pipeline(model, name), rows(M * ROWS)
    params, state = pipe.place(model.params), pipe.place_state(model.state)
    (loss, state), grads = pipe.value_and_grad(params, batch, state=state)
    (wanted, wanted_state), wanted_grads = jax.jit(
        jax.value_and_grad(lambda p: one_by_one(model, p, batch), has_aux=True)
    )(model.params)
    assert abs(loss - wanted) <= FLOAT64 * wanted
    found = pipe.canonical(grads)
    # A bias before a batch norm has no effect on the loss: its gradient is rounding alone, so
    # arrays are compared as one.
    assert (
        worst_error(
            *(
                jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])
                for tree in (found, wanted_grads)
            )
        )
        <= FLOAT64
    )
    # linen keeps statistics in float32: one rounding of 6e-8 a microbatch.
    assert worst_error(pipe.canonical_state(state), wanted_state) <= M * 6e-8
    evaluated = pipe.evaluate(params, batch, state=state)
    assert evaluated == pytest.approx(
        float(through(model, model.params, batch, state=wanted_state, training=False)[0]), rel=1e-6
    )


def test_dropout_does_not_depend_on_the_schedule() -> None:
    """Two stages and six: the same keys for the same layers, so the same losses; another step,
    other losses.
    """
    losses = {}
    for name, num_stages in (("1f1b", 2), ("interleaved_1f1b", 6)):
        model = taken_apart(Net(dropout=0.5), num_stages)
        schedule = jp.schedules.build(name, devices=2, microbatches=M, chunks=num_stages // 2)
        pipe = pipeline_of(model, schedule)
        params, batch = pipe.place(model.params), rows(M * ROWS)
        losses[name] = [
            float(pipe.value_and_grad(params, batch, rng=jax.random.key(step))[0])
            for step in range(2)
        ]
        if name == "1f1b":
            with refused("draws random numbers, but the step got no key; pass rng="):
                pipe.value_and_grad(params, batch)
    one, other = losses.values()
    assert worst_error(one, other) <= FLOAT64
    assert one[0] != one[1]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_dropout_does_not_depend_on_how_blocks_are_cut(kind: str) -> None:
    """By stages, in a pattern of two kinds of blocks, and by letters: the same keys for the same
    blocks.
    """
    net = LinenNet()
    variables = initialised(net)
    losses = []
    for cut in ({"num_stages": 1}, {"num_stages": 3}, {"num_stages": None, "layout": "Etutu|tuL"}):
        if kind == "nnx":
            model = taken_apart(Net(dropout=0.5, scales=(1.0, 0.5)), **cut)
        else:
            model = linen_apart(net, variables, dropout=0.5, **cut)
        losses.append(model.model.loss(model.params, rows(), microbatches=1, rng=jax.random.key(3)))
    assert worst_error(losses[:2], [losses[2]] * 2) <= FLOAT64
    assert losses[0] != model.model.loss(model.params, rows(), rng=jax.random.key(4))


@pytest.mark.parametrize("cut", [{"num_stages": 2}, {"layout": "tt|ttL"}], ids=str)
def test_each_block_is_told_its_own_number_and_key(cut: dict[str, Any]) -> None:
    def call(block: Any, x: Any, *, ctx: jp.Context) -> Any:
        return x.at[ctx.layer].set(jax.random.key_data(ctx.rng).astype(x.dtype))

    def keys(_: Any, x: Any, microbatch: Any) -> Any:
        return jnp.mean(x), x

    blocks, key = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(4)], jax.random.key(3)
    model = from_nnx(blocks, call=call, last=End(None, keys), has_metrics=True, **cut)
    batch = {"x": np.zeros((4, 2))}
    found = model.model.loss(model.params, batch, microbatches=1, rng=key)[1]
    wanted = [jax.random.key_data(key_of(key, STAGE, 0, number)) for number in range(4)]
    assert np.array_equal(found, np.stack(wanted))


def test_shapes_alone_are_enough_with_letters() -> None:
    variables = jax.eval_shape(LinenNet().init, jax.random.key(0), rows())
    models = (
        taken_apart(nnx.eval_shape(Net), None, layout="Etttt|ttL"),
        linen_apart(LinenNet(), variables, None, layout="Etttt|ttL"),
    )
    for model in models:
        leaves = jax.tree.leaves(model.params)
        assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
        assert {a.shape[0] for a in jax.tree.leaves(model.params["stages"])} == {6}


def test_a_layout_of_letters_has_uneven_stages_and_blocks_of_two_kinds() -> None:
    net = Net(scales=(1.0, 0.5))
    model = taken_apart(net, None, layout="Etdtd|tdL")
    pipe, batch = pipeline(model, "1f1b"), rows(M * ROWS)
    loss, grads = pipe.value_and_grad(pipe.place(model.params), batch)
    wanted, wanted_grads = nnx.jit(nnx.value_and_grad(lambda net: net.loss(batch)))(net)
    assert abs(loss - wanted) <= FLOAT64 * wanted
    other = Net(seed=1, scales=(1.0, 0.5))
    # written where parameters are: leaf by leaf
    taken_apart(other, None, layout="Etdtd|tdL").to_nnx(pipe.canonical(grads))
    assert worst_error(nnx.state(other, nnx.Param), wanted_grads) <= FLOAT64


def test_faults_of_a_layout_of_letters() -> None:
    net = Net(scales=(1.0, 0.5))
    with refused(
        "blocks 0 and 1 are unlike: scale is 1.0 in one and 0.5 in the other.* one letter"
    ):
        taken_apart(net, None, layout="Ettt|tttL")
    with refused("the layout has 4 layers between E and L, but there are 6 blocks"):
        taken_apart(net, None, layout="Etd|tdL")
    with refused(r"either num_stages=, for stages of equal size, or layout="):
        taken_apart(net, 2, layout="Etdt|dtdL")
    with refused(r"give num_stages= instead of layout=") as raised:
        taken_apart(Net(norm=True), None, layout="Ett|ttttL")
    assert "variables that are no parameters" in str(raised.value)
    with refused(r"do not divide into 4 stages.*or give layout="):
        taken_apart(net, 4)
    with refused(r"blocks 0 and 3 are unlike.* every stage.*Give layout="):
        taken_apart(net, 2)
    with refused("blocks must be nnx modules, but block 1 is function"):
        taken_apart(net, None, layout="Et|tL", blocks=[net.blocks[0], lambda x: x])
    with refused("variables that are no parameters"):
        taken_apart(Net(norm=True), None, layout="Ett|ttttL")


def test_a_layout_of_letters_of_linen_blocks() -> None:
    net = LinenNet()
    variables = initialised(net)
    even, uneven = (
        linen_apart(net, variables, 2),
        linen_apart(net, variables, None, layout="Etttt|ttL"),
    )
    batch = rows(M * ROWS)
    losses = [
        (pipe := pipeline(model, "1f1b")).evaluate(pipe.place(model.params), batch)
        for model in (even, uneven)
    ]
    assert abs(losses[0] - losses[1]) <= FLOAT64 * losses[0]
    back = uneven.to_linen(uneven.params)
    for i, found in enumerate(back):
        wanted = variables["params"][f"block_{i}"]
        assert same(found, wanted)
