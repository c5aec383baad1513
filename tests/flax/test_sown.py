"""What flax blocks sow is a loss of their stage, or an error: it is never dropped without
a word.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jaxpipe as jp
from jaxpipe.flax import End, from_linen, from_nnx
from tests.flax.models import F64, WIDTH, batch_norm
from tests.parity.engines import mesh_of
from tests.refused import refused
from tests.tolerance import FLOAT64

M, ROWS, BLOCKS = 2, 3, 4
X = np.random.default_rng(0).standard_normal((M * ROWS, WIDTH))
# flax says that sow() outside of nnx.capture() will go; blocks that do it are those of today.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


class Router(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(WIDTH, WIDTH, param_dtype=F64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "balance", jnp.mean(x**2))
        return jax.nn.softmax(self.gate(x))


class Expert(nnx.Module):
    """Sows twice; the statistics are state beside what is sown."""

    def __init__(self, seed: int, *, norm: bool = False) -> None:
        self.router = Router(nnx.Rngs(seed))
        self.norm = batch_norm(nnx.Rngs(seed)) if norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.norm is None else self.norm(x)
        return x + x * self.router(x) + self.router(2 * x)


class LinenRouter(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("losses", "balance", jnp.mean(x**2))
        return jax.nn.softmax(nn.Dense(WIDTH, param_dtype=F64)(x))


class LinenExpert(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        router = LinenRouter(name="router")
        return self.perturb("out", x + x * router(x) + router(2 * x))


def mean_square(_: Any, x: jax.Array, microbatch: Any) -> jax.Array:
    return jnp.mean(x**2)


def balanced(block: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How a user makes a loss of what a block sowed."""
    if isinstance(block, nn.Module):
        y, sown = block(x), block.variables["losses"]
    else:
        y, sown = nnx.capture(block, nnx.Intermediate)(x)
    balance = sown["router"]["balance"]
    return y, 0.1 * (balance[0] + balance[1])


LAST = End(None, mean_square)
CUTS = [{"num_stages": 2}, {"layout": "tt|ttL"}]


def nnx_model(**options: Any) -> Any:
    return from_nnx([Expert(i) for i in range(BLOCKS)], **{"last": LAST, **options})


def linen_variables(seed: int = 0, *collections: str) -> Any:
    found = LinenExpert().init(jax.random.key(seed), X[:1])
    return {name: found[name] for name in ("params", *collections)}


def linen_model(**options: Any) -> Any:
    collections = options.pop("collections", ())
    variables = [linen_variables(i, *collections) for i in range(BLOCKS)]
    return from_linen(LinenExpert(), variables, **{"last": LAST, "rngs": (), **options})


def pipeline(model: Any) -> tuple[jp.Pipeline, Any]:
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=M)
    pipe = jp.Pipeline(model.model, schedule, mesh_of(2), layout=model.layout)
    return pipe, pipe.place(model.params)


def blocks_of(model: Any) -> list[Any]:
    """Parameters of each block in order."""
    own = model.params["stages"]
    rows = (
        own["t"]
        if "t" in own
        else jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), own)
    )
    return [jax.tree.map(lambda leaf, i=i: leaf[i], rows) for i in range(BLOCKS)]


def expected(model: Any) -> float:
    """The loss of the blocks one after the other, written out."""
    total = 0.0
    for x in X.reshape(M, ROWS, WIDTH):
        for own in blocks_of(model):
            gate = own["router"].get("gate") or own["router"]["Dense_0"]
            routed = [jax.nn.softmax(h @ gate["kernel"] + gate["bias"]) for h in (x, 2 * x)]
            total += 0.1 * (np.mean(x**2) + np.mean((2 * x) ** 2))
            x = x + x * routed[0] + routed[1]
        total += np.mean(x**2)
    return total / M


@pytest.mark.parametrize("cut", CUTS, ids=["even", "layout"])
@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_a_sown_value_is_a_loss_where_the_user_says_so(make: Any, cut: Any) -> None:
    model = make(**cut, call=balanced, stage_loss=True)
    pipe, params = pipeline(model)
    loss, _ = pipe.value_and_grad(params, {"x": X})
    wanted = expected(model)
    assert abs(loss - wanted) <= FLOAT64 * wanted
    assert abs(pipe.evaluate(params, {"x": X}) - wanted) <= FLOAT64 * wanted
    plain = model.model.loss(model.params, {"x": X}, microbatches=M)
    assert abs(plain - wanted) <= FLOAT64 * wanted
    assert pipe.outputs(params, {"x": X}).shape == X.shape


@pytest.mark.parametrize("cut", CUTS, ids=["even", "layout"])
@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_it_is_refused_where_nobody_takes_it(make: Any, cut: Any) -> None:
    pipe, params = pipeline(make(**cut))
    text = (
        r"a block (makes|writes) variables in a call, .*router/balance/0, .*stage_loss=True, call="
    )
    for call in (pipe.value_and_grad, pipe.evaluate):
        with refused(text):
            call(params, {"x": X})


def test_statistics_go_on_beside_what_is_sown() -> None:
    model = from_nnx(
        [Expert(i, norm=True) for i in range(BLOCKS)],
        num_stages=2,
        last=LAST,
        call=balanced,
        stage_loss=True,
    )
    pipe, params = pipeline(model)
    shapes = jax.eval_shape(
        lambda p, s: pipe.value_and_grad(p, {"x": X}, state=s),
        params,
        pipe.place_state(model.state),
    )
    assert jax.tree.structure(shapes[0][1]) == jax.tree.structure(pipe.place_state(model.state))


def test_what_was_sown_before_is_refused() -> None:
    blocks = [Expert(i) for i in range(BLOCKS)]
    for block in blocks:
        block(X[:1])
    for model in (
        from_nnx(blocks, num_stages=2, last=LAST),
        linen_model(num_stages=2, collections=("losses",), call=balanced),
    ):
        pipe, params = pipeline(model)
        with refused(r"router/balance/2.*(sown before|init\(\) sowed)"):
            pipe.value_and_grad(params, {"x": X}, state=pipe.place_state(model.state))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_ends_that_sow_are_refused(kind: str) -> None:
    if kind == "nnx":
        last = End(Router(nnx.Rngs(0)), lambda router, x, microbatch: jnp.mean(router(x)))
        model = from_nnx(
            [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(2)], num_stages=2, last=last
        )
    else:
        head = LinenRouter()
        own = {"params": head.init(jax.random.key(0), X[:1])["params"]}
        last = End(head, lambda router, x, microbatch: jnp.mean(router(x)), own)
        dense = nn.Dense(WIDTH)
        model = from_linen(
            dense,
            [dense.init(jax.random.key(i), X[:1]) for i in range(2)],
            num_stages=2,
            last=last,
            rngs=(),
        )
    pipe, params = pipeline(model)
    with refused(r"`last` .*variables .*balance/0"):
        pipe.value_and_grad(params, {"x": X})


def test_a_loss_must_be_returned() -> None:
    pipe, params = pipeline(
        nnx_model(num_stages=2, call=lambda block, x: balanced(block, x)[0], stage_loss=True)
    )
    with refused(r"`a block` must return \(x, loss\), since stage_loss=True"):
        pipe.value_and_grad(params, {"x": X})
