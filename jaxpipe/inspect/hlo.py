"""The text of a compiled program (scheduled HLO after optimisation) as computations of
instructions, and its collectives: their groups, and the work that is issued beside them.

The format is that of XLA's HLO parser (openxla.org/xla/operation_semantics names the opcodes).  Of
a line only these are read: name, shapes of the results, opcode, operands, and attributes as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

_ARRAY = re.compile(
    r"\b(pred|token|opaque|bf16|f8e\w+|f4e\w+|[sufc]\d+)\[([\d,<=]*)\](?:\{([^}]*)\})?"
)
_TILE = re.compile(r"T\(([\d,]+)\)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(
    r"^ +(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<results>.*?) (?P<opcode>[\w\-]+)"
    r"\((?P<operands>.*?)\)(?P<attributes>(?:, .*)?)$",
    re.M,
)
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(condition|body|calls|to_apply|(?:true|false)_computation|branch_computations)="
    r"(%[\w.\-]+|\{[^}]*\})"
)


class Array(NamedTuple):
    """The dtype, dimensions and layout of one result."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""  # the order of its dimensions, tiles and memory space, as XLA prints them

    @property
    def nbytes(self) -> int:
        """Bytes, a dtype of less than a byte rounded up over the array."""
        return self._bytes(self.dims)

    @property
    def padded_nbytes(self) -> int:
        """Bytes with the padding of its tiles."""
        tile, order = _TILE.search(self.layout), self.layout.split(":")[0]
        if tile is None or not order:
            return self.nbytes
        dims, sizes = list(self.dims), [int(size) for size in tile[1].split(",")]
        # The tile's last size is of the dimension that comes first in the order.
        for dim, size in zip(map(int, order.split(",")), reversed(sizes), strict=False):
            dims[dim] = -(-dims[dim] // size) * size
        return self._bytes(dims)

    def _bytes(self, dims: Sequence[int]) -> int:
        # The first number in the name of a dtype; a predicate takes a byte, a token nothing.
        number = re.search(r"\d+", self.dtype)
        bits = int(number[0]) if number else 8 * (self.dtype == "pred")
        return math.ceil(math.prod(dims) * bits / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction; `results` are the arrays of a tuple in order, nested ones too."""

    name: str
    results: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]  # names; the number of a parameter, the value of a constant
    attributes: str
    is_root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(array.nbytes for array in self.results)

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations it runs, by role: condition, body, calls,
        to_apply, branches.
        """
        found: dict[str, tuple[str, ...]] = {}
        for key, names in _CALLED.findall(self.attributes):
            role = "branches" if key.endswith(("computation", "computations")) else key
            found[role] = (*found.get(role, ()), *_NAME.findall(names))
        return found

    @property
    def op_name(self) -> str:
        """The path of JAX names and scopes that it comes from."""
        return _quoted(self.attributes, "op_name=")

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return _quoted(self.attributes, "custom_call_target=")


def _quoted(text: str, key: str) -> str:
    match = re.search(re.escape(key) + r'"([^"]*)"', text)
    return match[1] if match else ""


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are issued."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {each.name: each for each in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose results it returns."""
        return next(each for each in self.instructions if each.is_root)


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    entry: str
    computations: Mapping[str, Computation]

    def opcodes(self, instruction: Instruction) -> set[str]:
        """The opcode of an instruction, or those in its fusion."""
        if instruction.opcode != "fusion":
            return {instruction.opcode}
        (name,) = instruction.called["calls"]
        return set[str]().union(*map(self.opcodes, self.computations[name].instructions))

    def trip_count(self, loop: Instruction) -> int | None:
        """The trip count of a while loop, if the compiler knows it; the host then waits for nothing
        between trips.

        Programs for GPUs name it.  In programs for TPUs the condition compares a counter, which
        starts at 0, with a constant.  A counter that is compared with 1 is that of a predicate.
        """
        match = _TRIPS.search(loop.attributes)
        if match:
            return int(match[1])
        (name,) = loop.called["condition"]
        condition = self.computations[name]
        root = condition.root
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        counter, bound = (condition.by_name[operand] for operand in root.operands)
        is_count = counter.opcode == "get-tuple-element" and bound.opcode == "constant"
        number = bound.operands[0] if is_count else ""
        return int(number) if number.isdecimal() and int(number) > 1 else None


def parse(text: str) -> Module:
    """Read `compiled.as_text()`.

    Raises:
        ValueError: the text is not a scheduled HLO module, so the order of its lines says nothing.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "not a scheduled HLO module: read what `compile()` returns, not what is lowered"
        )
    found = _COMPUTATION.findall(text)
    computations = {
        name: Computation(name, tuple(map(_instruction, _INSTRUCTION.finditer(body))))
        for _, name, body in found
    }
    return Module(next((name for is_entry, name, _ in found if is_entry), ""), computations)


def _instruction(match: re.Match[str]) -> Instruction:
    results = tuple(
        Array(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim), layout)
        for dtype, dims, layout in _ARRAY.findall(match["results"])
    )
    opcode, inside = match["opcode"], match["operands"]
    is_value = opcode in ("parameter", "constant")
    operands = (inside,) if is_value else tuple(_NAME.findall(inside))
    is_root = match["root"] is not None
    return Instruction(match["name"], results, opcode, operands, match["attributes"], is_root)


@dataclass(frozen=True)
class Frame:
    """A loop or conditional around a computation; `trips` is None where only the running program
    knows it.
    """

    instruction: Instruction
    trips: int | None


@dataclass(frozen=True)
class CodePlace:
    """A computation and the frames around it, outermost first."""

    computation: Computation
    frames: tuple[Frame, ...]

    @property
    def trips(self) -> int:
        """The number of runs a step; under predicates of at most one trip each, an upper bound."""
        return math.prod(frame.trips for frame in self.frames if frame.trips is not None)

    @property
    def guards(self) -> tuple[Instruction, ...]:
        """The predicates around it, outermost first."""
        return tuple(frame.instruction for frame in self.frames if frame.trips is None)

    @property
    def guarded(self) -> bool:
        """Whether it is under a predicate."""
        return bool(self.guards)

    def is_inside(self, instruction: Instruction) -> bool:
        """Whether a loop or conditional is around it."""
        return any(frame.instruction is instruction for frame in self.frames)

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


# Others, such as fusions and reductions, are kernels with what they call.
_ISSUING = ("while", "conditional", "call", "async-start")


def inner(module: Module, instruction: Instruction) -> Iterator[CodePlace]:
    """The computations that one instruction issues, each with the frame that it adds."""
    frames: tuple[Frame, ...] = ()
    if instruction.opcode == "while":
        frames = (Frame(instruction, module.trip_count(instruction)),)
    elif instruction.opcode == "conditional":
        frames = (Frame(instruction, None),)
    if instruction.opcode in _ISSUING:
        for name in chain.from_iterable(instruction.called.values()):
            yield CodePlace(module.computations[name], frames)


def walk(module: Module, place: CodePlace | None = None) -> Iterator[CodePlace]:
    """All computations that issue instructions: the entry, bodies and conditions of loops,
    branches, calls; not fusions.
    """
    place = place or CodePlace(module.computations[module.entry], ())
    yield place
    for instruction in place.computation.instructions:
        for inside in inner(module, instruction):
            frames = (*place.frames, *inside.frames)
            yield from walk(module, CodePlace(inside.computation, frames))


def issued(module: Module, instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
    """The instruction, and all that it issues, each with the number of its runs."""
    yield instruction, 1
    for inside in inner(module, instruction):
        for place in walk(module, inside):
            yield from ((each, place.trips) for each in place.computation.instructions)


# The scope of a block in a tick: "F chunk 0", "W stage 3", "F.0 with B.0", "L".
_SCOPE = re.compile(r"/([A-Z])(?: chunk \d+| stage \d+|\.\d+ with [A-Z]\.\d+)?(?:/|$)")


def kind_of(instruction: Instruction) -> str | None:
    """The kind of action whose block it is of (F of a pair); None where it is of no block."""
    scope = _SCOPE.search(instruction.op_name)
    return scope and scope[1]


# An elementwise fusion of fewer bytes takes some microseconds, and hides no transfer: 16 MiB take
# about 10 us on an H100.
LARGE = 2**24
MATMULS = frozenset({"convolution", "dot"})
_LIBRARY_MATMULS = ("gemm", "matmul", "conv", "cudnn", "dot", "fmha", "flash")


class Compute(IntEnum):
    """The heaviest compute that is issued between start and done."""

    NOTHING = 0
    ELEMENTWISE = 1  # a fusion of at least LARGE bytes; on TPUs, work that hides the transfer
    MATMUL = 2


DeviceGroup: TypeAlias = frozenset[int]


@dataclass(frozen=True)
class Collective:
    """One collective of a program; `compute` is NOTHING also for a synchronous call."""

    kind: str  # collective-permute, all-reduce, all-gather, all-to-all, reduce-scatter
    start: Instruction
    place: CodePlace
    compute: Compute
    between: tuple[Instruction, ...] = ()  # issued between its start and its done

    @property
    def overlapped(self) -> bool:
        """Whether compute is issued while it runs."""
        return self.compute is not Compute.NOTHING

    @property
    def is_permute(self) -> bool:
        """Whether devices send in pairs."""
        return self.kind == "collective-permute"

    @property
    def name(self) -> str:
        """Its kind and the name of its instruction."""
        return f"{self.kind} {self.start.name}"

    @property
    def queue(self) -> str:
        """The queue that it is issued on."""
        match = _QUEUE.search(self.start.attributes)
        return match[1] if match else "0"

    def cliques(self, count: int, components: bool) -> list[DeviceGroup]:
        """The devices of each communicator, of so many devices in all; see `check_collectives`."""
        sets = [frozenset(group) for group in groups_of(self.start, count)]
        if self.is_permute:
            return connected(sets) if components else [frozenset(range(count))]
        return sets


def in_flight(instructions: Sequence[Instruction], start: int) -> tuple[Instruction, ...]:
    """The instructions that are issued between a start and its done."""
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


_AMONG_ALL = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter", "ragged-all-to-all"}
KINDS = _AMONG_ALL | {"collective-permute", "collective-broadcast"}


def find_collectives(module: Module) -> list[Collective]:
    """All collectives, each where it is issued."""
    # The computation that an async-start wraps belongs to that start.
    every = (each for body in module.computations.values() for each in body.instructions)
    wrapped = {each.called["calls"] for each in every if each.opcode == "async-start"}
    found = []
    for place in walk(module):
        instructions = place.computation.instructions
        for i, instruction in enumerate(instructions):
            kind = _kind(module, instruction)
            if kind in KINDS and (place.computation.name,) not in wrapped:
                between = in_flight(instructions, i)
                compute = max(
                    (_compute(module, each) for own in between for each, _ in issued(module, own)),
                    default=Compute.NOTHING,
                )
                found.append(Collective(kind, instruction, place, compute, between))
    return found


def _kind(module: Module, instruction: Instruction) -> str:
    opcode = instruction.opcode
    if opcode == "async-start":
        (wrapped,) = instruction.called["calls"]
        opcode = module.computations[wrapped].root.opcode
    return opcode.removesuffix("-start")


def _compute(module: Module, instruction: Instruction) -> Compute:
    """The compute of one instruction, without the computations that it issues."""
    target = instruction.target.lower()
    if module.opcodes(instruction) & MATMULS or any(word in target for word in _LIBRARY_MATMULS):
        return Compute.MATMUL
    large = instruction.opcode == "fusion" and instruction.nbytes >= LARGE
    return Compute.ELEMENTWISE if large else Compute.NOTHING


def steady(collectives: Iterable[Collective]) -> list[Collective]:
    """The permutes in the segment of most trips that has any; of equal segments, in the one with
    the fewest under a predicate.

    Where no segment is a loop, the permutes outside loops.
    """
    segments: dict[Frame | None, list[Collective]] = {}
    for each in collectives:
        if each.is_permute:
            segments.setdefault(each.place.segment, []).append(each)

    def rank(segment: Frame | None) -> tuple[int, int]:
        trips = segment.trips if segment else 1
        return trips or 1, -sum(each.place.guarded for each in segments[segment])

    return segments[max(segments, key=rank)] if segments else []


_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# JAX 0.12: a mesh, and the axes, or parts of axes ('data':(1)2), along which groups extend.
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?P<order>, device_ids=\([^{]*\))?"
    r" ?\{(?P<axes>[^}]*)\}"
)
_QUEUE = re.compile(r'"operation_queue_id":"(\d+)"')


def groups_of(start: Instruction, count: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective, or the pairs of a permute; one of all devices where none are
    listed.

    Raises:
        ValueError: they are in a form that is not known.
    """
    if mesh := _MESH.search(start.attributes):
        return _along_axes(mesh)
    iota = _IOTA.search(start.attributes)
    if iota:
        shape, dims = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
        numbers = np.arange(np.prod(dims)).reshape(dims)
        if iota[3]:
            numbers = numbers.transpose([int(n) for n in iota[3].split(",")])
        return tuple(map(tuple, numbers.reshape(shape).tolist()))
    listed = _LISTED.search(start.attributes)
    if listed is None and "replica_groups=" in start.attributes:
        raise ValueError(f"the replica groups of {start.name} are not known: {start.attributes}")
    found = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
    groups = tuple(tuple(int(n) for n in group.split(",")) for group in found)
    return groups or (tuple(range(count)),)


def _along_axes(mesh: re.Match[str]) -> tuple[tuple[int, ...], ...]:
    """The groups along some axes of a mesh whose devices are numbered in order."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh["sizes"])}
    axes = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh["axes"])
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in axes}
    if mesh["order"] or len(parts) < len(axes):
        raise ValueError(f"groups along the axes of such a mesh are not known: {mesh[0]}")
    dims, where = list[int](), dict[str, int]()
    for name, size in sizes.items():
        before, own = parts.get(name, (1, 1))
        where[name] = len(dims) + 1
        dims += [before, own, size // (before * own)]
    last = [where[name] for name in parts]
    others = [dim for dim in range(len(dims)) if dim not in last]
    numbers = np.arange(np.prod(dims)).reshape(dims).transpose([*others, *last])
    count = int(np.prod([dims[dim] for dim in last]))
    return tuple(map(tuple, numbers.reshape(-1, count).tolist()))


def connected(pairs: Sequence[DeviceGroup]) -> list[DeviceGroup]:
    """The connected sets of devices.

    >>> connected([frozenset({0, 1}), frozenset({2, 3}), frozenset({1, 4})])
    [frozenset({2, 3}), frozenset({0, 1, 4})]
    """
    found: list[DeviceGroup] = []
    for pair in pairs:
        separate = [group for group in found if not group & pair]
        found = [*separate, pair.union(*(group for group in found if group & pair))]
    return found
