"""In the GPU program of slices, rows are written into buffers in place, and no buffer is copied."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe.inspect.gpu_program import compile_and_read
from jaxpipe.inspect.moves import Move
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler

WIDTH, TIME, SLICES, SEQUENCES = 1024, 2048, 4, 4


def attention(params: Any, x: Any, *, ctx: Any) -> Any:
    keys = ctx.append("keys", x @ params["k"])
    at = ctx.offset + jnp.arange(x.shape[1])
    seen = at[:, None] >= jnp.arange(keys.shape[1])
    scores = jnp.where(seen, jnp.einsum("rtd,rsd->rts", x @ params["q"], keys), -1e30)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return x + jnp.einsum("rts,rsd->rtd", weights, keys)


@pytest.mark.slow
@needs_gpu_compiler
def test_rows_are_appended_in_place() -> None:
    """A reader takes its sequence's buffer out of the pool, as readers of residuals do; nothing
    copies a pool, or a buffer on its way into one.
    """
    model = jp.Model(
        attention, last=lambda p, x, mb: jnp.mean(x.astype(jnp.float32) ** 2), time=("x",)
    )
    schedule = jp.schedules.build("1f1b", devices=2, microbatches=SEQUENCES * SLICES, slices=SLICES)
    mesh = gpu_mesh((2,), ("pipe",))
    pipe = jp.Pipeline(model, schedule, mesh)
    matrix = jax.ShapeDtypeStruct((2, WIDTH, WIDTH), jnp.bfloat16)
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = {"x": jax.ShapeDtypeStruct((SEQUENCES, TIME, WIDTH), jnp.bfloat16, sharding=everywhere)}
    params = pipe.place({"stages": {"q": matrix, "k": matrix}, "last": {}})
    moves = compile_and_read(pipe.lower(params, batch)).large_moves
    large = [m for m in moves if m.place.in_loop and math.prod(m.array.dims) >= TIME * WIDTH]
    assert large, "readers take buffers out of the pool"
    assert {m.move for m in large} == {Move.SLICE}
    assert {math.prod(m.array.dims) for m in large} == {TIME * WIDTH}, "never a pool of two slots"
