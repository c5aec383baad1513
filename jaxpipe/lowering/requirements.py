"""What each tick needs, read off the ticks: blocks, who runs them, and the transfers between devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.segments import Block, Payload
from ..table.encoded import BoolArray, Encoded, IntArray
from ..table.kinds import RECOMPUTE, RUNS_FORWARD, TOGETHER, Kind
from ..table.schedule import Schedule
from .assign_ticks import Ticks

NO_TRANSFER = np.iinfo(np.int32).max  # in `Requirements.slack`


class Edge(NamedTuple):
    """A transfer from one device to another at the end of a tick."""

    payload: Payload
    source: int
    target: int


class Count(NamedTuple):
    """How many devices run a block in a tick, and how many of those for the first, the last, a locally consumed stage."""

    active: int
    first: int
    last: int
    local: int


@dataclass(frozen=True)
class TickRequirements:
    """The static needs of one tick."""

    blocks: dict[Block, Count]
    slack: dict[Edge, int]  # each transfer, and how many ticks it may take beyond the one it is issued in
    paired: bool = False  # some device runs a forward and a whole backward

    @property
    def together(self) -> bool:
        """Whether the devices do something together."""
        return any(block.kind in TOGETHER for block in self.blocks)

    @property
    def signature(self) -> tuple[frozenset[Block], frozenset[Edge]]:
        """Ticks with equal signatures can share their code."""
        return frozenset(self.blocks), frozenset(self.slack)


@dataclass(frozen=True, eq=False)
class Requirements:
    """The requirements of every tick: tick t has `kinds[codes[t]]`.

    Ticks have one code where the same blocks of the same devices run and the same transfers leave with the same slack, so they
    also cost the same; what is made of many ticks costs no more than what is made of the different ones.
    """

    kinds: tuple[TickRequirements, ...]
    codes: IntArray
    num_devices: int
    forward_first: bool

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def signatures(self) -> IntArray:
        """Per tick, a number that ticks of equal signatures share."""
        numbers: dict[object, int] = {}
        found = np.array([numbers.setdefault(kind.signature, len(numbers)) for kind in self.kinds], np.int64)
        return found[self.codes]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that occur."""
        return tuple(dict.fromkeys(block for kind in self.kinds for block in kind.blocks))

    @cached_property
    def counts(self) -> IntArray:
        """`[kind, block]` is the `Count` of `blocks[block]` in `kinds[kind]`."""
        number = {block: i for i, block in enumerate(self.blocks)}
        found = np.zeros((len(self.kinds), len(number), len(Count._fields)), np.int64)
        for row, kind in zip(found, self.kinds, strict=True):
            for block, count in kind.blocks.items():
                row[number[block]] = count
        return found

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The transfers that occur, in order."""
        return tuple(sorted({edge for kind in self.kinds for edge in kind.slack}))

    @cached_property
    def slack(self) -> NDArray[np.int32]:
        """`[kind, edge]` is the slack of `edges[edge]` in `kinds[kind]`; NO_TRANSFER where it does not occur."""
        number = {edge: i for i, edge in enumerate(self.edges)}
        found = np.full((len(self.kinds), len(number)), NO_TRANSFER, np.int32)
        for row, kind in zip(found, self.kinds, strict=True):
            row[[number[edge] for edge in kind.slack]] = list(kind.slack.values())
        return found


def consumers(table: Encoded) -> IntArray:
    """Per action, the F that uses its output, or the B or I that uses its input gradient, in the neighbour stage; -1 for none."""
    found = np.full(table.num_actions, -1, np.int64)
    users = np.flatnonzero(table.producer >= 0)
    found[table.producer[users]] = users
    return found


def chunks_of(schedule: Schedule) -> IntArray:
    """Per action, the chunk that its stage is on its device; 0 for what is no stage's."""
    table = schedule.encoded
    chunk = np.full((table.num_devices, table.num_stages), -1, np.int64)
    for device, stages in enumerate(schedule.placement.stages_of):
        chunk[device, list(stages)] = np.arange(len(stages))
    found: IntArray = np.where(table.shares, 0, chunk[table.device, table.stage])
    return found


def recompute_of(table: Encoded, forward: IntArray) -> IntArray:
    """The R of each of these forwards, or -1."""
    (kind,) = RECOMPUTE
    found: IntArray = table.at[kind][table.stage[forward], table.microbatch[forward]]
    return found


def keeps(table: Encoded) -> BoolArray:
    """Per action, False for an F that keeps no residuals: those that have an R."""
    forward = np.flatnonzero(table.kind == Kind.F)
    found = np.ones(table.num_actions, bool)
    found[forward] = recompute_of(table, forward) < 0
    return found


@lru_cache(maxsize=4)  # asked for to bound a candidate, and again to cut it into segments
def collect(ticks: Ticks) -> Requirements:
    """The requirements of every tick."""
    schedule, table = ticks.schedule, ticks.schedule.encoded
    user = consumers(table)
    target = np.where(user >= 0, table.device[user], -1)
    local = target == table.device
    target = np.where(local, -1, target)
    slack = np.where(target >= 0, ticks.when[user] - ticks.when - 1, 0)
    # A tick is a line of at most two actions a device, each of them a row of numbers; equal lines are equal ticks.
    chain = ~table.of_kinds(RECOMPUTE) & ~table.shares  # they hand nothing on to another stage
    first, last = chain & (table.stage == 0), chain & (table.stage == table.num_stages - 1)
    fields = np.stack([table.kind, chunks_of(schedule), keeps(table), first, last, local, target, slack], 1, dtype=np.int32)
    lines = np.full((ticks.num_ticks, table.num_devices, 2, fields.shape[1]), -1, np.int32)
    lines[ticks.when, table.device, (~table.of_kinds(RUNS_FORWARD)).astype(np.int64)] = fields
    flat = lines.reshape(ticks.num_ticks, -1)
    numbers: dict[bytes, int] = {}
    codes = [numbers.setdefault(line.tobytes(), len(numbers)) for line in flat]
    shape = lines.shape[1:]
    kinds = tuple(_tick_requirements(np.frombuffer(line, np.int32).reshape(shape)) for line in numbers)
    return Requirements(kinds, np.array(codes, np.int64), table.num_devices, ticks.forward_first)


def _tick_requirements(line: NDArray[np.int32]) -> TickRequirements:
    """Read one line of `collect`: [device, half, field]."""
    devices, halves = np.nonzero(line[:, :, 0] >= 0)
    counts: dict[tuple[int, int, int], list[int]] = {}
    slack: dict[Edge, int] = {}
    for device, (kind, chunk, kept, first, last, local, target, room) in zip(devices.tolist(), line[devices, halves].tolist(), strict=True):
        sums = counts.setdefault((kind, chunk, kept), [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += first
        sums[2] += last
        sums[3] += local
        if target >= 0:
            slack[Edge(Payload.ACTIVATION if kind == Kind.F else Payload.COTANGENT, device, target)] = room
    blocks = {Block(Kind(kind), chunk, bool(kept)): Count(*sums) for (kind, chunk, kept), sums in counts.items()}
    return TickRequirements(blocks, slack, bool(((line[:, 0, 0] >= 0) & (line[:, 1, 0] == Kind.B)).any()))
