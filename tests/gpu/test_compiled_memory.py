"""The reader of memory gives XLA's own numbers, and its largest buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpipe.inspect.gpu_program import Buffer, compile_and_read, largest_buffers
from tests.gpu.programs import lower_for_gpu, needs_gpu_compiler

REPORT = """Memory Space: default (color=0)
Total bytes: 5641384 (5.38MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   132.0KiB( 72%);   132.0KiB;      3039232;                5; 5×bf16[2,96,352]
    1.72MiB( 38%);    1.50MiB;            0;               18; 2×f32[104480], 16×bf16[8,2,2,40,352]
    4.46MiB(100%);       320B;      3616256;                1; f32[2,40]
  The rest 13 values are less than 5% of the total size and not shown.
"""


def test_buffers_are_read_from_the_report() -> None:
    assert largest_buffers(REPORT) == (
        Buffer(3 * 2**19, 0, "2×f32[104480], 16×bf16[8,2,2,40,352]"),
        Buffer(132 * 2**10, 3039232, "5×bf16[2,96,352]"),
        Buffer(320, 3616256, "f32[2,40]"),
    )


@needs_gpu_compiler
def test_sizes_are_those_of_a_device() -> None:
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    memory = compile_and_read(lower_for_gpu(lambda x, y: jnp.sin(x @ y) @ y @ x, x, x)).memory
    matrix = 4 * 2**20
    assert (memory.arguments, memory.outputs, memory.aliased) == (2 * matrix, matrix, 0)
    # At least one product lies there while the next is made of it.
    assert memory.temp >= matrix
    assert memory.total == memory.temp + 3 * matrix
    assert memory.largest[0].nbytes >= matrix
