"""The collectives of a compiled program: the work that is issued between the start and the done of
each; and a check, before the program runs, that every device of a group reaches its collective, and
that no two collectives in flight can wait for each other.

All devices run one text, in one order.  They differ in predicates, which depend on the coordinate
along the pipe axis.  The predicates of collective actions (E, G, L) are the same on all devices.
Collectives of one queue run in the order of issue.  Those of different queues run in any order, and
where they share two devices, each can wait for the other (openxla/xla 19026, 40656, 47467).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..errors import PipelineError
from ..table.kinds import SHARES, Kind
from .hlo import Frame, Instruction, Module, Place, issued, kind_of, parse, walk

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


@dataclass(frozen=True)
class Collective:
    """One collective of a program; `compute` is NOTHING also for a synchronous call."""

    kind: str  # collective-permute, all-reduce, all-gather, all-to-all, reduce-scatter
    start: Instruction
    place: Place
    compute: Compute
    between: tuple[Instruction, ...] = ()  # issued between its start and its done

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
    wrapped = {
        each.called.get("calls")
        for computation in module.computations.values()
        for each in computation.instructions
        if each.opcode == "async-start"
    }
    found = []
    for place in walk(module):
        instructions = place.computation.instructions
        for i, instruction in enumerate(instructions):
            kind = _kind(module, instruction)
            if kind in KINDS and (place.computation.name,) not in wrapped:
                between = in_flight(instructions, i)
                compute = max(
                    (_compute(module, each) for own in between for each in issued(module, own)),
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


def steady(collectives: Iterable[Collective], kind: str = "collective-permute") -> list[Collective]:
    """The collectives of a kind in the segment of most trips that has any; of equal segments, in
    the one with the fewest under a predicate.

    Where no segment is a loop, the collectives outside loops.
    """
    segments: dict[str, list[Collective]] = {}
    for each in collectives:
        if each.kind == kind:
            frame = each.place.segment
            segments.setdefault(frame.instruction.name if frame else "", []).append(each)

    def rank(those: list[Collective]) -> tuple[int, int]:
        frame = those[0].place.segment
        trips = frame.trips or 1 if frame else 1
        return trips, -sum(each.place.guarded for each in those)

    return max(segments.values(), key=rank, default=[])


Group = frozenset[int]
_COMPONENTS = "xla_gpu_collective_permute_connected_components=true"
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_QUEUE = re.compile(r'"operation_queue_id":"(\d+)"')


def check_collectives(
    compiled: Any, mesh: Mesh, *, axis: str = "pipe", components: bool | None = None
) -> None:
    """Check the collectives of a compiled step, of real or described devices, before it runs.

    Args:
        compiled: what `pipe.lower(...).compile()` returns.
        mesh: of the pipeline.
        axis: its pipe axis, along which predicates differ.
        components: a permute's communicator holds the devices that its pairs connect, not all;
            None asks XLA_FLAGS.

    Raises:
        PipelineError: collectives that can hang; each fault names the two that are involved.
    """
    if components is None:
        components = _COMPONENTS in os.environ.get("XLA_FLAGS", "")
    coordinates = np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)].ravel().tolist()
    faults = collective_faults(parse(compiled.as_text()), coordinates, components=components)
    PipelineError.refuse("collectives of this program can hang", faults)


def collective_faults(
    module: Module, coordinates: Sequence[int], *, components: bool = False
) -> list[str]:
    """The faults of a program's collectives; `coordinates` are those of its devices along the pipe
    axis.
    """
    found = [_Exchange.of(each, len(coordinates), components) for each in find_collectives(module)]
    return [
        *(fault for exchange in found for fault in _group_faults(exchange, len(coordinates))),
        *_predicate_faults(found, coordinates),
        *_flight_faults(module, found),
    ]


@dataclass(frozen=True)
class _Exchange:
    """A collective, with the groups that exchange values and the devices of each communicator."""

    collective: Collective
    groups: tuple[tuple[int, ...], ...]  # of a permute: pairs
    cliques: tuple[Group, ...]

    @classmethod
    def of(cls, collective: Collective, count: int, components: bool) -> _Exchange:
        groups = groups_of(collective.start, count)
        sets = [frozenset(group) for group in groups]
        if collective.kind == "collective-permute":
            sets = connected(sets) if components else [frozenset(range(count))]
        return cls(collective, groups, tuple(sets))

    @property
    def name(self) -> str:
        return f"{self.collective.kind} {self.collective.start.name}"

    @property
    def queue(self) -> str:
        match = _QUEUE.search(self.collective.start.attributes)
        return match[1] if match else "0"

    def shares(self, other: _Exchange) -> Group:
        """The largest intersection of a clique of each."""
        common = [a & b for a in self.cliques for b in other.cliques]
        return max(common, key=len, default=frozenset())


def groups_of(start: Instruction, count: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective, or the pairs of a permute; one of all devices where none are
    listed.
    """
    iota = _IOTA.search(start.attributes)
    if iota:
        shape, dims = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
        numbers = np.arange(np.prod(dims)).reshape(dims)
        if iota[3]:
            numbers = numbers.transpose([int(n) for n in iota[3].split(",")])
        return tuple(map(tuple, numbers.reshape(shape).tolist()))
    listed = _LISTED.search(start.attributes)
    found = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
    groups = tuple(tuple(int(n) for n in group.split(",")) for group in found)
    return groups or (tuple(range(count)),)


def connected(pairs: Sequence[Group]) -> list[Group]:
    """The connected sets of devices.

    >>> connected([frozenset({0, 1}), frozenset({2, 3}), frozenset({1, 4})])
    [frozenset({2, 3}), frozenset({0, 1, 4})]
    """
    found: list[Group] = []
    for pair in pairs:
        separate = [group for group in found if not group & pair]
        found = [*separate, pair.union(*(group for group in found if group & pair))]
    return found


def _group_faults(exchange: _Exchange, count: int) -> Iterator[str]:
    """Faults of groups that devices cannot agree on."""
    groups, name = exchange.groups, exchange.name
    if unknown := sorted({d for group in groups for d in group if d >= count}):
        yield f"{name} has devices {unknown}; the program has {count}"
    if "channel_id=" not in exchange.collective.start.attributes:
        yield f"{name} has no channel: its groups are replicas, and every device waits for itself"
    permute = exchange.collective.kind == "collective-permute"
    columns = list(zip(*groups, strict=True)) if permute else [sum(groups, ())]
    places = ("twice as a source", "twice as a target") if permute else ("in two groups",)
    for where, column in zip(places, columns, strict=True):
        if twice := sorted({d for d in column if column.count(d) > 1}):
            yield f"{name} has devices {twice} {where}"
    if not permute and len({len(group) for group in groups}) > 1:
        yield f"{name} has groups of different sizes: {groups}"


def _differs(frames: Sequence[Frame]) -> bool:
    """Whether a predicate around the collective may differ along the pipe axis."""
    kinds = [kind_of(frame.instruction) for frame in frames if frame.trips is None]
    return any(kind is None or Kind[kind] not in SHARES for kind in kinds)


def _predicate_faults(found: Sequence[_Exchange], coordinates: Sequence[int]) -> Iterator[str]:
    """Faults of collectives that some device of a group does not reach."""
    for number, exchange in enumerate(found):
        if not _differs(exchange.collective.place.frames):
            continue
        for clique in exchange.cliques:
            at = sorted({coordinates[d] for d in clique if d < len(coordinates)})
            if len(at) < 2:
                continue
            others = (*found[number + 1 :], *found[:number])
            other = next((o for o in others if o.shares(exchange) & clique), exchange)
            yield (
                f"{exchange.name} is under a predicate that differs along the pipe axis, and meets "
                f"devices {sorted(clique)} at coordinates {at}: those that do not run it wait in "
                f"{other.name}"
            )
            break


def _flight_faults(module: Module, found: Sequence[_Exchange]) -> Iterator[str]:
    """Faults of two collectives of different queues that are in flight at the same time and share
    two devices or more.
    """
    by_name = {exchange.collective.start.name: exchange for exchange in found}
    for exchange in found:
        inside = [each for own in exchange.collective.between for each in issued(module, own)]
        for other in (by_name[each.name] for each in inside if each.name in by_name):
            common = exchange.shares(other)
            if exchange.queue != other.queue and len(common) > 1:
                yield (
                    f"{exchange.name} (queue {exchange.queue}) and {other.name} (queue "
                    f"{other.queue}) are in flight together and share devices {sorted(common)}: "
                    "each can wait for the other"
                )
