"""Compile a step, and read all that the readers of this package find in it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .collectives import Collective, find_collectives
from .copies import LargeMove, large_moves
from .hlo import Module, parse
from .memory import Memory, read_memory
from .thunks import only, read_graph_nodes
from .waits import Predicate, find_predicates


@dataclass(frozen=True)
class GpuProgram:
    """A program compiled for GPUs, read from its text and its thunks."""

    module: Module
    graph_nodes: frozenset[str]  # loops and conditionals that run in CUDA graphs
    memory: Memory

    @cached_property
    def predicates(self) -> tuple[Predicate, ...]:
        """See `waits`."""
        return find_predicates(self.module, self.graph_nodes)

    @cached_property
    def large_moves(self) -> list[LargeMove]:
        """See `copies`."""
        return large_moves(self.module)

    @cached_property
    def collectives(self) -> list[Collective]:
        """See `collectives`."""
        return find_collectives(self.module)


def compile_and_read(lowered: Any, options: Mapping[str, Any] | None = None) -> GpuProgram:
    """Compile what `pipe.lower(...)` or `jax.jit(f).lower(...)` returns, with XLA options besides
    its own.

    XLA writes its thunks into a temporary folder; nothing is run.

    Raises:
        ValueError: it has not written them (no GPU program, or a compilation cache has answered).
    """
    with tempfile.TemporaryDirectory() as name:
        return _read(_compile(lowered, options, name), Path(name))


def compile_and_try_to_read(lowered: Any) -> tuple[Any, GpuProgram | None]:
    """The compiled program, and what is read in it; None where it is none for GPUs, or where XLA
    has not written its thunks.
    """
    with tempfile.TemporaryDirectory() as name:
        compiled = _compile(lowered, None, name)
        try:
            return compiled, _read(compiled, Path(name))
        except ValueError:
            return compiled, None


def _compile(lowered: Any, options: Mapping[str, Any] | None, folder: str) -> Any:
    return lowered.compile(
        compiler_options={**(options or {}), "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    )


def _read(compiled: Any, folder: Path) -> GpuProgram:
    memory = read_memory(compiled, only(folder, "*-memory-usage-report.txt"))
    return GpuProgram(parse(compiled.as_text()), read_graph_nodes(folder), memory)
