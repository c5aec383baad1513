"""An overlapped pair is one loop over layers: the collectives of either half run beside matmuls of
the other.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.moves import Move, large_moves
from jaxpipe.inspect.hlo import Collective, Compute
from jaxpipe.inspect.programs import GpuProgram, compile_and_read
from tests.flat import flat_pipeline
from tests.gpu.programs import gpu_marks, gpu_mesh
from tests.tiers import exhaustive, slow

pytestmark = gpu_marks()
WIDTH, HIDDEN, ROWS, LAYERS, MICROBATCHES = 512, 1408, 2048, 2, 8


def normed(x: Any, scale: Any) -> Any:
    """The root mean square norm in float32.  The forward keeps x at once; the backward reads it
    late in its layer, in several kernels.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def routed(params: dict[str, Any], x: Any) -> Any:
    """Layers whose tokens go to the expert axis's devices and come back."""

    def layer(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
        sent = jax.lax.all_to_all(normed(x, p["scale"]) @ p["to"], "expert", 0, 0, tiled=True)
        back = jax.lax.all_to_all(jnp.tanh(sent @ p["up"]) @ p["down"], "expert", 0, 0, tiled=True)
        return x + back @ p["from"], None

    return jax.lax.scan(layer, x, params)[0]


def split(params: dict[str, Any], x: Any) -> Any:
    """Layers whose hidden units the partitioner splits over the tensor axis."""

    def layer(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
        for _ in range(2):
            x = x + jax.lax.with_sharding_constraint(
                jnp.tanh(x @ p["up"]) @ p["down"], PartitionSpec(None, None)
            )
        return x, None

    return jax.lax.scan(layer, x, params)[0]


def scattered(params: dict[str, Any], x: Any) -> Any:
    """The same, and between the layers x is split by rows over the tensor axis (sequence
    parallelism).
    """
    place = jax.lax.with_sharding_constraint

    def layer(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
        for _ in range(2):
            hidden = jnp.tanh(place(x, PartitionSpec(None, None)) @ p["up"])
            x = place(x + hidden @ p["down"], PartitionSpec("tensor", None))
        return x, None

    return jax.lax.scan(layer, x, params)[0]


def program(name: str, stage: Any, **axes: Any) -> GpuProgram:
    schedule = jp.schedules.build(name, devices=2, microbatches=MICROBATCHES)
    second = "expert" if "data_axes" in axes else "tensor"
    mesh = gpu_mesh((2, 2), ("pipe", second))
    shapes = {
        "to": (WIDTH, WIDTH),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "from": (WIDTH, WIDTH),
        "scale": (WIDTH,),
    }
    stages = {
        k: jax.ShapeDtypeStruct((schedule.num_stages, LAYERS, *dims), jnp.bfloat16)
        for k, dims in shapes.items()
    }
    pipe = flat_pipeline(
        stage,
        schedule=schedule,
        mesh=mesh,
        last=lambda p, x, mb: jnp.mean(jnp.square(x.astype(jnp.float32))),
        **axes,
    )
    shards = 2 if "data_axes" in axes else 1
    spec = PartitionSpec("expert") if shards == 2 else PartitionSpec()
    rows = jax.ShapeDtypeStruct(
        (MICROBATCHES * ROWS * shards, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    return compile_and_read(pipe.lower(pipe.place({"stages": stages, "last": {}}), {"x": rows}))


def of_pairs(found: GpuProgram, *kinds: str) -> list[Collective]:
    """Collectives of these kinds in the loops over layers of pairs: those with most of them."""
    loops: dict[str, list[Collective]] = {}
    for each in found.collectives:
        if each.kind in kinds and len(each.place.frames) > 2:
            loops.setdefault(each.place.frames[2].instruction.name, []).append(each)
    most = max(map(len, loops.values()))
    return [each for those in loops.values() if len(those) == most for each in those]


def check(found: GpuProgram, collectives: list[Collective]) -> None:
    assert 4 * sum(each.compute is Compute.MATMUL for each in collectives) >= 3 * len(collectives)
    assert made_again(found, over=2 * ROWS * WIDTH) == []


def made_again(found: GpuProgram, *, over: int) -> list[str]:
    """Arrays of more bytes that a loop carries, such as pools, and that are made again in it."""
    kinds = (Move.COPY, Move.TRANSPOSE, Move.FILL)
    looped = [
        each for each in large_moves(found.module) if each.place.in_loop and each.move in kinds
    ]
    return [str(each) for each in looped if each.is_carried and each.nbytes > over]


@pytest.mark.parametrize("name", ["1f1b_overlap", slow("dualpipev"), exhaustive("dualpipe")])
def test_all_to_alls_of_experts_run_beside_matmuls(name: str) -> None:
    found = program(name, routed, data_axes=("expert",))
    collectives = of_pairs(found, "all-to-all")
    assert len(collectives) >= 4
    check(found, collectives)


@pytest.mark.parametrize(
    ("name", "stage", "least"),
    [
        slow("1f1b_overlap", split, 3),
        exhaustive("dualpipev", split, 3),
        slow("1f1b_overlap", scattered, 8),
    ],
)
def test_collectives_of_the_tensor_axis_run_beside_matmuls(
    name: str, stage: Any, least: int
) -> None:
    """Each by itself: one that is made one with another, of the other half, has nothing left to run
    beside.
    """
    specs = {
        "stages": {"up": PartitionSpec(None, None, "tensor"), "down": PartitionSpec(None, "tensor")}
    }
    found = program(name, stage, specs=specs)
    collectives = of_pairs(found, "all-reduce", "reduce-scatter", "all-gather")
    assert len(collectives) >= least
    check(found, collectives)


def test_a_forward_alone_covers_nothing() -> None:
    """The measure can fail: in a loop of a forward alone each all-to-all waits for the matmul
    before it, and the next for it.
    """
    found = program("1f1b", routed, data_axes=("expert",))
    loops: dict[str, list[Collective]] = {}
    for each in found.collectives:
        if each.kind == "all-to-all":
            loops.setdefault(each.place.frames[-1].instruction.name, []).append(each)
    assert any(
        all(each.compute is not Compute.MATMUL for each in those) for those in loops.values()
    )
