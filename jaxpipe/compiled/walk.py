"""Where the instructions of a compiled program are run, and how often a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .hlo import Computation, Instruction, Module


@dataclass(frozen=True)
class Frame:
    """A loop or conditional around a computation; `trips` is None where only the running program
    knows how often it is run.
    """

    instruction: Instruction
    trips: int | None


@dataclass(frozen=True)
class Place:
    """A computation and the frames around it, outermost first."""

    computation: Computation
    frames: tuple[Frame, ...]

    @property
    def trips(self) -> int:
        """How often it is run a step; where it is guarded an upper bound, if each predicate is of
        at most one trip.
        """
        return math.prod(frame.trips for frame in self.frames if frame.trips is not None)

    @property
    def guarded(self) -> bool:
        """Whether a predicate says if it is run."""
        return any(frame.trips is None for frame in self.frames)

    @property
    def in_loop(self) -> bool:
        """Whether it is run more than once a step."""
        return self.trips > 1

    @property
    def segment(self) -> Frame | None:
        """The outermost loop of known trip count: a segment of the schedule, where it is unrolled
        into ticks.
        """
        return next((frame for frame in self.frames if frame.trips is not None), None)


def walk(module: Module) -> Iterator[Place]:
    """All computations that issue instructions: the entry, bodies and conditions of loops,
    branches, calls; not fusions.
    """
    return _walk(module, Place(module.computations[module.entry], ()))


def _walk(module: Module, place: Place) -> Iterator[Place]:
    yield place
    for instruction in place.computation.instructions:
        for computation, frames in inner(module, instruction):
            yield from _walk(module, Place(computation, (*place.frames, *frames)))


def inner(
    module: Module, instruction: Instruction
) -> Iterator[tuple[Computation, tuple[Frame, ...]]]:
    """The computations that one instruction issues, each with the frame that it adds."""
    roles = instruction.called
    if instruction.opcode == "while":
        frame = (Frame(instruction, instruction.trip_count),)
        for role in ("condition", "body"):
            yield from ((module.computations[name], frame) for name in roles[role])
    elif instruction.opcode == "conditional":
        yield from (
            (module.computations[name], (Frame(instruction, None),)) for name in roles["branches"]
        )
    elif instruction.opcode in ("call", "async-start"):
        names = (*roles.get("to_apply", ()), *roles.get("calls", ()))
        yield from ((module.computations[name], ()) for name in names)
