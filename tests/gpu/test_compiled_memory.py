"""The memory of a program that is read is XLA's own figure for one device, and a device allocates
no more than its part."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from benchmarks.gpu_programs import SHAPE, Axes, Case, Remat
from benchmarks.llama import parameters
from jaxpipe.inspect.blocks import stage_blocks
from jaxpipe.inspect.programs import compile_and_read
from jaxpipe.inspect.step_memory import temp
from tests.gpu.programs import gpu_mesh, lower_for_gpu, needs_gpu_compiler


@needs_gpu_compiler
def test_sizes_are_those_of_a_device() -> None:
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    program = compile_and_read(lower_for_gpu(lambda x, y: jnp.sin(x @ y) @ y @ x, x, x))
    memory, matrix = program.memory, 4 * 2**20
    assert memory.argument_size_in_bytes == 2 * matrix
    assert (memory.output_size_in_bytes, memory.alias_size_in_bytes) == (matrix, 0)
    # At least one product lies there while the next is made of it.
    assert memory.temp_size_in_bytes >= matrix
    assert program.total_bytes == memory.temp_size_in_bytes + 3 * matrix


@needs_gpu_compiler
def test_each_device_allocates_its_part_of_a_pool() -> None:
    """The partitioner gives every device all of an array that nothing fills."""
    case = Case("1f1b", devices=2, microbatches=4, axes=Axes.TENSOR, remat=Remat.NOTHING, layers=1)
    pipe, params, rows = case.arguments(gpu_mesh)
    module = compile_and_read(pipe.lower(params, rows)).module
    every = [each for own in module.computations.values() for each in own.instructions]
    assert [each.name for each in every if each.target == "AllocateBuffer"] == []


@needs_gpu_compiler
def test_weights_that_are_cast_are_split_as_those_that_are_not() -> None:
    """A forward alone needs the same room, whether its bfloat16 weights are cast before it."""
    case = Case(
        "1f1b", devices=2, microbatches=4, axes=Axes.TENSOR, remat=Remat.LAYER, layers=1, other=4
    )
    case = replace(case, shape=replace(SHAPE, heads=8, kv_heads=4, hidden=2048, time=512))
    pipe, _, rows = case.arguments(gpu_mesh)
    found = set[int]()
    for dtype in (jnp.bfloat16, jnp.float32):
        shapes = parameters(replace(case.shape, layers=2), 2, dtype)
        step = pipe.trace(pipe.place(shapes), rows)
        found.add(temp(step, stage_blocks(step, 0)["F"]))
    assert len(found) == 1
