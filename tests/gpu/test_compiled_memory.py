"""The memory of a program that is read is XLA's own figure for one device, and a device allocates
no more than its part."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.gpu_programs import Axes, Case, Remat
from jaxpipe.inspect.programs import compile_and_read
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
