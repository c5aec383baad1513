"""Parameters of which each device of a data axis has its own part, and functions that exchange rows
by themselves.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxpipe as jp
from jaxpipe.debug import find_nonfinite
from tests.axes.model import mesh
from tests.axes.test_errors import raises
from tests.tiers import slow
from tests.tolerance import FLOAT64, relative

WIDTH, HIDDEN, EXPERTS, ROWS, M = 4, 6, 6, 16, 2


def routed(axis: str | None) -> Any:
    """A layer of experts: each device of the axis computes its own ones for all rows."""

    def layer(params: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ params["router"])
        rows = x if axis is None else lax.all_gather(x, axis, tiled=True)
        weights = gates if axis is None else lax.all_gather(gates, axis, tiled=True)
        own = len(params["up"])
        begin = 0 if axis is None else lax.axis_index(axis) * own
        weights = lax.dynamic_slice_in_dim(weights, begin, own, axis=1)
        hidden = jnp.tanh(jnp.einsum("nd,edf->nef", rows, params["up"]))
        found = jnp.einsum("nef,efd,ne->nd", hidden, params["down"], weights)
        if axis is not None:
            found = lax.psum_scatter(found, axis, tiled=True)
        return x + found

    return layer


def dense(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params["w"]) @ params["v"]


def last(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(x @ params["head"] - microbatch["y"]))


def model(axis: str | None, layers: str) -> jp.Model:
    own = {"d": dense, "t": routed(axis), "L": last}
    return jp.Model({key: own[key] for key in {*layers} - {"|"}}, layers=layers)


def canonical(layers: str) -> Any:
    rng = np.random.default_rng(0)
    count = layers.count("t")
    stages = {
        "t": {
            "router": rng.standard_normal((count, WIDTH, EXPERTS)),
            "up": rng.standard_normal((count, EXPERTS, WIDTH, HIDDEN)) / 2,
            "down": rng.standard_normal((count, EXPERTS, HIDDEN, WIDTH)) / 2,
        }
    }
    if "d" in layers:
        shapes = {"w": (1, WIDTH, 50), "v": (1, 50, WIDTH)}
        stages["d"] = {k: rng.standard_normal(shape) / 4 for k, shape in shapes.items()}
    return {"stages": stages, "last": {"head": rng.standard_normal((WIDTH, 3))}}


def batch(rows: int = ROWS) -> Any:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((rows, WIDTH)), "y": rng.standard_normal((rows, 3))}


SPLIT = PartitionSpec("expert")
SPECS = {"stages": {"t": {"up": SPLIT, "down": SPLIT}}}


def pipeline(name: str, layers: str, count: int = M, **sharding: Any) -> jp.Pipeline:
    given = {"data": ("data", "expert"), "local": "expert", "specs": SPECS} | sharding
    return jp.Pipeline(
        model("expert", layers),
        jp.schedules.build(name, devices=2, microbatches=count),
        mesh("pipe", "data", "expert"),
        layout=layers,
        sharding=jp.Sharding(**given),
    )


def compared(pipe: jp.Pipeline, layers: str, rows: Any) -> tuple[Any, Any]:
    """Placed parameters and gradients of a step; the step equals that of one device."""
    weights = canonical(layers)
    params = pipe.place(weights)
    loss, grads = pipe.value_and_grad(params, rows)
    plain = model(None, layers.replace("|", "")).loss
    wanted, wanted_grads = jax.value_and_grad(lambda p: plain(p, rows))(weights)
    assert relative(float(loss), float(wanted)) <= FLOAT64
    found = jax.device_get(pipe.canonical(grads))
    assert relative({k: found[k] for k in wanted_grads}, jax.device_get(wanted_grads)) <= FLOAT64
    return params, grads


@pytest.mark.parametrize(
    ("name", "layers", "fsdp"),
    [
        slow("1f1b", "tt|ttL", None),
        slow("1f1b_overlap", "dt|tttL", None),
        ("1f1b", "dt|tttL", "expert"),
        slow("1f1b", "dt|tttL", "data"),
        slow("dualpipe", "tt|ttL", "expert"),
        slow("zbv", "d|tt|t|tL", "expert"),
    ],
)
def test_loss_and_gradients_equal_one_device(name: str, layers: str, fsdp: str | None) -> None:
    pipe, rows = pipeline(name, layers, fsdp=fsdp), batch()
    params, grads = compared(pipe, layers, rows)
    assert find_nonfinite(pipe, params, rows) is None
    # and each device has its own part of the experts, and of the others what fsdp says
    axes = {
        str(leaf.sharding.spec)
        for leaf in jax.tree.leaves(params["stages"])
        if leaf.ndim > 3 and "expert" in str(leaf.sharding.spec)
    }
    assert axes, "no expert is split"
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)


def pairs_in(pipe: jp.Pipeline, layers: str, rows: int = ROWS) -> set[str]:
    """The names of the blocks that run two actions as one, by the program's text."""
    text = pipe.lower(pipe.place(canonical(layers)), batch(rows)).as_text(debug_info=True)
    return set(re.findall(r"F\.\d with [BW]\.\d", text))


def test_a_weight_gradient_hides_the_exchange_of_a_forward() -> None:
    """W and F of a tick are one block, where parts of experts say that the F communicates."""
    pipe = pipeline("zb_h1", "tt|ttL", count=8)
    assert pipe._target.communicates  # so the host decides predicates on GPUs
    assert pairs_in(pipe, "tt|ttL", rows=32) == {"F.0 with W.0"}
    compared(pipe, "tt|ttL", batch(32))


def test_pairs_of_unlike_stages_are_one_block() -> None:
    assert pairs_in(pipeline("1f1b_overlap", "dt|tttL"), "dt|tttL") == {"F.0 with B.0"}
    layers = "d|tt|t|tL"
    assert pairs_in(pipeline("dualpipev", layers, count=4), layers) >= {
        "F.0 with B.1",
        "F.1 with B.0",
    }


def test_a_rule_for_whole_layers_is_refused_where_stages_differ() -> None:
    with raises("per_layer takes arrays of unlike stages apart"):
        jp.per_layer(pipeline("1f1b", "dt|tttL"), optax.lamb(1e-3))


def test_a_nan_in_a_part_is_found_where_it_is() -> None:
    pipe, weights, rows = pipeline("1f1b", "tt|ttL"), canonical("tt|ttL"), batch()
    weights["stages"]["t"]["down"][2, 5] = np.nan
    found = find_nonfinite(pipe, pipe.place(weights), rows)
    assert found is not None
    assert (found.stage, found.microbatch) == (1, 0)
    # shard 0 has the first half of the experts, and got it from shard 1
    assert any("'down'" in text and "on data shard 1" in text for text in found.inputs), found


def test_local_axes_that_do_not_fit() -> None:
    with raises("local='expert' must be one of data=('data',)"):
        pipeline("1f1b", "tt|ttL", data=("data",))
    with raises("local='expert', but no spec splits a parameter over 'expert'"):
        pipeline("1f1b", "tt|ttL", specs=None)
    both = {"stages": {"t": {"up": PartitionSpec(("data", "expert"))}}}
    with raises("name one axis of local= by itself"):
        pipeline("1f1b", "tt|ttL", specs=both, local=("data", "expert")).place(canonical("tt|ttL"))
    with raises("dim 0 of shape (6, 4, 6) does not divide over 'expert', which has 4 devices"):
        jp.Pipeline(
            model("expert", "tt|ttL"),
            jp.schedules.build("1f1b", devices=2, microbatches=M),
            jax.make_mesh((2, 4), ("pipe", "expert")),
            layout="tt|ttL",
            sharding=jp.Sharding(data="expert", local="expert", specs=SPECS),
        ).place(canonical("tt|ttL"))
