"""What no parameter lies in has no gradient, whatever functions do with zeros: rows of padding,
rows of devices without a stage, room in buffers.  So optimizers keep it at zero, and the global
norm is the model's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe as jp
from jaxpipe.eager import EagerExecutor
from jaxpipe.storage.padding import Padding
from tests.checkpoint.placements import uneven
from tests.parity.engines import mesh_of
from tests.parity.tolerance import FLOAT64
from tests.tolerance import relative

STEPS, RATE = 3, 1e-2
draw = np.random.default_rng(0).standard_normal


def squared(p: Any, x: Any, microbatch: Any, *, ctx: Any) -> Any:
    """Zeros add nothing to it, but have a gradient."""
    return jax.lax.psum(jnp.sum(x @ p["w"].T) + jnp.sum(p["b"]), ctx.axis) ** 2


def looked_up(p: Any, microbatch: Any, *, ctx: Any) -> Any:
    return microbatch["x"] + jax.lax.psum(jnp.sum(p["table"]), ctx.axis)


def shifted(p: Any, x: Any) -> Any:
    return x + jnp.sum(jnp.sin(p["w"])) + jnp.sum(p["b"])


def narrow(p: Any, x: Any) -> Any:
    return x + jnp.sum(jnp.sin(p["c"]))


def mean(p: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(x**2)


def is_there(pipe: jp.Pipeline, canonical: Any) -> Any:
    """Ones where a parameter is, and zeros elsewhere, laid out like the placed parameters."""
    return pipe.trained(pipe.place(jax.tree.map(np.ones_like, canonical)))


def check_padding(pipe: jp.Pipeline, canonical: Any, batch: Any, microbatches: int = 2) -> None:
    """In each of some steps loss and gradients are those of plain JAX with the parameters so far;
    what is no parameter stays zero.
    """
    optimizer = optax.sgd(RATE)
    spaces = [np.asarray(leaf) == 0 for leaf in jax.tree.leaves(is_there(pipe, canonical))]
    assert any(map(np.any, spaces))
    params, state = pipe.place(canonical), optimizer.init(pipe.trained(pipe.place(canonical)))
    plain = jax.jit(
        jax.value_and_grad(lambda p: pipe.model.loss(p, batch, microbatches=microbatches))
    )
    for _ in range(STEPS):
        loss, grads = pipe.value_and_grad(params, batch)
        wanted, wanted_grads = plain(jax.device_get(pipe.canonical(params)))
        found = pipe.canonical(grads)
        own = jax.tree.map(
            lambda g, w: None if g is None else w, found, wanted_grads, is_leaf=lambda n: n is None
        )
        assert relative((loss, found), (wanted, own)) <= FLOAT64
        for leaf, space in zip(jax.tree.leaves(grads), spaces, strict=True):
            assert not np.any(np.asarray(leaf)[space])
        trained = pipe.trained(params)
        updates, state = optimizer.update(grads, state, trained)
        params = pipe.with_trained(params, optax.apply_updates(trained, updates))


# Five rows of 4 on three devices are 2, 2 and 1; of two on three devices the last has none.
SPREAD = {
    "first": {"table": draw((2, 3))},
    "stages": {"w": draw((3, 4)), "b": draw((3, 4))},
    "last": {"w": draw((5, 4)), "b": draw((3, 2))},
}


@pytest.mark.parametrize(
    ("executor", "frozen"), [(None, None), (EagerExecutor(), "last/w")], ids=["compiled", "eager"]
)
def test_padding_of_spread_functions(executor: Any, frozen: str | None) -> None:
    """Of `first` and `last`, along dims 0 and 1, also where a device has padding alone."""
    model = jp.Model(
        shifted,
        first=jp.spread(looked_up),
        last=jp.spread(squared, dims={"w": 0, "b": 1}),
        frozen=frozen,
    )
    table = jp.schedules.build("1f1b", devices=3, microbatches=2)
    pipe = jp.Pipeline(model, table, mesh_of(3), executor=executor)
    check_padding(pipe, SPREAD, {"x": draw((4, 4))})


def test_padding_under_fsdp() -> None:
    """Another dim of the padded parameter is split over a data axis."""
    model = jp.Model(shifted, last=jp.spread(squared, dims={"w": 0, "b": 1}))
    table = jp.schedules.build("zb_h1", devices=2, microbatches=2)
    sharding = jp.Sharding(data="data", fsdp="data")
    pipe = jp.Pipeline(model, table, mesh_of(2, data=2), sharding=sharding)
    stages = {"w": draw((2, 4)), "b": draw((2, 4))}
    params = {"stages": stages, "last": {"w": draw((5, 4)), "b": draw((2, 3))}}
    check_padding(pipe, params, {"x": draw((8, 4))}, microbatches=4)


def test_devices_without_a_stage() -> None:
    model = jp.Model(shifted, last=mean)
    pipe = jp.Pipeline(model, uneven(), mesh_of(3))
    params = {"stages": {"w": draw((4, 4)), "b": draw((4, 4))}, "last": {}}
    check_padding(pipe, params, {"x": draw((8, 4))}, microbatches=8)


@pytest.mark.parametrize(("fsdp", "frozen"), [(None, None), ("data", "c")])
def test_room_in_buffers(fsdp: str | None, frozen: str | None) -> None:
    """Unlike stages: a device has room for the larger one, in whole parts of the fsdp axis."""
    model = jp.Model([shifted, narrow], last=mean, frozen=frozen)
    table = jp.schedules.build("1f1b", devices=2, microbatches=2)
    sharding = jp.Sharding(data="data", fsdp=fsdp)
    pipe = jp.Pipeline(model, table, mesh_of(2, data=2), sharding=sharding)
    params = {"stages": [{"w": draw((3, 4)), "b": draw(3)}, {"c": draw((2, 3))}], "last": {}}
    check_padding(pipe, params, {"x": draw((8, 4))}, microbatches=4)


def test_what_follows_a_parameter_loses_its_zeros_along_the_same_dim() -> None:
    """Moments, a history of them, and factors with some of the dims; what has other dims stays."""
    padding = Padding("last/w", dim=0, size=5, shape=(6, 4))
    for shape, own in (
        ((6, 4), (5, 4)),
        ((3, 6, 4), (3, 5, 4)),
        ((6,), (5,)),
        ((4,), (4,)),
        ((), ()),
    ):
        assert padding.cut_off(jnp.zeros(shape)).shape == own
    for shape, placed in (((5, 4), (6, 4)), ((5,), (5,)), ((4, 5), (4, 5))):
        assert padding.pad(jnp.zeros(shape)).shape == placed


def test_trees_of_equal_shapes_with_other_padding_are_of_another_structure() -> None:
    """Or one of them would run what was compiled for the other."""
    schedule = jp.schedules.build("gpipe", devices=2, microbatches=2)
    model = jp.Model(narrow, last=jp.spread(squared))
    pipe = jp.Pipeline(model, schedule, mesh_of(2))

    def place(rows: int) -> Any:
        last = {"w": np.ones((rows, 3)), "b": np.ones(2)}
        return pipe.place({"stages": {"c": np.ones((2, 3))}, "last": last})

    one, other = place(5), place(6)
    assert one["last"]["w"].shape == other["last"]["w"].shape == (6, 3)
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert jax.tree.structure(one) == jax.tree.structure(jax.tree.map(jnp.ones_like, one))
    assert [pipe.canonical(tree)["last"]["w"].shape for tree in (one, other)] == [(5, 3), (6, 3)]


@pytest.mark.parametrize("spread_to_whole", [True, False])
def test_a_pipeline_refuses_parameters_with_the_padding_of_another(spread_to_whole: bool) -> None:
    """Rows of zeros would be parameters of a function that is not spread."""
    table = jp.schedules.build("gpipe", devices=2, microbatches=2)
    batch = {"x": draw((4, 3))}

    def pipes(rows: int, **leaves: Any) -> tuple[jp.Pipeline, jp.Pipeline, Any]:
        models = [jp.Model(narrow, last=last) for last in (jp.spread(squared), whole)]
        spread, plain = (jp.Pipeline(model, table, mesh_of(2)) for model in models)
        old, new = (spread, plain) if spread_to_whole else (plain, spread)
        last = {"w": draw((rows, 3)), **leaves}
        return new, old, old.place({"stages": {"c": draw((2, 3))}, "last": last})

    def whole(p: Any, x: Any, microbatch: Any) -> Any:
        return (jnp.sum(x @ p["w"].T) + jnp.sum(p["b"])) ** 2

    new, old, params = pipes(5, b=draw(2))
    uses = [
        lambda: new.value_and_grad(params, batch),
        lambda: new.evaluate(params, batch),
        lambda: new.loss(params, batch),
        lambda: new.lower(jax.eval_shape(lambda: params), batch),
        lambda: new.init(optax.adam(RATE), params),
    ]
    for use in uses:
        with pytest.raises(jp.PipelineError, match=r"last/w of \(5, 3\).*new.place\(old.canonical"):
            use()
    brought = new.place(old.canonical(params))
    found, wanted = (pipe.loss(p, batch) for pipe, p in ((new, brought), (old, params)))
    assert relative(found, wanted) <= FLOAT64
    new, _, params = pipes(6, b=draw(2))
    new.evaluate(params, batch)  # nothing is padded
    if not spread_to_whole:
        new, _, params = pipes(5, b=draw(()))
        with pytest.raises(jp.PipelineError, match=r"last\['b'\] of shape \(\) has no dim 0"):
            new.evaluate(params, batch)
