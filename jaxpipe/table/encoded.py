"""A table as flat integer arrays, which the checker, the simulator and the passes read instead of
half a million tuples.

Actions are numbered row by row, idle cells left out, the halves of an overlapped pair one after the
other (forward first).  So number order is row order.  Each action waits for at most one action of
another device.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .kinds import (
    BACKWARDS,
    COLLECTIVES,
    COMPUTE,
    KIND_NAMES,
    KINDS,
    RECEIVES,
    RECOMPUTE,
    SHARES,
    SPREAD_FIRST,
    SPREAD_LAST,
    TRANSFERS,
    Action,
    Kind,
    Release,
    Row,
    Value,
    kinds_where,
    makers,
    parts,
)

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NUM_KINDS = len(Kind)
# The look-up table has an entry for each kind, stage and microbatch.  Where it would be this much
# larger than the number of actions, some number is a typing error (0F1000000).
_LEAST_ROOM, _ROOM_PER_ACTION = 1 << 17, 64


class CollectiveAction(NamedTuple):
    """A collective action of one microbatch: the number of each device's action, and its place
    between the actions of a stage.
    """

    members: tuple[int, ...]
    stage: int  # the stage that it belongs to: the first or the last
    # the actions of that stage whose result it reads, and that read its result; -1 for none
    source: int
    user: int

    @property
    def partner(self) -> int:
        """The action of its stage that it reads from, or else that reads from it."""
        return self.source if self.source >= 0 else self.user


@dataclass(frozen=True, eq=False)
class Encoded:
    """The actions of a table as arrays with one entry per action, and which action needs which.

    `first[d] : first[d + 1]` are the actions of device d.  `last_half[i]` is i, or the number of
    the backward half where i is the forward half of an overlapped pair: both are done only when
    that one is.
    """

    num_stages: int
    num_microbatches: int
    slices: int
    stage: IntArray
    kind: IntArray
    microbatch: IntArray
    device: IntArray
    position: IntArray
    last_half: IntArray
    first: tuple[int, ...]

    @property
    def num_actions(self) -> int:
        """The number of actions, both halves of a pair counted."""
        return len(self.stage)

    @property
    def num_devices(self) -> int:
        """P, the number of rows."""
        return len(self.first) - 1

    @property
    def slice(self) -> IntArray:
        """Per action, the number of its slice in its sequence."""
        return self.microbatch % self.slices

    @cached_property
    def in_range(self) -> BoolArray:
        """Per action, whether its stage and microbatch exist."""
        stage_ok = (self.stage >= 0) & (self.stage < self.num_stages)
        m = self.microbatch
        return stage_ok & (m >= 0) & (m < self.num_microbatches)

    @property
    def too_sparse(self) -> bool:
        """True where S * M is so much larger than the number of actions that some number must be a
        typing error.
        """
        room = NUM_KINDS * self.num_stages * self.num_microbatches
        return room > max(_LEAST_ROOM, _ROOM_PER_ACTION * self.num_actions)

    @cached_property
    def at(self) -> IntArray:
        """`at[kind, stage, microbatch]` is the number of that action (its first occurrence),
        or -1.
        """
        shape = (NUM_KINDS, self.num_stages, self.num_microbatches)
        table = np.full(shape, -1, np.int64)
        known = np.flatnonzero(self.in_range)[::-1]
        table[self.kind[known], self.stage[known], self.microbatch[known]] = known
        return table

    @cached_property
    def backward_at(self) -> IntArray:
        """`backward_at[stage, microbatch]` is the action that makes the input gradient: B, or else
        I, or else -1.
        """
        return self.maker(Value.INPUT_GRAD)

    def maker(self, value: Value) -> IntArray:
        """`[stage, microbatch]` is the first action that makes a value, or -1."""
        first, *others = makers(value)
        found: IntArray = self.at[first]
        for kind in others:
            found = np.where(found >= 0, found, self.at[kind])
        return found

    def of_kinds(self, kinds: Iterable[Kind]) -> BoolArray:
        """Per action, whether it is of one of these kinds."""
        wanted = np.zeros(NUM_KINDS, bool)
        wanted[list(kinds)] = True
        return wanted[self.kind]

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(map(Kind, np.unique(self.kind).tolist()))

    @cached_property
    def is_compute(self) -> BoolArray:
        """Per action, whether it is no SEND and no RECV."""
        return self.of_kinds(COMPUTE)

    @cached_property
    def pairs(self) -> IntArray:
        """The numbers of the forward halves of overlapped pairs; each backward half is the next
        number.
        """
        return np.flatnonzero(self.last_half != np.arange(self.num_actions))

    @cached_property
    def receives(self) -> IntArray:
        """The numbers of all RECV_F and RECV_B."""
        return np.flatnonzero(self.of_kinds(RECEIVES))

    @property
    def has_transfers(self) -> bool:
        """True where the table holds a SEND or RECV."""
        return not self.kinds.isdisjoint(TRANSFERS)

    @property
    def forward_only(self) -> bool:
        """True where the table computes nothing of the backward pass."""
        return self.kinds.isdisjoint(BACKWARDS)

    @cached_property
    def is_collective(self) -> BoolArray:
        """Per action, whether all devices do it at the same time."""
        return self.of_kinds(COLLECTIVES)

    @cached_property
    def shares(self) -> BoolArray:
        """Per action, whether its first number is its device's, and not a stage's."""
        return self.of_kinds(SHARES)

    @property
    def spreads_first(self) -> bool:
        """True where `first` is spread over the devices."""
        return not self.kinds.isdisjoint(SPREAD_FIRST)

    @property
    def spreads_last(self) -> bool:
        """True where `last` is spread over the devices."""
        return not self.kinds.isdisjoint(SPREAD_LAST)

    @property
    def recomputes(self) -> bool:
        """True where a forward is run again for its backward."""
        return not self.kinds.isdisjoint(RECOMPUTE)

    @cached_property
    def recomputed(self) -> BoolArray:
        """Per action, whether it is a forward that is run again for its backward."""
        found = self.of_kinds(makers(Value.INPUT)) & self.in_range
        mine = np.flatnonzero(found)
        again = self.at[list(RECOMPUTE)][:, self.stage[mine], self.microbatch[mine]]
        found[mine] = (again >= 0).any(axis=0)
        return found

    @cached_property
    def collectives(self) -> dict[int, CollectiveAction]:
        """By the number of any action of it: the collective actions, where each device has
        it once.
        """
        found: dict[int, CollectiveAction] = {}
        for kind in self.kinds.intersection(COLLECTIVES):
            end, members = KINDS[kind].end, self.at[kind, : self.num_devices]
            if end is None or len(members) < self.num_devices:
                continue
            stage = end.stage % self.num_stages
            none = np.full(self.num_microbatches, -1)
            source = none if end.needs is None else self.maker(end.needs)[stage]
            user = none if end.feeds is None else self.maker(end.feeds)[stage]
            own = self.device[members] == np.arange(self.num_devices)[:, None]
            right = (members >= 0) & own
            for m in np.flatnonzero(right.all(axis=0)).tolist():
                each = tuple(members[:, m].tolist())
                collective = CollectiveAction(each, stage, int(source[m]), int(user[m]))
                found |= dict.fromkeys(each, collective)
        return found

    @cached_property
    def producer(self) -> IntArray:
        """Per action, the action that makes its input from the neighbour stage, or -1 (none needed,
        or missing).

        F: the F of the stage before.  B and I: the B or I of the next stage.  SEND: the action
        that makes its message.  RECV: its SEND.
        """
        found = np.full(self.num_actions, -1, np.int64)
        for spec in KINDS:
            value = spec.needs or spec.sends
            if value is None and spec.receives is None:
                continue
            source = self.at[spec.receives] if value is None else self.maker(value)
            shift = 0 if spec.sends else spec.came_from
            mine = np.flatnonzero(self.in_range & (self.kind == spec.kind))
            stage = self.stage[mine] + shift
            inside = (stage >= 0) & (stage < self.num_stages)
            mine, stage = mine[inside], stage[inside]
            found[mine] = source[stage, self.microbatch[mine]]
        return found

    @cached_property
    def consumer(self) -> IntArray:
        """Per action, the action of the neighbour stage that uses its result, or -1."""
        found = np.full(self.num_actions, -1, np.int64)
        users = np.flatnonzero(self.producer >= 0)
        found[self.producer[users]] = users
        return found

    @cached_property
    def crosses(self) -> BoolArray:
        """Per action, whether its producer is on another device."""
        elsewhere: BoolArray = self.device[self.producer] != self.device
        return elsewhere & (self.producer >= 0)

    def action(self, number: int) -> Action:
        """The action with this number."""
        kind = Kind(int(self.kind[number]))
        return Action(int(self.stage[number]), kind, int(self.microbatch[number]))

    def text(self, number: int) -> str:
        """The text of the action with this number."""
        return f"{self.stage[number]}{KIND_NAMES[self.kind[number]]}{self.microbatch[number]}"

    def cell_text(self, number: int) -> str:
        """The text of the whole cell whose first (or only) action has this number."""
        if self.last_half[number] == number:
            return self.text(number)
        return f"({self.text(number)};{self.text(number + 1)})OVERLAP_F_B"

    def cell_of(self, number: int) -> tuple[int, int]:
        """(device, position) of the action with this number."""
        return int(self.device[number]), int(self.position[number])


def encode(
    rows: tuple[Row, ...], num_stages: int, num_microbatches: int, slices: int = 1
) -> Encoded:
    """Flatten the rows of a schedule."""
    cells = list(chain.from_iterable(rows))
    sizes = np.ones(len(cells), np.int64)
    actions: Iterable[Any] = cells
    if {*map(type, cells)} - {Action}:  # a large table of actions alone is read at once
        sizes = np.array([len(parts(cell)) for cell in cells], np.int64)
        actions = chain.from_iterable(map(parts, cells))
    numbers = np.fromiter(chain.from_iterable(actions), np.int64, 3 * int(sizes.sum()))
    stage, kind, microbatch = map(np.ascontiguousarray, numbers.reshape(-1, 3).T)
    lengths = [len(row) for row in rows]
    device = np.repeat(np.repeat(np.arange(len(rows)), lengths), sizes)
    starts = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    last_half = np.arange(len(stage))
    last_half[(np.cumsum(sizes) - sizes)[sizes == 2]] += 1
    return Encoded(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        slices=slices,
        stage=stage,
        kind=kind,
        microbatch=microbatch,
        device=device,
        position=np.repeat(np.arange(len(cells)) - starts, sizes),
        last_half=last_half,
        first=tuple(np.searchsorted(device, np.arange(len(rows) + 1)).tolist()),
    )


class Changes(NamedTuple):
    """Per action, the changes that it makes on its device, each for its own stage and microbatch.

    Attributes:
        begins: 1 where activations are held from its start on.
        ends: 1 where they are released at its end.
        inputs: 1 where only a stage's input is kept from its start on (an F with an R), -1 where
            activations replace it (the R).
    """

    begins: IntArray
    ends: IntArray
    inputs: IntArray


def activation_changes(table: Encoded, release: Release) -> Changes:
    """The activations that each action keeps and releases: they are held from F, or from R where
    there is one, to the end of B (or of I or W).

    An F whose microbatch has an R keeps the stage's input only.  In a forward-only table
    activations are held only while their F runs.
    """
    begins = table.of_kinds(makers(Value.ACTIVATIONS)).astype(np.int64)
    inputs = table.recomputed.astype(np.int64) - table.of_kinds(RECOMPUTE)
    if table.forward_only:
        return Changes(begins, begins, inputs)
    enders = kinds_where(lambda spec: release in spec.releases)
    ends = table.of_kinds(enders).astype(np.int64)
    return Changes(begins - table.recomputed, ends, inputs)


def live_activations(table: Encoded, release: Release) -> IntArray:
    """Per action, how many activations its device holds while it runs, its own included (kept
    inputs are not counted).

    The halves of an overlapped pair run at the same time: the forward's activations are held while
    the backward runs.
    """
    begins, dies, _ = activation_changes(table, release)
    return live(table, begins, dies)


def live(table: Encoded, begins: IntArray, dies: IntArray) -> IntArray:
    """Per action, what its device holds while it runs, its own included."""
    held = np.concatenate([[0], np.cumsum(begins - dies)])
    first = np.array(table.first)  # of integers also without a row
    before_row = held[np.repeat(first[:-1], np.diff(first))]
    found: IntArray = held[1:] + dies - before_row
    return found


# A value leaves while the action after it runs, and is back when the action before its reader ends:
# nothing is gained by less than this.
LEAST_AWAY = 4


class SplitMemory(NamedTuple):
    """Activations in two memories.

    Attributes:
        device: that the device holds.
        host: that wait in the memory of its host.
    """

    device: tuple[int, ...]
    host: tuple[int, ...]


def split_peaks(table: Encoded, release: Release) -> SplitMemory:
    """The most activations of each device in either memory, where those that live long wait on the
    host (Wan et al. 2025, "PipeOffload").

    One leaves while the action after it runs, and comes back while the one before its first reader
    does, where that is at least `LEAST_AWAY` actions later.
    """
    begins, dies, _ = activation_changes(table, release)
    begin, enders = np.flatnonzero(begins), np.flatnonzero(dies)
    at = table.stage[begin], table.microbatch[begin]
    last = np.zeros_like(table.backward_at)
    last[table.stage[enders], table.microbatch[enders]] = enders
    read = begin if table.forward_only else table.backward_at[at]
    away = read - begin >= LEAST_AWAY
    since, until = begin[away], read[away]

    def held(first: IntArray, last: IntArray) -> IntArray:
        changes = np.zeros(table.num_actions + 1, np.int64)
        np.add.at(changes, first, 1)
        np.add.at(changes, last + 1, -1)
        return np.cumsum(changes)

    device = row_peaks(table, held(begin, last[at]) - held(since + 2, until - 2))
    return SplitMemory(device, row_peaks(table, held(since + 1, until - 1)))


def row_peaks(table: Encoded, live: IntArray) -> tuple[int, ...]:
    """Per device, the most of what is held while its actions run."""
    return tuple(int(live[a:b].max(initial=0)) for a, b in pairwise(table.first))


class Transfers(enum.Enum):
    """The behaviour of the SEND and RECV of a table, from the laxest to the strictest: what runs
    under one runs under those before it.

    A compute-only table has no SEND or RECV, and its transfers are all ASYNC.
    """

    # SEND and RECV are posted and take no device time; the consumer waits for the data
    ASYNC = "async"
    BUFFERED = "buffered"  # SEND returns at once; RECV holds its device until the data is there
    # both hold their devices until both are reached, then for the transfer itself
    RENDEZVOUS = "rendezvous"
