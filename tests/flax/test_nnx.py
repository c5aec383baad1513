"""nnx models taken apart for a pipeline compute what they compute whole.  No step is compiled here:
see test_pipeline.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe as jp
from jaxpipe.flax import End, from_nnx
from tests.axes.model import worst_error
from tests.flax.models import (
    LAYERS,
    ROWS,
    VOCAB,
    WIDTH,
    Block,
    Net,
    batch_norm,
    cross_entropy,
    rows,
)
from tests.flax.walk import Key, through
from tests.parity.engines import mesh_of
from tests.refused import refused
from tests.tolerance import FLOAT64, relative, same


def head_loss(modules: Any, x: jax.Array, microbatch: Any) -> jax.Array:
    return cross_entropy(modules["head"](modules["out"](x)), microbatch)


def taken_apart(net: Net, num_stages: int | None, **options: Any) -> Any:
    ends = {
        "first": End(net.embed, lambda embed, microbatch: embed(microbatch["tokens"])),
        "last": End({"out": net.out, "head": net.head}, head_loss),
    }
    blocks = options.pop("blocks", net.blocks)
    return from_nnx(blocks, num_stages=num_stages, **{**ends, **options})


def gradient_of(net: Net) -> tuple[Any, Any]:
    return nnx.jit(nnx.value_and_grad(lambda net: net.loss(rows())))(net)


@pytest.mark.parametrize(
    ("num_stages", "scales"),
    [
        (2, (1.0, 0.5, 2.0)),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(1, (1.0,)), (6, (1.0,))]),
    ],
)
def test_a_list_of_blocks_gives_the_model_s_loss_and_gradients(
    num_stages: int, scales: tuple[float, ...]
) -> None:
    """Also where blocks differ in a pattern that each stage repeats."""
    net = Net(scales=scales)
    model = taken_apart(net, num_stages)
    loss, grads = jax.value_and_grad(lambda p: through(model, p, rows())[0])(model.params)
    wanted, wanted_grads = gradient_of(net)
    assert abs(loss - wanted) <= FLOAT64 * wanted
    other = Net(seed=1, scales=scales)
    # gradients written where parameters are: the inverse, leaf by leaf
    taken_apart(other, num_stages).to_nnx(grads)
    found = nnx.state(other, nnx.Param)
    assert worst_error(found, wanted_grads) <= FLOAT64


def test_leaves_of_stages_are_stage_then_block() -> None:
    model = taken_apart(Net(), 2)
    assert model.params["stages"]["up"]["kernel"].shape == (2, 3, WIDTH, WIDTH)
    assert model.params["first"]["embedding"].shape == (VOCAB, WIDTH)
    assert set(model.params["last"]) == {"out", "head"}
    assert model.state == {}
    assert model.specs is model.layout is None
    # So `per_layer` acts on each block, also where it is not told.
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(model.model, schedule, mesh_of(2), memory=jp.Memory(remat="full"))
    state = jax.eval_shape(
        jp.per_layer(pipe, optax.adam(0.1)).init, jax.eval_shape(pipe.place, model.params)
    )
    assert jax.tree.leaves(state["stages"])[0].shape == (2, 3)  # Adam's counts


def test_to_nnx_writes_parameters_back() -> None:
    net, other = Net(), Net(seed=5)
    taken_apart(other, 3).to_nnx(taken_apart(net, 3).params)
    assert same(nnx.state(other), nnx.state(net))


@nnx.vmap(in_axes=0, out_axes=0)
def make_stack(rngs: nnx.Rngs) -> Block:
    return Block(rngs=rngs, dropout=0.5, norm=True)


def test_blocks_stacked_by_vmap_are_blocks() -> None:
    stack = make_stack(nnx.Rngs(0).split(LAYERS))
    found = from_nnx(stack, num_stages=2)
    x = np.random.default_rng(0).standard_normal((ROWS, 5, WIDTH))
    y = x
    stack.eval()
    for i in range(LAYERS):
        graph, state = nnx.split(stack)
        y = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(y)
    own, _ = through(found, found.params, x, training=False)
    assert np.max(np.abs(own - y)) <= FLOAT64 * np.max(np.abs(y))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, found.params)
    before = np.asarray(stack.up.kernel[...])
    found.to_nnx(doubled)
    assert np.array_equal(stack.up.kernel[...], 2 * before)


@pytest.mark.slow
def test_dropout_draws_a_key_for_each_layer_and_microbatch_however_layers_are_staged() -> None:
    net = Net(dropout=0.5)
    losses = {}
    for num_stages in (1, 3):
        model = taken_apart(net, num_stages)
        for key in (0, 1):
            losses[num_stages, key] = float(through(model, model.params, rows(), key=Key(key))[0])
    assert relative(losses[1, 0], losses[3, 0]) <= FLOAT64
    assert losses[1, 0] != losses[1, 1]
    # No two layers drop the same: with equal weights, and an input of ones, every layer's own mask
    # shows.
    blocks = [Block(rngs=nnx.Rngs(0), dropout=0.5) for _ in range(3)]
    for block in blocks:
        block.up.kernel[...], block.up.bias[...] = jnp.zeros((WIDTH, WIDTH)), jnp.ones(WIDTH)
        block.down.kernel[...] = jnp.eye(WIDTH)
    masks = []
    for i in range(1, 4):
        model = from_nnx(blocks[:i], num_stages=1)
        masks.append(through(model, model.params, jnp.zeros((8, WIDTH)), key=Key(3))[0])
    steps = [b - a for a, b in zip([0, *masks[:-1]], masks, strict=True)]
    assert all(not np.array_equal(steps[i], steps[j]) for i in range(3) for j in range(i))
    assert all(
        set(np.unique(np.round(step, 6))) <= {0.0, round(2 * np.tanh(1), 6)} for step in steps
    )


def test_evaluation_drops_nothing_and_needs_no_key() -> None:
    net = Net(dropout=0.5)
    model = taken_apart(net, 2)
    found = through(model, model.params, rows(), training=False)[0]
    net.eval()
    assert relative(found, net.loss(rows())) <= FLOAT64


def test_batch_statistics_are_state() -> None:
    net = Net(norm=True)
    model = taken_apart(net, 3)
    assert model.state["norm"]["mean"].shape == (3, 2, WIDTH)
    loss, state = through(model, model.params, rows())
    wanted = net.loss(rows())  # changes the modules' statistics
    assert relative(loss, wanted) <= FLOAT64
    other = Net(norm=True)
    taken_apart(other, 3).to_nnx(model.params, state)
    assert worst_error(nnx.state(other, nnx.BatchStat), nnx.state(net, nnx.BatchStat)) <= FLOAT64
    # Evaluation reads the statistics and leaves them: numbers that are handed through.
    found, after = through(model, model.params, rows(), state=state, training=False)
    net.eval()
    assert relative(found, net.loss(rows())) <= FLOAT64
    assert same(after, state)


def test_parameters_that_are_not_trained_are_state() -> None:
    model = from_nnx(Net().blocks, num_stages=2, trainable=nnx.PathContains("down"))
    assert set(model.params["stages"]) == {"down"}
    assert set(model.state) == {"up"}


def test_a_tied_embedding_is_shared() -> None:
    net = Net()

    def loss(_: Any, x: jax.Array, microbatch: Any, *, shared: Any) -> jax.Array:
        return cross_entropy(shared.attend(x), microbatch)

    first = End(None, lambda _, microbatch, *, shared: shared(microbatch["tokens"]))
    model = taken_apart(net, 2, first=first, last=End(None, loss), shared=net.embed)
    assert model.params["shared"]["embedding"].shape == (VOCAB, WIDTH)
    assert model.params["first"] == {}
    x = net.embed(rows()["tokens"])
    for block in net.blocks:
        x = block(x)
    assert (
        relative(
            through(model, model.params, rows())[0], cross_entropy(net.embed.attend(x), rows())
        )
        <= FLOAT64
    )


def test_call_may_take_the_microbatch() -> None:
    net = Net()
    model = taken_apart(
        net,
        2,
        call=lambda block, x, *, microbatch: block(x) * (microbatch["tokens"] > 2)[..., None],
    )
    x = net.embed(rows()["tokens"])
    for block in net.blocks:
        x = block(x) * (rows()["tokens"] > 2)[..., None]
    wanted = cross_entropy(net.head(net.out(x)), rows())
    assert relative(through(model, model.params, rows())[0], wanted) <= FLOAT64


def test_shapes_alone_are_enough() -> None:
    """A model that was never initialised gives ShapeDtypeStructs, for `Pipeline.lower`."""
    net = nnx.eval_shape(lambda: Net(norm=True))
    model = taken_apart(net, 2)
    leaves = jax.tree.leaves((model.params, model.state))
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert jax.tree.map(jnp.shape, model.params) == jax.tree.map(
        jnp.shape, taken_apart(Net(norm=True), 2).params
    )


class TestErrors:
    def test_blocks_that_do_not_divide(self) -> None:
        with refused(
            r"6 blocks do not divide into 4 stages of equal size; num_stages may be one of "
            r"\[1, 2, 3, 6\]"
        ):
            taken_apart(Net(), 4)
        with refused("there are no blocks"):
            from_nnx([], num_stages=1)

    def test_unlike_settings_name_both_blocks(self) -> None:
        with refused(r"blocks 0 and 3 are unlike: scale is 1.0 in one and 0.5 in the other"):
            from_nnx(
                [Block(rngs=nnx.Rngs(i), scale=0.5 if i == 3 else 1.0) for i in range(6)],
                num_stages=2,
            )

    def test_unlike_shapes_name_both_blocks(self) -> None:
        blocks = [Block(rngs=nnx.Rngs(i), hidden=8 if i == 2 else WIDTH) for i in range(4)]
        with refused(r"blocks 0 and 2 are unlike: down.in_features is 4 in one and 8 in the other"):
            from_nnx(blocks, num_stages=2)

    def test_a_variable_in_two_parts(self) -> None:
        net = Net()
        with refused(r"first and last hold the same variable, embedding and embedding; .* shared="):
            taken_apart(
                net, 2, last=End(net.embed, lambda e, x, mb: cross_entropy(e.attend(x), mb))
            )
        with refused(r"block 0 and block 1 hold the same variable"):
            from_nnx([net.blocks[0]] * 2, num_stages=2)

    def test_state_outside_of_blocks(self) -> None:
        norm = batch_norm(nnx.Rngs(0))
        model = taken_apart(
            Net(), 2, first=End((Net().embed, norm), lambda m, mb: m[1](m[0](mb["tokens"])))
        )
        with refused(
            r"`first` changes its variables \['1/mean', '1/var'\]; only blocks may keep "
            r"state"
        ):
            through(model, model.params, rows())
        through(model, model.params, rows(), training=False)

    def test_dropout_without_a_key(self) -> None:
        model = taken_apart(Net(dropout=0.5), 2)
        with refused(r"`stage` draws random numbers, but the step got no key; pass rng="):
            model.model.loss(model.params, rows(), microbatches=1)

    def test_what_is_no_module(self) -> None:
        with refused(r"blocks must be nnx modules, but block 1 is function"):
            from_nnx([Net().blocks[0], lambda x: x], num_stages=2)

    def test_a_stack_of_unequal_lengths(self) -> None:
        with refused(
            r"must all have a leading axis of blocks, of one length.*make it with nnx.vmap"
        ):
            from_nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), num_stages=1)
