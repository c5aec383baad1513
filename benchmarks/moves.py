"""Moves of a compiled program that compute nothing: whole arrays copied, transposed, zeroed or
padded; and the flow of whole arrays through layouts, loops, fusions and updates in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from jaxpipe.inspect.hlo import Array, CodePlace, Computation, Instruction, Module, walk

_SPACE = re.compile(r"S\((\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")
# Where an array in a TPU's memory beside a core is split; the order of its elements is the same.
_SPLIT = re.compile(r"SC\([^)]*\)")
# Their results are new arrays, also where the operands are as large.
_MAKE_OTHERS = ("dot", "convolution", "custom-call")


class Value(NamedTuple):
    """One array among the results of an instruction."""

    computation: str
    instruction: str
    number: int


class Flow:
    """The arrays that are computed element by element from others of as many elements, across the
    borders of computations.

    An update in place, a copy, a transpose and a sum continue an array.  A matmul and a slice do
    not.
    """

    def __init__(self, module: Module) -> None:
        self._module = module

    def is_of(self, loop: Instruction, computation: Computation, moving: Instruction) -> bool:
        """Whether an instruction's operand or result is an array that the loop around it carries or
        reads in each trip.
        """
        (body,) = (self._module.computations[name] for name in loop.called["body"])
        array = moving.results[0]
        starts = {v for v in self._values(body, self._parameters(body)[0]) if self._alike(v, array)}
        ends = {v for v in self._values(body, body.root) if self._alike(v, array)}
        read = [
            v
            for name in moving.operands
            for v in self._values(computation, computation.by_name[name])
        ]
        moved = self._values(computation, moving)
        return bool(starts & _reached(read, self._before) or ends & _reached(moved, self._after))

    def _alike(self, value: Value, array: Array) -> bool:
        found = self._array(value)
        return (found.dtype, math.prod(found.dims)) == (array.dtype, math.prod(array.dims))

    def _array(self, value: Value) -> Array:
        return (
            self._module.computations[value.computation]
            .by_name[value.instruction]
            .results[value.number]
        )

    @cached_property
    def _after(self) -> Mapping[Value, list[Value]]:
        """The arrays that continue each array."""
        found: dict[Value, list[Value]] = {}
        for computation in self._module.computations.values():
            for instruction in computation.instructions:
                for old, new in self._steps(computation, instruction):
                    if math.prod(self._array(old).dims) == math.prod(self._array(new).dims):
                        found.setdefault(old, []).append(new)
        return found

    @cached_property
    def _before(self) -> Mapping[Value, list[Value]]:
        """The arrays that each array continues."""
        found: dict[Value, list[Value]] = {}
        for old, those in self._after.items():
            for new in those:
                found.setdefault(new, []).append(old)
        return found

    def _steps(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Value, Value]]:
        """Pairs of an operand's array and a result's array that may continue it: those of as many
        elements.
        """
        if instruction.opcode in ("parameter", "constant"):
            return
        operands = [
            self._values(computation, computation.by_name[name]) for name in instruction.operands
        ]
        results = self._values(computation, instruction)
        match instruction.opcode:
            case "tuple":
                yield from zip((v for values in operands for v in values), results, strict=True)
            case "get-tuple-element":
                yield from (
                    (operands[0][self._index(instruction, operands[0])], v) for v in results[:1]
                )
            case "while" | "conditional" | "call" | "fusion":
                yield from self._across(instruction, operands, results)
            case opcode if opcode not in _MAKE_OTHERS:
                yield from ((old, new) for values in operands for old in values for new in results)

    def _across(
        self, instruction: Instruction, operands: list[list[Value]], results: list[Value]
    ) -> Iterator[tuple[Value, Value]]:
        """Into the computations that an instruction runs, and out of them."""
        for role, names in instruction.called.items():
            for number, name in enumerate(names):
                inside = self._module.computations[name]
                passed = operands[number + 1 : number + 2] if role == "branches" else operands
                for values, parameter in zip(passed, self._parameters(inside), strict=True):
                    yield from zip(values, self._values(inside, parameter), strict=True)
                if role == "condition":
                    continue
                end = self._values(inside, inside.root)
                yield from zip(end, results, strict=True)
                if role == "body":
                    yield from zip(
                        end, self._values(inside, self._parameters(inside)[0]), strict=True
                    )
        if instruction.opcode == "while":
            yield from zip(operands[0], results, strict=True)

    def _index(self, instruction: Instruction, values: list[Value]) -> int:
        match = _INDEX.search(instruction.attributes)
        assert match, f"an element of a tuple without a number: {instruction.name}"
        # The arrays of nested tuples, which transfers have, are in order too, but their numbers are
        # not.
        return min(int(match[1]), len(values) - 1)

    def _parameters(self, computation: Computation) -> list[Instruction]:
        found = [each for each in computation.instructions if each.opcode == "parameter"]
        return sorted(found, key=lambda each: int(each.operands[0]))

    def _values(self, computation: Computation, instruction: Instruction) -> list[Value]:
        return [
            Value(computation.name, instruction.name, i) for i in range(len(instruction.results))
        ]


def _reached(start: Iterable[Value], steps: Mapping[Value, list[Value]]) -> set[Value]:
    seen = set(start)
    waiting = list(seen)
    while waiting:
        for value in steps.get(waiting.pop(), ()):
            if value not in seen:
                seen.add(value)
                waiting.append(value)
    return seen


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
    place: CodePlace
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


def large_moves_on_tpus(module: Module) -> list[LargeMove]:
    """The same, without copies between the device's memories that keep the layout, which XLA makes
    ahead of their readers.
    """
    return [each for each in large_moves(module) if not _is_prefetch(each)]


def _is_prefetch(move: LargeMove) -> bool:
    """Whether it copies an array to or from another memory without a change of layout."""
    instruction = move.instruction
    if instruction.opcode not in ("copy", "copy-start"):
        return False
    to = instruction.results[0]
    from_ = (
        instruction.results[1]
        if instruction.opcode == "copy-start"
        else _operand(move.place.computation, instruction).results[0]
    )
    return order(to) == order(from_) and space(to) != space(from_)


def space(array: Array) -> str:
    """The number of an array's memory space; "" is the device's main memory."""
    match = _SPACE.search(array.layout)
    return match[1] if match else ""


def order(array: Array) -> str:
    """The layout without the memory space, nor how the array is split there."""
    return _SPLIT.sub("", _SPACE.sub("", array.layout))


def _operand(computation: Computation, instruction: Instruction) -> Instruction:
    return computation.by_name[instruction.operands[0]]


def _named(computation: Computation, instruction: Instruction, root: Instruction) -> Instruction:
    """The instruction itself, the root of its fusion, or its nearest user: the first with a name of
    the program's.
    """
    if root.op_name or instruction.op_name:
        return root if root.op_name else instruction
    users: dict[str, list[Instruction]] = {}
    for each in computation.instructions:
        for name in dict.fromkeys(each.operands):
            users.setdefault(name, []).append(each)
    seen, waiting = {instruction.name}, [instruction.name]
    for name in waiting:
        for user in users.get(name, ()):
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
    if move is Move.TRANSPOSE and _behind(fused, _operand(fused, maker)).opcode == "dot":
        return None  # the kernel of the product writes its result in this order
    return move


def _behind(
    fused: Computation, instruction: Instruction, through: tuple[str, ...] = _SEEN_THROUGH
) -> Instruction:
    while instruction.opcode in through:
        instruction = fused.by_name[instruction.operands[0]]
    return instruction
