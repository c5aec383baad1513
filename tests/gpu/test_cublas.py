"""On a GPU, autotuning gives many matmuls to cuBLAS; without one, XLA gives all to Triton.  The
claims hold for both.
"""

from __future__ import annotations

import pytest

import jaxpipe as jp
from benchmarks.gpu_programs import SHAPE, Case
from benchmarks.moves import Move, large_moves
from jaxpipe.inspect.hlo import steady
from jaxpipe.inspect.programs import GpuProgram, compile_and_read, count_waits
from jaxpipe.spmd import xla
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler

CUBLAS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
MERGED = {"xla_gpu_dot_merger_threshold_mb": "64"}


def moved(program: GpuProgram) -> int:
    """Bytes of what loops make again, a step."""
    moves = [each for each in large_moves(program.module) if each.place.in_loop]
    return sum(each.nbytes_a_step for each in moves if each.move is not Move.SLICE)


@needs_gpu_compiler
@pytest.mark.slow
def test_matmuls_of_either_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, params, rows = Case("1f1b", devices=4, microbatches=8).arguments(gpu_mesh)
    step = pipe.lower(params, rows)
    triton, cublas = compile_and_read(step), compile_and_read(step, CUBLAS)
    calls = {
        each.target
        for computation in cublas.module.computations.values()
        for each in computation.instructions
        if each.opcode == "custom-call"
    }
    assert any("cublas" in name for name in calls), calls
    for program in (triton, cublas):
        assert count_waits(program.predicates, taken=True) == 0
        assert all(each.overlapped for each in steady(program.collectives))
    predicted = jp.inspect.memory(pipe, params, rows)["total"]
    assert predicted == pytest.approx(triton.total_bytes, rel=0.02)
    assert moved(cublas) < 1.6 * moved(triton)
    # XLA would merge the matmuls of the gate and the hidden layer, and write their operands.
    assert moved(compile_and_read(step, CUBLAS | MERGED)) > 1.8 * moved(cublas)
    # Blocks that are compiled with calls of cuBLAS have its workspaces.  In B alone XLA fuses what
    # makes the scores of one layer again with their gradient, so that one array of scores more is
    # alive than in the step.
    chosen = xla.options_for
    monkeypatch.setattr(xla, "options_for", lambda target: chosen(target) | CUBLAS)
    predicted = jp.inspect.memory(pipe, params, rows)["total"]
    scores = 2 * SHAPE.heads * SHAPE.time**2
    assert 0.98 * cublas.total_bytes <= predicted <= 1.02 * cublas.total_bytes + scores
