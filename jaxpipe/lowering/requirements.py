"""What each tick needs, read off the ticks: blocks, who runs them, and the transfers between
devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..program.templates import Block, Payload
from ..table.encoded import BoolArray, Encoded, IntArray
from ..table.kinds import RECOMPUTE, RUNS_FORWARD, Kind
from ..table.schedule import Schedule
from .assign_ticks import Ticks

NO_TRANSFER = np.iinfo(np.int32).max  # in `Requirements.slack`


class Edge(NamedTuple):
    """A transfer from one device to another at the end of a tick."""

    payload: Payload
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Requirements:
    """The requirements of every tick, by its code: tick t has `kinds[codes[t]]`.

    Ticks have one code where the same blocks of the same devices run and the same transfers leave
    with the same slack, so they also cost the same; what is made of many ticks costs no more than
    what is made of the different ones.
    """

    codes: IntArray
    blocks: tuple[Block, ...]  # that occur
    # `[code, block]`: how many devices run it, and how many of them for the first, the last, a
    # locally consumed stage
    counts: IntArray
    edges: tuple[Edge, ...]  # the transfers that occur, in order
    # `[code, edge]` is the slack of `edges[edge]`; NO_TRANSFER where it does not occur
    slack: NDArray[np.int32]
    # per code, whether some device runs a forward and a backward that may be one block
    paired: BoolArray
    num_devices: int

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def collective(self) -> IntArray:
        """Per tick, a number that ticks with equal collective actions share; else 0."""
        shares = (
            self.counts[:, np.array([block.is_collective for block in self.blocks], bool), 0] > 0
        )
        return equal_rows(np.concatenate([np.zeros_like(shares[:1]), shares]))[1:][self.codes]

    @cached_property
    def signatures(self) -> IntArray:
        """Per tick, a number that ticks of equal blocks and transfers share, which can share their
        code.
        """
        return equal_rows(
            np.concatenate([self.counts[:, :, 0] > 0, self.slack < NO_TRANSFER], axis=1)
        )[self.codes]


def equal_rows(rows: NDArray[Any]) -> IntArray:
    """Per row, a number that equal rows share, the first of them 0."""
    numbers: dict[bytes, int] = {}
    return np.array(
        [numbers.setdefault(row.tobytes(), len(numbers)) for row in np.ascontiguousarray(rows)],
        np.int64,
    )


def consumers(table: Encoded) -> IntArray:
    """Per action, the F that uses its output, or the B or I that uses its input gradient, in the
    neighbour stage; -1 for none.
    """
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


@lru_cache(maxsize=4)  # called for each list of spans
def collect(ticks: Ticks) -> Requirements:
    """The requirements of every tick."""
    schedule, table = ticks.schedule, ticks.schedule.encoded
    user = consumers(table)
    target = np.where(user >= 0, table.device[user], -1)
    local = target == table.device
    target = np.where(local, -1, target)
    slack = np.where(target >= 0, ticks.when[user] - ticks.when - 1, 0)
    # A tick is a line of at most two actions a device, each of them a row of numbers; equal lines
    # are equal ticks.
    chain = ~table.of_kinds(RECOMPUTE) & ~table.shares  # they hand nothing on to another stage
    first, last = chain & (table.stage == 0), chain & (table.stage == table.num_stages - 1)
    fields = np.stack(
        [table.kind, chunks_of(schedule), keeps(table), first, last, local, target, slack],
        1,
        dtype=np.int32,
    )
    lines = np.full((ticks.num_ticks, table.num_devices, 2, fields.shape[1]), -1, np.int32)
    lines[ticks.when, table.device, (~table.of_kinds(RUNS_FORWARD)).astype(np.int64)] = fields
    codes = equal_rows(lines.reshape(ticks.num_ticks, -1))
    return _requirements(lines[np.unique(codes, return_index=True)[1]], codes, ticks.joint)


def _requirements(lines: NDArray[np.int32], codes: IntArray, joint: Sequence[Kind]) -> Requirements:
    """Read the lines of `collect`, one of each code: `[code, device, half, field]`."""
    num_codes, num_devices = lines.shape[:2]
    there = lines[..., 0] >= 0
    code, device, half = np.nonzero(there)
    kind, chunk, kept, first, last, local, target, room = lines[code, device, half].T
    example, block = np.unique(
        (kind * (1 + chunk.max(initial=0)) + chunk) * 2 + kept,
        return_index=True,
        return_inverse=True,
    )[1:]
    shape = (num_codes, len(example))
    sums = [
        np.bincount(code * shape[1] + block, weights, math.prod(shape))
        for weights in (None, first, last, local)
    ]
    payload = np.where(kind == Kind.F, Payload.ACTIVATION, Payload.COTANGENT)
    sent = np.flatnonzero(target >= 0)
    ends, edge = np.unique(
        np.ravel_multi_index((payload[sent], device[sent], target[sent]), _edges(num_devices)),
        return_inverse=True,
    )
    slack = np.full((num_codes, len(ends)), NO_TRANSFER, np.int32)
    slack[code[sent], edge] = room[sent]
    return Requirements(
        codes=codes,
        blocks=tuple(
            Block(Kind(k), c, bool(r))
            for k, c, r in zip(*(of[example].tolist() for of in (kind, chunk, kept)), strict=True)
        ),
        counts=np.stack(sums, -1).astype(np.int64).reshape(*shape, len(sums)),
        edges=tuple(
            Edge(Payload(p), d, e)
            for p, d, e in np.transpose(np.unravel_index(ends, _edges(num_devices))).tolist()
        ),
        slack=slack,
        paired=np.any(there[:, :, 0] & np.isin(lines[:, :, 1, 0], joint), axis=1),
        num_devices=num_devices,
    )


def _edges(num_devices: int) -> tuple[int, int, int]:
    """How many payloads, sources and targets there are."""
    return len(Payload), num_devices, num_devices
