"""Gathers and reductions of a step run beside matmuls, and nothing that is gathered is copied."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe as jp
from jaxpipe.inspect.hlo import Compute
from jaxpipe.inspect.programs import GpuProgram, compile_and_read
from jaxpipe.transforms import Reduce
from tests.gpu.programs import gpu_marks, gpu_mesh

pytestmark = gpu_marks()
DEVICES, SHARDS, CHUNKS, MICROBATCHES, TIME = 2, 4, 3, 4, 512
WIDTH, HIDDEN = 544, 1312  # of no other array


def stage(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["up"].astype(x.dtype))
    return x + hidden @ params["down"].astype(x.dtype)


def last(_: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean(jnp.square(x - microbatch["y"]).astype(jnp.float32))


@cache
def program(max_active: int | None) -> GpuProgram:
    plain = jp.schedules.build(
        "interleaved_1f1b", devices=DEVICES, microbatches=MICROBATCHES, chunks=CHUNKS
    )
    schedule = jp.add_gathers(plain, max_active=max_active, reduce=Reduce.EACH_RUN)
    mesh = gpu_mesh((DEVICES, SHARDS), ("pipe", "data"))
    sharding = jp.Sharding(data="data", fsdp="data")
    pipe = jp.Pipeline(jp.Model(stage, last=last), schedule, mesh, sharding=sharding)
    count = DEVICES * CHUNKS
    shapes = {"up": (count, WIDTH, HIDDEN), "down": (count, HIDDEN, WIDTH)}
    stages = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rows = jax.ShapeDtypeStruct((MICROBATCHES * SHARDS, TIME, WIDTH), jnp.bfloat16)
    params = pipe.place({"stages": stages, "last": {}})
    return compile_and_read(pipe.lower(params, {"x": rows, "y": rows}))


def test_matmuls_are_between_the_start_and_the_end_of_gathers_and_reductions() -> None:
    found = program(2).collectives
    for kind, least in (("all-gather", 3 / 4), ("reduce-scatter", 1 / 2)):
        own = [each.compute is Compute.MATMUL for each in found if each.kind == kind]
        assert np.mean(own) >= least, (kind, own)
    once = [each for each in program(None).collectives if each.kind == "all-gather"]
    assert not any(each.overlapped for each in once), "before the first tick there is no matmul"


def test_no_whole_parameter_and_no_whole_gradient_is_copied() -> None:
    computations = program(2).module.computations
    instructions = [i for own in computations.values() for i in own.instructions]
    by_name = {i.name: i for i in instructions}
    whole = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    copies = [
        i
        for i in instructions
        if i.opcode == "copy"
        and tuple(d for d in i.results[0].dims if d > 1) in whole
        and by_name[i.operands[0]].opcode not in ("broadcast", "constant")  # what is empty at first
    ]
    assert copies == []
