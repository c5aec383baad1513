"""Passes: give every cell of a table the lock-step tick in which the lowered program runs it, and
list what each tick needs: blocks, who runs them, and the transfers between devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError
from ..program.ir import JOINT
from ..program.segments import Block, Payload
from ..table.effects import flags_of
from ..table.encoded import BoolArray, IntArray
from ..table.kinds import RUNS_FORWARD, Action, Cell, Kind, Overlap
from ..table.run_order import Transfers, waits
from ..table.schedule import Schedule
from ..table.text import grid


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

    @cached_property
    def num_ticks(self) -> int:
        """T, the number of ticks; a multiple of `period`."""
        used = int(self.when.max(initial=-1)) + 1
        return used + -used % self.period

    @cached_property
    def cells(self) -> tuple[tuple[Cell, ...], ...]:
        """`cells[device][tick]`: what each device does in each tick, None where it idles; all rows
        have length T.
        """
        rows: list[list[Cell]] = [[None] * self.num_ticks for _ in self.schedule.rows]
        when = iter(self.when.tolist())
        for device, _, action in self.schedule.actions():
            tick = next(when)
            other = rows[device][tick]
            rows[device][tick] = action if other is None else _pair(action, other)
        return tuple(tuple(row) for row in rows)

    @cached_property
    def pairs(self) -> BoolArray:
        """`[tick, device]`: whether it runs a forward and a backward that may be one block."""
        table, halves = self.schedule.encoded, []
        for kinds in (RUNS_FORWARD, self.joint):
            runs, found = table.of_kinds(kinds), np.zeros((self.num_ticks, table.num_devices), bool)
            found[self.when[runs], table.device[runs]] = True
            halves.append(found)
        return halves[0] & halves[1]

    def __str__(self) -> str:
        return grid(self.cells)


def _pair(one: Action, other: Cell) -> Overlap:
    """A forward and a backward, whichever comes first in the row."""
    assert isinstance(other, Action), "three actions in one tick"
    forward, backward = sorted((one, other), key=lambda action: action.kind)
    return Overlap(forward, backward)


def assign_ticks(schedule: Schedule) -> Ticks:
    """Put each cell in the first tick after its device's previous cell and after every producer on
    another device.

    This is the longest path through the table's order and data dependencies, so T is the least that
    any lock-step program of this table can have.  Linear in the number of cells.  ScheduleError if
    the table cannot run.
    """
    return _earliest(
        schedule, np.zeros(schedule.encoded.num_actions, np.int64), 1, schedule.encoded.last_half
    )


def joins_weights(schedule: Schedule) -> BoolArray:
    """Per action, whether it is a W with an F right after it in its row, neither of them half of a
    pair.
    """
    return _followed(schedule, Kind.W, Kind.F)


def joins_shares(schedule: Schedule) -> BoolArray:
    """Per action, whether it is an F with an H right after it in its row."""
    return _followed(schedule, Kind.F, Kind.H)


def _followed(schedule: Schedule, one: Kind, other: Kind) -> BoolArray:
    """Per action, whether it is of one kind and the next of its row of the other, neither of them
    half of a pair.
    """
    table = schedule.encoded
    alone = np.ones(table.num_actions, bool)
    alone[table.pairs] = alone[table.pairs + 1] = False
    first, second = (alone & table.of_kinds((kind,)) for kind in (one, other))
    return np.append(
        (first[:-1] & second[1:]) & (np.diff(table.device) == 0),
        [False] * min(1, table.num_actions),
    )


def joined_ticks(schedule: Schedule, *, as_one: bool = False) -> Ticks:
    """As `assign_ticks`, but a W is in the tick of the F right after it, and an H in that of the F
    right before it: fewer ticks, and in each of them predicates to ask.

    A W and an H neither await nor make a transfer, so where transfers run beside blocks they run
    while their tick's F awaits its input.  With `as_one` a W and its F are one block: where blocks
    communicate, matmuls of the W run beside collectives of the F.
    """
    table = schedule.encoded
    joined = joins_weights(schedule)
    joined[1:] |= joins_shares(schedule)[1:] & ~joined[:-1]
    ends = np.where(joined, np.arange(table.num_actions) + 1, table.last_half)
    ticks = _earliest(schedule, np.zeros(table.num_actions, np.int64), 1, ends)
    return replace(ticks, joint=(*JOINT, Kind.W)) if as_one else ticks


def modulo_ticks(schedule: Schedule, *, shift: int = 0) -> Ticks:
    """Put each cell in the first tick that it can have, where kinds of cells take turns: F, then I,
    then W, then F again.

    With no shift all devices do the same kind in the same tick, so nobody waits for a longer
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
    kind[pairs] = kind[pairs + 1] = len(Kind) + table.kind[pairs + 1]  # a pair is a kind of its own
    kinds, turn = np.unique(kind, return_inverse=True)
    # All devices have the turn of a collective action in the same tick.
    turn = np.where(table.is_collective, turn, (turn + shift * table.device) % max(1, len(kinds)))
    return _earliest(schedule, turn, max(1, len(kinds)), table.last_half)


def _earliest(schedule: Schedule, turn: IntArray, period: int, ends: IntArray) -> Ticks:
    """The first tick that is right for each cell, among those whose number is its turn modulo the
    number of turns.

    `ends`: per action the last one of its tick, itself or the next in its row.
    """
    table = schedule.encoded
    run_order(schedule)  # there is one
    nothing, unmet = table.num_actions, table.num_actions + 1
    needs = np.append(ends, nothing)[needs_of(schedule)]
    # later than any tick, until it is known
    when = np.full(table.num_actions + 2, table.num_actions * period + 1)
    when[nothing] = -1
    last = np.flatnonzero(ends == np.arange(table.num_actions))
    two, met = ends[last - 1] == last, np.isin(last, list(table.collectives))
    # After the last cell of a device there is one that can never run.
    stops = np.searchsorted(last, table.first[1:])
    cells, turns, are_collective = (
        np.insert(last, stops, unmet),
        np.insert(turn[last], stops, 0),
        np.insert(met, stops, False),
    )
    need = np.insert(np.where(met, nothing, needs[last]), stops, unmet)
    # what the first of two actions needs
    of_first = np.insert(np.where(two, needs[last - 1], nothing), stops, nothing)
    # the next cell of each device
    at = np.searchsorted(last, table.first[:-1]) + np.arange(table.num_devices)
    left, tick = len(last), 0
    while left:
        ready = when[need[at]] < tick
        if two.any():
            ready &= when[of_first[at]] < tick
        if period > 1:
            ready &= turns[at] == tick % period
        if table.collectives and not (waiting := are_collective[at]).all():
            ready &= ~waiting
        running = at[ready]
        when[cells[running]] = tick
        at += ready
        left -= len(running)
        tick += 1
    return Ticks(schedule, when[:nothing][ends], period=period)


def run_order(schedule: Schedule) -> Sequence[int]:
    """An order of the actions in which each comes after all it needs; ScheduleError where there is
    none.
    """
    found = schedule.run_order(Transfers.ASYNC)
    if found.cycles:
        table = schedule.encoded
        stuck = [
            f"{table.text(wait.at)} on device {wait.device}"
            for cycle in found.cycles
            for wait in cycle
        ]
        raise ScheduleError(
            f"the table deadlocks: {', '.join(stuck)} wait for each other; run jaxpipe.check on it"
        )
    return found.order


def needs_of(schedule: Schedule) -> IntArray:
    """Per action, the last half of the cell on another device that makes its input; the number of
    actions where none does.
    """
    table = schedule.encoded
    wait = waits(table, Transfers.ASYNC)
    needs: IntArray = np.where(wait >= 0, wait, table.num_actions)
    return needs


NO_TRANSFER = np.iinfo(np.int32).max  # in `Requirements.slack`


class Edge(NamedTuple):
    """A transfer from one device to another at the end of a tick."""

    payload: Payload
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Requirements:
    """The requirements of every tick."""

    blocks: tuple[Block, ...]  # that occur
    # `[tick, block]`: how many devices run it, and how many of them for the first, the last, a
    # locally consumed stage
    counts: IntArray
    edges: tuple[Edge, ...]  # the transfers that occur, in order
    # `[tick, edge]` is the slack of `edges[edge]`; NO_TRANSFER where it does not occur
    slack: NDArray[np.int32]
    # per tick, whether some device runs a forward and a backward that may be one block
    paired: BoolArray
    num_devices: int

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def collective(self) -> IntArray:
        """Per tick, a number that ticks with equal collective actions share; else 0."""
        mine = [block.is_collective for block in self.blocks]
        shares = self.counts[:, np.array(mine, bool), 0] > 0
        return equal_rows(np.concatenate([np.zeros_like(shares[:1]), shares]))[1:]

    @cached_property
    def signatures(self) -> IntArray:
        """Per tick, a number that ticks of equal blocks and transfers share, which can share their
        code.
        """
        needs = [self.counts[:, :, 0] > 0, self.slack < NO_TRANSFER]
        return equal_rows(np.concatenate(needs, axis=1))


def equal_rows(rows: NDArray[Any]) -> IntArray:
    """Per row, a number that equal rows share, the first of them 0."""
    numbers: dict[bytes, int] = {}
    return np.array(
        [numbers.setdefault(row.tobytes(), len(numbers)) for row in np.ascontiguousarray(rows)],
        np.int64,
    )


@lru_cache(maxsize=4)  # called for each list of spans
def collect(ticks: Ticks) -> Requirements:
    """The requirements of every tick."""
    table, when = ticks.schedule.encoded, ticks.when
    kinds = np.stack([table.kind, ticks.schedule.chunks, ~table.recomputed], 1)
    blocks, block = np.unique(kinds, axis=0, return_inverse=True)
    shape = (ticks.num_ticks, len(blocks))
    cells = np.ravel_multi_index((when, block.reshape(-1)), shape)
    flags = flags_of(table)
    some = (None, *(flags[name] for name in ("is_first", "is_last", "is_local")))
    sums = [np.bincount(cells, each, math.prod(shape)) for each in some]
    sent = np.flatnonzero((table.consumer >= 0) & ~flags["is_local"])
    user = table.consumer[sent]
    payload = np.where(table.kind == Kind.F, Payload.ACTIVATION, Payload.COTANGENT)
    ends = np.stack([payload[sent], table.device[sent], table.device[user]], 1)
    edges, edge = np.unique(ends, axis=0, return_inverse=True)
    slack = np.full((ticks.num_ticks, len(edges)), NO_TRANSFER, np.int32)
    slack[when[sent], edge.reshape(-1)] = when[user] - when[sent] - 1
    return Requirements(
        blocks=tuple(Block(Kind(k), chunk, bool(kept)) for k, chunk, kept in blocks.tolist()),
        counts=np.stack(sums, -1).astype(np.int64).reshape(*shape, len(sums)),
        edges=tuple(Edge(Payload(p), d, e) for p, d, e in edges.tolist()),
        slack=slack,
        paired=np.any(ticks.pairs, axis=1),
        num_devices=table.num_devices,
    )
