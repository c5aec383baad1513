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
    """Compile what `pipe.lower(...)` or `jax.jit(f).lower(...)` returns, with XLA options besides its own.

    XLA writes its thunks into a temporary folder; nothing is run.
    """
    with tempfile.TemporaryDirectory() as name:
        dumps = {"xla_dump_to": name, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options={**(options or {}), **dumps})
        folder = Path(name)
        memory = read_memory(compiled, only(folder, "*-memory-usage-report.txt"))
        return GpuProgram(parse(compiled.as_text()), read_graph_nodes(folder), memory)
