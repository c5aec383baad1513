"""Moves of a compiled program that compute nothing: whole arrays copied, transposed, zeroed or
padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .flow import Flow
from .hlo import Array, Computation, Instruction, Module, Place, walk

LARGE = 2**20


class Move(Enum):
    """The kind of a move."""

    COPY = "copy"
    TRANSPOSE = "transpose"
    FILL = "fill"  # a broadcast: zeros of an accumulator or stack, mostly
    PAD = "pad"
    CONCATENATE = "concatenate"
    REWRITE = "rewrite"  # a dynamic-update-slice that is not in place
    SLICE = "slice"  # part of an array, read by itself: an entry of a pool before its reader


MADE_ANEW = frozenset(Move) - {Move.SLICE}
_OPCODES = {
    "copy": Move.COPY,
    "copy-start": Move.COPY,
    "transpose": Move.TRANSPOSE,
    "broadcast": Move.FILL,
    "pad": Move.PAD,
    "concatenate": Move.CONCATENATE,
    "slice": Move.SLICE,
    "dynamic-slice": Move.SLICE,
}
# Operations that change neither the number of an array's elements nor their order; the move is the
# operation before them.
_SEEN_THROUGH = ("bitcast", "reshape", "convert", "bitcast-convert", "copy-done")


@dataclass(frozen=True)
class LargeMove:
    """One moved array, at each place that runs it."""

    move: Move
    array: Array
    instruction: Instruction
    place: Place
    # op_name of the instruction that makes the array; if XLA has added that one, of the array's
    # first reader
    origin: str
    # The outermost loop around it carries the array or reads it in each trip: it is a pool, an
    # accumulator, stacked parameters or a sent value, and is written whole again.  Other arrays are
    # a block's own.
    is_carried: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.array.nbytes

    @property
    def nbytes_a_step(self) -> int:
        """Bytes a step; where a predicate is around it, an upper bound."""
        return self.nbytes * self.place.trips

    def __str__(self) -> str:
        often = f"{self.place.trips} x{' guarded' if self.place.guarded else ''}"
        whose = "carried " if self.is_carried else ""
        return (
            f"{self.move.value} {whose}{self.array} {self.nbytes / 2**20:.1f} MiB, {often}: "
            f"{self.instruction.name} for {self.origin or '?'}"
        )


def large_moves(module: Module, *, least: int = LARGE) -> list[LargeMove]:
    """Every array of `least` bytes or more that an instruction, or a root of a fusion, moves or
    fills.
    """
    found, flow = [], Flow(module)
    for place in walk(module):
        loop = place.segment
        for instruction in place.computation.instructions:
            for move, computation, root in _moves(module, place.computation, instruction):
                if root.results[0].nbytes >= least:
                    named = _named(place.computation, instruction, root)
                    is_carried = loop is not None and flow.is_of(
                        loop.instruction, computation, root
                    )
                    found.append(
                        LargeMove(
                            move,
                            root.results[0],
                            instruction,
                            place,
                            named.op_name,
                            is_carried,
                        )
                    )
    return found


def _named(computation: Computation, instruction: Instruction, root: Instruction) -> Instruction:
    """The instruction itself, the root of its fusion, or its nearest user: the first with a name of
    the program's.
    """
    if root.op_name or instruction.op_name:
        return root if root.op_name else instruction
    seen, waiting = {instruction.name}, [instruction.name]
    for name in waiting:
        for user in computation.users.get(name, ()):
            if user.op_name and user.opcode not in ("tuple", "get-tuple-element"):
                return user
            if user.name not in seen:
                seen.add(user.name)
                waiting.append(user.name)
    return instruction


def _moves(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Move, Computation, Instruction]]:
    """The moves of an instruction, each with its computation and instruction: itself or a root of
    its fusion.
    """
    if instruction.opcode in _OPCODES:
        yield _OPCODES[instruction.opcode], computation, instruction
    elif instruction.opcode == "fusion":
        (name,) = instruction.called["calls"]
        fused = module.computations[name]
        for root in _roots(fused):
            move = _move_of(fused, root)
            if move is not None:
                yield move, fused, root


def _roots(fused: Computation) -> list[Instruction]:
    """The instructions that compute the results of a fusion."""
    root = fused.root
    return [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _move_of(fused: Computation, root: Instruction) -> Move | None:
    maker = _behind(fused, root)
    if maker.opcode == "dynamic-update-slice":
        # XLA updates the operand in place where it is a parameter of the fusion, and copies before
        # the fusion where it may not.
        in_place = (
            _behind(fused, fused.by_name[maker.operands[0]], through=("bitcast",)).opcode
            == "parameter"
        )
        return None if in_place else Move.REWRITE
    move = _OPCODES.get(maker.opcode)
    if move is Move.COPY:  # a slice in another layout
        read = _OPCODES.get(_behind(fused, maker, through=(*_SEEN_THROUGH, "copy")).opcode)
        return Move.SLICE if read is Move.SLICE else move
    return move


def _behind(
    fused: Computation, instruction: Instruction, through: tuple[str, ...] = _SEEN_THROUGH
) -> Instruction:
    while instruction.opcode in through:
        instruction = fused.by_name[instruction.operands[0]]
    return instruction
