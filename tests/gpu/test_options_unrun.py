"""How the partitioner splits what stages store is asked of programs that are compiled without
optimisation.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu_programs import Axes, Case
from jaxpipe.spmd import entries
from jaxpipe.table.effects import Place
from tests.gpu.programs import gpu_mesh, needs_gpu_compiler


@needs_gpu_compiler
@pytest.mark.slow
def test_the_answer_is_that_of_the_optimised_program(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("1f1b", devices=2, microbatches=4, axes=Axes.TENSOR)

    def found_entries() -> tuple[entries.StageEntries, ...]:
        pipe, params, rows = case.arguments(gpu_mesh)
        return pipe.trace(params, rows).entries

    found = found_entries()
    assert any(entry.parts for kind in found for entry in kind.stored[Place.RESIDUAL_INPUT])
    calls: list[bool] = []
    monkeypatch.setattr(entries, "options_unrun", lambda _: calls.append(True) or {})
    assert found_entries() == found
    assert calls
