"""The memory of a program that is read is XLA's own figure for one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpipe.inspect.programs import compile_and_read
from tests.gpu.programs import lower_for_gpu, needs_gpu_compiler


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
