"""Gathers and reductions of a step in TPU programs: one stage is whole at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jaxpipe as jp
from jaxpipe.inspect.programs import TpuProgram
from tests.gpu.test_gathers import last, stage
from tests.tpu.programs import needs_tpu_compiler, read, tpu_mesh

EIGHT = "v5p:2x2x2"
WIDTH, HIDDEN, ROWS, CHUNKS = 1024, 4096, 256, 4


def program(max_active: int | None) -> TpuProgram:
    schedule = jp.schedules.build("looped_bfs", devices=2, microbatches=4, chunks=CHUNKS)
    sharding = jp.Sharding(data="data", fsdp="data", max_active=max_active)
    mesh = tpu_mesh((2, 4), ("pipe", "data"), EIGHT)
    pipe = jp.Pipeline(jp.Model(stage, last=last), schedule, mesh, sharding=sharding)
    shapes = {"up": (2 * CHUNKS, WIDTH, HIDDEN), "down": (2 * CHUNKS, HIDDEN, WIDTH)}
    stages = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rows = jax.ShapeDtypeStruct((16, ROWS, WIDTH), jnp.bfloat16)
    params: Any = pipe.place({"stages": stages, "last": {}})
    return read(pipe.lower(params, {"x": rows, "y": rows}), EIGHT)


@needs_tpu_compiler
def test_a_device_holds_one_whole_stage() -> None:
    """A stage has 32 MiB of parameters, and as many of gradients."""
    once, often = program(None), program(1)
    saved = once.memory.temp_size_in_bytes - often.memory.temp_size_in_bytes
    assert saved > 3 * 32 * 2**20
    gathers = [each for each in often.collectives if each.kind == "all-gather"]
    assert gathers
    assert all(each.place.in_loop for each in gathers)
