"""The form of blocks that GPUs run gives the numbers of the plain function, on CPUs too: layers one
after the other with arrays of their own, functions computed again, pools that begin with NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from tests.forms import gpu_form
from tests.parity.engines import mesh_of
from tests.tiers import by_actions
from tests.tolerance import FLOAT64

WIDTH, ROWS, MICROBATCHES = 6, 2, 4
EARLY = ("1f1b", "zbv")
TABLES = [*EARLY, *(by_actions(name) for name in jp.schedules.names() if name not in EARLY)]


def layer(w: Any, x: Any) -> Any:
    gate = jax.nn.silu(x @ w["gate"]) * jnp.tanh(x @ w["up"])
    return x + w["scale"] * (gate @ w["down"])


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, row: (layer(row, x), None), x, w)[0]


def indexed(w: Any, x: Any) -> Any:
    """Layers by static numbers of a stack that is cast whole."""
    w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
    for i in range(w["scale"].shape[0]):
        x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], w), x)
    return x


def nested(w: Any, x: Any) -> Any:
    """A scan under remat whose results a second scan reads, backwards, and a value that something
    else reads too.
    """

    def stacked(x: Any) -> Any:
        return jax.lax.scan(lambda x, row: (layer(row, x), jnp.tanh(x)), x, w)

    x, seen = jax.checkpoint(stacked)(x)
    x = jax.lax.scan(
        lambda x, row: (x + row[0] * row[1]["scale"], None), x, (seen, w), reverse=True
    )[0]
    return x * jnp.mean(w["up"])


def last(w: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((x @ w - microbatch["t"]) ** 2)


def stacks(*leading: int) -> Any:
    draw = np.random.default_rng(3).standard_normal
    shape = (*leading, WIDTH, WIDTH)
    return {name: 0.4 * draw(shape) for name in ("gate", "up", "down")} | {
        "scale": draw((*leading, WIDTH))
    }


def check(model: jp.Model, schedule: jp.Schedule, stages: Any, mesh: Any = None, **options: Any):
    draw = np.random.default_rng(4).standard_normal
    rows = ROWS * schedule.num_microbatches
    batch = {"x": draw((rows, WIDTH)), "t": draw((rows, 3))}
    params = {"stages": stages, "last": draw((WIDTH, 3))}
    mesh = mesh_of(schedule.num_devices) if mesh is None else mesh
    pipe = jp.Pipeline(model, schedule, mesh, **{"executor": gpu_form(), **options})
    loss, grads = pipe.value_and_grad(pipe.place(params), batch)
    want, expected = jax.jit(jax.value_and_grad(model.loss))(params, batch)
    np.testing.assert_allclose(loss, want, rtol=FLOAT64)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=FLOAT64 * scale),
        pipe.canonical(grads),
        expected,
    )
    return pipe, params, batch, want


@pytest.mark.parametrize("name", TABLES)
def test_layers_of_a_scan(name):
    devices = 4 if name == "dualpipe" else 2
    schedule = jp.schedules.build(name, devices=devices, microbatches=2 * devices)
    pipe, params, batch, want = check(
        jp.Model(scanned, last=last), schedule, stacks(schedule.num_stages, 3)
    )
    if name == EARLY[0]:
        np.testing.assert_allclose(pipe.evaluate(pipe.place(params), batch), want, rtol=FLOAT64)


def test_predicates_around_groups_of_slots():
    schedule = jp.schedules.build("gpipe", devices=2, microbatches=7)
    pipe, params, batch, _ = check(jp.Model(scanned, last=last), schedule, stacks(2, 2))
    program = pipe.trace(pipe.place(params), batch).program
    assert program.together
    assert program.slots.residual_weight == 7


@pytest.mark.parametrize("stage", [indexed, nested])
@pytest.mark.parametrize("table", ["1f1b", by_actions("zb_h1")])
def test_layers_in_other_ways(stage, table):
    schedule = jp.schedules.build(table, devices=2, microbatches=MICROBATCHES)
    check(jp.Model(stage, last=last), schedule, stacks(2, 3))


@pytest.mark.parametrize(
    ("table", "layout"), [("1f1b", "aab|abL"), by_actions("zbv", "ab|aaa|b|abbL")]
)
def test_layers_by_letters_of_unlike_stages(table, layout):
    """Stages of unlike letters share arrays, in which a layer is a part."""
    model = jp.Model({"a": layer, "b": layer, "L": last}, layers=layout)
    schedule = jp.schedules.build(table, devices=2, microbatches=MICROBATCHES)
    stages = {letter: stacks(layout.count(letter)) for letter in "ab"}
    check(model, schedule, stages, layout=layout)


@pytest.mark.parametrize("table", [by_actions("1f1b"), by_actions("zb_h1")])
@pytest.mark.parametrize("how", ["tensor", "fsdp", "full", "dots", "offload", "rows"])
def test_layers_with_other_settings(table, how):
    # Residuals wait for long only in GPipe.
    name = "gpipe" if how == "offload" else table
    schedule = jp.schedules.build(name, devices=2, microbatches=3 * MICROBATCHES)
    split = jax.sharding.PartitionSpec(None, "model")
    dots = jax.checkpoint_policies.dots_saveable
    options: dict[str, Any] = {
        "tensor": lambda: {
            "mesh": mesh_of(2, model=2),
            "sharding": jp.Sharding(specs={"stages": {"gate": split}}),
        },
        "fsdp": lambda: {
            "mesh": mesh_of(2, data=2),
            "sharding": jp.Sharding(data="data", fsdp="data"),
        },
        "full": lambda: {"memory": jp.Memory(remat="full")},
        "dots": lambda: {"memory": jp.Memory(remat=dots)},
        "offload": lambda: {"memory": jp.Memory(offload="residuals")},
        "rows": lambda: {"executor": gpu_form(apart=False)},
    }[how]()
    check(jp.Model(scanned, last=last), schedule, stacks(2, 3), **options)
