"""Passes: give every cell of a table the lock-step tick in which the lowered program runs it, and
list what each tick needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.ir import NOBODY, IntTable, Record, links_of
from ..program.segments import JOINT, Block, Payload
from ..table.clock import EventLoop
from ..table.effects import flags_of
from ..table.encoded import BoolArray, IntArray, Transfers
from ..table.kinds import RUNS_FORWARD, Action, Cell, Kind, Overlap, kinds_where
from ..table.order import waiting
from ..table.schedule import Schedule
from ..table.text import drawn

NO_TRANSFER = np.iinfo(np.int32).max  # in `Ticks.transfers`


class Edge(NamedTuple):
    """A transfer from one device to another at the end of a tick."""

    payload: Payload
    source: int
    target: int


def equal_rows(rows: NDArray[np.generic]) -> IntArray:
    """Per row, a number that equal rows share, the first of them 0."""
    numbers: dict[bytes, int] = {}
    found = [numbers.setdefault(r.tobytes(), len(numbers)) for r in np.ascontiguousarray(rows)]
    return np.array(found, np.int64)


@dataclass(frozen=True, eq=False)
class Rooms:
    """The rooms of a table with U, D and X.

    Attributes:
        plain: the table without them.
        room: per action of that table, the room of its stage's parameters; 0 for an action that
            belongs to no stage.
        linked: of each U and X [5, n]: device, room, chunk, whether it is an X, and the number of
            the action before it in its row of the plain table (-1 for none).
    """

    plain: Schedule
    room: IntArray
    linked: IntArray

    @property
    def count(self) -> int:
        """The most rooms of a device."""
        return 1 + int(self.room.max(initial=0))

    def links(self, when: IntArray, shape: tuple[int, int]) -> Record[IntTable]:
        """The reductions and then the gathers before each tick's blocks, where action i of the
        plain table runs in tick `when[i]`.
        """
        names = links_of(self.count)
        found = {name: np.full(shape, NOBODY, np.int32) for name in names}
        ticks = self.ticks(when)
        for (device, room, chunk, reduces, _), tick in zip(self.linked.T, ticks, strict=True):
            found[names[room + self.count * reduces]][tick, device] = chunk
        return Record(found)

    def ticks(self, when: IntArray) -> Iterator[int]:
        """The tick of each of these: that of the next action of its device, beside which it runs,
        where that one does not need its room; else the tick after that of the action before it.
        """
        table = self.plain.encoded
        for device, room, *_, before in self.linked.T.tolist():
            after = table.first[device] if before < 0 else before + 1
            both = {after, int(table.last_half[after])} if after < table.first[device + 1] else {}
            if both and all(room != self.room[i] for i in both):
                yield int(when[after])
            else:
                yield 1 + int(when[before]) if before >= 0 else 0


@dataclass(frozen=True, eq=False)
class Ticks:
    """`when[i]` is the tick in which action i of `schedule.encoded` runs.

    Within a tick a device does at most one forward and one backward, or a W and then a forward;
    what it produces is transferred. A collective action (L, E, G) has a tick of its own on every
    device.
    """

    schedule: Schedule
    when: IntArray
    # the period of the whole table's code, for which the ticks were made; 1 leaves it to
    # `span_candidates`
    period: int = 1
    # backwards that run as one block with a forward of their tick
    joint: tuple[Kind, ...] = JOINT
    # of parameters that are gathered during the step
    rooms: Rooms | None = None

    @property
    def chunks(self) -> IntArray:
        """Per action, the chunk or the room of its stage."""
        return self.schedule.chunks if self.rooms is None else self.rooms.room

    @cached_property
    def num_ticks(self) -> int:
        """T, the number of ticks; a multiple of `period`."""
        # A reduction may come after all blocks.
        linked = () if self.rooms is None else self.rooms.ticks(self.when)
        used: int = 1 + max([int(self.when.max(initial=-1)), *linked])
        return used + -used % self.period

    @cached_property
    def cells(self) -> tuple[tuple[Cell, ...], ...]:
        """`cells[device][tick]`: what each device does in each tick, None where it idles; all rows
        have length T.
        """
        rows: list[list[Cell]] = [[None] * self.num_ticks for _ in self.schedule.rows]
        for (device, _, action), tick in zip(self.schedule.actions(), self.when, strict=True):
            other = rows[device][tick]
            if other is None:
                rows[device][tick] = action
            else:  # a forward and a backward, whichever comes first in the row
                assert isinstance(other, Action), "three actions in one tick"
                rows[device][tick] = Overlap(*sorted((action, other), key=lambda a: a.kind))
        return tuple(map(tuple, rows))

    @cached_property
    def pairs(self) -> BoolArray:
        """`[tick, device]`: whether it runs a forward and a backward that may be one block."""
        return self.runs(RUNS_FORWARD) & self.runs(self.joint)

    def runs(self, kinds: Iterable[Kind]) -> BoolArray:
        """`[tick, device]`: whether it runs an action of these kinds."""
        table = self.schedule.encoded
        found = np.zeros((self.num_ticks, table.num_devices), bool)
        mine = table.of_kinds(kinds)
        found[self.when[mine], table.device[mine]] = True
        return found

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], IntArray]:
        """The blocks that occur; and `[tick, block]`: how many devices run it, and how many of them
        for the first, the last, a locally consumed stage.
        """
        table, chunk = self.schedule.encoded, self.chunks
        every = len(Kind), 1 + int(chunk.max(initial=0)), 2
        numbers = np.ravel_multi_index((table.kind, chunk, (~table.recomputed).astype(int)), every)
        blocks, block = np.unique(numbers, return_inverse=True)
        shape, flags = (self.num_ticks, len(blocks)), flags_of(table)
        cells = np.ravel_multi_index((self.when, block), shape)
        some = (None, *(flags[name] for name in ("is_first", "is_last", "is_local")))
        counts = np.stack([np.bincount(cells, each, math.prod(shape)) for each in some], -1)
        kinds = np.transpose(np.unravel_index(blocks, every)).tolist()
        found = tuple(Block(Kind(k), own, bool(keeps)) for k, own, keeps in kinds)
        return found, counts.astype(np.int64).reshape(*shape, len(some))

    @cached_property
    def transfers(self) -> tuple[tuple[Edge, ...], NDArray[np.int32]]:
        """The transfers that occur, in order; and `[tick, edge]` the slack of each, `NO_TRANSFER`
        where it does not occur.
        """
        table, when = self.schedule.encoded, self.when
        sent = np.flatnonzero((table.consumer >= 0) & ~flags_of(table)["is_local"])
        user = table.consumer[sent]
        payload = np.where(table.kind[sent] == Kind.F, Payload.ACTIVATION, Payload.COTANGENT)
        every = len(Payload), table.num_devices, table.num_devices
        numbers = np.ravel_multi_index((payload, table.device[sent], table.device[user]), every)
        edges, edge = np.unique(numbers, return_inverse=True)
        slack = np.full((self.num_ticks, len(edges)), NO_TRANSFER, np.int32)
        slack[when[sent], edge] = when[user] - when[sent] - 1
        ends = np.transpose(np.unravel_index(edges, every)).tolist()
        return tuple(Edge(Payload(p), d, e) for p, d, e in ends), slack

    @cached_property
    def collective(self) -> IntArray:
        """Per tick, a number that ticks with equal collective actions share; else 0."""
        blocks, counts = self.blocks
        shared = np.array([block.is_collective for block in blocks], bool)
        shares = counts[:, shared, 0] > 0
        return equal_rows(np.concatenate([np.zeros_like(shares[:1]), shares]))[1:]

    @cached_property
    def signatures(self) -> IntArray:
        """Per tick, a number that ticks of equal blocks and transfers share, which can share their
        code.
        """
        needs = [self.blocks[1][:, :, 0] > 0, self.transfers[1] < NO_TRANSFER]
        return equal_rows(np.concatenate(needs, axis=1))

    def __str__(self) -> str:
        ticks = [{t: str(cell) for t, cell in enumerate(row) if cell} for row in self.cells]
        return drawn(ticks, ())


def assign_ticks(schedule: Schedule) -> Ticks:
    """Put each cell in the first tick after its device's previous cell and after every producer on
    another device.

    This is the longest path through the table's order and data dependencies, so T is the least that
    any lock-step program of this table, which `check` accepts, can have.  Linear in the number of
    cells.
    """
    return _earliest(schedule, schedule.encoded.last_half)


# What `joined_ticks` puts in one tick: an action, and the next of its row.
W_THEN_F = (Kind.W, Kind.F)
F_THEN_PART = tuple((Kind.F, kind) for kind in kinds_where(lambda spec: spec.part_of))


def followed(schedule: Schedule, kinds: tuple[Kind, Kind]) -> BoolArray:
    """Per action, whether it is of one kind and the next of its row of the other, neither of them
    half of a pair.
    """
    table, found = schedule.encoded, np.zeros(schedule.encoded.num_actions, bool)
    kind = table.kind.copy()
    kind[table.pairs] = kind[table.pairs + 1] = -1
    same_row = table.device[:-1] == table.device[1:]
    found[:-1] = same_row & (kind[:-1] == kinds[0]) & (kind[1:] == kinds[1])
    return found


def joined_ticks(schedule: Schedule, *, as_one: bool = False) -> Ticks:
    """As `assign_ticks`, but a W is in the tick of the F right after it, and a late part of a share
    in that of the F right before it: fewer ticks, and in each of them predicates to ask.

    Both neither await nor make a transfer, so where transfers run beside blocks they run while
    their tick's F awaits its input.  With `as_one` a W and its F are one block: where blocks
    communicate, matmuls of the W run beside collectives of the F.
    """
    table = schedule.encoded
    joined = followed(schedule, W_THEN_F)
    for kinds in F_THEN_PART:
        joined[1:] |= followed(schedule, kinds)[1:] & ~joined[:-1]
    ends = np.where(joined, np.arange(table.num_actions) + 1, table.last_half)
    ticks = _earliest(schedule, ends)
    return replace(ticks, joint=(*JOINT, Kind.W)) if as_one else ticks


def modulo_ticks(schedule: Schedule, *, shift: int = 0) -> Ticks:
    """Put each cell in the first tick that it can have, where kinds of cells take turns: F, then I,
    then W, then F again.

    With no shift all devices do the same kind in the same tick, so no device waits for a longer
    action, and what an F sends has the whole turn of the other kinds to arrive.  It costs nothing
    where the table has that much slack between a stage's action and its neighbour's, as interleaved
    1F1B and ZB-H2 have.  With a shift of one, each device is a tick later than the device before
    it: the steady state of 1F1B, where neighbours do F and B in turn.  Ticks in which a device has
    nothing to do take no time.

    It is modulo scheduling with kernel-only code (Rau, Schlansker and Tirumalai 1992, section 3):
    warm-up and cool-down run in the code of the steady state, so there is one segment, whatever M
    is.
    """
    table = schedule.encoded
    pairs = table.pairs
    kind = table.kind.copy()
    # A pair is a kind of its own.
    kind[pairs] = kind[pairs + 1] = len(Kind) + table.kind[pairs + 1]
    kinds, turn = np.unique(kind, return_inverse=True)
    # All devices have the turn of a collective action in the same tick.
    turn = turn + np.where(table.is_collective, 0, shift * table.device)
    return _earliest(schedule, table.last_half, turn, period=max(1, len(kinds)))


def _earliest(
    schedule: Schedule, ends: IntArray, turn: IntArray | None = None, *, period: int = 1
) -> Ticks:
    """The first tick that is right for each cell, among those whose number is its turn modulo the
    number of turns.

    `ends`: per action the last one of its tick, itself or the next in its row.
    """
    table, order = schedule.encoded, schedule.run_order(Transfers.ASYNC).order
    need, together = waiting(table, Transfers.ASYNC)
    # A tick each, and none for what the next of its row shares its tick with.
    duration = (ends == np.arange(table.num_actions)).astype(np.int64)
    latency, free = 1 - duration[need], [0] * table.num_devices
    loop = EventLoop((table.device, need, latency, duration), free, groups=together)
    loop.run(order if turn is None else _in_turn(loop, order, turn.tolist(), period))
    return Ticks(schedule, np.array(loop.starts, np.int64)[ends], period=period)


def _in_turn(
    loop: EventLoop, order: Iterable[int], turns: Sequence[int], period: int
) -> Iterator[int]:
    """An order in which each action waits for its turn."""
    for i in order:
        if i == loop.groups.get(i, (i,))[0]:
            begin = loop.begin(i)
            loop.free[loop.device[i]] = begin + (turns[i] - begin) % period
        yield i
