"""Collectives that overlap compute: the work that a compiled program issues between the start and
the done of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .hlo import Computation, Instruction, Module, Place, inner, walk

# An elementwise fusion of fewer bytes takes some microseconds, and hides no transfer: 16 MiB take
# about 10 us on an H100.
LARGE = 2**24
_MATMULS = ("gemm", "matmul", "conv", "cudnn", "dot", "fmha", "flash")


class Compute(IntEnum):
    """The heaviest compute that is issued between start and done."""

    NOTHING = 0
    ELEMENTWISE = 1  # a fusion of at least LARGE bytes
    MATMUL = 2


@dataclass(frozen=True)
class Collective:
    """One collective of a program; `compute` is NOTHING also for a synchronous call."""

    kind: str  # collective-permute, all-reduce, all-gather, all-to-all, reduce-scatter
    start: Instruction
    place: Place
    compute: Compute
    beside: tuple[Instruction, ...] = ()  # what is issued between its start and its done

    @property
    def overlapped(self) -> bool:
        """Whether compute is issued while it runs."""
        return self.compute is not Compute.NOTHING

    def __str__(self) -> str:
        guarded = " guarded" if self.place.guarded else ""
        return (
            f"{self.kind} {self.start.name}, {self.place.trips} x{guarded}, beside "
            f"{self.compute.name.lower()}"
        )


def in_flight(instructions: Sequence[Instruction], start: int) -> tuple[Instruction, ...]:
    """What is issued between a start and its done."""
    first = instructions[start]
    if not first.opcode.endswith("-start") or '"is_sync":true' in first.attributes:
        return ()
    chain, found = {first.name}, list[Instruction]()
    for instruction in instructions[start + 1 :]:
        follows = instruction.operands[:1] and instruction.operands[0] in chain
        if follows and instruction.opcode.endswith("-done"):
            return tuple(found)
        if follows and instruction.opcode.endswith("-update"):
            chain.add(instruction.name)
        else:
            found.append(instruction)
    raise AssertionError(f"{first.name} is never done")


class _Reader:
    """Reads the pairs of one module; the compute of each computation is looked up once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._known: dict[str, Compute] = {}

    def of(self, place: Place) -> list[Collective]:
        """The collectives that one computation issues."""
        found = []
        instructions = place.computation.instructions
        for i, instruction in enumerate(instructions):
            kind = self._kind(instruction)
            if kind is not None:
                beside = in_flight(instructions, i)
                compute = max(map(self._compute, beside), default=Compute.NOTHING)
                found.append(Collective(kind, instruction, place, compute, beside))
        return found

    def _kind(self, instruction: Instruction) -> str | None:
        opcode = instruction.opcode
        if opcode == "async-start":
            ((wrapped,),) = (names for role, names in instruction.called.items() if role == "calls")
            opcode = self.module.computations[wrapped].root.opcode
        kind = opcode.removesuffix("-start")
        return kind if kind in KINDS else None

    def _compute(self, instruction: Instruction) -> Compute:
        """The compute of one instruction, with all that it issues."""
        if instruction.opcode in ("dot", "convolution"):
            return Compute.MATMUL
        if instruction.opcode == "custom-call":
            target = instruction.target.lower()
            return Compute.MATMUL if any(word in target for word in _MATMULS) else Compute.NOTHING
        if instruction.opcode == "fusion":
            (name,) = instruction.called["calls"]
            if any(
                each.opcode in ("dot", "convolution")
                for each in self.module.computations[name].instructions
            ):
                return Compute.MATMUL
            return Compute.ELEMENTWISE if instruction.nbytes >= LARGE else Compute.NOTHING
        return max(
            (self._computed_by(body) for body, _ in inner(self.module, instruction)),
            default=Compute.NOTHING,
        )

    def _computed_by(self, computation: Computation) -> Compute:
        if computation.name not in self._known:
            self._known[computation.name] = max(
                map(self._compute, computation.instructions), default=Compute.NOTHING
            )
        return self._known[computation.name]


KINDS = (
    "collective-permute",
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-broadcast",
    "ragged-all-to-all",
)


def find_collectives(module: Module) -> list[Collective]:
    """All collectives, each where it is issued."""
    reader = _Reader(module)
    # The computation that an async-start wraps belongs to that start.
    wrapped = {
        name
        for computation in module.computations.values()
        for each in computation.instructions
        if each.opcode == "async-start"
        for names in each.called.values()
        for name in names
    }
    return [
        found
        for place in walk(module)
        if place.computation.name not in wrapped
        for found in reader.of(place)
    ]


def steady(collectives: Iterable[Collective], kind: str = "collective-permute") -> list[Collective]:
    """The collectives of a kind in the segment of most trips that has any; of equal segments, in
    the one with the fewest under a predicate.

    Where no segment is a loop, the collectives outside loops.
    """
    found = [each for each in collectives if each.kind == kind]
    segments: dict[str, tuple[int, list[Collective]]] = {}
    for each in found:
        frame = each.place.segment
        name, trips = (frame.instruction.name, frame.trips or 1) if frame else ("", 1)
        segments.setdefault(name, (trips, []))[1].append(each)
    best = max(
        segments.values(),
        key=lambda item: (item[0], -sum(each.place.guarded for each in item[1])),
        default=(0, []),
    )
    return best[1]
