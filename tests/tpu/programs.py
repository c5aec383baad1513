"""TPU programs compiled on a machine without a TPU: libtpu describes the devices."""

from __future__ import annotations

import math
import os
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.gpu_programs import Case
from benchmarks.llama import Shape
from benchmarks.moves import LargeMove, Move, large_moves_on_tpus
from jaxpipe.inspect.programs import TpuProgram
from jaxpipe.lowering.target import Chip

V5P, V6E = "v5p:2x2x1", "v6e:2x2"  # hosts of four devices
# No metadata server is asked, and several processes load libtpu: they only compile.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Activations of 1 MiB; every array's last two dims are whole tiles, but for those of heads.
SHAPE = Shape(
    width=512, heads=4, kv_heads=2, head_dim=128, hidden=1024, vocab=2048, rows=2, time=512
)
ACTIVATION = 2 * SHAPE.rows * SHAPE.time * SHAPE.width


@cache
def _devices(topology: str) -> Any:
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    return np.array(topologies.get_topology_desc(topology, "tpu").devices)


def tpu_mesh(shape: tuple[int, ...], names: tuple[str, ...], topology: str = V5P) -> Mesh:
    """A mesh of the first of the TPUs that a topology describes."""
    return Mesh(_devices(topology)[: math.prod(shape)].reshape(shape), names)


@cache
def tpu_fault() -> str | None:
    """Why TPU programs cannot be compiled here, or None."""
    try:
        _devices(V5P)
    except Exception as error:  # whatever the missing library raises
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def needs_tpu_compiler(test: Any) -> Any:
    """Marks a test that compiles TPU programs: it is skipped where that is not possible."""
    fault = tpu_fault()
    why = (
        f"TPU programs cannot be compiled here ({fault}); install libtpu of the version that "
        "jax[tpu] names"
    )
    return pytest.mark.tpu_compile(pytest.mark.skipif(fault is not None, reason=why)(test))


def lower(case: Case, topology: str = V5P) -> Any:
    """The case's step, lowered for described TPUs."""
    pipe, params, rows = case.arguments(partial(tpu_mesh, topology=topology))
    return pipe.lower(params, rows)


def read(lowered: Any, topology: str = V5P) -> TpuProgram:
    """The compiled program."""
    return TpuProgram(lowered.compile(), Chip.of(tpu_mesh((1,), ("pipe",), topology)))


def made_again(program: TpuProgram) -> list[LargeMove]:
    """Whole arrays that a loop carries or reads, larger than what stages hand on, that it makes
    again.
    """
    moves = (each for each in large_moves_on_tpus(program.module) if each.place.in_loop)
    return [
        each
        for each in moves
        if each.is_carried and each.move is not Move.SLICE and each.nbytes > ACTIVATION
    ]


def copied_after(program: TpuProgram) -> list[LargeMove]:
    """Copies of accumulators outside the loops, to the layout of the step's results.  Rows that a
    gather makes are none.
    """
    return [
        each
        for each in large_moves_on_tpus(program.module)
        if not each.place.in_loop
        and each.move in (Move.COPY, Move.TRANSPOSE)
        and each.array.dtype == "f32"
        and not each.origin.endswith("/gather")
    ]


def check(program: TpuProgram) -> None:
    """No pool, accumulator or stack is made again in a loop, and no accumulator after it; permutes
    run beside compute, and under no predicate.
    """
    copied = [str(each) for each in (*made_again(program), *copied_after(program))]
    assert not copied, copied
    permutes = [each for each in program.collectives if each.kind == "collective-permute"]
    assert permutes
    assert [each.name for each in permutes if each.place.guarded] == []
