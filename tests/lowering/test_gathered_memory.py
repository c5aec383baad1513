"""The memory of plans whose stages take turns in being whole, against the traced and the compiled
step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxpipe as jp
from jaxpipe.planner import Plans
from tests.tiers import slow

WIDTH, HIDDEN, ROWS, M, CHUNKS = 256, 1024, 32, 8, 4
SHARDED = jp.Sharding(data="data", fsdp="data")
STAGE = 4 * 2 * WIDTH * HIDDEN  # bytes of whole parameters
MODEL = jp.Model(
    {
        "E": lambda w, microbatch: microbatch["x"] @ w,
        "t": lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
        "L": lambda w, x, microbatch: jnp.mean(jnp.square(x @ w)),
    },
    layers=f"Et*{2 * CHUNKS},L",
)


def shapes(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS: dict[str, Any] = {
    "first": shapes(WIDTH, WIDTH),
    "stages": {"t": {"up": shapes(8, WIDTH, HIDDEN), "down": shapes(8, HIDDEN, WIDTH)}},
    "last": shapes(WIDTH, WIDTH),
}


def mesh(pipe: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: 2 * pipe]).reshape(pipe, 2), ("pipe", "data"))


@cache
def plans() -> Plans:
    costs = jp.measure(
        MODEL,
        PARAMS,
        {"x": shapes(ROWS, WIDTH)},
        mesh=mesh(1),
        sharding=SHARDED,
        peak=jp.measuring.Peak(flops=1e12, bandwidth=1e30),
    )
    assert costs["t"].parameters == STAGE / 2
    return jp.plan(
        MODEL,
        costs,
        devices=2,
        microbatches=M,
        chunks=(CHUNKS,),
        schedules="interleaved_1f1b",
        remat=(None,),
        mesh=mesh(2),
        fsdp={"data": 2},
    )


@pytest.mark.parametrize("most", [None, 1, slow(2)])
def test_memory_is_that_of_the_program(most: int | None) -> None:
    (plan,) = (p for p in plans() if p.max_active == most)
    pipe = plan.pipeline(MODEL, mesh(2))
    params, rows = pipe.place(PARAMS), {"x": shapes(M * 2 * ROWS, WIDTH)}
    traced, parts = jp.inspect.memory(pipe, params, rows), plan.parts
    ends = 2 * 2 * 4 * WIDTH * WIDTH
    assert traced["gathered"] == parts.gathered == 2 * STAGE * (most or CHUNKS) + ends
    assert traced["accumulators"] == parts.accumulators == (CHUNKS * STAGE / 2 if most else 0)
    for name in ("parameters", "gradients", "batch"):
        assert traced[name] == getattr(parts, name)
    compiled = pipe.lower(params, rows).compile().memory_analysis()
    own = ("argument", "output", "temp")
    total = sum(getattr(compiled, f"{name}_size_in_bytes") for name in own)
    # XLA on CPUs gives results the room of an accumulator, or copies one before it is reduced: of
    # one stage at a time in each room.
    room = (most or 1) * STAGE
    assert abs(traced["total"] - total) < room
    assert abs(parts.total - parts.optimizer - total) < room


def test_experts_of_the_fsdp_axis_are_measured_apart() -> None:
    """Each device has one of two `own`, which nobody gathers, and half of `up`."""
    model = jp.Model(
        {
            "t": lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["own"][0],
            "L": lambda w, x, microbatch: jnp.mean(jnp.square(x @ w)),
        },
        layers="ttL",
    )
    stages = {"up": shapes(2, WIDTH, HIDDEN), "own": shapes(2, 2, HIDDEN, WIDTH)}
    costs = jp.measure(
        model,
        {"stages": {"t": stages}, "last": shapes(WIDTH, WIDTH)},
        {"x": shapes(ROWS, WIDTH)},
        mesh=mesh(1),
        sharding=jp.Sharding(
            data="data",
            fsdp="data",
            local="data",
            specs={"stages": {"t": {"own": PartitionSpec("data")}}},
        ),
        peak=jp.measuring.Peak(flops=1e12, bandwidth=1e30),
    )
    assert costs["t"].local == STAGE / 2
    assert costs["t"].parameters == STAGE / 2 + STAGE / 4
    assert costs["L"].local == 0
