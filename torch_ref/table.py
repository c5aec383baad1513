"""Reads a schedule table: a line a device, a cell an action, an empty cell where the device idles.

torch's UNSHARD, RESHARD and REDUCE_GRAD say where parameters and gradients are whole, which changes
no number: they are passed over.  Nothing else is: a cell that is not F, B, I, W, R, L, E, G, H or
an overlapped pair is an error, and so is a table that does not hold every forward (and, if it has
any backward, every backward) exactly once, on one device.  An L is a device's share of `last`, an E
of `first`, a G of the gradient of `first`: its first number is the device's, and a table that has
any has one for every device and microbatch.
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from .errors import TableError


class Kind(enum.Enum):
    """What an action does: forward, full backward, input gradient, weight gradient, recomputation
    of the forward, shares.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    R = "R"
    L = "L"  # of `last`
    E = "E"  # of `first`
    G = "G"  # of the gradient of `first`
    H = "H"  # of the gradient of the parameters of `last`, where L leaves it for later


# What all devices do at the same time.
COLLECTIVES = (Kind.L, Kind.E, Kind.G)
# Of what each device does its share.
SHARES = {
    Kind.L: "`last`",
    Kind.E: "`first`",
    Kind.G: "the gradient of `first`",
    Kind.H: "the gradient of the parameters of `last`",
}


class Action(NamedTuple):
    """One action, printed as torch prints it: `2F0` is stage 2, forward, microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


# The actions of a cell: none (idle, or what is passed over), one, or the forward and the backward
# of an overlapped pair.
Cell: TypeAlias = tuple[Action, ...]


class Place(NamedTuple):
    """Where an action stands: the device (line) and the position in its row, both from 0."""

    device: int
    position: int

    def __str__(self) -> str:
        return f"device {self.device}, position {self.position}"


# What is passed over.
SHARDED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")
_ACTION = re.compile(r"(\d+)([FBIWRLEGH])(\d+)")
_TRANSFER = re.compile(r"\d+(SEND|RECV)_[FB]\d+")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True)
class Table:
    """A table's rows; `places` finds an action."""

    rows: tuple[tuple[Cell, ...], ...]

    @property
    def num_devices(self) -> int:
        """P, the number of rows."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """One more than the highest stage."""
        return 1 + max(
            (action.stage for _, action in self.actions() if action.kind not in SHARES), default=-1
        )

    @property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch."""
        return 1 + max(action.microbatch for _, action in self.actions())

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward of any kind."""
        return all(action.kind in (Kind.F, Kind.L, Kind.E) for _, action in self.actions())

    @cached_property
    def spreads_last(self) -> bool:
        """Whether `last` is spread over the devices, as L."""
        return any(action.kind is Kind.L for _, action in self.actions())

    @cached_property
    def defers_last(self) -> bool:
        """Whether L leaves the gradient of the parameters of `last` to H."""
        return any(action.kind is Kind.H for _, action in self.actions())

    @cached_property
    def spreads_first(self) -> bool:
        """Whether `first` is spread over the devices, as E and G."""
        return any(action.kind in (Kind.E, Kind.G) for _, action in self.actions())

    def actions(self) -> Iterator[tuple[Place, Action]]:
        """Every action with its place, the halves of a pair one after the other."""
        for device, row in enumerate(self.rows):
            for position, cell in enumerate(row):
                for action in cell:
                    yield Place(device, position), action

    @cached_property
    def places(self) -> dict[Action, Place]:
        """Where every action stands."""
        return {action: place for place, action in self.actions()}


def read_table(text: str) -> Table:
    """Read and check a table; TableError lists every cell that is no action, and everything
    missing, doubled or misplaced.
    """
    rows: list[tuple[Cell, ...]] = []
    faults: list[str] = []
    for device, line in enumerate(csv.reader(io.StringIO(text))):
        row: list[Cell] = []
        for position, cell in enumerate(line):
            try:
                row.append(_read_cell(cell.strip()))
            except TableError as error:
                faults.append(f"{Place(device, position)}: {error}")
        rows.append(tuple(row))
    if faults:
        raise TableError("the text is not a table:\n" + "\n".join(f"  {fault}" for fault in faults))
    if not any(cell for row in rows for cell in row):
        raise TableError(
            "the table holds no action; write a line a device and an action a cell, e.g. 0F0,0B0"
        )
    table = Table(tuple(rows))
    faults = list(_faults(table))
    if faults:
        raise TableError("the table cannot be run:\n" + "\n".join(f"  {fault}" for fault in faults))
    return table


def _read_cell(text: str) -> Cell:
    if not text or SHARDED.fullmatch(text):
        return ()
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return (_read_action(text),)
    forward, backward = _read_action(pair[1]), _read_action(pair[2])
    if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.I):
        raise TableError(f"{text!r}: the first of a pair must be F, the second B or I")
    return forward, backward


def _read_action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is not None:
        return Action(int(match[1]), Kind(match[2]), int(match[3]))
    if _TRANSFER.fullmatch(text):
        raise TableError(
            f"{text!r} is a transfer; give the compute-only table, transfers follow from it"
        )
    raise TableError(
        f"{text!r} is not an action; write [stage][F, B, I, W, R, L, E, G or H][microbatch], "
        "e.g. 2F0"
    )


def _faults(table: Table) -> Iterator[str]:
    """Everything wrong with the set of actions, whatever their order."""
    places: dict[Action, list[Place]] = {}
    for place, action in table.actions():
        places.setdefault(action, []).append(place)
    for action, found in places.items():
        if len(found) > 1:
            yield f"{action} stands {len(found)} times: " + "; ".join(str(place) for place in found)
    wanted = [Kind.L] if table.spreads_last or table.defers_last else []
    wanted += [Kind.H] if table.defers_last else []
    wanted += [Kind.E] if table.spreads_first else []
    wanted += [Kind.G] if table.spreads_first and not table.forward_only else []
    for kind in wanted:
        yield from _share_faults(table, kind, places)
    forward_only = table.forward_only
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            yield from _faults_of(places, stage, microbatch, forward_only=forward_only)


def _share_faults(table: Table, kind: Kind, places: dict[Action, list[Place]]) -> Iterator[str]:
    """What is wrong with the set of L, E, G or H."""
    for microbatch in range(table.num_microbatches):
        for device in range(table.num_devices):
            if Action(device, kind, microbatch) not in places:
                yield (
                    f"{Action(device, kind, microbatch)} is missing: every device has its "
                    f"share of {SHARES[kind]}"
                )
    for action, found in places.items():
        if action.kind is kind and any(place.device != action.stage for place in found):
            yield (
                f"{action} is on device {found[0].device}, but it is the share of device "
                f"{action.stage}"
            )


def _faults_of(
    places: dict[Action, list[Place]], stage: int, microbatch: int, *, forward_only: bool
) -> Iterator[str]:
    """What is wrong with one stage's actions of one microbatch."""
    own = {kind: Action(stage, kind, microbatch) for kind in Kind if kind not in SHARES}
    here = {kind for kind, action in own.items() if action in places}
    if Kind.F not in here:
        yield f"{own[Kind.F]} is missing"
    if {Kind.B, Kind.I} <= here or {Kind.B, Kind.W} <= here:
        others = " and ".join(str(own[kind]) for kind in (Kind.I, Kind.W) if kind in here)
        yield f"{own[Kind.B]} is a full backward, so {others} must not be there too"
    elif not forward_only and not here & {Kind.B, Kind.I, Kind.W}:
        yield f"{own[Kind.B]} is missing (or {own[Kind.I]} and {own[Kind.W]})"
    elif Kind.I in here and Kind.W not in here:
        yield f"{own[Kind.W]} is missing, though {own[Kind.I]} is there"
    elif Kind.W in here and Kind.I not in here:
        yield f"{own[Kind.I]} is missing, though {own[Kind.W]} is there"
    devices = {place.device for kind in here for place in places[own[kind]]}
    if len(devices) > 1:
        names = ", ".join(
            f"{own[kind]} on device {places[own[kind]][0].device}" for kind in own if kind in here
        )
        yield (
            f"stage {stage}, microbatch {microbatch} is spread over devices, but what F saves "
            f"stays on its device: {names}"
        )
