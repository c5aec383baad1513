"""A table as flat integer arrays, which the checker, the simulator and the passes read instead of
half a million tuples.

Actions are numbered row by row, idle cells left out, the halves of an overlapped pair one after the
other (forward first).  So number order is row order.  Each action waits for at most one action of
another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..errors import ScheduleError, Violation, listed, quoted
from .kinds import (
    COLLECTIVES,
    COMPUTE,
    KIND_NAMES,
    KINDS,
    MESSAGES,
    RECEIVES,
    RECOMPUTE,
    SHARES,
    SPREAD_FIRST,
    SPREAD_LAST,
    Action,
    Cell,
    Kind,
    Overlap,
    Pass,
    Row,
    Value,
    kinds_where,
    makers,
    parts,
)
from .limits import is_whole

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NUM_KINDS = len(Kind)
_CELL_TYPES = {Action, Overlap, type(None)}
_STAGE, _KIND, _MICROBATCH = (cast(Callable[[Any], Any], itemgetter(field)) for field in range(3))
# The look-up table has an entry for each kind, stage and microbatch.  Where it would be this much
# larger than the number of actions, some number is a typing error (0F1000000).
_LEAST_ROOM, _ROOM_PER_ACTION = 1 << 17, 64


class CollectiveAction(NamedTuple):
    """A collective action of one microbatch: the number of each device's action, and its place
    between the actions of a stage.
    """

    members: tuple[int, ...]
    stage: int  # the stage that it belongs to: the first or the last
    source: int  # the action of that stage whose result it reads; -1 where there is none
    user: int  # the action of that stage that reads its result; -1 where there is none

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
        microbatch_ok = (self.microbatch >= 0) & (self.microbatch < self.num_microbatches)
        in_range: BoolArray = stage_ok & microbatch_ok
        return in_range

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
        table = np.full((NUM_KINDS, self.num_stages, self.num_microbatches), -1, np.int64)
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

    @cached_property
    def has_transfers(self) -> bool:
        """True where the table holds a SEND or RECV."""
        return not bool(self.is_compute.all())

    @cached_property
    def forward_only(self) -> bool:
        """True where the table computes nothing of the backward pass."""
        return not bool(
            self.of_kinds(
                kinds_where(lambda spec: spec.is_compute and spec.direction is Pass.BACKWARD)
            ).any()
        )

    @cached_property
    def is_collective(self) -> BoolArray:
        """Per action, whether all devices do it at the same time."""
        return self.of_kinds(COLLECTIVES)

    @cached_property
    def shares(self) -> BoolArray:
        """Per action, whether its first number is its device's, and not a stage's."""
        return self.of_kinds(SHARES)

    @cached_property
    def spreads_first(self) -> bool:
        """True where `first` is spread over the devices."""
        return bool(self.of_kinds(SPREAD_FIRST).any())

    @cached_property
    def spreads_last(self) -> bool:
        """True where `last` is spread over the devices."""
        return bool(self.of_kinds(SPREAD_LAST).any())

    @cached_property
    def recomputes(self) -> bool:
        """True where a forward is run again for its backward."""
        return bool(self.of_kinds(RECOMPUTE).any())

    @cached_property
    def collectives(self) -> dict[int, CollectiveAction]:
        """By the number of any action of it: the collective actions, where each device has
        it once.
        """
        found: dict[int, CollectiveAction] = {}
        shares = np.flatnonzero(self.is_collective & self.in_range)
        if not len(shares):
            return found
        for kind in COLLECTIVES:
            end = KINDS[kind].end
            assert end is not None
            stage = end.stage % self.num_stages
            before, after = (
                None if value is None else self.maker(value)[stage]
                for value in (end.needs, end.feeds)
            )
            for m in range(self.num_microbatches):
                members = self.at[kind, : self.num_devices, m]
                if (
                    len(members) < self.num_devices
                    or (members < 0).any()
                    or (self.device[members] != np.arange(self.num_devices)).any()
                ):
                    continue
                source, user = (-1 if those is None else int(those[m]) for those in (before, after))
                collective = CollectiveAction(tuple(members.tolist()), stage, source, user)
                found.update(dict.fromkeys(collective.members, collective))
        return found

    @cached_property
    def producer(self) -> IntArray:
        """Per action, the action that makes its input from the neighbour stage, or -1 (none needed,
        or missing).

        F: the F of the stage before.  B and I: the B or I of the next stage.  SEND: the action
        that makes its message.  RECV: its SEND.
        """
        found = np.full(self.num_actions, -1, np.int64)
        sources = {message.value: self.maker(message.value) for message in MESSAGES}
        for spec in KINDS:
            if spec.needs is not None:
                source, shift = sources[spec.needs], spec.came_from
            elif spec.sends is not None:
                source, shift = sources[spec.sends], 0
            elif spec.receives is not None:
                source, shift = self.at[spec.receives], spec.came_from
            else:
                continue
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
        crosses: BoolArray = (self.producer >= 0) & (self.device[self.producer] != self.device)
        return crosses

    @cached_property
    def receives_from(self) -> IntArray:
        """Per compute action of a table with transfers, the SEND of the input it receives,
        or -1.
        """
        found = np.full(self.num_actions, -1, np.int64)
        for message in MESSAGES:
            mine = np.flatnonzero(self.crosses & self.of_kinds(message.users))
            found[mine] = self.at[message.send][
                self.stage[mine] + KINDS[message.receive].came_from, self.microbatch[mine]
            ]
        return found

    def action(self, number: int) -> Action:
        """The action with this number."""
        return Action(
            int(self.stage[number]), Kind(int(self.kind[number])), int(self.microbatch[number])
        )

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
    """Flatten rows; ScheduleError where a cell is not an Action, an Overlap or None."""
    fields, positions, last_half = [], [], []
    first = [0]
    for device, row in enumerate(rows):
        cells, where, paired = _flat(row, simple=set(map(type, row)) <= {Action})
        count = len(cells)
        try:
            fields.append(
                np.fromiter(chain.from_iterable(cells), np.int64, 3 * count).reshape(count, 3)
            )
        except (OverflowError, TypeError, ValueError):
            raise _not_a_cell(device, row, _not_numbers) from None
        positions.append(where)
        last_half.append(np.arange(first[-1], first[-1] + count) + paired)
        first.append(first[-1] + count)
    table = np.ascontiguousarray(np.concatenate([np.zeros((0, 3), np.int64), *fields]).T)
    nothing = np.zeros(0, np.int64)
    return Encoded(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        slices=slices,
        stage=table[0],
        kind=table[1],
        microbatch=table[2],
        device=np.repeat(np.arange(len(rows)), np.diff(first)),
        position=np.concatenate([nothing, *positions]),
        last_half=np.concatenate([nothing, *last_half]),
        first=tuple(first),
    )


def _flat(row: Row, *, simple: bool) -> tuple[list[Action], IntArray, IntArray]:
    """A row's actions, the position of each, and 1 at each forward half of a pair (0 elsewhere)."""
    if simple:
        positions, whole = np.arange(len(row)), np.zeros(len(row), np.int64)
        return list(row), positions, whole  # type: ignore[arg-type]
    cells: list[Action] = []
    where: list[int] = []
    paired: list[int] = []
    for position, cell in enumerate(row):
        if cell is None:
            continue
        if isinstance(cell, Overlap):
            cells += cell
            where += (position, position)
            paired += (1, 0)
            continue
        cells.append(cell)
        where.append(position)
        paired.append(0)
    return cells, np.array(where, np.int64), np.array(paired, np.int64)


def as_rows(rows: Iterable[Iterable[Cell]]) -> tuple[Row, ...]:
    """Rows as tuples; ScheduleError where there are none."""
    try:
        return tuple(map(tuple, rows))
    except TypeError as error:
        raise ScheduleError(
            f"{quoted(rows)} are not the rows of a table; give each device a list of its actions"
        ) from error


def plain_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, whole numbers as Python's own; ScheduleError where they hold anything but cells."""
    return tuple(_plain_row(device, row) for device, row in enumerate(rows))


def _plain_row(device: int, row: Row) -> Row:
    if not set(map(type, row)) <= _CELL_TYPES or not {
        type(half) for cell in row if type(cell) is Overlap for half in cell
    } <= {Action}:
        raise _not_a_cell(device, row, _not_actions)
    actions = list(chain.from_iterable(map(parts, row))) if set(map(type, row)) - {Action} else row
    if {*map(type, map(_STAGE, actions)), *map(type, map(_MICROBATCH, actions))} <= {int} and set(
        map(type, map(_KIND, actions))
    ) <= {Kind}:
        return row
    if any(map(_not_numbers, row)):
        raise _not_a_cell(device, row, _not_numbers)
    return tuple(map(_plain_cell, row))


def _plain_cell(cell: Cell) -> Cell:
    plain = [
        Action(int(stage), Kind(int(kind)), int(microbatch))
        for stage, kind, microbatch in parts(cell)
    ]
    return Overlap(*plain) if isinstance(cell, Overlap) else plain[0] if plain else None


def _not_a_cell(device: int, row: Row, fault: Callable[[Cell], str]) -> ScheduleError:
    """The error for a row that holds anything but cells; `fault` gives what is wrong with a cell,
    or an empty text.
    """
    faults = {position: fault(cell) for position, cell in enumerate(row)}
    bad = tuple(
        Violation("cell", f"{quoted(row[p])} {why}", device, p) for p, why in faults.items() if why
    )
    return ScheduleError(listed("the table holds things that are not actions", bad), bad)


def _not_actions(cell: Cell) -> str:
    if type(cell) in _CELL_TYPES and (
        type(cell) is not Overlap or {type(half) for half in cell} == {Action}
    ):
        return ""
    return "is not an Action, an Overlap or None; jaxpipe.table.parse_cell reads text"


def _not_numbers(cell: Cell) -> str:
    numbers = [number for action in parts(cell) for number in action]
    if not all(is_whole(number) and abs(number) < 2**63 for number in numbers):
        return "must have whole numbers for its stage, kind and microbatch"
    wrong = [action.kind for action in parts(cell) if not 0 <= action.kind < NUM_KINDS]
    return f"has kind {wrong[0]}; a kind is one of {', '.join(KIND_NAMES)}" if wrong else ""
