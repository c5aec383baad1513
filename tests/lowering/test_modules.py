"""Layers that are registered dataclasses, as equinox's modules are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.modules import freeze_lowest, split, stack


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    w: Any
    act: Callable[[Any], Any]
    rate: float
    scale: float = dataclasses.field(default=0.5, metadata={"static": True})

    def __call__(self, x):
        return x + self.scale * self.rate * self.act(x @ self.w)


def block(seed=0, width=3, **others):
    w = jax.random.normal(jax.random.key(seed), (width, width))
    return Block(**{"w": w, "act": jnp.tanh, "rate": 2.0, **others})


def test_split_and_rebuild_are_inverse():
    module = block()
    arrays, rebuild = split(module)
    assert jax.tree.leaves(arrays) == [module.w]
    again = rebuild(jax.tree.map(lambda leaf: 2 * leaf, arrays))
    assert (again.act, again.rate, again.scale) == (jnp.tanh, 2.0, 0.5)
    np.testing.assert_array_equal(again.w, 2 * module.w)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_pipeline_of_modules_has_the_gradients_of_the_modules(schedule):
    blocks = [block(n) for n in range(4)]
    arrays, block_of = stack(blocks)
    model = jp.Model(
        lambda p, x: block_of(p)(x),
        first=lambda _, microbatch: microbatch["x"],
        last=lambda p, x, _: jnp.mean((x * p) ** 2),
    )
    devices = 4 if schedule == "1f1b" else 2
    table = jp.schedules.build(schedule, devices=devices, microbatches=2)
    pipe = jp.Pipeline(model, table, jax.make_mesh((devices,), ("pipe",)))
    params = {"first": {}, "stages": arrays, "last": jnp.float64(1.5)}
    batch = {"x": jax.random.normal(jax.random.key(9), (4, 3))}
    loss, grads = pipe.value_and_grad(pipe.place(params), batch)

    def plain(blocks):
        x = batch["x"]
        for n in range(4):
            x = block_of(jax.tree.map(lambda leaf, n=n: leaf[n], blocks))(x)
        return jnp.mean((x * 1.5) ** 2)

    wanted, wanted_grads = jax.value_and_grad(plain)(arrays)
    found = pipe.canonical(grads)["stages"]
    assert isinstance(found, Block)
    # sums of two microbatches in another order
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    np.testing.assert_allclose(found.w, wanted_grads.w, rtol=1e-12, atol=1e-14)


def test_modules_that_differ_are_refused_with_every_difference():
    others = [
        block(),
        block(width=4),
        block(act=jnp.sin, rate=3.0),
        block(scale=1.0),
        {"w": jnp.ones(3)},
    ]
    with pytest.raises(jp.PipelineError) as refused:
        stack(others)
    text = str(refused.value)
    assert "module 1 has float64[4, 4] at w, module 0 has float64[3, 3]" in text
    assert "module 2 has <" in text
    assert "at act" in text
    assert "module 2 has 3.0 at rate, module 0 has 2.0" in text
    assert "module 3 has other static fields than module 0" in text
    assert "module 4 has the leaves ['w'], module 0 has ['w', 'act', 'rate']" in text
    with pytest.raises(jp.PipelineError, match="at least one"):
        stack([])


def test_a_changed_model_is_checked_again():
    model = jp.Model({"t": lambda p, x: x, "L": lambda p, x, mb: x.sum()}, layers="t*2L")
    assert model.changed(layers="t*3L").layers == "tttL"
    with pytest.raises(jp.PipelineError, match="'m', for which there is no function"):
        model.changed(layers="tmL")
    with pytest.raises(jp.PipelineError, match=r"loss must be one of Loss\.MEAN"):
        model.changed(contract="mean")


def test_the_lowest_layers_are_frozen():
    calls = {
        "E": lambda p, microbatch: microbatch["x"] * p,
        "t": lambda p, x: x + jnp.tanh(x @ p["w"]),
        "m": lambda p, x: x * p,
        "L": lambda p, x, microbatch: jnp.mean((x - p) ** 2),
    }
    model = jp.Model(calls, layers="Ettmttm|ttL", frozen=("last",))
    params = {
        "first": jnp.float64(1.1),
        "stages": {"t": {"w": jax.random.normal(jax.random.key(0), (6, 3, 3))}, "m": jnp.ones(2)},
        "last": jnp.float64(0.5),
    }
    batch = {"x": jax.random.normal(jax.random.key(1), (4, 3))}
    tuned, cut, rejoin = freeze_lowest(model, params, 4)
    assert tuned.layers == "EaabatmttL"
    again = rejoin(cut)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    pipe = jp.Pipeline(
        tuned,
        jp.schedules.build("1f1b", devices=2, microbatches=2),
        jax.make_mesh((2,), ("pipe",)),
        layout="Eaabat|mttL",
    )
    loss, grads = pipe.value_and_grad(pipe.place(cut), batch)
    found = pipe.canonical(grads)
    wanted, whole = jax.value_and_grad(lambda p: model.loss(p, batch))(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    assert found["last"] is None
    assert found["stages"]["a"]["w"] is None
    assert found["stages"]["b"] is None
    np.testing.assert_allclose(
        found["stages"]["t"]["w"], whole["stages"]["t"]["w"][3:], rtol=1e-11, atol=1e-13
    )
    np.testing.assert_allclose(found["stages"]["m"], whole["stages"]["m"][1:], rtol=1e-12)
    np.testing.assert_allclose(found["first"], whole["first"], rtol=1e-12)


def test_frozen_layers_keep_leaves_that_are_replaced():
    calls = {"t": lambda p, x: x * p["w"] + p["scale"], "L": lambda p, x, microbatch: x.sum()}
    model = jp.Model(calls, layers="t*4L", replaced={"scale$": jp.Replaced.MAX})
    params = {"stages": {"t": {"w": jnp.ones(4), "scale": jnp.ones(4)}}, "last": {}}
    tuned, cut, _ = freeze_lowest(model, params, 2)
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
    pipe = jp.Pipeline(tuned, schedule, jax.make_mesh((2,), ("pipe",)), layout="aa|ttL")
    _, grads = pipe.value_and_grad(pipe.place(cut), {"x": jnp.ones((4, 3))})
    found = pipe.canonical(grads)["stages"]
    assert found["a"]["w"] is None
    assert found["a"]["scale"].shape == found["t"]["scale"].shape == (2,)


@pytest.mark.parametrize(("count", "message"), [(0, "count=0"), (9, "the model has 8 layers")])
def test_layers_that_cannot_be_frozen(count, message):
    model = jp.Model({"t": lambda p, x: x * p, "L": lambda p, x, mb: x.sum()}, layers="t*8L")
    with pytest.raises(jp.PipelineError, match=message):
        freeze_lowest(model, {"stages": {"t": jnp.ones(8)}}, count)
    alike = jp.Model(lambda p, x: x * p, last=lambda p, x, mb: x.sum())
    with pytest.raises(jp.PipelineError, match="by letters"):
        freeze_lowest(alike, {"stages": jnp.ones(8)}, 1)
