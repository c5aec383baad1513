"""The record of a step that is traced and lowered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..program.ir import Program
from ..stage.codes import ModelCode
from ..stage.setup import Setup
from .pools import Buffers, StageEntries, shared_buffers


@dataclass(frozen=True)
class TracedStep:
    """A step that is traced and lowered.

    Attributes:
        setup: what is known of it besides arrays.
        code: the code of the model's functions.
        program: the table with its ticks and slots, verified.
        entries: the entries of pools, by kind of stage.
        function: the `jax.stages.Traced` step of (params, batch), and `rng` and `state` where they
            are given.
    """

    setup: Setup
    code: ModelCode
    program: Program
    entries: tuple[StageEntries, ...]
    function: Any = None

    @property
    def buffers(self) -> Buffers:
        """The buffers of pools and transfers."""
        return shared_buffers(self.code.kinds, self.entries, self.code.outer_pools)
