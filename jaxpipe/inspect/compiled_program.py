"""The readings of a compiled program for any kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .collectives import Collective, find_collectives
from .hlo import Module
from .moves import LargeMove, large_moves


@dataclass(frozen=True)
class CompiledProgram:
    """A program that is read from its text."""

    module: Module
    memory: Any  # XLA's own figures for one device

    @property
    def total_bytes(self) -> int:
        """Peak bytes of the step on one device."""
        found = self.memory
        kept = found.argument_size_in_bytes + found.output_size_in_bytes
        return int(kept + found.temp_size_in_bytes - found.alias_size_in_bytes)

    @cached_property
    def large_moves(self) -> list[LargeMove]:
        """See `moves`."""
        return large_moves(self.module)

    @cached_property
    def collectives(self) -> list[Collective]:
        """See `collectives`."""
        return find_collectives(self.module)
