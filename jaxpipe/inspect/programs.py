"""Compile a step and read its program: for GPUs how often the host waits, for TPUs XLA's estimates
of the time of a step, and the padding of tiles.

On GPUs the host runs a `while` without a known trip count.  It runs the condition, copies the flag
to the host and waits for the stream, before each trip and once more at the end.  A predicate is a
loop of at most one trip, so it waits once where it is not taken and twice where it is.  A
`conditional` waits once, for the number of its branch.  Neither waits inside a CUDA graph, nor does
a loop whose trip count is known (XLA's WhileThunk and ConditionalThunk).

A TPU decides on its predicates by itself, so no host waits.  libtpu describes devices
(`jax.experimental.topologies`), so such a program can be compiled without a TPU.

All devices run one text, in one order.  They differ in predicates, which depend on the coordinate
along the pipe axis.  The predicates of collective actions (E, G, L) are the same on all devices.
Collectives of one queue run in the order of issue.  Those of different queues run in any order, and
where they share two devices, each can wait for the other (openxla/xla 19026, 40656, 47467).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from ..errors import PipelineError
from ..lowering.target import Chip, Target
from ..table.kinds import SHARES, Kind
from .hlo import (
    MATMULS,
    CodePlace,
    Collective,
    Compute,
    DeviceGroup,
    Frame,
    Instruction,
    Module,
    find_collectives,
    groups_of,
    inner,
    issued,
    kind_of,
    parse,
    walk,
)


@dataclass(frozen=True)
class CompiledProgram:
    """What `pipe.lower(...).compile()` returns, read from its text."""

    compiled: Any

    @cached_property
    def module(self) -> Module:
        """Its computations."""
        return parse(self.compiled.as_text())

    @cached_property
    def memory(self) -> Any:
        """XLA's own figures for one device."""
        return self.compiled.memory_analysis()

    @property
    def total_bytes(self) -> int:
        """Peak bytes of the step on one device."""
        found = self.memory
        kept = found.argument_size_in_bytes + found.output_size_in_bytes
        return int(kept + found.temp_size_in_bytes - found.alias_size_in_bytes)

    @cached_property
    def collectives(self) -> list[Collective]:
        """See `find_collectives`."""
        return find_collectives(self.module)


@dataclass(frozen=True)
class Predicate:
    """A loop of unknown trip count, or a conditional."""

    instruction: Instruction
    place: CodePlace
    in_graph: bool  # a node of a CUDA graph: the host does not wait

    @property
    def is_loop(self) -> bool:
        """A loop, which waits once more each time that it is taken."""
        return self.instruction.opcode == "while"

    @property
    def kind(self) -> str | None:
        """The kind of action of its block (F of a pair); None where it is around no block."""
        return kind_of(self.instruction)


def count_waits(predicates: Sequence[Predicate], *, taken: bool) -> int:
    """Waits a step of a device that takes each predicate once each time, or none."""
    return sum(
        each.place.trips * (2 if taken and each.is_loop else 1)
        for each in predicates
        if not each.in_graph and (taken or not each.place.guarded)
    )


def most_waits(
    predicates: Sequence[Predicate], actions: int, *, by_kind: Mapping[str, int] | None = None
) -> float:
    """The most waits a step of a device that runs so many actions, and with `by_kind` so many of
    each kind.

    Each action takes one predicate.
    """

    def gain(each: Predicate) -> float:
        """The waits that it adds each time that it is taken, with all predicates inside."""
        inside = [other for other in predicates if other.place.is_inside(each.instruction)]
        more = count_waits([each, *inside], taken=True) - count_waits([each], taken=False)
        return more / max(1, each.place.trips)

    total: float = count_waits(predicates, taken=False)
    left, of_kind = actions, dict(by_kind or {})
    outer = [each for each in predicates if not each.place.guarded]
    for each in sorted(outer, key=gain, reverse=True):
        kind = each.kind or ""
        taken = min(left, each.place.trips, of_kind.get(kind, each.place.trips))
        total += gain(each) * taken
        left -= taken
        if kind in of_kind:
            of_kind[kind] -= taken
    return total


@dataclass(frozen=True)
class GpuProgram(CompiledProgram):
    """A program compiled for GPUs, read from its text and its thunks."""

    graph_nodes: frozenset[str]  # loops and conditionals that run in CUDA graphs

    @cached_property
    def predicates(self) -> tuple[Predicate, ...]:
        """Loops of unknown trip count, and conditionals, nested ones after those around them."""
        return tuple(
            Predicate(instruction, place, instruction.name in self.graph_nodes)
            for place in walk(self.module)
            for instruction in place.computation.instructions
            if any(inside.guarded for inside in inner(self.module, instruction))
        )


def compile_and_read(
    lowered: jax.stages.Lowered, options: Mapping[str, str | bool] | None = None
) -> GpuProgram:
    """Compile and read the result of `pipe.lower(...)` or `jax.jit(f).lower(...)`, with XLA options
    added to its own.

    XLA writes its thunks into a temporary folder; nothing is run.

    Raises:
        ValueError: it has not written them (no GPU program, or a compilation cache has answered).
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        return GpuProgram(compiled, read_graph_nodes(Path(folder)))


_LINE = re.compile(r"^(?P<indent> *)(?P<number>\d+): k(?P<kind>\w+)")
_ENTRY = re.compile(
    r'profile_annotation: "(?P<name>[^"]*)"(?:\s+thunk_id: (?P<number>\d+))?\s*\}\s*thunk_kind: '
    r'"k(?P<kind>\w+)"'
)
_HOST = ("While", "Conditional")


def graph_nodes(sequence: str, metadata: str) -> frozenset[str]:
    """The names of `while` and `conditional` instructions that run inside a command buffer, without
    the host.
    """
    names = {int(match["number"] or 0): match["name"] for match in _ENTRY.finditer(metadata)}
    found: set[str] = set()
    around: list[tuple[int, str]] = []
    for line in sequence.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while around and around[-1][0] >= indent:
            around.pop()
        if match["kind"] in _HOST and any(kind == "CommandBuffer" for _, kind in around):
            found.add(names[int(match["number"])])
        around.append((indent, match["kind"]))
    return frozenset(found)


def read_graph_nodes(folder: Path) -> frozenset[str]:
    """`graph_nodes` of the one program that was dumped into a folder.

    Raises:
        ValueError: the folder does not hold the thunks of exactly one program (a compilation cache
            may have answered, say).
    """
    changed = any(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))
    sequence = only(folder, f"*.thunk_sequence{'_after_thunk_passes' if changed else ''}.txt")
    return graph_nodes(sequence, only(folder, "*.thunk_metadata.txt"))


def only(folder: Path, pattern: str) -> str:
    """The text of the one file with such a name.

    Raises:
        ValueError: there is none, or several.
    """
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise ValueError(f"{folder} has {len(files)} files {pattern}, where one program has 1")
    return files[0].read_text()


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


# Opcodes that say what an operation is for.
_MARKS = {
    Purpose.MATMUL: MATMULS,
    Purpose.KERNEL: {"custom-call"},
    Purpose.WRITE: {"dynamic-update-slice"},
    Purpose.READ: {"dynamic-slice"},
}


@dataclass(frozen=True)
class TpuProgram(CompiledProgram):
    """A program compiled for TPUs; without a chip, the time of a transfer is not known."""

    chip: Chip | None

    @cached_property
    def collectives(self) -> list[Collective]:
        """See `find_collectives`.  A permute is beside compute also where work of any purpose hides
        it.
        """
        return [
            replace(each, compute=max(each.compute, Compute.ELEMENTWISE))
            if each.is_permute and self.hidden(each) >= _HIDDEN
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
        work = (each for own in permute.between for each in issued(self.module, own))
        cycles = sum(_own_cycles(instruction) * trips for instruction, trips in work)
        return cycles / self.chip.clock / transfer

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
        loops = {place.segment for place in walk(self.module)}
        carried = (loop.instruction.results for loop in loops if loop is not None)
        return max((sum(a.padded_nbytes - a.nbytes for a in own) for own in carried), default=0)


def program_of(compiled: jax.stages.Compiled, target: Target) -> CompiledProgram:
    """A compiled step of a target, with the figures that its text alone has."""
    return TpuProgram(compiled, target.chip) if target.on_tpus else CompiledProgram(compiled)


def heap_bytes(memory: Any) -> int:
    """Bytes of the heap of a program's temporary arrays, from XLA's figures for one device.

    libtpu's `temp_size_in_bytes` has the gaps between arrays twice: the heap, and its gaps.  The
    peak has no gaps.
    """
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + memory.peak_memory_in_bytes - kept) // 2


def _own_cycles(instruction: Instruction) -> int:
    """XLA's estimate of an instruction, without the computations that it issues."""
    match = _CYCLES.search(instruction.attributes)
    return int(match[1]) if match else 0


def _purpose(module: Module, instruction: Instruction) -> Purpose:
    held = module.opcodes(instruction)
    purposes = (purpose for purpose, opcodes in _MARKS.items() if held & opcodes)
    return next(purposes, Purpose.MOVE if held <= _MOVES else Purpose.OTHER)


_COMPONENTS = "xla_gpu_collective_permute_connected_components=true"
_WithCliques: TypeAlias = tuple[Collective, list[DeviceGroup]]


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
    count = len(coordinates)
    found = [(each, each.cliques(count, components)) for each in find_collectives(module)]
    return [
        *(fault for each, _ in found for fault in _group_faults(each, count)),
        *_predicate_faults(found, coordinates),
        *_flight_faults(module, found),
    ]


def _shared(some: Sequence[DeviceGroup], others: Sequence[DeviceGroup]) -> DeviceGroup:
    """The largest intersection of a clique of each."""
    return max((a & b for a in some for b in others), key=len, default=frozenset())


def _group_faults(each: Collective, count: int) -> Iterator[str]:
    """Faults of groups that devices cannot agree on."""
    groups, name = groups_of(each.start, count), each.name
    if unknown := sorted({d for group in groups for d in group if d >= count}):
        yield f"{name} has devices {unknown}; the program has {count}"
    if "channel_id=" not in each.start.attributes:
        yield f"{name} has no channel: its groups are replicas, and every device waits for itself"
    columns = {"in two groups": sum(groups, ())}
    if each.is_permute:
        columns = dict(zip(("twice as a source", "twice as a target"), zip(*groups), strict=True))
    for where, column in columns.items():
        if twice := sorted({d for d in column if column.count(d) > 1}):
            yield f"{name} has devices {twice} {where}"
    if not each.is_permute and len(set(map(len, groups))) > 1:
        yield f"{name} has groups of different sizes: {groups}"


def differs(frames: Sequence[Frame]) -> bool:
    """Whether a predicate among these frames may differ along the pipe axis."""
    kinds = [kind_of(frame.instruction) for frame in frames if frame.trips is None]
    return any(kind is None or Kind[kind] not in SHARES for kind in kinds)


def _predicate_faults(found: Sequence[_WithCliques], coordinates: Sequence[int]) -> Iterator[str]:
    """Faults of collectives that some device of a group does not reach."""
    for number, (each, cliques) in enumerate(found):
        for clique in cliques if differs(each.place.frames) else ():
            at = sorted({coordinates[d] for d in clique if d < len(coordinates)})
            if len(at) < 2:
                continue
            others = (*found[number + 1 :], *found[:number])
            meets = (other for other, theirs in others if _shared(theirs, cliques) & clique)
            yield (
                f"{each.name} is under a predicate that differs along the pipe axis, and meets "
                f"devices {sorted(clique)} at coordinates {at}: those that do not run it wait in "
                f"{next(meets, each).name}"
            )
            break


def _flight_faults(module: Module, found: Sequence[_WithCliques]) -> Iterator[str]:
    """Faults of two collectives of different queues that are in flight at the same time and share
    two devices or more.
    """
    by_name = {each.start.name: (each, cliques) for each, cliques in found}
    for each, cliques in found:
        inside = [inner for own in each.between for inner, _ in issued(module, own)]
        for other, theirs in (by_name[i.name] for i in inside if i.name in by_name):
            common = _shared(cliques, theirs)
            if each.queue != other.queue and len(common) > 1:
                yield (
                    f"{each.name} (queue {each.queue}) and {other.name} (queue {other.queue}) are "
                    f"in flight together and share devices {sorted(common)}: each can wait for the "
                    "other"
                )
