"""linen models taken apart for a pipeline compute what they compute whole.  No step is compiled
here: see test_flax_pipeline.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpipe.flax import End, from_linen, submodule, submodules
from tests.axes.model import worst_error
from tests.flax.models import (
    F64,
    LAYERS,
    ROWS,
    VOCAB,
    WIDTH,
    LinenBlock,
    LinenNet,
    cross_entropy,
    rows,
)
from tests.flax.walk import Key, through
from tests.refused import refused
from tests.tolerance import FLOAT64, relative, same

FLOAT32_ULP = 1.2e-7  # a value on the border of two float32 may be rounded either way
EMBED, HEAD = nn.Embed(VOCAB, WIDTH, param_dtype=F64), nn.Dense(VOCAB, param_dtype=F64)


def in_mode(block: Any, x: jax.Array, *, training: bool) -> jax.Array:
    return block(x, train=training)


def initialised(net: LinenNet) -> Any:
    return jax.jit(net.init)(jax.random.key(0), rows())


def taken_apart(net: LinenNet, variables: Any, num_stages: int | None, **options: Any) -> Any:
    ends = {
        "first": End(
            EMBED,
            lambda embed, microbatch: embed(microbatch["tokens"]),
            submodule(variables, "embed"),
        ),
        "last": End(
            HEAD,
            lambda head, x, microbatch: cross_entropy(head(x), microbatch),
            submodule(variables, "head"),
        ),
    }
    blocks = LinenBlock(norm=net.norm, dropout=options.pop("dropout", 0.0))
    return from_linen(
        blocks,
        submodules(variables, "block_{}"),
        num_stages=num_stages,
        call=in_mode,
        **{**ends, **options},
    )


def test_numbered_blocks_give_the_model_s_loss_gradients_and_statistics() -> None:
    net = LinenNet(norm=True)
    variables = initialised(net)
    model = taken_apart(net, variables, 3)
    assert model.params["stages"]["up"]["kernel"].shape == (3, 2, WIDTH, WIDTH)
    assert model.state["batch_stats"]["BatchNorm_0"]["mean"].shape == (3, 2, WIDTH)
    (loss, state), grads = jax.value_and_grad(lambda p: through(model, p, rows()), has_aux=True)(
        model.params
    )

    @jax.jit
    def whole(params: Any) -> Any:
        return net.apply({**variables, "params": params}, rows(), mutable=["batch_stats"])

    (wanted, after), wanted_grads = jax.value_and_grad(whole, has_aux=True)(variables["params"])
    # the type that they had; flax widens them under float64
    after = jax.tree.map(lambda a: a.astype(jnp.float32), after)
    assert abs(loss - wanted) <= FLOAT64 * wanted
    blocks = model.to_linen(grads, state)
    for i, block in enumerate(blocks):
        assert worst_error(block["params"], wanted_grads[f"block_{i}"]) <= FLOAT64
        assert worst_error(block["batch_stats"], after["batch_stats"][f"block_{i}"]) <= FLOAT32_ULP
    assert (
        worst_error((grads["first"], grads["last"]), (wanted_grads["embed"], wanted_grads["head"]))
        <= FLOAT64
    )
    # Evaluation reads the statistics and leaves them: numbers that are handed through.
    found, left = through(model, model.params, rows(), state=state, training=False)
    assert found == pytest.approx(
        float(net.apply({**variables, **after}, rows(), train=False)), rel=1e-6
    )
    assert same(left, state)


class Scanned(nn.Module):
    """Blocks stacked by `nn.scan`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        return layers(LinenBlock(name="block"), x, None)[0]


def test_blocks_stacked_by_scan_are_blocks() -> None:
    net, x = Scanned(), np.random.default_rng(0).standard_normal((ROWS, WIDTH))
    variables = net.init(jax.random.key(0), x)
    stacked = submodule(variables, "block")
    model = from_linen(LinenBlock(), stacked, num_stages=2)
    found, _ = through(model, model.params, x)
    wanted = net.apply(variables, x)
    assert np.max(np.abs(found - wanted)) <= FLOAT64 * np.max(np.abs(wanted))
    back = model.to_linen(model.params)
    assert jax.tree.structure(back) == jax.tree.structure(dict(stacked))
    assert same(back, stacked)


def test_a_stack_of_one_block_comes_back_as_a_stack() -> None:
    one = LinenBlock().init(jax.random.key(0), jnp.ones((1, WIDTH)))
    stacked = jax.tree.map(lambda leaf: leaf[None], one)
    model = from_linen(LinenBlock(), stacked, num_stages=1)
    assert same(model.to_linen(model.params), stacked)


def test_a_pattern_of_unlike_blocks_that_stages_repeat() -> None:
    blocks = [LinenBlock(scale=0.5 if i % 2 else 2.0, hidden=8 if i % 2 else 4) for i in range(4)]
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH))
    variables = [block.init(jax.random.key(i), x) for i, block in enumerate(blocks)]
    model = from_linen(blocks, variables, num_stages=2)
    y = x
    for block, own in zip(blocks, variables, strict=True):
        y = block.apply(own, y)
    found, _ = through(model, model.params, x)
    assert np.max(np.abs(found - y)) <= FLOAT64 * np.max(np.abs(y))
    back = model.to_linen(model.params)
    assert same(back, variables)


@pytest.mark.exhaustive
def test_dropout_draws_from_the_step_s_key() -> None:
    block, x = LinenBlock(dropout=0.5), jnp.ones((ROWS, WIDTH))
    variables = [
        block.init({"params": jax.random.key(i), "dropout": jax.random.key(0)}, x) for i in range(4)
    ]
    losses = {}
    for num_stages in (1, 2):
        model = from_linen(block, variables, num_stages=num_stages, call=in_mode)
        for key in (0, 1):
            losses[num_stages, key] = np.asarray(through(model, model.params, x, key=Key(key))[0])
    assert relative(losses[1, 0], losses[2, 0]) <= FLOAT64
    assert not np.allclose(losses[1, 0], losses[1, 1])
    through(model, model.params, x, training=False)
    with refused(r"`stage` draws random numbers, but the step got no key; pass rng="):
        model.model.loss(model.params, {"x": x}, microbatches=1)


@pytest.mark.exhaustive
def test_a_tied_embedding_is_shared() -> None:
    net = LinenNet()
    variables = initialised(net)
    first = End(None, lambda _, microbatch, *, shared: shared(microbatch["tokens"]))
    last = End(
        None, lambda _, x, microbatch, *, shared: cross_entropy(shared.attend(x), microbatch)
    )
    model = taken_apart(
        net, variables, 2, first=first, last=last, shared=(EMBED, submodule(variables, "embed"))
    )
    x = EMBED.apply(submodule(variables, "embed"), rows()["tokens"])
    for own in submodules(variables, "block_{}"):
        x = LinenBlock().apply(own, x)
    wanted = cross_entropy(EMBED.apply(submodule(variables, "embed"), x, method="attend"), rows())
    assert relative(through(model, model.params, rows())[0], wanted) <= FLOAT64


def test_faults_are_told() -> None:
    net = LinenNet()
    variables = jax.eval_shape(net.init, jax.random.key(0), rows())
    with refused(r"6 blocks do not divide into 4 stages"):
        taken_apart(net, variables, 4)
    with refused(
        r"no submodule is called 'layer_0'; the names are \['block_0', .*'embed', 'head'\]"
    ):
        submodules(variables, "layer_{}")
    own = submodules(variables, "block_{}")
    with refused(r"blocks 0 and 1 are unlike: scale is 1.0 in one and 2.0 in the other"):
        from_linen([LinenBlock(), LinenBlock(scale=2.0)], own[:2], num_stages=2)
    with refused(r"there are 1 blocks but variables of 6"):
        from_linen([LinenBlock()], own, num_stages=2)
    with refused(r"variables with a leading axis of blocks are of one module"):
        from_linen([LinenBlock()] * 6, own[0], num_stages=2)
    with refused(r"stacked variables must all have a leading axis of blocks"):
        from_linen(nn.Dense(3), nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2))), num_stages=1)
    norm = nn.BatchNorm(use_running_average=False)
    first = End(
        norm,
        lambda norm, microbatch: norm(microbatch["tokens"] * 1.0),
        norm.init(jax.random.key(0), jnp.ones((1, 5))),
    )
    model = taken_apart(net, variables, 2, first=first)
    text = r"`first` changes its variables \['batch_stats/mean', .*\]; only blocks may keep state"
    for training in (True, False):
        with refused(text):
            model.model.first(model.params["first"], rows(), ctx=None, training=training)


MLP = nn.Dense(WIDTH)
MLP_VARIABLES = MLP.init(jax.random.key(0), jnp.zeros((1, WIDTH)))


def two_blocks(**ends: Any) -> Any:
    """Two blocks, with other ends."""
    last = End(None, lambda _, x, microbatch: jnp.mean(x))
    return from_linen(MLP, [MLP_VARIABLES] * 2, num_stages=2, **{"last": last, **ends})


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (((MLP, MLP_VARIABLES),), r"modules \(Dense, \{'params': ...\}\) and variables NoneType"),
        (((MLP, MLP), MLP_VARIABLES), r"modules \(Dense, Dense\) and variables \{'params': ...\}"),
        (({"a": MLP}, {"b": MLP_VARIABLES}), "modules {'a': Dense} and variables {'b':"),
        ((nn.Dense, MLP_VARIABLES), "modules type and variables"),
        ((lambda x: x, MLP_VARIABLES), "modules function and variables"),
        ((MLP, lambda x: x), "modules Dense and variables function"),
    ],
)
def test_modules_and_variables_of_an_end_must_fit(end: tuple[Any, ...], text: str) -> None:
    modules, *variables = end
    own = End(modules, lambda h, x, microbatch: jnp.mean(h(x)), *variables)
    with refused(rf"`last` has {text}.*give a linen module and its variables"):
        two_blocks(last=own)


@pytest.mark.parametrize("shared", [MLP, (MLP,), (MLP, MLP_VARIABLES, 1)])
def test_shared_modules_come_with_their_variables(shared: Any) -> None:
    with refused("shared= is .modules, variables. of linen modules, not"):
        two_blocks(shared=shared)
