"""Blocks with convolutions are nodes of CUDA graphs too: the host waits for none of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from jaxpipe.inspect.programs import compile_and_read, count_waits
from tests.gpu.programs import gpu_mesh, lower_for_gpu, needs_gpu_compiler
from tests.tiers import slow

CHANNELS, ROWS, SIZE, CLASSES, MICROBATCHES = 32, 4, 16, 10, 4
GRAPHS = "xla_gpu_enable_command_buffer"


def convolve(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def first(params: Any, microbatch: Any) -> Any:
    return convolve(microbatch["images"].astype(jnp.bfloat16), params["stem"])


def stage(params: Any, x: Any) -> Any:
    return x + convolve(jax.nn.silu(convolve(x, params["a"])), params["b"])


def last(params: Any, x: Any, microbatch: Any) -> Any:
    logits = jnp.mean(x, (1, 2)).astype(jnp.float32) @ params["head"]
    return jnp.mean(jnp.square(logits - microbatch["targets"]))


def lowered(name: str) -> tuple[jp.Pipeline, Any]:
    schedule = jp.schedules.build(name, devices=2, microbatches=MICROBATCHES)
    mesh = gpu_mesh((2,), ("pipe",))
    pipe = jp.Pipeline(jp.Model(stage, first=first, last=last), schedule, mesh)

    def shape(*dims: int, sharding: Any = None) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)

    kernels = shape(schedule.num_stages, 3, 3, CHANNELS, CHANNELS)
    params = {
        "first": {"stem": shape(3, 3, 3, CHANNELS)},
        "stages": {"a": kernels, "b": kernels},
        "last": {"head": shape(CHANNELS, CLASSES)},
    }
    rows, everywhere = MICROBATCHES * ROWS, NamedSharding(mesh, PartitionSpec())
    batch = {
        "images": shape(rows, SIZE, SIZE, 3, sharding=everywhere),
        "targets": shape(rows, CLASSES, sharding=everywhere),
    }
    return pipe, pipe.lower(pipe.place(params), batch)


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["1f1b", slow("zb_h1")])
def test_the_host_waits_for_no_block(name: str) -> None:
    pipe, step = lowered(name)
    found = compile_and_read(step)
    assert found.predicates
    assert count_waits(found.predicates, taken=True) == 0
    # Convolutions are a type of command of their own.
    kinds = str(pipe.compiler_options[GRAPHS]).split(",")
    without = ",".join(kind for kind in kinds if kind != "CONVOLUTION")
    apart = compile_and_read(step, {GRAPHS: without})
    assert count_waits(apart.predicates, taken=True) > 0
    assert apart.total_bytes == found.total_bytes


@needs_gpu_compiler
def test_every_type_of_command_is_in_the_list() -> None:
    """XLA's sources name one more; this XLA knows it no longer, or not yet."""
    step = lower_for_gpu(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid enum value"):
        step.compile(compiler_options={GRAPHS: "DYNAMIC_SLICE_COPY_FUSION"})
