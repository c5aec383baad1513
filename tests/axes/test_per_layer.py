"""Rules that look at one array: under `per_layer` they do on stacks of stages what they do in a
loop over plain layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec

import jaxpipe as jp
from tests.flat import flat_pipeline
from tests.parity.tolerance import FLOAT64
from tests.refused import refused

WIDTH = 6


def layers(count: int, *, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {"norm": 1 + rng.standard_normal(WIDTH) / 9, "w": rng.standard_normal((WIDTH, WIDTH))}
        for _ in range(count)
    ]


def outer(*, seed: int) -> dict[str, Any]:
    return {"head": np.random.default_rng(seed).standard_normal((WIDTH, 3))}


def stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


RULES: dict[str, Callable[[], Any]] = {
    "muon": lambda: optax.contrib.muon(0.1),
    "lamb": lambda: optax.lamb(0.1, weight_decay=0.1, mask=matrices),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "decay by rank": lambda: optax.adamw(0.1, weight_decay=0.5, mask=matrices),
}


@pytest.fixture(scope="module")
def pipes() -> dict[str, jp.Pipeline]:
    """A stage is a layer; two layers; and by letters, three layers and one."""

    def layer(p: Any, x: Any) -> Any:
        return x * p["norm"] @ p["w"]

    def last(p: Any, x: Any, mb: Any) -> Any:
        return jnp.mean(x @ p["head"])

    def of(devices: int, **model: Any) -> jp.Pipeline:
        schedule = jp.schedules.build("1f1b", devices=devices, microbatches=2)
        return flat_pipeline(
            schedule=schedule,
            mesh=jax.make_mesh((devices,), ("pipe",), devices=jax.devices()[:devices]),
            **model,
        )

    return {
        "stage": of(4, stage=layer, last=last),
        "layers": of(2, stage=lambda p, x: x, last=last),
        "letters": of(2, layers={"t": layer, "L": last}, layout="ttt|tL"),
    }


def canonical(form: str, own: list[Any], last: Any) -> dict[str, Any]:
    stages = stack(own)
    if form == "layers":
        stages = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), stages)
    return {"stages": {"t": stages} if form == "letters" else stages, "last": last}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_acts_on_each_layer_as_in_the_plain_run(
    pipes: dict[str, jp.Pipeline], rule: str
) -> None:
    """Two steps, with clipping by the global norm outside, on all three forms; equal to optax on a
    list of layers.
    """
    given = [{"layers": layers(4, seed=s), "last": outer(seed=s)} for s in range(3)]
    plain_rule = optax.chain(optax.clip_by_global_norm(1.0), RULES[rule]())
    plain, state = given[0], plain_rule.init(given[0])
    for grads in given[1:]:
        updates, state = jax.jit(plain_rule.update)(grads, state, plain)
        plain = optax.apply_updates(plain, updates)
    for form, pipe in pipes.items():
        placed = [pipe.place(canonical(form, g["layers"], g["last"])) for g in given]
        wrapped = optax.chain(
            optax.clip_by_global_norm(1.0),
            jp.per_layer(pipe, RULES[rule](), layer_axis=form == "layers"),
        )
        params, state = placed[0], pipe.init(wrapped, placed[0])

        @jax.jit
        def step(params: Any, state: Any, grads: Any, rule: Any = wrapped) -> Any:
            updates, state = rule.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for grads in placed[1:]:
            params, state = step(params, state, grads)
        assert step._cache_size() == 1
        wanted = canonical(form, plain["layers"], plain["last"])
        found = pipe.canonical(params)
        for key, tree in wanted.items():
            for a, b in zip(jax.tree.leaves(found[key]), jax.tree.leaves(tree), strict=True):
                # The same formula, in two programs; five Newton-Schulz steps of muon grow rounding
                # by some tens.
                np.testing.assert_allclose(
                    a, b, rtol=100 * FLOAT64, atol=100 * FLOAT64, err_msg=f"{form} {key}"
                )


def test_a_rule_that_spans_parameters_stands_outside(pipes: dict[str, jp.Pipeline]) -> None:
    pipe = pipes["stage"]
    params = pipe.place(canonical("stage", layers(4, seed=0), outer(seed=0)))
    inside = jp.per_layer(pipe, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    with refused("the update of 'stages/norm' depends on the gradient of 'stages/w'"):
        inside.update(params, inside.init(params), params)


def test_without_the_view_the_same_rule_is_another(pipes: dict[str, jp.Pipeline]) -> None:
    """What the wrapper is for: placed vectors of scales look like matrices."""
    pipe = pipes["stage"]
    params = pipe.place(canonical("stage", layers(4, seed=0), outer(seed=0)))
    assert jax.tree.leaves(matrices(params["stages"])) == [True, True]


@pytest.mark.parametrize("rule", ["muon", "adafactor"])
def test_devices_run_a_rule_on_layers_that_the_partitioner_splits(rule: str) -> None:
    """Each device runs it on its own stage, whose layers are split over a tensor axis: what its
    neighbours along that axis exchange is the same on all of them.
    """
    mesh = jax.make_mesh((2, 2), ("pipe", "tensor"), devices=jax.devices()[:4])
    pipe = flat_pipeline(
        layers={"t": lambda p, x: x * p["norm"] @ p["w"], "L": lambda p, x, mb: jnp.mean(x)},
        layout="ttt|tL",
        schedule=jp.schedules.build("1f1b", devices=2, microbatches=2),
        mesh=mesh,
        specs={"stages": {"t": {"w": PartitionSpec(None, "tensor")}}},
    )
    own = [layers(4, seed=seed) for seed in range(3)]
    plain_rule = RULES[rule]()
    plain, state = own[0], plain_rule.init(own[0])
    for grads in own[1:]:
        updates, state = jax.jit(plain_rule.update)(grads, state, plain)
        plain = optax.apply_updates(plain, updates)
    params, *rest = (pipe.place({"stages": {"t": stack(each)}, "last": {}}) for each in own)
    optimizer = jp.per_layer(pipe, RULES[rule]())
    state, update = pipe.init(optimizer, params), jax.jit(optimizer.update)
    jp.inspect.check_collectives(update.lower(rest[0], state, params).compile(), mesh)
    for grads in rest:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    found = pipe.canonical(params)["stages"]["t"]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(stack(plain)), strict=True):
        # the tolerance of the rules above, for the same reason
        np.testing.assert_allclose(a, b, rtol=100 * FLOAT64, atol=100 * FLOAT64)
