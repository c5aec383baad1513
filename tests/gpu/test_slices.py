"""In GPU programs of slices no buffer of appended rows is copied in the loop, nor their gradients,
nor a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.moves import LargeMove, Move, large_moves
from jaxpipe.inspect.programs import compile_and_read
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler
from tests.tiers import slow

TIME, WIDTH, STATE = 2048, 256, 384  # a buffer of 2 MiB


def stage(params: Any, x: Any, *, ctx: jp.Context, carry: Any) -> Any:
    """Attention to appended rows, and a carry that is as large as x."""
    keys, values = ctx.append("keys", x @ params["k"]), ctx.append("values", x @ params["v"])
    at = ctx.offset + jnp.arange(x.shape[1])
    seen = at[:, None] >= jnp.arange(keys.shape[1])
    scores = jnp.where(seen, jnp.einsum("rtd,rsd->rts", x @ params["q"], keys), -1e30)
    y = x + jnp.einsum("rts,rsd->rtd", jax.nn.softmax(scores), values)
    carry = jnp.tanh(carry @ params["a"] + jnp.swapaxes(y, 1, 2)[..., :STATE] @ params["b"])
    return y + jnp.mean(carry), carry


def loss(params: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((x @ params) ** 2) + 0 * jnp.mean(microbatch["x"])


def shape(*dims: int) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def pipeline(
    schedule: jp.Schedule, described: Callable[..., Any] = gpu_mesh
) -> tuple[jp.Pipeline, Any, Any]:
    """A pipeline of slices on described devices, its parameters and a batch."""
    mesh = described((schedule.num_devices,), ("pipe",))
    first = lambda params, x: jnp.zeros((x.shape[0], WIDTH, STATE), x.dtype)  # noqa: E731
    pipe = jp.Pipeline(jp.Model(stage, last=loss, time=("x",), carry=first), schedule, mesh)
    own = {name: shape(schedule.num_stages, WIDTH, WIDTH) for name in "qkv"}
    own |= {name: shape(schedule.num_stages, STATE, STATE) for name in "ab"}
    params = pipe.place({"stages": own, "last": shape(WIDTH, 3)})
    rows = jax.ShapeDtypeStruct(
        (schedule.num_microbatches // schedule.slices, TIME, WIDTH),
        jnp.float32,
        sharding=NamedSharding(mesh, PartitionSpec()),
    )
    return pipe, params, {"x": rows}


def carried(moves: list[LargeMove]) -> list[str]:
    """Moves of whole arrays that loops carry, in the loops."""
    return [
        f"{m.move} of {m.array} by {m.origin}"
        for m in moves
        if m.place.in_loop and m.is_carried and m.move is not Move.SLICE
    ]


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["1f1b", slow("zb_h1"), slow("interleaved_1f1b")])
def test_no_buffer_of_a_step_is_copied(name: str) -> None:
    schedule = jp.schedules.build(name, devices=2, microbatches=16, slices=4)
    pipe, params, batch = pipeline(schedule)
    assert carried(large_moves(compile_and_read(pipe.lower(params, batch)).module)) == []


@needs_gpu_compiler
@pytest.mark.parametrize("slices", [4, slow(1)])
def test_no_cache_is_copied(slices: int) -> None:
    shape = {"devices": 2, "microbatches": 4 * slices, "slices": slices}
    schedule = jp.schedules.build("gpipe", forward_only=True, **shape)
    pipe, params, batch = pipeline(schedule)
    cache = pipe.empty_cache(params, batch, length=TIME)
    call = pipe.jit(pipe.outputs, donate_argnames="cache")
    at = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = call.lower(params, batch, cache=cache, position=at)
    assert carried(large_moves(compile_and_read(lowered).module)) == []
