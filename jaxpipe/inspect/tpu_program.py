"""Read the text of a program compiled for TPUs: XLA's estimates of the time of a step, and the
padding of tiles.

Such a program can be compiled without a TPU: libtpu describes the devices
(`jax.experimental.topologies`).  A TPU decides on its predicates by itself, so no host waits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from typing import Any

from ..lowering.target import Chip
from .collectives import MATMULS, Collective, CompiledProgram, Compute, find_collectives
from .hlo import Instruction, Module, inner, walk

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# XLA issues a transfer as late as its estimates of other work let it, so that they hide little more
# than the transfer; 0.98 of it was seen.
_HIDDEN = 0.9
# Operations that move or fill arrays and compute nothing.
_VIEWS = {"bitcast", "parameter", "reshape", "slice", "transpose", "tuple"}
_MOVES = _VIEWS | {"broadcast", "concatenate", "constant", "copy", "pad"}


class Purpose(Enum):
    """The purpose of an operation: the first of these that it contains."""

    MATMUL = "matmuls"
    KERNEL = "kernels"  # custom calls
    WRITE = "writes"  # dynamic updates: of slots, and of rows of stacks and accumulators
    READ = "reads"  # dynamic slices: of slots, and of rows of stacks
    MOVE = "copies"  # copies, transposes, reshapes, fills
    OTHER = "other"  # elementwise arithmetic and reductions


@dataclass(frozen=True)
class TpuProgram(CompiledProgram):
    """A program compiled for TPUs; without a chip, the time of a transfer is not known."""

    chip: Chip | None = None

    @cached_property
    def collectives(self) -> list[Collective]:
        """See `find_collectives`.  A permute is beside compute also where work of any purpose hides
        it.
        """
        return [
            replace(each, compute=max(each.compute, Compute.ELEMENTWISE))
            if each.kind == "collective-permute" and self.hidden(each) >= _HIDDEN
            else each
            for each in find_collectives(self.module)
        ]

    def hidden(self, permute: Collective) -> float:
        """XLA's estimate of the time of the work that is issued beside a permute, over the time of
        its transfer to a neighbour.
        """
        if self.chip is None:
            return 0.0
        transfer = permute.start.results[0].nbytes / self.chip.link
        cycles = sum(map(self._all_cycles, permute.between))
        return cycles / self.chip.clock / transfer

    @cached_property
    def _all_cycles(self) -> Callable[[Instruction], int]:
        """XLA's estimate of an instruction with all that it issues, added up once."""

        @cache
        def cycles(instruction: Instruction) -> int:
            return _own_cycles(instruction) + sum(
                cycles(each) * place.trips
                for place in inner(self.module, instruction)
                for each in place.computation.instructions
            )

        return cycles

    @property
    def total_bytes(self) -> int:
        """XLA's peak of one device: arguments, results and temporary arrays, without the gaps
        between them.
        """
        return int(self.memory.peak_memory_in_bytes)

    @cached_property
    def cycles(self) -> dict[Purpose, int]:
        """XLA's estimate of the cycles of a step's loops, by purpose.

        Every predicate counts as taken.  Collectives have no estimates.
        """
        found: Counter[Purpose] = Counter()
        for place in walk(self.module):
            for instruction in place.computation.instructions if place.in_loop else ():
                found[_purpose(self.module, instruction)] += _own_cycles(instruction) * place.trips
        return {purpose: found[purpose] for purpose in Purpose}

    @cached_property
    def padding(self) -> int:
        """Bytes that tiles add to the arrays that the loops of the step's segments carry."""
        segments = [place.segment for place in walk(self.module)]
        carried = [segment.instruction.results for segment in segments if segment is not None]
        return max(
            (sum(array.padded_nbytes - array.nbytes for array in arrays) for arrays in carried),
            default=0,
        )


def heap_bytes(memory: Any) -> int:
    """Bytes of the heap of a program's temporary arrays, from XLA's figures for one device.

    libtpu's `temp_size_in_bytes` has the gaps between arrays twice: the heap, and its gaps.  The
    peak has no gaps.
    """
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + memory.peak_memory_in_bytes - kept) // 2


def _own_cycles(instruction: Instruction) -> int:
    """XLA's estimate of an instruction, without what it calls."""
    match = _CYCLES.search(instruction.attributes)
    return int(match[1]) if match else 0


def _purpose(module: Module, instruction: Instruction) -> Purpose:
    held = module.opcodes(instruction)
    if held & MATMULS:
        return Purpose.MATMUL
    if "custom-call" in held:
        return Purpose.KERNEL
    if "dynamic-update-slice" in held:
        return Purpose.WRITE
    if "dynamic-slice" in held:
        return Purpose.READ
    return Purpose.MOVE if held <= _MOVES else Purpose.OTHER
