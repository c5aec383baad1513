"""Reads GPU programs that XLA has compiled: host waits, large copies, overlap of collectives,
memory.

A GPU program can be compiled on a machine without a GPU (`tests.gpu.programs.gpu_mesh`); nothing
here runs one.
"""

from .collectives import Beside, Collective, find_collectives, steady
from .copies import MADE_ANEW, LargeMove, Move, large_moves
from .hlo import Module, parse
from .memory import Buffer, Memory
from .program import GpuProgram, compile_and_read, compile_and_try_to_read
from .waits import Predicate, always, count_waits, find_predicates, flat, most_waits, never

__all__ = [
    "MADE_ANEW",
    "Beside",
    "Buffer",
    "Collective",
    "GpuProgram",
    "LargeMove",
    "Memory",
    "Module",
    "Move",
    "Predicate",
    "always",
    "compile_and_read",
    "compile_and_try_to_read",
    "count_waits",
    "find_collectives",
    "find_predicates",
    "flat",
    "large_moves",
    "most_waits",
    "never",
    "parse",
    "steady",
]
